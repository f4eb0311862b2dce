"""Triton model `tensorrt_llm_bls`: text in and out through the other models, many requests at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ..shared.arrays import Tensors, encoded, words_of
from ..shared.inner_models import InnerModelError, call, stop_request
from ..shared.lora_names import LoraNames
from ..shared.parameters import ModelParameters, check_classes
from ..shared.text_model import TextModel
from .inputs import (
    BlsSettings,
    CoreModel,
    adapter_of,
    check,
    core_inputs,
    engine_length,
    is_set,
    largest,
    may_answer_repeatedly,
    prompts,
)
from .speculative import SpeculativeDecoding
from .texts import FullTexts, Key, StopWords, StreamedTexts

_TOKENS = ("output_ids", "sequence_length")


class BlsRequest:
    """Runs one request; each answer is a dict of output arrays with `text_output`."""

    def __init__(self, settings: BlsSettings, inputs: Tensors, request_id: str, cancelled: threading.Event) -> None:
        """Check the inputs. Raises ValueError for wrong ones. `cancelled` is set when the client cancels."""
        check(settings, inputs)
        self._settings = settings
        self._inputs = inputs
        self._request_id = request_id
        self._cancelled = cancelled
        self._core = CoreModel(
            settings.core, request_id, lora=settings.lora, adapter=adapter_of(inputs), pushed=settings.pushed
        )
        self._batch = len(inputs["text_input"])
        words = self._inputs.get("stop_words")
        rows = [()] * self._batch if words is None else [words_of(row, "stop_words") for row in words]
        self._words = [StopWords(row) for row in rows]

    def answers(self) -> Iterator[Tensors]:
        """Yield the answers; InnerModelError carries the message of the model that refused the request."""
        inputs = core_inputs(self._settings, self._inputs, self._request_id)
        texts = self._texts(inputs)
        stoppable = is_set(self._inputs, "stream") and any(self._words)
        sequences = self._batch * max(1, largest(self._inputs, "num_return_sequences", 1))
        stopped = False
        for result in self._results(inputs):
            answer = texts.add({name: result[name] for name in (*_TOKENS, *self._settings.outputs) if name in result})
            if answer is not None:
                yield {name: value for name, value in answer.items() if name not in _TOKENS}
            if stoppable and len(texts.stopped) == sequences:
                stoppable = False
                self._core.stop()
            if self._settings.pushed and self._cancelled.is_set() and not stopped:
                stopped = True
                self._core.stop()  # here, because no other thread may call a model now
        for key, rest in texts.finish():
            yield {"text_output": encoded([rest]), **self._indexes(key)}

    def _results(self, inputs: Tensors) -> Iterator[Tensors]:
        if largest(self._inputs, "num_draft_tokens", 0) <= 0:
            return self._core.answers(inputs, (*_TOKENS, *self._settings.outputs))
        decoding = SpeculativeDecoding(
            self._settings, self._core, self._inputs, inputs, request_id=self._request_id, cancelled=self._cancelled
        )
        return iter([decoding.run(self._words[0], self._decode_rows)])

    def _texts(self, inputs: Tensors) -> FullTexts | StreamedTexts:
        streamed = is_set(self._inputs, "stream")
        if streamed and largest(self._inputs, "beam_width", 1) <= 1:
            return StreamedTexts(self._decode_rows, self._words, accumulate=self._settings.accumulate)
        given = self._inputs.get("exclude_input_in_output")
        excluded = self._settings.exclude_input if given is None else bool(np.any(given))
        # Each streamed result of a beam search holds all tokens so far, without the prompt.
        return FullTexts(self._decode_rows, self._words, None if streamed or excluded else prompts(inputs))

    def _indexes(self, key: Key) -> Tensors:
        indexes: Tensors = {}
        if self._batch > 1 or self._settings.always_indexed:
            indexes["batch_index"] = np.array([[key[0]]], dtype=np.int32)
        if largest(self._inputs, "num_return_sequences", 0) > 1:
            indexes["sequence_index"] = np.array([[key[1]]], dtype=np.int32)
        return indexes

    def _decode_rows(self, rows: Sequence[list[int]]) -> list[str]:
        """Decode rows of ids, sent as beams of one batch row because the batch size may be limited to 1."""
        ids = np.zeros((1, len(rows), max(1, *map(len, rows), 1)), dtype=np.int32)
        for index, row in enumerate(rows):
            ids[0, index, : len(row)] = row
        lengths = np.array([[len(row) for row in rows]], dtype=np.int32)
        tensors = {"TOKENS_BATCH": ids, "SEQUENCE_LENGTH": lengths}
        output = call(self._settings.postprocessing, tensors, ("OUTPUT",))
        return [text.decode("utf-8") for text in output["OUTPUT"].reshape(-1)]


class TritonPythonModel(TextModel):
    """Calls preprocessing, the core model and postprocessing."""

    def prepare(self, config: dict[str, Any], folder: Path, parameters: ModelParameters) -> None:
        check_classes(parameters, folder, pb_utils.Logger.log_info)
        decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._settings = _settings(config, folder.parents[1], parameters, decoupled=decoupled)
        # Pushed answers allow no calls from other threads; the repository has one process per request of the engine.
        self.one_at_a_time = self._settings.pushed

    def answers(self, inputs: Tensors, inner_id: str, cancelled: threading.Event) -> Iterator[Tensors]:
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
