"""One request of the BLS model: preprocessing, the core model, and its answers turned into text."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
from adapter import CoreModel, adapter_of
from chain import Chain
from core_inputs import asks, check, core_inputs, largest, prompts
from inner_models import Tensors, call
from speculative import SpeculativeDecoding
from stop_words import StopWords
from texts import Key, StreamedTexts, WholeTexts, encoded

_TOKENS = ("output_ids", "sequence_length")


class Conversation:
    """Answers of one request, in order; each is a dict of output arrays with `text_output`."""

    def __init__(self, chain: Chain, inputs: Tensors, request_id: str, cancelled: threading.Event) -> None:
        """Check the inputs; ValueError says what is wrong with them. `cancelled` is set when the client gave up."""
        check(chain, inputs)
        self._chain = chain
        self._inputs = inputs
        self._request_id = request_id
        self._cancelled = cancelled
        self._core = CoreModel(chain.core, request_id, lora=chain.lora, adapter=adapter_of(inputs), pushed=chain.pushed)
        self._batch = len(inputs["text_input"])
        self._words = self._stop_words()

    def answers(self) -> Iterator[Tensors]:
        """Run the request; InnerModelError carries the message of the model that refused it."""
        inputs = core_inputs(self._chain, self._inputs, self._request_id)
        texts = self._texts(inputs)
        stoppable = asks(self._inputs, "stream") and any(self._words)
        gave_up = False
        for result in self._results(inputs):
            answer = texts.add({name: result[name] for name in (*_TOKENS, *self._chain.outputs) if name in result})
            if answer is not None:
                yield {name: value for name, value in answer.items() if name not in _TOKENS}
            if stoppable and len(texts.stopped) == self._sequences:
                stoppable = False
                self._core.stop()
            if self._chain.pushed and self._cancelled.is_set() and not gave_up:
                gave_up = True
                self._core.stop()  # here, since no other thread may call a model now
        for key, rest in texts.finish():
            yield {"text_output": encoded([rest]), **self._indexes(key)}

    def _results(self, inputs: Tensors) -> Iterator[Tensors]:
        if largest(self._inputs, "num_draft_tokens", 0) <= 0:
            return self._core.answers(inputs, (*_TOKENS, *self._chain.outputs))
        decoding = SpeculativeDecoding(
            self._chain, self._core, self._inputs, inputs, request_id=self._request_id, cancelled=self._cancelled
        )
        return iter([decoding.run(self._words[0], self._decode_rows)])

    def _texts(self, inputs: Tensors) -> WholeTexts | StreamedTexts:
        streamed = asks(self._inputs, "stream")
        if streamed and largest(self._inputs, "beam_width", 1) <= 1:
            return StreamedTexts(self._decode_rows, self._words, accumulate=self._chain.accumulate)
        # Streamed beams are sent whole each time and without the prompt.
        without = streamed or self._excludes_input()
        return WholeTexts(self._decode_rows, self._words, None if without else prompts(inputs))

    def _excludes_input(self) -> bool:
        given = self._inputs.get("exclude_input_in_output")
        return self._chain.exclude_input if given is None else bool(np.any(given))

    @property
    def _sequences(self) -> int:
        return self._batch * max(1, largest(self._inputs, "num_return_sequences", 1))

    def _stop_words(self) -> list[StopWords]:
        words = self._inputs.get("stop_words")
        if words is None:
            return [StopWords()] * self._batch
        try:
            return [StopWords([word.decode("utf-8") for word in row.reshape(-1)]) for row in words]
        except UnicodeDecodeError as error:
            raise ValueError(f"stop_words is not valid UTF-8: {error.reason} at byte {error.start}.") from error

    def _indexes(self, key: Key) -> Tensors:
        indexes: Tensors = {}
        if self._batch > 1:
            indexes["batch_index"] = np.array([[key[0]]], dtype=np.int32)
        if largest(self._inputs, "num_return_sequences", 0) > 1:
            indexes["sequence_index"] = np.array([[key[1]]], dtype=np.int32)
        return indexes

    def _decode_rows(self, rows: Sequence[list[int]]) -> list[str]:
        """Texts of rows of ids; they go as beams of one batch row, since the batch size may be limited to 1."""
        ids = np.zeros((1, len(rows), max(1, *map(len, rows), 1)), dtype=np.int32)
        for index, row in enumerate(rows):
            ids[0, index, : len(row)] = row
        lengths = np.array([[len(row) for row in rows]], dtype=np.int32)
        tensors = {"TOKENS_BATCH": ids, "SEQUENCE_LENGTH": lengths}
        output = call(self._chain.postprocessing, tensors, ("OUTPUT",))
        return [text.decode("utf-8") for text in output["OUTPUT"].reshape(-1)]
