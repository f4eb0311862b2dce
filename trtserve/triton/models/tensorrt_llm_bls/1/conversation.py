"""One request of the BLS model: preprocessing, the core model, and its answers turned into text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from incremental_text import AccumulatedText, IncrementalText
from inner_models import Tensors, call, call_streamed
from numpy.typing import NDArray
from tensor_names import CORE, CORE_FROM_PREPROCESSING, PREPROCESSING, PREPROCESSING_OUTPUTS, PROMPT_TABLE_OUTPUT


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Names of the models behind a BLS model, the outputs that it hands on, and how streamed text is sent."""

    core: str
    draft: str | None
    outputs: tuple[str, ...]
    accumulate: bool
    preprocessing: str = "preprocessing"
    postprocessing: str = "postprocessing"


class Conversation:
    """Answers of one request, in order; each is a dict of output arrays with `text_output`."""

    def __init__(self, chain: Chain, inputs: Tensors, request_id: str) -> None:
        """Check the inputs; ValueError says what is wrong with them."""
        self._chain = chain
        self._inputs = inputs
        self._request_id = request_id
        self._texts: dict[tuple[int, int], IncrementalText | AccumulatedText] = {}
        _check(chain, inputs)

    def answers(self) -> Iterator[Tensors]:
        """Run the request; InnerModelError carries the message of the model that refused it."""
        results = call_streamed(
            self._chain.core,
            self._core_inputs(),
            ("output_ids", "sequence_length", *self._chain.outputs),
            self._request_id,
        )
        if self._is_incremental():
            yield from self._streamed(results)
        else:
            for result in results:
                yield self._answer(result, self._decoded(result["output_ids"], result["sequence_length"]))

    def _is_incremental(self) -> bool:
        # Beams are sent whole each time, so there is nothing to add up.
        beams = int(np.max(self._inputs.get("beam_width", 1)))
        return bool(np.any(self._inputs.get("stream", False))) and beams <= 1

    def _core_inputs(self) -> Tensors:
        given = {inner: self._inputs[name] for name, inner in PREPROCESSING.items() if name in self._inputs}
        wanted = list(PREPROCESSING_OUTPUTS)
        if "prompt_table_extra_id" in self._inputs:
            wanted.append(PROMPT_TABLE_OUTPUT)
        prepared = call(self._chain.preprocessing, given, wanted, self._request_id)
        batch = len(self._inputs["text_input"])
        inputs = {CORE_FROM_PREPROCESSING[name]: value for name, value in prepared.items()}
        for name, inner in CORE.items():
            if name in self._inputs:
                inputs[inner] = _with_batch_axis(self._inputs[name], batch)
        for name in ("return_context_logits", "return_generation_logits"):
            inputs.setdefault(name, np.zeros((batch, 1), dtype=np.bool_))
        return inputs

    def _streamed(self, results: Iterator[Tensors]) -> Iterator[Tensors]:
        sent = False
        for result in results:
            ids = result["output_ids"].reshape(-1)[: int(result["sequence_length"].reshape(-1)[0])]
            extra = [name for name in self._chain.outputs if name in result]
            if ids.size == 0 and sent and not extra:
                continue  # the closing result of a request that ended on its end id
            text = self._text_of(result).add(ids.tolist())
            yield self._answer(result, [text])
            sent = True
        for (row, sequence), state in self._texts.items():
            if rest := state.finish():
                yield {"text_output": _encoded([rest]), **self._indexes(row, sequence)}

    def _text_of(self, result: Tensors) -> IncrementalText | AccumulatedText:
        key = _index(result, "batch_index"), _index(result, "sequence_index")
        if key not in self._texts:
            kind = AccumulatedText if self._chain.accumulate else IncrementalText
            self._texts[key] = kind(self._decode_rows)
        return self._texts[key]

    def _indexes(self, row: int, sequence: int) -> Tensors:
        indexes: Tensors = {}
        if len(self._inputs["text_input"]) > 1:
            indexes["batch_index"] = np.array([[row]], dtype=np.int32)
        if int(np.max(self._inputs.get("num_return_sequences", 0))) > 1:
            indexes["sequence_index"] = np.array([[sequence]], dtype=np.int32)
        return indexes

    def _answer(self, result: Tensors, texts: Sequence[str]) -> Tensors:
        handed_on = {name: result[name] for name in self._chain.outputs if name in result}
        return {"text_output": _encoded(texts), **handed_on}

    def _decode_rows(self, rows: Sequence[list[int]]) -> list[str]:
        """Texts of rows of ids; they go as beams of one batch row, since the batch size may be limited to 1."""
        ids = np.zeros((1, len(rows), max(1, *map(len, rows))), dtype=np.int32)
        for index, row in enumerate(rows):
            ids[0, index, : len(row)] = row
        return self._decoded(ids, np.array([[len(row) for row in rows]], dtype=np.int32))

    def _decoded(self, ids: NDArray[Any], lengths: NDArray[Any]) -> list[str]:
        output = call(self._chain.postprocessing, {"TOKENS_BATCH": ids, "SEQUENCE_LENGTH": lengths}, ("OUTPUT",))
        return [text.decode("utf-8") for text in output["OUTPUT"].reshape(-1)]


def _check(chain: Chain, inputs: Tensors) -> None:
    if inputs.get("text_input") is None or inputs["text_input"].size == 0:
        raise ValueError("text_input is required")
    limits = inputs.get("max_tokens")
    batch = len(inputs["text_input"])
    if limits is None or limits.size != batch or int(limits.min()) <= 0:
        raise ValueError("max_tokens must be a single value > 0")
    if "image_input" in inputs:
        raise ValueError("image_input was given, but this repository serves a text model without vision parts.")
    if int(np.max(inputs.get("num_draft_tokens", 0))) > 0:
        _check_speculative(chain, inputs, batch)
    if bool(np.any(inputs.get("use_draft_logits", False))):
        raise ValueError("use_draft_logits needs num_draft_tokens above 0.")
    if bool(np.any(inputs.get("prompt_table_extra_id", 0))) and "prompt_embedding_table" not in inputs:
        raise ValueError("prompt_table_extra_id needs prompt_embedding_table, which was not given.")


def _check_speculative(chain: Chain, inputs: Tensors, batch: int) -> None:
    if bool(np.any(inputs.get("stream", False))):
        raise ValueError("streaming is not supported with speculative decoding")
    if bool(np.any(inputs.get("return_context_logits", False))):
        raise ValueError("context logits are not supported with speculative decoding")
    if batch > 1:
        raise ValueError("batch size above 1 is not supported with speculative decoding")
    if chain.draft is None:
        raise ValueError("cannot perform speculative decoding without draft model")
    raise ValueError("num_draft_tokens above 0: this BLS model cannot carry out speculative decoding")


def _with_batch_axis(value: NDArray[Any], batch: int) -> NDArray[Any]:
    """Inputs declared with `reshape { }` arrive as [batch]; the inner model takes [batch, 1]."""
    return value.reshape(batch, 1) if value.ndim == 1 else value


def _index(result: Tensors, name: str) -> int:
    value = result.get(name)
    return 0 if value is None else int(value.reshape(-1)[0])


def _encoded(texts: Sequence[str]) -> NDArray[Any]:
    return np.array([text.encode("utf-8") for text in texts], dtype=np.object_)
