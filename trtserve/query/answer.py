"""Responses of one request, collected into sequences: by prompt, by sample, by beam."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trtserve.errors import RequestError
from trtserve.query.generation import GeneratedSequence, Generation, OutputKey
from trtserve.query.request import Context
from trtserve.query.tokenizer import TokenizerFiles
from trtserve.triton.client import Reply

if TYPE_CHECKING:
    import numpy.typing as npt

TEXT_OUTPUT = "text_output"
IDS_OUTPUT = "output_ids"
LENGTHS_OUTPUT = "sequence_length"
# Outputs that are read into the fields of a sequence or of the answer; all others are kept as they come.
_READ = (
    TEXT_OUTPUT,
    IDS_OUTPUT,
    LENGTHS_OUTPUT,
    "batch_index",
    "sequence_index",
    "cum_log_probs",
    "output_log_probs",
    "finish_reason",
    "num_input_tokens",
    "num_output_tokens",
)
_LOGITS = ("context_logits", "generation_logits")
_UNFINISHED = ("", "not_finished")
_BY_ITSELF = ("length", "end_id", "stop_words")
_HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"

Outputs = Mapping[str, "npt.NDArray[Any]"]
Key = tuple[int, int, int]


class Answer:
    """Collects the responses of one request. `on_text` receives the pieces of its only sequence as they come."""

    def __init__(self, context: Context, *, on_text: Callable[[str], None] | None = None) -> None:
        self._context = context
        self._options = context.spec.options
        self._beams = int(self._options.get("beam_width", 1))
        sequences = context.prompts.rows * self._beams * int(self._options.get("num_return_sequences", 1))
        self._on_text = on_text if sequences == 1 else None
        self._collected: dict[Key, _Collected] = {}
        self._outputs: dict[OutputKey, npt.NDArray[Any]] = {}
        self._responses = 0
        self._output_tokens: int | None = None
        self._input_tokens: dict[int, int] = {}
        self._started = time.monotonic()
        self._first: float | None = None

    def read(self, replies: Iterator[Reply]) -> None:
        """Read all responses of one request."""
        for reply in replies:
            row, sample = _index(reply.outputs, "batch_index"), _index(reply.outputs, "sequence_index")
            self._responses += TEXT_OUTPUT in reply.outputs or IDS_OUTPUT in reply.outputs
            for place, key in enumerate(self._keys(reply.outputs, row, sample)):
                self._add(key, reply, place)
            self._count(reply.outputs, row or 0)
            self._keep(reply.outputs, row or 0, sample or 0)

    def _keys(self, outputs: Outputs, row: int | None, sample: int | None) -> list[Key]:
        """Which sequences a response is about, in the order of its texts or rows of ids: by row, sample and beam."""
        about = outputs.get(TEXT_OUTPUT, outputs.get(LENGTHS_OUTPUT))
        count = 0 if about is None else about.size
        each = max(1, count // (self._context.prompts.rows if row is None else 1))
        beams = min(self._beams, each)
        return [
            (
                place // each if row is None else row,
                place % each // beams if sample is None else sample,
                place % each % beams,
            )
            for place in range(count)
        ]

    def _add(self, key: Key, reply: Reply, place: int) -> None:
        collected = self._collected.setdefault(key, self._begin(key))
        outputs, pieces = reply.outputs, []
        if IDS_OUTPUT in outputs and LENGTHS_OUTPUT in outputs:
            pieces.append(collected.add_ids(_ids(outputs, place)))
        if TEXT_OUTPUT in outputs:
            pieces.append(collected.add_text(str(outputs[TEXT_OUTPUT].reshape(-1)[place])))
        if any(pieces) and self._first is None:
            self._first = time.monotonic()
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        if text and self._on_text is not None:
            self._on_text(text)
        collected.add_finish_reason(reply, place)
        if self._options.get("return_log_probs"):  # releases before 0.14 send zeros unasked
            collected.add_log_probs(outputs, place)

    def _begin(self, key: Key) -> _Collected:
        context, streams = self._context, self._context.streams
        repeated = not streams and _repeats_prompt(context)
        return _Collected(
            GeneratedSequence(prompt=key[0], sequence=key[1], beam=key[2]),
            # Accumulating models repeat all of the text in every response, and beams do in any model.
            whole=streams and (self._beams > 1 or context.model.flag("accumulate_tokens")),
            rewritten=self._beams > 1,
            prompt=context.prompts.texts[key[0]] if repeated and context.prompts.texts else "",
            prompt_ids=len(context.prompts.token_ids[key[0]]) if repeated and context.prompts.token_ids else 0,
            strip=context.spec.exclude_input,
            files=context.tokenizer,
        )

    def _count(self, outputs: Outputs, row: int) -> None:
        for counted in outputs["num_output_tokens"].reshape(-1) if "num_output_tokens" in outputs else ():
            # Every response counts its own tokens; of beams it has all so far.
            before = 0 if self._beams > 1 else self._output_tokens or 0
            self._output_tokens = before + int(counted)
        if "num_input_tokens" in outputs:
            counts = outputs["num_input_tokens"].reshape(-1).tolist()
            self._input_tokens |= {row + number: int(counted) for number, counted in enumerate(counts)}

    def _keep(self, outputs: Outputs, row: int, sample: int) -> None:
        for name, array in outputs.items():
            if name in _READ or (name in _LOGITS and not self._options.get(f"return_{name}")):
                continue
            key = (name, row, sample)
            if name == "generation_logits" and self._context.streams:
                self._outputs[key] = _joined(self._outputs.get(key), array)
            else:
                self._outputs[key] = array

    def finished(self, request_id: str, *, stopped: bool = False) -> Generation:
        """The answer after the last response; `stopped`: it was told to end."""
        streamed = self._context.streams
        if not self._collected and self._output_tokens is None and not streamed and not stopped:
            raise RequestError(f"The model {self._context.model.name!r} ended the request without an answer.")
        sequences = tuple(self._collected[key].sequence for key in sorted(self._collected))
        return Generation(
            sequences=sequences,
            model=self._context.model.name,
            request_id=request_id,
            streamed=streamed,
            responses=self._responses,
            latency=time.monotonic() - self._started,
            time_to_first_token=self._first - self._started if streamed and self._first is not None else None,
            output_tokens=_generated(sequences) if self._output_tokens is None else self._output_tokens,
            input_tokens=sum(self._input_tokens.values()) or sum(map(len, self._context.prompts.token_ids)) or None,
            # A stop may come when the last token is on its way.
            stopped=stopped and not (sequences and all(each.finish_reason in _BY_ITSELF for each in sequences)),
            outputs=self._outputs,
        )


class _Collected:
    """One sequence while its responses come.

    `whole`: every response has the text from its beginning; `rewritten`: and may change it. `prompt` and `prompt_ids`
    (a count) are what a response repeats of the prompt. `files` decode the ids of a core model.
    """

    def __init__(
        self,
        sequence: GeneratedSequence,
        *,
        whole: bool,
        rewritten: bool,
        prompt: str,
        prompt_ids: int,
        strip: bool,
        files: TokenizerFiles | None,
    ) -> None:
        self.sequence = sequence
        self._whole = whole
        self._rewritten = rewritten
        self._prompt = prompt
        self._prompt_ids = prompt_ids
        self._strip = strip
        self._files = files
        self._seen = ""

    def add_text(self, text: str) -> str:
        """Add a response's text; the new piece."""
        text = text.removeprefix(self._prompt)
        if self._rewritten:
            self.sequence.text = self._stripped(text)
            return text
        if self._whole:
            self._seen, text = text, text[len(self._seen) :]
        piece = text if self.sequence.text else self._stripped(text)
        self.sequence.text = (self.sequence.text or "") + piece
        return piece

    def add_ids(self, ids: list[int]) -> str | bool:
        """Add a response's tokens; the new piece of text where they can be decoded, else whether there are any."""
        ids = ids[self._prompt_ids :]
        known = [] if self._rewritten else self.sequence.token_ids or []
        self.sequence.token_ids = [*known, *ids]
        if self._files is None or not ids:
            return bool(ids)
        self.sequence.text = self._stripped(self._files.decode(self.sequence.token_ids))
        if self.sequence.text.endswith(_HALF_A_CHARACTER):
            return True
        self._seen, before = self.sequence.text, self._seen
        return self._seen.removeprefix(before)

    def _stripped(self, text: str) -> str:
        return text.lstrip(" ") if self._strip else text

    def add_finish_reason(self, reply: Reply, place: int) -> None:
        """From the output of that name, else from the response's parameter, which joins those of several beams."""
        told = reply.outputs.get("finish_reason")
        if told is not None:
            reasons = [str(reason) for reason in told.reshape(-1)]
        else:
            reasons = str(reply.parameters.get("finish_reason", "")).split(",")
        if place < len(reasons) and reasons[place] not in _UNFINISHED:
            self.sequence.finish_reason = reasons[place]

    def add_log_probs(self, outputs: Outputs, place: int) -> None:
        """The sum, and one value per token; every streamed response has those of all tokens so far."""
        sums, values = outputs.get("cum_log_probs"), outputs.get("output_log_probs")
        if sums is None or values is None or sums.size <= place:
            return
        self.sequence.cum_log_prob = float(sums.reshape(-1)[place])
        row: list[float] = values.reshape(sums.size, -1)[place].tolist()
        if self.sequence.token_ids is not None:
            row = row[: len(self.sequence.token_ids)]
        # Where the tokens are not known: rows of shorter beams are padded with -1.
        while self.sequence.token_ids is None and sums.size > 1 and row and row[-1] == -1.0:
            row.pop()
        self.sequence.log_probs = row


