"""Which of several copies of a server gets a request: the one with the least to do, or with its prefix in the cache.

Engines keep the keys and values of prompts in blocks, and begin behind those that they have. Nobody tells a gateway
what an engine has, so it remembers where the blocks of past prompts went: chained hashes of their token ids.
"""

from __future__ import annotations

import mmap
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtserve.errors import ServerUnreachableError

BLOCK = 64
"""Token ids of a block; engines use 16 to 64, so that a shorter prefix than this is worth little."""
MOST_REPLICAS = 4096
_MOST_BLOCKS = 128  # of one prompt: what is behind 8,192 shared tokens changes the choice no more
_REMEMBERED = 1 << 20  # blocks, of 16 bytes each
_WAYS = 4  # replicas that are remembered for a block, the latest first, in one number
_BITS = np.uint64(64 // _WAYS)
_SLIGHTLY = 1e-6
_USUAL_ANSWER = 128.0  # tokens; nobody knows before
_WAIT = 0.5  # of a token that a replica has to work on before: it works on several requests at once
_UNEVEN = 1.25  # times the mean load, above which a replica gets no request for the sake of its cache
_DOWN_SECONDS = 2.0
_OTHERS_SECONDS = 0.005
# A linear hash with secret factors: nobody outside can make two prompts look the same. Processes that are forked share
# the factors, and so what they remember.
_FACTORS = np.array([secrets.randbits(64) | 1 for _ in range(BLOCK // 2)], dtype=np.uint64)
_SALTS = np.array([secrets.randbits(64) | 1 for _ in range(_MOST_BLOCKS)], dtype=np.uint64)
_NONE = np.zeros(0, dtype=np.uint64)

Ids = Sequence[int] | NDArray[Any]


@dataclass(kw_only=True)
class RequestShare:
    """A request on one replica."""

    replica: int
    cached: int
    """Tokens of the prompt that the replica probably has."""
    cost: float
    """Tokens that it will work on, about: those of the prompt that are not cached, and an answer."""


class BalancerMemory:
    """What balancers of several processes share: made before they are forked. Its size is fixed."""

    def __init__(self, *, processes: int = 1, remembered: int = _REMEMBERED) -> None:
        """`remembered` is a power of two. A block is kept in one place only, so new ones replace some of the old."""
        self.keys = shared_array((remembered,), np.uint64)
        self.rows = shared_array((remembered,), np.uint64)
        """The replicas that had a block last: four numbers of 16 bits, from 1, the latest in the lowest; 0: none."""
        self.loads = shared_array((processes, MOST_REPLICAS), np.float64)
        """Tokens that each replica has to work on for each process."""


def shared_array(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return zeros that processes share which are forked later."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype=dtype).reshape(shape)


class Balancer:
    """Chooses replicas, and remembers what they do and what they have."""

    def __init__(
        self,
        count: int,
        *,
        memory: BalancerMemory | None = None,
        process: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`process` is the row of this process in `memory`."""
        memory = memory or BalancerMemory()
        self._memory, self._process, self._clock = memory, process, clock
        self._shift = np.uint64(65 - len(memory.keys).bit_length())
        self._loads = memory.loads[process]
        self._order = np.zeros(MOST_REPLICAS)
        """Own load of each, and a little of what it has done, which decides between replicas with as little to do."""
        self._done = np.zeros(MOST_REPLICAS)
        self._others = np.zeros(MOST_REPLICAS) if len(memory.loads) > 1 else None
        self._others_at = -_OTHERS_SECONDS
        self._until: dict[int, float] = {}
        """Replica that failed → until when it gets no request."""
        self.closed: Collection[int] = ()
        """Replicas that get no new request: drained ones, and those that were removed."""
        self.count = count
        """Replicas are numbered below it."""
        self._total = 0.0

    @property
    def loads(self) -> list[float]:
        """Tokens that each replica has to work on, about."""
        return [float(load) for load in self._memory.loads[:, : self.count].sum(axis=0)]

    def choose(self, ids: Ids, *, without: Collection[int] = ()) -> RequestShare:
        """Return the replica for a prompt, and count its work there until `end`.

        `without` are replicas that it was tried on, or that cannot take it. If all others are down, one that failed a
        moment ago is tried again. Raises ServerUnreachableError if none is left.
        """
        loads, total = self._order[: self.count], self._total
        if self._others is not None:
            others = self._others_now()
            loads, total = loads + others[: self.count], total + float(others.sum())
        if self._until or without or self.closed:
            loads = self._open(loads, without)
        idlest = int(loads.argmin())
        keys = _chain(ids)
        slots, deepest = keys >> self._shift, 0
        candidates = [(idlest, 0)]
        if len(keys) and len(found := (self._memory.keys[slots] == keys).nonzero()[0]):
            deepest = int(found[-1]) + 1
            places = self._memory.rows[slots[found]].view(np.uint16)
            own = (places == idlest + 1).nonzero()[0]
            candidates = [(idlest, int(found[own[-1] // _WAYS]) + 1 if len(own) else 0)]
            limit = _UNEVEN * total / self.count + len(ids) + _USUAL_ANSWER
            candidates += [
                (each - 1, deepest)
                for each in places[-_WAYS:].tolist()
                if 0 < each <= self.count and each - 1 != idlest and loads[each - 1] <= limit
            ]
        replica, depth = min(candidates, key=lambda each: _WAIT * loads[each[0]] - each[1] * BLOCK)
        cached = min(depth * BLOCK, max(0, len(ids) - 1))
        share = RequestShare(replica=replica, cached=cached, cost=len(ids) - cached + _USUAL_ANSWER)
        self._count(replica, share.cost)
        self._done[replica] += share.cost * _SLIGHTLY
        self._order[replica] += share.cost * _SLIGHTLY
        if self._done[replica] > 1:  # a little stays little, so that old replicas do not look busy
            self._order -= self._done
            self._done[:] = 0
        if depth < len(keys):
            self._remember(keys[depth:], slots[depth:], deepest - depth, replica + 1)
        return share

    def end(self, share: RequestShare) -> None:
        """Forget the work of a request that has ended."""
        self._count(share.replica, -share.cost)

    def failed(self, replica: int) -> None:
        """Leave a replica that did not answer alone for a moment; what its cache had is gone with it."""
        if replica not in self._until:
            self.forget(replica)
        self._until[replica] = self._clock() + _DOWN_SECONDS

    def forget(self, replica: int) -> None:
        """Forget what the cache of a replica had."""
        places = self._memory.rows.view(np.uint16)
        places[places == replica + 1] = 0

    def answered(self, replica: int) -> None:
        """Send requests to a replica that failed again."""
        self._until.pop(replica, None)

    def is_down(self, replica: int) -> bool:
        """Return whether a replica failed a moment ago."""
        return self._until.get(replica, 0.0) > self._clock()

    def _open(self, loads: NDArray[Any], without: Collection[int]) -> NDArray[Any]:
        """Return the loads, endless for replicas that should not be asked."""
        open_loads = loads.copy()
        open_loads[list(self.closed)] = np.inf
        if open_loads.min() == np.inf:
            raise ServerUnreachableError(
                "Every copy of the server is drained.", hint="Open one: trtserve replicas resume HOST:PORT"
            )
        open_loads[list(without)] = np.inf
        if open_loads.min() == np.inf:
            raise ServerUnreachableError("No copy of the server that is open can take this request.")
        down = [each for each in self._until if each < self.count and self.is_down(each)]
        best = open_loads.copy()
        best[down] = np.inf
        return open_loads if best.min() == np.inf else best

    def _others_now(self) -> NDArray[Any]:
        """Return the loads that other processes make, as they were a moment ago."""
        assert self._others is not None
        if (now := self._clock()) - self._others_at >= _OTHERS_SECONDS:
            self._others = self._memory.loads.sum(axis=0) - self._loads
            self._others_at = now
        return self._others

    def _count(self, replica: int, tokens: float) -> None:
        self._loads[replica] += tokens
        self._order[replica] += tokens
        self._total += tokens

    def _remember(self, keys: NDArray[Any], slots: NDArray[Any], known: int, number: int) -> None:
        """Note that a replica has blocks; others may have the first `known` of them."""
        memory, latest = self._memory, np.uint64(number)
        if known > 0:
            places = slots[:known]
            rows = memory.rows[places]
            rows[memory.keys[places] != keys[:known]] = 0
            memory.rows[places] = (rows << _BITS) | latest
        memory.rows[slots[known:] if known > 0 else slots] = latest
        memory.keys[slots] = keys


def _chain(ids: Ids) -> NDArray[Any]:
    """Return the chained hashes of the whole blocks of a prompt."""
    whole = min(len(ids) // BLOCK, _MOST_BLOCKS)
    if not whole:
        return _NONE
    tokens = ids[: whole * BLOCK]
    if not (isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.flags.c_contiguous):
        tokens = np.ascontiguousarray(tokens, dtype=np.int32)  # of a list it takes longer than all the rest
    pairs = tokens.view(np.uint64).reshape(whole, BLOCK // 2)
    hashes: NDArray[Any] = (pairs.dot(_FACTORS) * _SALTS[:whole]).cumsum()
    return hashes
