"""A paged model in NumPy whose next token depends on every earlier token, read back from the KV blocks."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.model import Chosen, Draws, FatalModelError, StepInputs
from trtserve.executor.engine.sampling import SamplingRow, choose_tokens
from trtserve.host.machine import free_memory

VOCAB = 97
HIDDEN = 3
TABLE = 1_000
ADAPTER = 1_000_000
POSITION = 1_000_000_000


def fake_logits(tokens: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Logits f32[97] after `tokens`."""
    seed = zlib.crc32(np.asarray(tokens, dtype=np.int64).tobytes())
    return np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)


def greedy_continuation(prompt: list[int], count: int) -> list[int]:
    """Return the next `count` tokens after `prompt`, computed without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(fake_logits(np.array(tokens)).argmax()))
    return tokens[len(prompt) :]


class FakeModel:
    """Stores each token instead of its keys and values, so that a wrong block table gives wrong tokens.

    That is the token's id, or `TABLE` plus the first number of its prompt-table row; `ADAPTER` times the task id of
    its adapter and `POSITION` times the distance to its usual position are added. `gate` holds each step back until
    it is set; `failures` steps raise before they work; `steps` holds the tokens of each step.
    """

    def __init__(self, *, tokens_per_block: int = 4, bytes_per_block: int = 64) -> None:
        self.vocab_size = VOCAB
        self.hidden_size = HIDDEN
        self.max_prompt_table = 0
        self.lora: Any = None
        self.max_position = 1 << 20
        self.tokens_per_block = tokens_per_block
        self.bytes_per_block = bytes_per_block
        self.kv_memory_fraction = 0.3
        self.step_costs: list[float] = []
        self.cache = np.zeros(0, dtype=np.int64)
        self.blocks = 0
        self.gate = threading.Event()
        self.gate.set()
        self.failures = 0
        self.steps: list[int] = []
        self.is_warm = False

    def free_memory(self) -> int:
        return free_memory()

    def allocate(self, num_blocks: int) -> None:
        self.blocks = num_blocks
        self.cache = np.full(num_blocks * self.tokens_per_block, -1, dtype=np.int64)

    def warm_up(self) -> None:
        """Do nothing: this model needs no warm-up."""
        assert self.blocks
        self.is_warm = True

    def forward(self, step: StepInputs) -> npt.NDArray[np.float32]:
        if not self.gate.wait(timeout=30):
            raise TimeoutError("the test never opened the gate")
        if self.failures:
            self.failures -= 1
            raise ValueError("broken step")
        token_ids, rows, begins = step.token_ids, step.rows, step.subsequence_begins
        self.steps.append(len(token_ids))
        contents = _contents(token_ids, step.prompt_table, step.adapters)
        spans: list[tuple[int, int, npt.NDArray[np.int64]]] = []
        longest = 0
        for number, past in enumerate(step.past_lens.tolist()):
            first, last = begins[number : number + 2].tolist()
            blocks = step.block_indices[step.block_indices_begins[number] : step.block_indices_begins[number + 1]]
            places = (blocks[:, None] * self.tokens_per_block + np.arange(self.tokens_per_block)).reshape(-1)
            end = past + last - first
            assert (len(blocks) - 1) * self.tokens_per_block < end <= len(places)
            spans.append((first, past, places[:end]))
            self.cache[places[past:end]] = contents[first:last] + POSITION * (
                step.positions[first:last] - range(past, end)
            )
            longest = max(longest, end)
        written = [place for _, past, places in spans for place in places[past:].tolist()]
        assert len(set(written)) == len(written), "two sequences write to one place"
        assert longest == step.max_context_len
        assert len(token_ids) == begins[-1] == len(written)
        if len(rows) == 0:
            return np.zeros((0, VOCAB), dtype=np.float32)
        owners = np.searchsorted(begins[:-1], rows, side="right") - 1
        return np.stack([self._logits(int(row), spans[owner]) for row, owner in zip(rows, owners, strict=True)])

    def _logits(self, row: int, span: tuple[int, int, npt.NDArray[np.int64]]) -> npt.NDArray[np.float32]:
        first, past, places = span
        return self.logits_after(self.cache[places[: past + row - first + 1]])

    def logits_after(self, contents: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Logits f32[97] after tokens with these contents."""
        return fake_logits(contents)

    def copy_block(self, source: int, target: int) -> None:
        size = self.tokens_per_block
        self.cache[target * size : (target + 1) * size] = self.cache[source * size : (source + 1) * size]


