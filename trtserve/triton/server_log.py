"""What Triton's log says: why a model did not load, and which lines are harmless noise on a machine without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trtserve.triton.rank_log import untagged

_NOISE = (
    "Unable to allocate pinned system memory",
    "CUDA memory pool disabled",
    "CudaDriverHelper has not been initialized",
    "Failed to initialize NVML",
    "DCGM unable to start",
    "Collecting CPU metrics",
    "Non-graceful termination detected",
)
_HEADER = re.compile(r"^[IWEF]\d{4} [\d:.]+\s+\d+ [\w.]+:\d+\]\s*")
_LOAD_FAILED = re.compile(r"failed to load '([^']+)' version \d+: (.*)$")
_POLL_FAILED = re.compile(r"Poll failed for model directory '([^']+)': (.*)$")
_STUB_FAILED = re.compile(r"Failed to preinitialize Python stub: (.*)$")
_PROTO_ERROR = re.compile(r"Error parsing text-format inference\.ModelConfig: (.*)$")
_SOCKET = re.compile(r"failed to start \w+ service: (.*)$")
_USAGE = re.compile(r"^\S*tritonserver: (.*)$")
_LOADING = re.compile(r"\bloading: ([^:\"]+):\d+")
_LOADED = re.compile(r"successfully loaded '([^']+)'")
_ERROR_LINE = re.compile(r"^(E\d{4} |error:|Error:)")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One reason why the server did not come up; `model` is None when it concerns the server."""

    model: str | None
    message: str

    def __str__(self) -> str:
        return self.message if self.model is None else f"model {self.model}: {self.message}"


def failures(text: str) -> list[Failure]:
    """Why models failed to load, each reason once, in the order of the log; else the log's other error lines."""
    lines = significant(text)
    found = [failure for line in lines if (failure := _failure(line)) is not None]
    proto = [match[1] for line in lines if (match := _PROTO_ERROR.search(line)) is not None]
    if proto:
        found = [_with_detail(failure, proto[0]) for failure in found]
    if not found:
        found = [Failure(model=None, message=plain(line)) for line in lines if _ERROR_LINE.match(line)]
    return list(dict.fromkeys(found))


def fatal(text: str) -> Failure | None:
    """A failure after which Triton 2.51 waits for ever instead of ending: a stub that found no model.py."""
    match = _STUB_FAILED.search(text)
    return None if match is None else Failure(model=None, message=plain(match[1]))


def still_loading(text: str) -> list[str]:
    """Models whose load has begun and not ended."""
    loaded = set(_LOADED.findall(text))
    return [name for name in dict.fromkeys(_LOADING.findall(text)) if name not in loaded]


def significant(text: str) -> list[str]:
    """Lines without tables, blank lines, the noise of a machine without a GPU, and the tags of ranks."""
    lines = (untagged(line).rstrip() for line in text.splitlines())
    return [line for line in lines if line and line[0] not in "|+" and not any(noise in line for noise in _NOISE)]


def plain(line: str) -> str:
    """A log line without its header, quotes and escapes."""
    body = _HEADER.sub("", line).strip()
    if body.startswith('"') and body.endswith('"') and len(body) > 1:
        body = body[1:-1]
    return body.replace("\\n", "\n").replace('\\"', '"').strip().rstrip('"')


def tail(log: Path, count: int) -> list[str]:
    """The last `count` lines of a log; none when it does not exist."""
    text = read(log)
    return text.splitlines()[-count:] if count > 0 else []


def read(log: Path) -> str:
    """The whole log; empty when it does not exist."""
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def follow(log: Path, *, position: int, ended: Callable[[], bool], pause: Callable[[], None]) -> Iterator[str]:
    """Yield what is added to a log after byte `position` until `ended`; one that starts anew is read from its start."""
    while True:
        last = ended()
        size = log.stat().st_size if log.exists() else 0
        position = 0 if size < position else position
        if size > position:
            with log.open("rb") as handle:
                handle.seek(position)
                added = handle.read(size - position)
            position = size
            yield added.decode("utf-8", errors="replace")
        if last:
            return
        pause()


def _failure(line: str) -> Failure | None:
    for pattern in (_LOAD_FAILED, _POLL_FAILED):
        if match := pattern.search(line):
            return Failure(model=match[1], message=_reason(match[2]))
    if match := _SOCKET.search(line) or _USAGE.match(line):
        return Failure(model=None, message=_reason(match[1]))
    return None


def _reason(text: str) -> str:
    """What a model said, without the stack that the python backend adds behind "At:"; the log has it."""
    message = plain(text.rstrip().removesuffix('"')).removeprefix("Internal: ")
    lines = message.split("\n\nAt:\n", maxsplit=1)[0].splitlines()
    return "\n".join(line for line in lines if line.strip())


def _with_detail(failure: Failure, detail: str) -> Failure:
    if "text proto" not in failure.message:
        return failure
    return Failure(model=failure.model, message=f"{failure.message} ({detail})")
