"""Triton's log: why models did not load, which ranks wrote what, and its file, which is kept small."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trtserve.process import how_it_ended

_NOISE = (
    "Unable to allocate pinned system memory",
    "CUDA memory pool disabled",
    "CudaDriverHelper has not been initialized",
    "Failed to initialize NVML",
    "unable to create stream for ensemble: CUDA driver version is insufficient",
    "DCGM unable to start",
    "Collecting CPU metrics",
    "Non-graceful termination detected",
)
_HEADER = re.compile(r"^([IWEF])(\d{4} [\d:.]+)\s+(\d+) ([\w.]+:\d+)\]\s*")
_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "error"}
_LOAD_FAILED = re.compile(r"failed to load '([^']+)' version \d+: (.*)$")
_POLL_FAILED = re.compile(r"Poll failed for model directory '([^']+)': (.*)$")
_STUB_FAILED = re.compile(r"Failed to preinitialize Python stub: (.*)$")
# Words of a failure → the line with its cause, which another part of the server has written before.
_CAUSES = {
    "text proto": re.compile(r"Error parsing text-format inference\.ModelConfig: (.*)$"),
    "Engine core initialization failed": re.compile(r"^\((?:EngineCore|Worker)[^)]*\) ERROR [^\]]*\] ([\w.]+: .+)$"),
}
_SOCKET = re.compile(r"failed to start \w+ service: (.*)$")
_USAGE = re.compile(r"^\S*tritonserver: (.*)$")
_LOADING = re.compile(r"\bloading: ([^:\"]+):\d+")
_LOADED = re.compile(r"successfully loaded '([^']+)'")
_CAPTURED = re.compile(r"Captured the decode step of \d+ rows, (\d+ of \d+)")
_INITIALIZING = re.compile(r"python_be.*TRITONBACKEND_ModelInstanceInitialize: (.+)_\d+_\d+ \(")
_ERROR_LINE = re.compile(r"^(E\d{4} |error:|Error:)")
# Stacks of all threads that Python's faulthandler writes below "Fatal Python error: Segmentation fault".
_STACKS = re.compile(r'^(  File ".+", line \d+ in |  <no Python frame>|(Current t|T)hread 0x|Extension modules: )')
# mpirun --tag-output puts `[job,rank]<stdout>:` in front of each line.
_TAG = re.compile(r"^\[\d+,(\d+)\]<(?:stdout|stderr|stddiag)>: ?")
# The words of Open MPI 4 and 5 about the rank that ended first.
_SIGNAL = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited\s+on\s+signal (\d+)")
_CODE = re.compile(r"Process name: \[\S*?,(\d+)\]\s+Exit code:\s+(\d+)")
_SLOTS = re.compile(r"not enough slots available|nodes allocated for this job are already filled|already filled")
_LARGEST = 64 * 2**20
_KEPT = 3


@dataclass(frozen=True, kw_only=True)
class LoadFailure:
    """One reason why the server did not start."""

    model: str | None  # None when it concerns the server
    message: str

    def __str__(self) -> str:
        return self.message if self.model is None else f"model {self.model}: {self.message}"


def failures(text: str) -> list[LoadFailure]:
    """Return why models failed to load, in the order of the log; else the log's other error lines."""
    lines = significant(text)
    found = [failure for line in lines if (failure := _failure(line)) is not None]
    for words, pattern in _CAUSES.items():
        cause = next((match[1] for line in lines if (match := pattern.search(line)) is not None), None)
        if cause is not None:
            found = [
                replace(failure, message=f"{failure.message} ({cause})") if words in failure.message else failure
                for failure in found
            ]
    if not found:
        found = [LoadFailure(model=None, message=plain(line)) for line in lines if _ERROR_LINE.match(line)]
    return list(dict.fromkeys(found))


def fatal(text: str) -> LoadFailure | None:
    """Return a failure after which Triton 2.51 waits forever instead of ending: a stub without model.py."""
    match = _STUB_FAILED.search(text)
    return None if match is None else LoadFailure(model=None, message=plain(match[1]))


def loaded(text: str) -> set[str]:
    return set(_LOADED.findall(text))


def still_loading(text: str) -> list[str]:
    done = loaded(text)
    return [name for name in dict.fromkeys(_LOADING.findall(text)) if name not in done]


def initializing(text: str) -> set[str]:
    """Return the Python models whose stubs have been started and that are still loading."""
    return set(still_loading(text)) & set(_INITIALIZING.findall(text))


def captured(text: str) -> str:
    """Return how many decode steps the torch runtime has captured as CUDA graphs, such as "3 of 20", or ""."""
    found = _CAPTURED.findall(text)
    return str(found[-1]) if found else ""


def significant(text: str) -> list[str]:
    """Return the lines that matter: without tables, stacks, blank lines, messages about missing GPUs, and rank tags."""
    lines = (untagged(line).rstrip() for line in text.splitlines())
    lines = (line for line in lines if line and line[0] not in "|+" and not _HEADER.fullmatch(line))
    return [line for line in lines if not _STACKS.match(line) and not is_noise(line)]


def is_noise(line: str) -> bool:
    """Return whether a line only says that this machine has no GPU, which the CPU runtime does not need."""
    return any(noise in line for noise in _NOISE)


