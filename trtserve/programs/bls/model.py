"""Triton model `tensorrt_llm_bls`: text in and out through the other models, many requests at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from ..shared.inner_models import InnerModelError, Tensors, stop_request
from ..shared.lora_names import LoraNames
from ..shared.parameter_classes import check_classes
from ..shared.parameters import ModelParameters
from ..shared.text_model import TextModel
from .core_inputs import may_answer_repeatedly
from .request import BlsRequest
from .settings import BlsSettings, engine_length


class TritonPythonModel(TextModel):
    """Calls preprocessing, the core model and postprocessing."""

    def prepare(self, config: dict[str, Any], folder: Path, parameters: ModelParameters) -> None:
        """Read the settings. Raises ValueError for a refused parameter."""
        check_classes(parameters, folder, pb_utils.Logger.log_info)
        decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._settings = _settings(config, folder.parents[1], parameters, decoupled=decoupled)
        # Pushed answers allow no calls from other threads; the repository has one process per request of the engine.
        self.one_at_a_time = self._settings.pushed

    def answers(self, inputs: Tensors, inner_id: str, cancelled: threading.Event) -> Iterator[Tensors]:
        """Yield the answers of one request."""
        return BlsRequest(self._settings, inputs, inner_id, cancelled).answers()

    def stop(self, inner_id: str, inputs: Tensors) -> None:
        """Stop the request in the core models, of which any may be running a round of speculative decoding."""
        if self._settings.pushed and may_answer_repeatedly(inputs):
            return  # BlsRequest does it with the next answer
        for model in filter(None, (self._settings.core, self._settings.draft)):
            try:
                stop_request(model, inner_id)
            except (InnerModelError, RuntimeError) as error:  # noqa: PERF203 - the other model must be stopped too
                pb_utils.Logger.log_error(f"A cancelled request could not be stopped in {model}: {error}")


def _settings(config: dict[str, Any], repository: Path, parameters: ModelParameters, *, decoupled: bool) -> BlsSettings:
    core = parameters.text("tensorrt_llm_model_name") or "tensorrt_llm"
    draft = parameters.text("tensorrt_llm_draft_model_name")
    return BlsSettings(
        core=core,
        lora=LoraNames(repository, parameters.text("lora_table") or "lora.json"),
        inputs=frozenset(tensor["name"] for tensor in config["input"]),
        outputs=tuple(output["name"] for output in config["output"] if output["name"] != "text_output"),
        accumulate=decoupled and parameters.choice("accumulate_tokens", default=False),
        exclude_input=bool(parameters.switch("exclude_input_in_output")),
        longest=engine_length(repository, core),
        draft=draft,
        draft_longest=None if draft is None else engine_length(repository, draft),
        preprocessing=parameters.text("preprocessing_model_name") or "preprocessing",
        postprocessing=parameters.text("postprocessing_model_name") or "postprocessing",
        pushed=decoupled and parameters.text("core_answers") == "pushed",
    )
