"""What happened to each request. Every figure of a report is computed from these records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from trtserve.errors import UsageError
from trtserve.files import parse_json

FILE_NAME = "requests.jsonl"

Status = Literal["completed", "failed", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response, decoded after the run."""

    time_ns: int
    text: str | None = None
    """New text; None from a model that answers with token ids."""
    tokens: int | None = None
    """New tokens, or None where the server does not count them."""
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    """What the server reports instead of an answer."""
    ids: tuple[int, ...] = ()
    """New token ids, for the next turn of a conversation."""


@dataclass(kw_only=True)
class Record:
    """What happened to one planned request; times are nanoseconds of the monotonic clock."""

    index: int
    input_tokens: int
    requested_tokens: int
    worker: int = 0
    """Number of the process that sent it."""
    intended_ns: int = 0
    """Time of the schedule; in a closed loop the actual send."""
    sent_ns: int | None = None
    """None if the request was never sent."""
    ended_ns: int = 0
    status: Status = "cancelled"
    error: str | None = None
    scheduled: bool = False
    streamed: bool = False
    finish_reason: str | None = None
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    """Time (ns) and number of tokens of every response that carried tokens."""
    server_tokens: int | None = None
    """Output tokens by the server's count, or None if it does not count."""
    tokenizer_tokens: int | None = None
    """Tokens of the answer's text by the tokenizer, or None for token ids."""
    responses: list[Response] = field(default_factory=list, repr=False)
    """What arrived; not part of the file."""

    @property
    def output_tokens(self) -> int:
        """Number of generated tokens received."""
        return sum(tokens for _, tokens in self.arrivals)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the responses."""
        content = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "responses"}
        return {**content, "output_tokens": self.output_tokens}


def write_records(records: Iterable[Record], folder: Path) -> None:
    """Write one JSON line per planned request."""
    lines = (json.dumps(record.to_json()) + "\n" for record in records)
    (folder / FILE_NAME).write_text("".join(lines), encoding="utf-8")


def read_records(path: Path) -> list[Record]:
    """Read the lines that `write_records` wrote. Raises UsageError for anything else."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    return [_read_record(line, number, path) for number, line in enumerate(lines, 1)]


def _read_record(line: str, number: int, path: Path) -> Record:
    known = {each.name for each in fields(Record)}
    try:
        content = {key: value for key, value in parse_json(line).items() if key in known}
        content["arrivals"] = [(int(time), int(tokens)) for time, tokens in content["arrivals"]]
        return Record(**content)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UsageError(
            f"Line {number} of {path} is not the record of a request: {error}.",
            hint=f"`trtserve bench … --out DIR` writes such a file: DIR/{FILE_NAME}.",
        ) from None


def pooled(parts: Iterable[Sequence[Record]]) -> list[Record]:
    """Return the records of several workers in the order of the requests."""
    return sorted((record for part in parts for record in part), key=lambda record: record.index)
