"""All errors: every class has its own exit code, and every message says what happened and what to do next.

TrtserveError
├── UsageError                  2   a flag, name or combination that cannot work
├── MissingDependencyError      3   an optional package or program is not installed
├── ModelOptMissingError        4   a quantisation needs NVIDIA ModelOpt, which is not installed
├── ModelNotFoundError         10   the source does not name a model
├── AccessDeniedError          11   the model is gated or private, and the token has no access
├── NetworkError               12   the hub cannot be reached
├── DiskSpaceError             13   not enough free disk
├── MemoryLimitError           14   too large for the memory of this machine
├── UnsupportedModelError      15   an architecture, weight format or feature that is not supported
├── CorruptFileError           16   a file's size, hash or content is wrong
├── ConversionError            20   a checkpoint could not be produced
├── BuildError                 21   an engine could not be produced
├── RepositoryError            22   a model repository could not be produced or is not valid
├── ArtifactError              23   an artefact is missing, incomplete or of another kind or schema
├── LockedError                24   another process works on the same artefact
├── CheckError                 25   an artefact did not pass `trtserve check`
├── MachineError               30   this machine cannot run the server (doctor names the fix)
├── PortInUseError             31   a port is taken
├── ServerStartError           32   the server did not become ready
├── ServerNotFoundError        33   no such server is running
├── ServerAmbiguousError       34   several servers are running and none was named
├── ServerDiedError            35   a running server ended by itself
├── ServerStopError            36   a server could not be stopped within the bound
├── ServerNotReadyError        37   a server does not answer for all of its models (status)
├── ServerRunningError         38   a server of this name is running already (start)
├── ServerUnreachableError     40   no answer from the endpoint
├── RequestError               41   the server refused or failed the request
├── AnswerMismatchError        42   two answers that must be equal differ (bench e2e)
├── BenchmarkError             50   a benchmark could not be carried out
├── DoubtfulResultError        51   a benchmark's verdict is not `valid` (bench --strict)
├── RegressionError            52   a result is worse than an earlier one (bench compare)
└── MissedLimitError           53   figures do not meet their limits (up, tune, plan --fleet)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

_LISTED = 10
_LONGEST = 4000


class TrtserveError(Exception):
    """An error with an explanation for the user."""

    code = 1
    """Exit code of the process."""

    def __init__(self, message: str, *, hint: str | None = None, log: Path | None = None) -> None:
        """Store what to do next as `hint` and the file with the details as `log`."""
        # Values of strangers are in messages.
        message = message if len(message) <= _LONGEST else f"{message[: _LONGEST - 600]} … {message[-500:]}"
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.log = log


class UsageError(TrtserveError):
    code = 2


class MissingDependencyError(TrtserveError):
    code = 3


class ModelOptMissingError(MissingDependencyError):
    code = 4


class ModelNotFoundError(TrtserveError):
    code = 10


class AccessDeniedError(TrtserveError):
    code = 11


class NetworkError(TrtserveError):
    code = 12


class DiskSpaceError(TrtserveError):
    code = 13


class MemoryLimitError(TrtserveError):
    code = 14


class UnsupportedModelError(TrtserveError):
    code = 15


class CorruptFileError(TrtserveError):
    code = 16


class ConversionError(TrtserveError):
    code = 20


class BuildError(TrtserveError):
    code = 21


class RepositoryError(TrtserveError):
    code = 22


class ArtifactError(TrtserveError):
    code = 23


class LockedError(TrtserveError):
    code = 24


class CheckError(TrtserveError):
    code = 25


class MachineError(TrtserveError):
    code = 30


class PortInUseError(TrtserveError):
    code = 31


class ServerStartError(TrtserveError):
    code = 32

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        log: Path | None = None,
        killed: bool = False,
        by_chance: bool = False,
    ) -> None:
        """Store whether a process was `killed`, and whether Triton failed `by_chance`: another start may succeed."""
        super().__init__(message, hint=hint, log=log)
        self.killed = killed
        self.by_chance = by_chance


class ServerNotFoundError(TrtserveError):
    code = 33


class ServerAmbiguousError(TrtserveError):
    code = 34


class ServerDiedError(TrtserveError):
    code = 35


class ServerStopError(TrtserveError):
    code = 36


class ServerNotReadyError(TrtserveError):
    code = 37


class ServerRunningError(TrtserveError):
    code = 38


class ServerUnreachableError(TrtserveError):
    code = 40


class RequestError(TrtserveError):
    code = 41


class AnswerMismatchError(TrtserveError):
    code = 42


class BenchmarkError(TrtserveError):
    code = 50


class DoubtfulResultError(TrtserveError):
    code = 51


class RegressionError(TrtserveError):
    code = 52


class MissedLimitError(TrtserveError):
    code = 53


def exit_codes() -> list[tuple[str, str, str]]:
    """Return code, class and meaning of each way in which a command ends, from the tree above."""
    drawn = re.findall(r"[├└]── (\w+) +(\d+) +(.+)", __doc__ or "")
    return [
        ("0", "–", "success"),
        ("1", "TrtserveError", "an unexpected error: a bug in trtserve"),
        *((code, name, meaning) for name, code, meaning in drawn),
        ("129, 143", "–", "ended by SIGHUP or SIGTERM; unfinished work was removed"),
        ("130", "–", "Ctrl-C"),
    ]


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", *, most: int = 1, cutoff: float = 0.6) -> str:
    """Return a hint with up to `most` words of `known` that resemble `word`, or `otherwise` when none does."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=most, cutoff=cutoff)
    return f"Did you mean {' or '.join(close)}?" if close else otherwise


def listing(items: Sequence[str], separator: str = ", ", *, most: int = _LISTED) -> str:
    """Return items for a message: the first ones, and how many more there are."""
    more = len(items) - most
    return separator.join([*items[:most], *([f"and {more} more"] if more > 0 else [])])


def counted(number: int, noun: str) -> str:
    """Return a number of things for a message: `1 rank`, `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
