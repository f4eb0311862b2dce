"""The requests of a run, the limits they respect, and a record of what happened to each.

Every figure of a report is computed from the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from trtserve.artifacts.engine_config import EngineConfig
from trtserve.client.tokenizer import TokenizerFiles
from trtserve.errors import RepositoryError, UsageError
from trtserve.files import LARGEST_DATA, decode_as, optional_json_object, parse_json, read_text
from trtserve.specs import BenchSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class TrafficLimits:
    """Limits of the engine, or None where unknown."""

    vocab_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    special_ids: frozenset[int] = frozenset()  # special tokens, which random prompts never contain


@dataclass(frozen=True, kw_only=True)
class TrafficRequest:
    token_ids: npt.NDArray[np.int32]  # the prompt [n]; for a text model the ids into which the server encodes `text`
    output_len: int  # number of tokens to generate
    text: str | None = None
    end_id: int | None = None
    """Token that ends the answer early; -1: none; None: the model's default (core models have none)."""
    session: int | None = None
    """Conversation that this is a turn of; its turns follow each other, and each continues the answers before it."""
    cancel_after: int | None = None  # responses after which the client cancels the request


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All requests of a run."""

    requests: tuple[TrafficRequest, ...]
    clipped_inputs: int = 0  # number of prompts that were cut to the engine's limits
    clipped_outputs: int = 0  # number of answers that were shortened to the engine's limits
    offsets: tuple[float, ...] | None = None  # send times of a recorded trace, in seconds after the start
    notes: tuple[str, ...] = ()


def limits_of_repository(repository: Path, model: str) -> TrafficLimits:
    """Read the limits from the files of a model repository. Raises RepositoryError for a damaged one."""
    added = TokenizerFiles(repository / "preprocessing" / "1" / "tokenizer").added_tokens()
    special = frozenset(token["id"] for token in added if token.get("special"))
    return replace(limits_of_engine(engine_of_repository(repository, model)), special_ids=special)


def limits_of_engine(config: EngineConfig) -> TrafficLimits:
    return TrafficLimits(
        vocab_size=config.model.vocab_size or None,
        max_input_len=config.build.max_input_len,
        max_seq_len=config.build.max_seq_len or None,
    )


def engine_of_repository(repository: Path, model: str) -> EngineConfig:
    """Return the config of a model's engine, an empty one where there is no file. Raises RepositoryError."""
    path = repository / model / "1" / "config.json"
    return EngineConfig.of(optional_json_object(path, RepositoryError), path, RepositoryError, hint=None)


def override_limits(limits: TrafficLimits, spec: BenchSpec) -> TrafficLimits:
    """Replace limits by those that the user gave."""
    given = {name: getattr(spec, name) for name in ("vocab_size", "max_input_len", "max_seq_len")}
    return replace(limits, **{name: value for name, value in given.items() if value is not None})


def clip(input_len: int, output_len: int, limits: TrafficLimits) -> tuple[int, int]:
    """Cut both lengths to the limits: the prompt leaves room for one token, the answer for the prompt."""
    if limits.max_seq_len is not None:
        input_len = min(input_len, limits.max_seq_len - 1)
    if limits.max_input_len is not None:
        input_len = min(input_len, limits.max_input_len)
    if limits.max_seq_len is not None:
        output_len = min(output_len, limits.max_seq_len - input_len)
    return input_len, output_len


FILE_NAME = "requests.jsonl"

Status = Literal["completed", "failed", "cancelled"]
# Numbers of a result, which may be a stranger's file: larger ones overflow where figures are computed.
Whole = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Real = Annotated[float, Meta(ge=-(1 << 62), le=1 << 62)]
Positive = Annotated[float, Meta(gt=0, le=1 << 62)]


@dataclass(frozen=True, kw_only=True)
class DecodedResponse:
    """One response, decoded after the run."""

    time_ns: int
    text: str | None = None  # new text; None from a model that answers with token ids
    in_markup: bool = False
    """Whether the text stood in markup (reasoning, calls), whose tokens are counted but are not in the text."""
    tokens: int | None = None  # new tokens, or None where the server does not count them
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None  # what the server reports instead of an answer
    ids: tuple[int, ...] = ()  # new token ids, for the next turn of a conversation


@dataclass(kw_only=True)
class RequestRecord:
    """What happened to one planned request; times are nanoseconds of the monotonic clock."""

    index: Whole
    input_tokens: Count
    requested_tokens: Count
    worker: Whole = 0  # number of the process that sent it
    intended_ns: Whole = 0  # time of the schedule; in a closed loop the actual send
    sent_ns: Whole | None = None  # None if the request was never sent
    ended_ns: Whole = 0
    status: Status = "cancelled"
    error: str | None = None
    scheduled: bool = False
    streamed: bool = False
    finish_reason: str | None = None
    arrivals: list[tuple[Whole, Count]] = field(default_factory=list)
    """Time (ns) and number of tokens of every response that carried tokens."""
    server_tokens: Count | None = None  # output tokens by the server's count, or None if it does not count
    tokenizer_tokens: Count | None = None  # tokens of the answer's text by the tokenizer, or None for token ids
    responses: list[DecodedResponse] = field(default_factory=list, repr=False)  # what arrived; not part of the file

    @property
    def output_tokens(self) -> int:
        """Number of generated tokens received."""
        return sum(tokens for _, tokens in self.arrivals)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the responses."""
        content = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "responses"}
        return {**content, "output_tokens": self.output_tokens}


def latency_ms(record: RequestRecord) -> float:
    """Return milliseconds from the intended send to the end."""
    return (record.ended_ns - record.intended_ns) / 1e6


def first_token_ms(record: RequestRecord) -> float | None:
    """Return milliseconds from the intended send to the first token, or None without a stream or a token."""
    if not record.streamed or not record.arrivals:
        return None
    return (record.arrivals[0][0] - record.intended_ns) / 1e6


def per_token_ms(record: RequestRecord) -> float | None:
    """Return milliseconds per token after the first response, whose own tokens came together."""
    if not record.streamed or len(record.arrivals) < 2:
        return None
    (first, tokens), (last, _) = record.arrivals[0], record.arrivals[-1]
    return (last - first) / 1e6 / (record.output_tokens - tokens)


def longest_gap_ms(record: RequestRecord) -> float | None:
    """Return the longest time between two responses with tokens."""
    if not record.streamed or len(record.arrivals) < 2:
        return None
    times = [time for time, _ in record.arrivals]
    return max(after - before for before, after in pairwise(times)) / 1e6


def read_records(path: Path) -> list[RequestRecord]:
    """Read the lines of a result's file of requests. Raises UsageError for anything else."""
    try:
        lines = read_text(path, UsageError, limit=LARGEST_DATA).splitlines()
    except FileNotFoundError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.", hint="Give the folder that `trtserve bench … --out DIR` wrote."
        ) from None
    return [_read_record(line, number, path) for number, line in enumerate(lines, 1)]


def _read_record(line: str, number: int, path: Path) -> RequestRecord:
    place, hint = f"Line {number} of {path}", f"`trtserve bench … --out DIR` writes such a file: DIR/{FILE_NAME}."
    try:
        content = parse_json(line)
    except ValueError as error:
        raise UsageError(f"{place} is not JSON: {error}.", hint=hint) from None
    return decode_as(content, RequestRecord, "the record of a request", place, UsageError, hint=hint, tolerant=True)


def pooled(parts: Iterable[Sequence[RequestRecord]]) -> list[RequestRecord]:
    """Return the records of several workers in the order of the requests."""
    return sorted((record for part in parts for record in part), key=lambda record: record.index)
