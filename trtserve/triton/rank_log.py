"""Lines of several ranks in one log: mpirun's --tag-output puts `[job,rank]<stdout>:` in front of each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trtserve.process import how_it_ended

_TAG = re.compile(r"^\[\d+,(\d+)\]<(?:stdout|stderr|stddiag)>: ?")
# What mpirun of Open MPI 4 and 5 says of the rank that ended first.
_SIGNAL = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited\s+on\s+signal (\d+)")
_CODE = re.compile(r"Process name: \[\S*?,(\d+)\]\s+Exit code:\s+(\d+)")
_SLOTS = re.compile(r"not enough slots available|nodes allocated for this job are already filled|already filled")


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """The first rank that ended, and with what: an exit code, negative for a signal."""

    rank: int
    code: int

    @property
    def sentence(self) -> str:
        """Words for the beginning of a message."""
        return f"Rank {self.rank} {how_it_ended(self.code)}"


def rank_of(line: str) -> int | None:
    """The rank that wrote a line; None for mpirun's own and those of a server without ranks."""
    match = _TAG.match(line)
    return None if match is None else int(match[1])


def untagged(line: str) -> str:
    """A line as its rank wrote it."""
    return _TAG.sub("", line)


def lines_of(text: str, rank: int) -> list[str]:
    """What one rank wrote, without tags."""
    return [untagged(line) for line in text.splitlines() if rank_of(line) == rank]


def first_end(text: str) -> RankEnd | None:
    """The rank with which mpirun explains that it ended the job; None when it explains nothing."""
    if match := _SIGNAL.search(text):
        return RankEnd(rank=int(match[1]), code=-int(match[2]))
    if match := _CODE.search(text):
        return RankEnd(rank=int(match[1]), code=int(match[2]))
    return None


def lacks_slots(text: str) -> bool:
    """Whether mpirun refused to start more ranks than there are cores."""
    return _SLOTS.search(text) is not None


def silent_longest(text: str, ranks: int) -> int:
    """The rank whose last line stands first in the log; one that wrote nothing comes before all others."""
    last = dict.fromkeys(range(ranks), -1)
    for number, line in enumerate(text.splitlines()):
        rank = rank_of(line)
        if rank in last:
            last[rank] = number
    return min(last, key=lambda rank: last[rank])
