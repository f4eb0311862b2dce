"""Random sequences in one KV cache: every row reads back what was written."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trtserve.executor.engine.kv_cache import CacheKey, KvCache
from trtserve.executor.engine.requests import BlockUse

SIZE, BLOCKS, ROWS, LONGEST = 3, 10, 6, 15
MOSTLY = st.sampled_from([True, True, True, False])
# Contexts with common beginnings, so that blocks match as a whole and partially.
TOKENS = st.builds(
    lambda length, tail: [0] * length + tail, st.integers(0, 8), st.lists(st.integers(0, 1), min_size=1, max_size=2)
)


@dataclass(eq=False)
class _Life:
    """A running sequence: the cached tokens of each beam, and the length at which it must end."""

    key: CacheKey
    slots: tuple[int, ...]
    longest: int
    steps: bool
    beams: list[list[int]] = field(default_factory=list)

    @property
    def context(self) -> list[int]:
        tokens: list[int] = self.key.tokens.tolist()
        return tokens

    @property
    def generating(self) -> bool:
        return len(self.beams[0]) >= len(self.key.tokens)

    def identity(self, tokens: list[int]) -> tuple[object, ...]:
        """What the keys and values of `tokens` depend on."""
        extra = (self.key.extra_ids or ()) + (0,) * len(tokens)
        return self.key.adapter, self.key.salt, tuple(tokens), extra[: len(tokens)]


class KvCacheMachine(RuleBasedStateMachine):
    """Starts, chunks, generated tokens, rejected drafts, beams and ends in any order."""

    @initialize(reuse=MOSTLY, partial=MOSTLY, copied=MOSTLY)
    def begin(self, reuse: bool, partial: bool, copied: bool) -> None:
        self.contents: list[list[object]] = [[None] * SIZE for _ in range(BLOCKS)]
        self.lives: list[_Life] = []
        self.cache = KvCache(
            blocks=BLOCKS,
            tokens_per_block=SIZE,
            max_rows=ROWS,
            max_tokens=LONGEST,
            copy_block=self._copy,
            reuse=reuse,
            partial_reuse=partial,
            copy_on_partial_reuse=copied,
        )

    def _copy(self, source: int, target: int) -> None:
        assert self.cache.pool.references(target) == 1
        self.contents[target] = list(self.contents[source])

    def _write(self, life: _Life, beam: int, tokens: list[int], count: int) -> None:
        """Write the last `count` of `tokens` to the cache, to blocks that no other sequence uses."""
        slot = life.slots[beam]
        for position in range(len(tokens) - count, len(tokens)):
            block = int(self.cache.table[slot, position // SIZE])
            assert self.cache.pool.references(block) == 1
            assert block not in self.cache.tree
            self.contents[block][position % SIZE] = life.identity(tokens[: position + 1])

    def _pick(self, number: int, *, generating: bool) -> _Life | None:
        lives = [life for life in self.lives if life.generating is generating]
        return lives[number % len(lives)] if lives else None

    @rule(
        tokens=TOKENS,
        more=st.integers(1, 5),
        width=st.sampled_from([1, 1, 1, 2, 3]),
        lora=st.sampled_from([None] * 7 + [1]),
        extra=st.sampled_from([None] * 6 + [0, 4]),
        steps=st.booleans(),
        flags=st.tuples(MOSTLY, MOSTLY),
    )
    def start(
        self,
        tokens: list[int],
        more: int,
        width: int,
        lora: int | None,
        extra: int | None,
        steps: bool,
        flags: tuple[bool, bool],
    ) -> None:
        key = CacheKey(
            np.array(tokens, dtype=np.int64),
            extra_ids=None if extra is None else (extra,) * len(tokens),
            adapter=lora,
            reusable=flags[0],
            stored=flags[1] and width == 1,
        )
        use = BlockUse()
        before = self.cache.available
        reserve = len(tokens) if steps else len(tokens) + more
        allocation = self.cache.start(key, reserve=reserve, width=width, use=use)
        if allocation is None:
            assert self.cache.available == before
            return
        known = allocation.reused_tokens
        assert 0 <= known < len(tokens)
        assert (known == 0) or (self.cache.reuse and key.reusable)
        assert use.reused == -(-known // SIZE)
        life = _Life(key, allocation.slots, len(tokens) + more, steps, [tokens[:known] for _ in allocation.slots])
        self.lives.append(life)
        self._check_row(life, 0)

    @rule(number=st.integers(0, 9), size=st.sampled_from([1, 2, 4, 10, 10]))
    def compute_chunk(self, number: int, size: int) -> None:
        life = self._pick(number, generating=False)
        if life is None:
            return
        done = life.context[: len(life.beams[0]) + size]
        assert self.cache.extend(life.slots[0], len(done)) >= len(done)
        self._write(life, 0, done, len(done) - len(life.beams[0]))
        life.beams = [list(done) for _ in life.slots]
        if life.generating and len(life.slots) > 1:
            self.cache.fork(life.slots, len(done))
        self.cache.register_full_blocks(life.slots[0], done)

    @rule(number=st.integers(0, 9), choices=st.lists(st.integers(0, 5), min_size=6, max_size=6))
    def generate(self, number: int, choices: list[int]) -> None:
        life = self._pick(number, generating=True)
        if life is None or len(life.beams[0]) >= life.longest:
            return
        length = len(life.beams[0]) + 1
        if life.steps and not self.cache.reserve(life.slots, length):
            self._end(life, stored=True)  # as a pause does
            return
        for beam, slot in enumerate(life.slots):
            self.cache.extend(slot, length)
            life.beams[beam] = [*life.beams[beam], choices[beam] % 2]
            self._write(life, beam, life.beams[beam], 1)
        if len(life.slots) > 1:
            parents = [choice % len(life.slots) for choice in choices[: len(life.slots)]]
            self.cache.reorder(life.slots, parents, length)
            life.beams = [life.beams[parent] for parent in parents]
        self.cache.register_full_blocks(life.slots[0], life.beams[0])

    @rule(number=st.integers(0, 9), wrong=st.integers(1, 4))
    def reject_draft(self, number: int, wrong: int) -> None:
        life = self._pick(number, generating=True)
        if life is None or len(life.slots) > 1 or life.steps:
            return
        tokens = life.beams[0] + [1] * min(wrong, life.longest - len(life.beams[0]))
        self.cache.extend(life.slots[0], len(tokens))
        self._write(life, 0, tokens, len(tokens) - len(life.beams[0]))

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 9), stored=MOSTLY)
    def end(self, number: int, stored: bool) -> None:
        self._end(self.lives[number % len(self.lives)], stored=stored)

    def _end(self, life: _Life, *, stored: bool) -> None:
        self.lives.remove(life)
        self.cache.free(life.slots, life.beams[0] if stored else [])

    def _check_row(self, life: _Life, beam: int) -> None:
        tokens = life.beams[beam]
        for position in range(len(tokens)):
            block = int(self.cache.table[life.slots[beam], position // SIZE])
            assert self.contents[block][position % SIZE] == life.identity(tokens[: position + 1])

    @invariant()
    def rows_read_back(self) -> None:
        for life in getattr(self, "lives", []):
            for beam in range(len(life.slots) if life.generating else 1):
                self._check_row(life, beam)

    @invariant()
    def references_are_the_rows(self) -> None:
        if not hasattr(self, "cache"):
            return
        counted = [0] * BLOCKS
        for life in self.lives:
            for slot in life.slots:
                for block in self.cache.table[slot, : self.cache.counts[slot]].tolist():
                    counted[block] += 1
        assert counted == [self.cache.pool.references(block) for block in range(BLOCKS)]
        assert self.cache.pool.free == counted.count(0)
        assert 0 <= self.cache.available <= self.cache.pool.free

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for life in list(self.lives):
            self._end(life, stored=True)
        assert self.cache.available == self.cache.pool.free == BLOCKS
        taken = [self.cache.pool.acquire() for _ in range(BLOCKS)]
        assert sorted(taken) == list(range(BLOCKS)), "whatever is known, every block can be had"


KvCacheMachine.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestKvCache = KvCacheMachine.TestCase
