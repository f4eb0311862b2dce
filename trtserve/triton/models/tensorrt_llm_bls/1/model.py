"""Triton model `tensorrt_llm_bls`: text in, text out, through the other models, many requests at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from chain import Chain, engine_length
from conversation import Conversation
from core_inputs import answered_often
from inner_models import InnerModelError, Tensors, stop_request
from lora_names import LoraNames
from model_parameters import ModelParameters
from parameter_classes import check_classes
from text_model import TextModel


class TritonPythonModel(TextModel):
    """Asks preprocessing, the core model and postprocessing."""

    def prepare(self, config: dict[str, Any], repository: Path, parameters: ModelParameters) -> None:
        """Read the names of the models behind this one."""
        check_classes(parameters, Path(__file__).parent, pb_utils.Logger.log_info)
        decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._chain = _chain(config, repository, parameters, decoupled=decoupled)
        # A stream of pushed answers needs it; there are as many processes as the engine takes requests.
        self.one_at_a_time = self._chain.pushed

    def answers(self, inputs: Tensors, inner_id: str, cancelled: threading.Event) -> Iterator[Tensors]:
        """The answers of one request."""
        return Conversation(self._chain, inputs, inner_id, cancelled).answers()

    def stop(self, inner_id: str, inputs: Tensors) -> None:
        """Stop it in the core models; between two rounds of speculative decoding none of them knows it."""
        if self._chain.pushed and answered_often(inputs):
            return  # the conversation does it with the next answer
        for model in filter(None, (self._chain.core, self._chain.draft)):
            try:
                stop_request(model, inner_id)
            except (InnerModelError, RuntimeError) as error:  # noqa: PERF203 - the other model must be stopped too
                pb_utils.Logger.log_error(f"A cancelled request could not be stopped in {model}: {error}")


def _chain(config: dict[str, Any], repository: Path, parameters: ModelParameters, *, decoupled: bool) -> Chain:
    core = parameters.text("tensorrt_llm_model_name") or "tensorrt_llm"
    draft = parameters.text("tensorrt_llm_draft_model_name")
    return Chain(
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