class FakeRepeatingModel(FakeModel):
    """Mostly repeats itself: its next token depends on the last one alone, and now and then on all of them.

    Steps of up to 16 tokens take as long as those of one, so that there is always room for drafts.
    """

    STEP_COSTS = (1.0,) * 16

    def __init__(self) -> None:
        super().__init__()
        self.step_costs = list(self.STEP_COSTS)

    def logits_after(self, contents: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        digest = zlib.crc32(contents.tobytes())
        return 4 * fake_logits(contents if digest % 8 == 0 else contents[-1:])


class FakeChoosingModel(FakeModel):
    """Chooses tokens itself, and like a GPU it computes steps and copies in their order, some time after the call.

    Here that is as late as possible: when the result of a step is asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[Callable[[], None]] = deque()
        self._rows: dict[int, SamplingRow] = {}
        self._last: dict[int, int] = {}
        self._drafted: set[int] = set()
        self.plain_costs: list[float] = []
        self.brief_tokens = 0

    def start(self, draws: Draws, step: StepInputs) -> _FakeStep:
        begun = {
            slot: SamplingRow(row.parameters, row.processor.fork(), list(row.generated), row.log_prob)
            for slot, row, begins in zip(draws.slots, draws.rows, draws.begins, strict=True)
            if begins
        }
        values = {field.name: getattr(step, field.name) for field in fields(step)}
        copies: dict[str, Any] = {name: each.copy() for name, each in values.items() if isinstance(each, np.ndarray)}
        waiting = _FakeStep(self, draws, begun, replace(step, **copies))
        self._waiting.append(waiting.compute)
        assert sum(isinstance(getattr(each, "__self__", None), _FakeStep) for each in self._waiting) <= 2
        return waiting

    def copy_block(self, source: int, target: int) -> None:
        self._waiting.append(lambda: super(FakeChoosingModel, self).copy_block(source, target))

    def catch_up(self, *, to: Callable[[], None]) -> None:
        """Do what waits, up to and including `to`."""
        while to in self._waiting:
            self._waiting.popleft()()

    def choose(
        self,
        draws: Draws,
        begun: dict[int, SamplingRow],
        step: StepInputs,
        allowed: npt.NDArray[np.uint32] | None,
    ) -> Chosen:
        """Compute a step; `begun` are the sequences whose slots are new, `allowed` is what their guides allow."""
        self._rows |= begun
        ids = step.token_ids
        for place in np.flatnonzero(ids < 0):
            ids[place] = max(self._last[-1 - ids[place]], 0)
        logits = self.forward(step)
        for slot in self._drafted & set(draws.slots):  # what was guessed wrongly is forgotten
            del self._rows[slot].generated[draws.counts[draws.slots.index(slot)] :]  # type: ignore[attr-defined]
        rows, known = list[SamplingRow](), dict[int, int]()
        for slot, count in zip(draws.slots, draws.counts, strict=True):
            row = self._rows[slot]
            assert len(row.generated) + known.setdefault(slot, 0) == count
            rows.append(replace(row, generated=[*row.generated, *[0] * known[slot]]))
            known[slot] += 1
        self._drafted = {slot for slot, drawn in known.items() if drawn > 1}
        guides = [row.processor.guide for row in rows if row.processor.guide is not None]
        assert (allowed is None) == (not guides)
        for guide, told in zip(guides, () if allowed is None else allowed, strict=True):
            assert not told.any() or np.array_equal(told, guide.allowed())  # nothing: it has ended meanwhile
        choices = choose_tokens(logits[draws.numbers], rows, normalize_log_probs=draws.normalize_log_probs)
        self._last = {}
        for number, slot, choice in zip(draws.numbers, draws.slots, choices, strict=True):
            row, self._last[number] = self._rows[slot], choice.token
            row.processor.accept(max(choice.token, 0))
            row.generated.append(choice.token)  # type: ignore[attr-defined]
        log_probs = np.array([(each.log_prob, each.full_log_prob) for each in choices], np.float32).reshape(-1, 2)
        return Chosen([each.token for each in choices], log_probs, np.delete(logits, draws.numbers, axis=0))


class FakeRepeatingChooser(FakeChoosingModel, FakeRepeatingModel):
    """Chooses tokens itself, mostly those that it has chosen before."""

    def __init__(self) -> None:
        super().__init__()
        self.plain_costs = self.step_costs


class _FakeStep:
    """A step of a `FakeChoosingModel`."""

    def __init__(self, model: FakeChoosingModel, *step: Any) -> None:
        self._choose: Callable[..., Chosen] = partial(model.choose, *step)
        self._model = model
        self._outcome: Chosen | Exception | None = None
        self._allowed: npt.NDArray[np.uint32] | None = None

    def choose(self, allowed: npt.NDArray[np.uint32]) -> None:
        assert self._allowed is None
        self._allowed = allowed

    def compute(self) -> None:
        try:
            self._outcome = self._choose(allowed=self._allowed)
        except (ValueError, MemoryError, FatalModelError) as error:  # of `FakeModel.failures`
            self._outcome = error

    def result(self) -> Chosen:
        self._model.catch_up(to=self.compute)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome


def _contents(
    token_ids: npt.NDArray[np.int64], table: npt.NDArray[np.float32] | None, adapters: Any
) -> npt.NDArray[np.int64]:
    """Return the contents of each token without its position; `adapters` are those of FakeAdapters.batch."""
    contents = token_ids.copy()
    above = token_ids >= VOCAB
    if above.any():
        assert table is not None
        contents[above] = TABLE + table[token_ids[above] - VOCAB, 0].astype(np.int64)
    if adapters is not None:
        assert sum(count for _, count in adapters) == len(token_ids)
        ids = [0 if adapter is None else adapter.task_id for adapter, _ in adapters]
        contents += ADAPTER * np.repeat(np.array(ids, dtype=np.int64), [count for _, count in adapters])
    return contents