def _repeats_prompt(context: Context) -> bool:
    """Whether answers begin with the prompt unasked: releases before 0.16 have no input that leaves it out."""
    model = context.model
    excluded = "exclude_input_in_output" in model.inputs or model.flag("exclude_input_in_output")
    return context.spec.exclude_input and not excluded


def _index(outputs: Outputs, name: str) -> int | None:
    return int(outputs[name].reshape(-1)[0]) if name in outputs and outputs[name].size == 1 else None


def _ids(outputs: Outputs, place: int) -> list[int]:
    lengths = outputs[LENGTHS_OUTPUT].reshape(-1)
    row = outputs[IDS_OUTPUT].reshape(len(lengths), -1)[place]
    ids: list[int] = row[: int(lengths[place])].tolist()
    return ids


def _generated(sequences: tuple[GeneratedSequence, ...]) -> int | None:
    return sum(len(sequence.token_ids or ()) for sequence in sequences) or None


def _joined(before: npt.NDArray[Any] | None, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Logits [1, 1, tokens, vocabulary]; a streamed response has [1, tokens, 1, vocabulary] of its own tokens."""
    import numpy as np

    steps = array.reshape(1, 1, -1, array.shape[-1]) if array.ndim > 1 else array
    return steps if before is None else np.concatenate([before, steps], axis=-2 if array.ndim > 1 else -1)
