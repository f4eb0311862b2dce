"""The answer to a request: its responses, collected into sequences by prompt, sample and beam."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trtserve.client.endpoint import understood
from trtserve.client.request import RequestContext
from trtserve.client.tensors import IDS_OUTPUT, TEXT_INPUT, TEXT_OUTPUT, Reply
from trtserve.client.tokenizer import TokenizerFiles
from trtserve.errors import RequestError
from trtserve.files import parse_json

if TYPE_CHECKING:
    import numpy.typing as npt

OutputKey = tuple[str, int, int]  # (name of the output, prompt, sequence)


@dataclass(kw_only=True)
class GeneratedSequence:
    prompt: int  # prompt, sequence (sample) and beam count from 0
    sequence: int
    beam: int
    text: str | None = None
    """Text without the prompt (unless requested) and without leading spaces, or None where only token ids are known."""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    cum_log_prob: float | None = None
    log_probs: list[float] | None = None
    """One value per generated token."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The answer to one request."""

    sequences: tuple[GeneratedSequence, ...]
    model: str
    request_id: str
    streamed: bool
    responses: int
    """Number of responses that carried text or tokens."""
    latency: float
    """Seconds from sending the request to its last response."""
    time_to_first_token: float | None = None
    """Seconds from sending the request to the first token, or None unless the answer was streamed."""
    output_tokens: int | None = None
    input_tokens: int | None = None
    stopped: bool = False
    """Whether --stop-after-ms ended the request."""
    outputs: dict[OutputKey, npt.NDArray[Any]] = field(default_factory=dict)
    """All other arrays: logits, performance metrics and further outputs that the model declares."""

    @property
    def text(self) -> str:
        """The first sequence's text."""
        return self.sequences[0].text or "" if self.sequences else ""

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens per second of latency, or None when the number of tokens is unknown."""
        return self.output_tokens / self.latency if self.output_tokens and self.latency > 0 else None


LENGTHS_OUTPUT = "sequence_length"
# Outputs that fill fields of a sequence or of the answer; all others are kept unchanged.
_PARSED_OUTPUTS = (
    TEXT_OUTPUT,
    IDS_OUTPUT,
    LENGTHS_OUTPUT,
    "batch_index",
    "sequence_index",
    "cum_log_probs",
    "output_log_probs",
    "cumulative_logprob",
    "logprobs",
    "finish_reason",
    "num_input_tokens",
    "num_output_tokens",
)
_LOGITS = ("context_logits", "generation_logits")
_UNFINISHED = ("", "not_finished", "None")  # the last one from NVIDIA's LLM API and vllm models
_NATURAL_ENDS = ("length", "end_id", "stop_words", "stop")
_INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"

Outputs = Mapping[str, "npt.NDArray[Any]"]
Key = tuple[int, int, int]  # (prompt, sample, beam)


class Answer:
    """Collects the responses of one request."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._options = context.spec.options
        self._beams = int(self._options.get("beam_width", 1))
        sequences = context.prompts.rows * self._beams * int(self._options.get("num_return_sequences", 1))
        self._single = sequences == 1
        self._collectors: dict[Key, _SequenceCollector] = {}
        self._outputs: dict[OutputKey, npt.NDArray[Any]] = {}
        self._responses = 0
        self._output_tokens: int | None = None
        self._input_tokens: dict[int, int] = {}
        self._started = time.monotonic()
        self._first: float | None = None

    def add(self, reply: Reply) -> str:
        """Add a response and return its new text, if the answer has only one sequence, else an empty one.

        Raises RequestError for outputs that do not fit together.
        """
        with understood():
            return self._added(reply)

    def _added(self, reply: Reply) -> str:
        row, sample = _index(reply.outputs, "batch_index"), _index(reply.outputs, "sequence_index")
        self._responses += TEXT_OUTPUT in reply.outputs or IDS_OUTPUT in reply.outputs
        keys = self._keys(reply.outputs, row, sample)
        texts = [self._add(key, reply, position) for position, key in enumerate(keys)]
        self._add_counts(reply.outputs, row or 0)
        self._keep_outputs(reply.outputs, row or 0, sample or 0)
        return "".join(texts) if self._single else ""

    def rest(self) -> str:
        """Return the end of the only sequence's text, which was held back because it may have been half a character."""
        return "".join(collector.rest() for collector in self._collectors.values()) if self._single else ""

    @property
    def stopped(self) -> bool:
        """Whether the only sequence contains a stop word, which the engine may not know because it ends in a token."""
        return self._single and any(collector.stopped for collector in self._collectors.values())

    def _keys(self, outputs: Outputs, row: int | None, sample: int | None) -> list[Key]:
        """Return the key of each sequence in a response, in the order of its texts or rows of ids."""
        per_sequence = outputs.get(TEXT_OUTPUT, outputs.get(LENGTHS_OUTPUT))
        count = 0 if per_sequence is None else per_sequence.size
        per_row = max(1, count // (self._context.prompts.rows if row is None else 1))
        beams = min(self._beams, per_row)
        return [
            (
                position // per_row if row is None else row,
                position % per_row // beams if sample is None else sample,
                position % per_row % beams,
            )
            for position in range(count)
        ]

    def _add(self, key: Key, reply: Reply, position: int) -> str:
        """Add a response to one sequence and return its new text."""
        collector = self._collectors.setdefault(key, self._new_collector(key))
        outputs, pieces = reply.outputs, []
        if IDS_OUTPUT in outputs and LENGTHS_OUTPUT in outputs:
            lengths = outputs[LENGTHS_OUTPUT].reshape(-1)
            ids = outputs[IDS_OUTPUT].reshape(len(lengths), -1)[position]
            pieces.append(collector.add_ids(ids[: int(lengths[position])].tolist()))
        if TEXT_OUTPUT in outputs:
            pieces.append(collector.add_text(str(outputs[TEXT_OUTPUT].reshape(-1)[position])))
        if any(pieces) and self._first is None:
            self._first = time.monotonic()
        collector.add_finish_reason(reply, position)
        if self._options.get("return_log_probs"):  # releases before 0.14 send zeros even unasked
            collector.add_log_probs(outputs, position)
        return "".join(piece for piece in pieces if isinstance(piece, str))

    def _new_collector(self, key: Key) -> _SequenceCollector:
        context, streams = self._context, self._context.streams
        # Releases before 0.16 have no input that excludes the prompt from the answer.
        can_exclude = "exclude_input_in_output" in context.model.inputs or context.model.flag("exclude_input_in_output")
        repeats_prompt = not streams and context.spec.exclude_input and not can_exclude
        return _SequenceCollector(
            sequence=GeneratedSequence(prompt=key[0], sequence=key[1], beam=key[2]),
            # With accumulate_tokens every response repeats the text so far; with beams it always does.
            cumulative=streams and (self._beams > 1 or context.model.flag("accumulate_tokens")),
            revised=self._beams > 1,
            prompt=context.prompts.texts[key[0]] if repeats_prompt and context.prompts.texts else "",
            prompt_len=len(context.prompts.token_ids[key[0]]) if repeats_prompt and context.prompts.token_ids else 0,
            strip=context.spec.exclude_input,
            files=context.tokenizer,
            end_of_words=_end_of_words(context),
        )

    def _add_counts(self, outputs: Outputs, row: int) -> None:
        for counted in outputs["num_output_tokens"].reshape(-1) if "num_output_tokens" in outputs else ():
            # Every response counts its own tokens; with beams it counts all so far.
            before = 0 if self._beams > 1 else self._output_tokens or 0
            self._output_tokens = before + int(counted)
        if "num_input_tokens" in outputs:
            counts = outputs["num_input_tokens"].reshape(-1).tolist()
            self._input_tokens |= {row + number: int(counted) for number, counted in enumerate(counts)}

    def _keep_outputs(self, outputs: Outputs, row: int, sample: int) -> None:
        for name, array in outputs.items():
            if name in _PARSED_OUTPUTS or (name in _LOGITS and not self._options.get(f"return_{name}")):
                continue
            key = (name, row, sample)
            if name == "generation_logits" and self._context.streams:
                import numpy as np

                # A response has [1, tokens, 1, vocabulary], the whole answer [1, 1, tokens, vocabulary].
                before = self._outputs.get(key)
                steps = array.reshape(1, 1, -1, array.shape[-1]) if array.ndim > 1 else array
                self._outputs[key] = (
                    steps if before is None else np.concatenate([before, steps], axis=-2 if array.ndim > 1 else -1)
                )
            else:
                self._outputs[key] = array

    def generation(self, request_id: str, *, stopped: bool = False) -> Generation:
        """Return the answer after the last response; `stopped`: a stop was sent to the engine."""
        streamed = self._context.streams
        if not self._collectors and self._output_tokens is None and not streamed and not stopped:
            raise RequestError(f"The model {self._context.model.name!r} ended the request without an answer.")
        sequences = tuple(self._collectors[key].sequence for key in sorted(self._collectors))
        received = sum(len(sequence.token_ids or ()) for sequence in sequences) or None
        return Generation(
            sequences=sequences,
            model=self._context.model.name,
            request_id=request_id,
            streamed=streamed,
            responses=self._responses,
            latency=time.monotonic() - self._started,
            time_to_first_token=self._first - self._started if streamed and self._first is not None else None,
            output_tokens=received if self._output_tokens is None else self._output_tokens,
            input_tokens=sum(self._input_tokens.values()) or sum(map(len, self._context.prompts.token_ids)) or None,
            # The stop may arrive when the answer is already complete.
            stopped=stopped and not (sequences and all(each.finish_reason in _NATURAL_ENDS for each in sequences)),
            outputs=self._outputs,
        )


@dataclass(kw_only=True)
class _SequenceCollector:
    sequence: GeneratedSequence
    cumulative: bool
    """Whether every response repeats the text so far."""
    revised: bool
    """Whether a response replaces the text so far (beam search)."""
    prompt: str
    """The prompt that responses repeat, as text, and as its number of tokens."""
    prompt_len: int
    strip: bool
    files: TokenizerFiles | None
    """The tokenizer that decodes the ids of a core model."""
    end_of_words: Callable[[str], int | None] | None
    """Finds the end of a stop word: a core model only knows ids of words, which may begin or end inside a token."""
    stopped: bool = False
    seen: str = ""

    def add_text(self, text: str) -> str:
        """Add the text of a response and return the new piece."""
        text = text.removeprefix(self.prompt)
        if self.revised:
            self.sequence.text = self._stripped(text)
            return text
        if self.cumulative:
            self.seen, text = text, text[len(self.seen) :]
        piece = text if self.sequence.text else self._stripped(text)
        self.sequence.text = (self.sequence.text or "") + piece
        return piece

    def add_ids(self, ids: list[int]) -> str | bool:
        """Add the tokens of a response; return the new text if it can be decoded, else whether there are tokens."""
        if self.stopped:
            return False
        ids = ids[self.prompt_len :]
        earlier = [] if self.revised else self.sequence.token_ids or []
        self.sequence.token_ids = [*earlier, *ids]
        if self.files is None or not ids:
            return bool(ids)
        text = self._stripped(self.files.decode(self.sequence.token_ids))
        end = None if self.revised or self.end_of_words is None else self.end_of_words(text)
        self.stopped, self.sequence.text = end is not None, text[:end]
        if self.stopped:
            self.sequence.finish_reason = "stop_words"
        elif text.endswith(_INCOMPLETE_CHARACTER):
            return True
        self.seen, before = self.sequence.text, self.seen
        return self.seen.removeprefix(before)

    def rest(self) -> str:
        """Return the end of a text that was decoded here, if no response has brought it."""
        if self.files is None or not self.sequence.token_ids:
            return ""
        self.seen, before = self.sequence.text or "", self.seen
        return self.seen[len(before) :]

    def _stripped(self, text: str) -> str:
        return text.lstrip(" ") if self.strip else text

    def add_finish_reason(self, reply: Reply, position: int) -> None:
        """Read the output `finish_reason`, else the response parameter, which lists those of several beams."""
        output = reply.outputs.get("finish_reason")
        if output is not None:
            reasons = [str(reason) for reason in output.reshape(-1)]
        else:
            reasons = str(reply.parameters.get("finish_reason", "")).split(",")
        if not self.stopped and position < len(reasons) and reasons[position] not in _UNFINISHED:
            self.sequence.finish_reason = reasons[position]

    def add_log_probs(self, outputs: Outputs, position: int) -> None:
        """Read cumulative and per-token log-probabilities; streamed responses repeat those of earlier tokens.

        Those of NVIDIA's vllm backend are JSON texts, with new tokens only.
        """
        if "cumulative_logprob" in outputs and "logprobs" in outputs:
            rows = parse_json(str(outputs["logprobs"].reshape(-1)[position])) or []
            found = [float(next(iter(row.values()))["logprob"]) for row in rows]
            self.sequence.log_probs = [*(self.sequence.log_probs or []), *found]
            self.sequence.cum_log_prob = float(outputs["cumulative_logprob"].reshape(-1)[position])
            return
        sums, values = outputs.get("cum_log_probs"), outputs.get("output_log_probs")
        if sums is None or values is None or sums.size <= position:
            return
        self.sequence.cum_log_prob = float(sums.reshape(-1)[position])
        row: list[float] = values.reshape(sums.size, -1)[position].tolist()
        if self.sequence.token_ids is not None:
            row = row[: len(self.sequence.token_ids)]
        # Without token ids the length is unknown: rows of shorter beams are padded with -1.
        while self.sequence.token_ids is None and sums.size > 1 and row and row[-1] == -1.0:
            row.pop()
        self.sequence.log_probs = row


def _end_of_words(context: RequestContext) -> Callable[[str], int | None] | None:
    words = context.spec.options.get("stop_words", ())
    if not words or context.tokenizer is None or TEXT_INPUT in context.model.inputs:
        return None
    from trtserve.programs.bls.texts import StopWords

    return StopWords(words).end


def _index(outputs: Outputs, name: str) -> int | None:
    return int(outputs[name].reshape(-1)[0]) if name in outputs and outputs[name].size == 1 else None