def described(line: str) -> dict[str, object]:
    """Return a line as JSON; `logged` is Triton's own time, month and day first. Noise has the level debug."""
    text = untagged(line)
    header = _HEADER.match(text)
    level = _LEVELS[header[1]] if header else "error" if _ERROR_LINE.match(text) else "info"
    record: dict[str, object] = {"level": "debug" if is_noise(line) else level, "message": plain(text)}
    if header is not None:
        record |= {"logged": header[2], "pid": int(header[3]), "source": header[4]}
    if (rank := rank_of(line)) is not None:
        record["rank"] = rank
    return record


def summary(line: str) -> str:
    """Return a line as a person reads it: the time, the rank, the level unless it is info, and the message."""
    header = _HEADER.match(untagged(line))
    if header is None:
        return line
    rank = "" if (number := rank_of(line)) is None else f"rank {number}: "
    level = "" if header[1] == "I" else f"{_LEVELS[header[1]]}: "
    return f"{header[2].split()[1].partition('.')[0]}  {rank}{level}{plain(untagged(line))}"


def plain(line: str) -> str:
    """Strip header, quotes and escapes from a log line."""
    body = _HEADER.sub("", line).strip()
    if body.startswith('"') and body.endswith('"') and len(body) > 1:
        body = body[1:-1]
    return body.replace("\\n", "\n").replace('\\"', '"').strip().rstrip('"')


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    rank: int
    code: int  # exit code, negative for a signal

    @property
    def sentence(self) -> str:
        """How it ended, for the beginning of a message."""
        return f"Rank {self.rank} {how_it_ended(self.code)}"


def rank_of(line: str) -> int | None:
    """Return the rank that wrote a line, or None for lines of mpirun, and for servers without ranks."""
    match = _TAG.match(line)
    return None if match is None else int(match[1])


def untagged(line: str) -> str:
    return _TAG.sub("", line)


def lines_of(text: str, rank: int) -> list[str]:
    """Return the lines of one rank, without tags."""
    return [untagged(line) for line in text.splitlines() if rank_of(line) == rank]


def first_end(text: str) -> RankEnd | None:
    """Return the rank that mpirun names as the reason for ending the job, or None when it names none."""
    if match := _SIGNAL.search(text):
        return RankEnd(rank=int(match[1]), code=-int(match[2]))
    if match := _CODE.search(text):
        return RankEnd(rank=int(match[1]), code=int(match[2]))
    return None


def lacks_slots(text: str) -> bool:
    """Return whether mpirun refused to start more ranks than there are cores."""
    return _SLOTS.search(text) is not None


def silent_longest(text: str, ranks: int) -> int:
    """Return the rank that has been silent the longest; a rank that wrote nothing comes first."""
    last = dict.fromkeys(range(ranks), -1)
    for number, line in enumerate(text.splitlines()):
        rank = rank_of(line)
        if rank in last:
            last[rank] = number
    return min(last, key=lambda rank: last[rank])


def tail(log: Path, count: int) -> list[str]:
    """Return the last `count` lines of a log, or [] when it does not exist."""
    text = read(log)
    return text.splitlines()[-count:] if count > 0 else []


def read(log: Path) -> str:
    """Return the log, or empty when it does not exist."""
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def follow(log: Path, *, position: int, ended: Callable[[], bool], pause: Callable[[], None]) -> Iterator[str]:
    """Yield what is added to a log after byte `position` until `ended`; a truncated log is read from its start."""
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


def _failure(line: str) -> LoadFailure | None:
    for pattern in (_LOAD_FAILED, _POLL_FAILED):
        if match := pattern.search(line):
            return LoadFailure(model=match[1], message=_reason(match[2]))
    if match := _SOCKET.search(line) or _USAGE.match(line):
        return LoadFailure(model=None, message=_reason(match[1]))
    return None


def _reason(text: str) -> str:
    """Return a model's error without the stack that the Python backend adds after "At:"."""
    message = plain(text.rstrip().removesuffix('"')).removeprefix("Internal: ")
    lines = message.split("\n\nAt:\n", maxsplit=1)[0].splitlines()
    return "\n".join(line for line in lines if line.strip())


def rotate(log: Path) -> None:
    """Make room for a new log: the present one becomes `log`.1, and so on; three old ones are kept.

    Logs next to it that were written before the clock was set back get the present time: the new log is the last.
    """
    now = time.time()
    for other in log.parent.glob("*.log"):
        with suppress(OSError):
            if other.stat().st_mtime > now:
                os.utime(other, (now, now))
    if log.exists() and log.stat().st_size:
        _shift(log)
        log.replace(_old(log, 1))


def limit_size(log: Path) -> None:
    """Rotate a log that has grown too large. Its writer keeps the file open, so it is copied and emptied."""
    if log.exists() and log.stat().st_size > _LARGEST:
        _shift(log)
        shutil.copy(log, _old(log, 1))  # and its permissions
        with log.open("r+b") as handle:
            handle.truncate()


def _shift(log: Path) -> None:
    for number in range(_KEPT - 1, 0, -1):
        if _old(log, number).exists():
            _old(log, number).replace(_old(log, number + 1))


def _old(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")


def last_lines(log: Path, count: int = 5) -> str:
    """Return the last significant lines of a log, indented for a message."""
    return indented(significant(read(log))[-count:])


def indented(lines: Iterable[str]) -> str:
    """Return lines of a log without their headers, indented for a message."""
    return "\n".join(f"  {text}" for line in lines if (text := plain(line)))
