"""Triton model with the tensors of `tensorrt_llm_bls`, in front of the model of TensorRT-LLM's LLM API."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from ..shared.inner_models import InnerModelError, Tensors, stop_text_request
from ..shared.parameters import ModelParameters
from ..shared.text_model import TextModel
from .request import LlmBlsRequest, LlmModel


class TritonPythonModel(TextModel):
    """Maps inputs and outputs; an input without a counterpart is refused by name."""

    def prepare(self, config: dict[str, Any], folder: Path, parameters: ModelParameters) -> None:
        """Read the name of the called model."""
        self._model = LlmModel(
            name=parameters.text("tensorrt_llm_model_name") or "tensorrt_llm",
            outputs=tuple(output["name"] for output in config["output"]),
            accumulate=parameters.choice("accumulate_tokens", default=False),
        )

    def answers(self, inputs: Tensors, inner_id: str, cancelled: threading.Event) -> Iterator[Tensors]:
        """Yield the answers of one request."""
        return LlmBlsRequest(self._model, inputs, inner_id, cancelled).answers()

    def stop(self, inner_id: str, inputs: Tensors) -> None:
        """Stop the request in the called model."""
        try:
            stop_text_request(self._model.name, inner_id)
        except (InnerModelError, RuntimeError) as error:
            pb_utils.Logger.log_error(f"A cancelled request could not be stopped in {self._model.name}: {error}")
