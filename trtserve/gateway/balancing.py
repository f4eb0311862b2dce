"""Which of several copies of a server gets a request: the one with the least to do, or with its prefix in the cache.

Engines keep the keys and values of prompts in blocks, and begin behind those that they have. Nobody tells a gateway
what an engine has, so it remembers where the blocks of past prompts went: chained hashes of their token ids.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

BLOCK = 64
"""Token ids of a block; engines use 16 to 64, so that a shorter prefix than this is worth little."""
_MOST_BLOCKS = 128  # of one prompt: what is behind 8,192 shared tokens changes the choice no more
_REMEMBERED = 1 << 18  # blocks; about 60 MB
_SLIGHTLY = 1e-6
_USUAL_ANSWER = 128.0  # tokens; nobody knows before
_UNEVEN = 1.25  # times the mean load, above which a replica gets no request for the sake of its cache
_DOWN_SECONDS = 2.0
_SECRET = secrets.randbits(62)  # nobody outside can make two prompts look the same


@dataclass(kw_only=True)
class RequestShare:
    """A request on one replica."""

    replica: int
    blocks: Sequence[int]
    cached: int
    """Tokens of the prompt that the replica probably has."""
    cost: float
    """Tokens that it will work on, about: those of the prompt that are not cached, and an answer."""


class Balancer:
    """Chooses replicas, and remembers what they do and what they have."""

    def __init__(
        self, count: int, *, remembered: int = _REMEMBERED, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loads = np.zeros(count)
        self._work = np.zeros(count)
        """What each has done, which decides between replicas that have as little to do."""
        self._until = np.zeros(count)
        """Until when a replica that failed gets no request."""
        self._clock = clock
        self._remembered = remembered
        self._places: OrderedDict[int, int] = OrderedDict()
        """Block → bits of the replicas that had it last."""
        self._total = 0.0

    @property
    def loads(self) -> list[float]:
        """Tokens that each replica has to work on, about."""
        return [float(load) for load in self._loads]

    def choose(self, ids: Sequence[int], *, without: Sequence[int] = ()) -> RequestShare:
        """Return the replica for a prompt, and count its work there until `end`.

        `without` are replicas that it was tried on. If all are down, one that failed is tried again.
        """
        blocks = _blocks(ids)
        loads = self._loads + self._work * _SLIGHTLY
        if without or self._until.any():
            out = self._until > self._clock()
            out[list(without)] = True
            loads = np.where(out, np.inf, loads) if not out.all() else loads
        idlest = int(loads.argmin())
        candidates = [(idlest, self._depth(blocks, idlest))]
        deepest, mask = self._deepest(blocks)
        if mask and not mask >> idlest & 1:
            limit = _UNEVEN * self._total / len(loads) + len(ids) + _USUAL_ANSWER
            candidates += [(each, deepest) for each in _bits(mask) if loads[each] <= limit]
        # What a replica has to do before, and what this prompt adds.
        replica, depth = min(candidates, key=lambda each: loads[each[0]] - each[1] * BLOCK)
        cached = min(depth * BLOCK, max(0, len(ids) - 1))
        share = RequestShare(replica=replica, blocks=blocks, cached=cached, cost=len(ids) - cached + _USUAL_ANSWER)
        self._count(replica, share.cost)
        self._work[replica] += share.cost
        self._remember(blocks, replica)
        return share

    def end(self, share: RequestShare) -> None:
        """Forget the work of a request that has ended."""
        self._count(share.replica, -share.cost)

    def failed(self, replica: int) -> None:
        """Leave a replica that did not answer alone for a moment; what its cache had is gone with it."""
        if not self._until[replica]:
            keep = ~(1 << replica)
            for block in self._places:
                self._places[block] &= keep
        self._until[replica] = self._clock() + _DOWN_SECONDS

    def answered(self, replica: int) -> None:
        """Send requests to a replica that failed again."""
        self._until[replica] = 0.0

    def _count(self, replica: int, tokens: float) -> None:
        self._loads[replica] = max(0.0, self._loads[replica] + tokens)
        self._total = max(0.0, self._total + tokens)

    def _depth(self, blocks: Sequence[int], replica: int) -> int:
        """Return how many blocks at the beginning a replica has."""
        for depth, block in enumerate(blocks):
            if not self._places.get(block, 0) >> replica & 1:
                return depth
        return len(blocks)

    def _deepest(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Return the longest beginning that a replica has, in blocks, and the bits of those that have it."""
        found = (0, 0)
        for depth, block in enumerate(blocks, 1):
            mask = self._places.get(block, 0)
            if not mask:
                break
            found = depth, mask
        return found

    def _remember(self, blocks: Sequence[int], replica: int) -> None:
        bit = 1 << replica
        for block in reversed(blocks):  # so that the end of a prompt is forgotten before its beginning
            self._places[block] = self._places.get(block, 0) | bit
            self._places.move_to_end(block)
        while len(self._places) > self._remembered:
            self._places.popitem(last=False)


def _blocks(ids: Sequence[int]) -> list[int]:
    """Return the chained hashes of the whole blocks of a prompt."""
    chain, found = _SECRET, list[int]()
    for at in range(0, min(len(ids) // BLOCK, _MOST_BLOCKS) * BLOCK, BLOCK):
        chain = hash((chain, tuple(ids[at : at + BLOCK])))
        found.append(chain)
    return found


def _bits(mask: int, most: int = 4) -> list[int]:
    """Return some of the bits that are set, the highest ones."""
    found: list[int] = []
    while mask and len(found) < most:
        found.append(mask.bit_length() - 1)
        mask ^= 1 << found[-1]
    return found
