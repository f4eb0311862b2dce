"""CUDA graphs of decode steps and of small steps with prompts, from packed inputs to chosen tokens.

There is one for each of a ladder of sizes; smaller steps are padded.
"""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trtserve.executor.engine.model import StepInputs
from trtserve.executor.torch.adapters import Adapters, AdapterStore, Spans
from trtserve.executor.torch.decoder import Inputs
from trtserve.executor.torch.draw_words import WORDS
from trtserve.executor.torch.mixers import StepStates
from trtserve.executor.torch.step_kernels import (
    FIRST_BLOCK,
    FIRST_SPAN,
    LENGTH,
    POSITION,
    STATE,
    STEP_WORDS,
    TOKEN,
    unpack_step,
)

logger = logging.getLogger(__name__)

Int32s = npt.NDArray[np.int32]
Array = npt.NDArray[Any]


def ladder(most: int) -> list[int]:
    """Return the batch sizes to capture: finer where a step of one more row costs most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 32, 32)]
    return sorted({min(size, most) for size in sizes})


def captured_bytes(most: int, vocab: int) -> int:
    """Return the bytes of logits that the graphs of up to `most` rows keep.

    All graphs write the same logits in float32. While they are computed there are two more copies in the memory that
    the graphs share.
    """
    return (4 + 4 + 4) * vocab * most


class GraphRecorder:
    """Captures steps one after the other; they share their memory, so that the largest should come first."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # one for all: cuBLAS keeps a workspace of 32 MiB for each
        self._pool: Any = None

    def record(self, what: str, run: Callable[[], None]) -> Any:
        """Return the graph of `run`. Raises RuntimeError with the first error of a capture that fails."""
        stream, graph = self._stream, torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compile and tune, which is not allowed while capturing
            run()
        torch.cuda.current_stream().wait_stream(stream)
        try:
            # With ranks a thread of NCCL makes CUDA calls meanwhile.
            with (
                _no_collection(),
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                run()
        except Exception as error:  # noqa: BLE001 - whatever it is, it says what failed
            # PyTorch ends the capture before it lets an error through, and then only says that there was one.
            first = error.__context__ or error
            raise RuntimeError(
                f"The {what} could not be captured as a CUDA graph: {type(first).__name__}: {first}"
            ) from first
        self._pool = graph.pool()
        return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage: a graph of an earlier model that ends during a capture makes it fail."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class DecodeGraphs:
    """Captured decode steps of up to `rows` sequences, for engines with adapters without and with them.

    spare_state: the model's own row of states, None if it has none. compute: the logits of a step. choose: writes the
    chosen tokens of logits and words. parts: how many follow each other in a step. hidden [rows, hidden]: where a later
    stage of a pipeline receives what it computes from. outputs: where hidden states of stages before the last are
    written, instead of logits.
    """

    def __init__(
        self,
        *,
        rows: int,
        max_position: int,
        page: int,
        spare_block: int,
        spare_state: int | None,
        vocab: int,
        chosen: Tensor,
        adapters: AdapterStore | None,
        compute: Callable[[Inputs], Tensor],
        choose: Callable[[Tensor, Tensor], None],
        parts: int = 1,
        hidden: Tensor | None = None,
        outputs: Tensor | None = None,
    ) -> None:
        self._page = page
        self._spare_place = spare_block * page
        self._spare_state = spare_state
        self._blocks = -(-max_position // page)
        self._chosen = chosen
        self._adapters = adapters
        self._compute = compute
        self._choose = choose
        words = rows * (STEP_WORDS + self._blocks)
        self._packed = torch.zeros(words, dtype=torch.int32, device=chosen.device)
        # Two for each part are enough: a step is only packed when the one before the last has been computed.
        self._staging = [torch.zeros(words, dtype=torch.int32, pin_memory=True) for _ in range(2 * parts)]
        self._hidden = hidden
        # Logits of its own for every graph would be gigabytes.
        self.logits = torch.empty((rows, vocab), device=chosen.device) if outputs is None else outputs
        # Without and with adapters, by the number of rows.
        self._captured: dict[bool, dict[int, Any]] = {adapted: {} for adapted in (False, True)[: 2 if adapters else 1]}

    def capture(self, recorder: GraphRecorder) -> None:
        """Capture all batch sizes, the largest first."""
        sizes = ladder(len(self._chosen))
        total = len(sizes) * len(self._captured)
        for done, (size, adapted) in enumerate(itertools.product(reversed(sizes), self._captured), start=1):
            run = partial(self._run, size, adapted=adapted)
            self._captured[adapted][size] = recorder.record(f"decode step of {size} rows", run)
            logger.info("Captured the decode step of %d rows, %d of %d", size, done, total)

    def _run(self, size: int, *, adapted: bool) -> None:
        """Compute a step of `size` rows from the packed inputs."""
        device = self._packed.device
        ids, positions, cache_places = (torch.empty(size, dtype=torch.int64, device=device) for _ in range(3))
        lengths = torch.empty(size, dtype=torch.int32, device=device)
        tables = torch.empty((size, self._blocks), dtype=torch.int32, device=device)
        unpack_step(
            self._packed,
            size,
            self._chosen,
            ids=ids,
            positions=positions,
            cache_places=cache_places,
            tables=tables,
            lengths=lengths,
            page=self._page,
            spare_place=self._spare_place,
        )
        words = self._packed[: size * STEP_WORDS].view(size, STEP_WORDS)
        step = Inputs(
            token_ids=ids,
            positions=positions,
            cache_places=cache_places,
            block_tables=tables,
            past_lengths=lengths,
            lengths=lengths,
            begins=lengths,
            most_new=1,
            adapters=Adapters(self._adapters, words[:, FIRST_SPAN:], beside=True)
            if adapted and self._adapters
            else None,
            # Rows of padding have no tokens, others always their own.
            states=None if self._spare_state is None else StepStates(words[:, STATE].long(), lengths <= 1, []),
            hidden=None if self._hidden is None else self._hidden[:size],
        )
        logits = self.logits[:size]
        logits.copy_(self._compute(step))
        self._choose(logits, words)

    def seconds(self, most: int) -> list[float]:
        """Return the times of steps of 1 … `most` rows."""
        return _seconds(self._captured[False], most)

    def fits(self, step: StepInputs) -> bool:
        """Return whether a step only decodes, one token of each sequence and its logits."""
        rows = len(step.rows)
        return (
            0 < rows == len(step.token_ids) == len(step.past_lens) <= len(self._chosen)
            and np.array_equal(step.rows, np.arange(rows))
            and step.prompt_table is None
        )

    def replay(self, draws: Int32s, step: StepInputs, positions: npt.NDArray[Any], spans: Spans | None) -> Tensor:
        """Send a step with the words of its draws and the spans of its adapters, if it has any.

        Returns its logits, which the next call overwrites.
        """
        rows, captured = len(step.rows), self._captured[spans is not None]
        size = next(size for size in sorted(captured) if size >= rows)
        self._staging.append(self._staging.pop(0))
        staging = self._staging[0].numpy()
        words = staging[: size * STEP_WORDS].reshape(size, STEP_WORDS)
        words[:, :] = 0
        words[: len(draws), :WORDS] = draws
        words[:rows, TOKEN] = step.token_ids
        words[:rows, POSITION] = positions
        words[:rows, LENGTH] = step.past_lens + 1
        words[:rows, FIRST_BLOCK] = step.block_indices_begins[:-1]
        if self._spare_state is not None:
            words[:, STATE] = self._spare_state
            words[:rows, STATE] = self._spare_state if step.states is None else step.states
        if spans is not None:
            words[: len(spans), FIRST_SPAN:] = spans
        blocks = step.block_indices
        used = size * STEP_WORDS + len(blocks)
        staging[size * STEP_WORDS : used] = blocks
        self._packed[:used].copy_(self._staging[0][:used], non_blocking=True)
        captured[size].replay()
        return self.logits[:rows]


def _seconds(graphs: Mapping[int, Any], most: int) -> list[float]:
    """Return the times of steps of 1 … `most` rows or tokens, whose graphs are those of the next larger sizes."""
    sizes = sorted(graphs)
    needed = {count: next(size for size in sizes if size >= count) for count in range(1, most + 1)}
    measured = {size: _replayed(graphs[size]) for size in set(needed.values())}
    return [measured[size] for size in needed.values()]


def _replayed(graph: Any) -> float:
    """Return the shortest of a few times of a graph."""
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1000)
    return min(times)


MOST_CAPTURED = 512
PROMPT_SIZES = (32, 64, 128, 192, 256, 384, MOST_CAPTURED)
"""Tokens of captured steps with prompts. Larger steps compute for longer than the host takes to send them."""


MOST_DRAFTED = 32
"""The most tokens of a step with drafts: those of the smallest graph of `PromptGraphs`, sequences as well."""


class PromptGraphs:
    """Captured steps with prompts and sequences that decode, which all take the kernel of prompts.

    logits: where `DecodeGraphs` has them. `compute` and `choose` as there.
    """

    def __init__(
        self,
        *,
        most: int,
        blocks: int,
        spare_place: int,
        logits: Tensor,
        compute: Callable[[Inputs], Tensor],
        choose: Callable[[Tensor, Tensor], None],
        resolve: Callable[[Tensor], Tensor],
    ) -> None:
        """`most` tokens are in a step, and `blocks` hold the longest sequence. `resolve` finds tokens by rows."""
        rows, device = len(logits), logits.device
        self.sizes = [size for size in PROMPT_SIZES if size <= most]
        self._spare_place = spare_place
        self._logits = logits
        self._compute, self._choose, self._resolve = compute, choose, resolve
        tokens = max(self.sizes, default=0)
        # Token ids, positions and places in the cache; past lengths, begins, rows whose logits are needed, and draws.
        self._parts = [tokens] * 3 + [rows, rows + 1, rows, rows * WORDS]
        self._packed = torch.zeros(sum(self._parts), dtype=torch.int32, device=device)
        self._tables = torch.zeros((rows, blocks), dtype=torch.int32, device=device)
        self._staging = [torch.zeros(sum(self._parts), dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._sequences = sorted({min(32, rows), rows})
        self._captured: dict[tuple[int, int], Any] = {}

    def capture(self, recorder: GraphRecorder) -> None:
        """Capture all sizes, the largest first."""
        for size, sequences in itertools.product(reversed(self.sizes), reversed(self._sequences)):
            what = f"step of {size} tokens of {sequences} sequences"
            self._captured[size, sequences] = recorder.record(what, partial(self._run, size, sequences))
            logger.info("Captured the %s", what)

    def _run(self, size: int, sequences: int) -> None:
        ids, positions, places, past, begins, rows, words = self._packed.split(self._parts)
        new = begins.diff()
        step = Inputs(
            token_ids=self._resolve(ids[:size].long()),
            positions=positions[:size].long(),
            cache_places=places[:size].long(),
            block_tables=self._tables[:sequences],
            past_lengths=past[:sequences],
            lengths=(past + new)[:sequences],
            begins=begins[: sequences + 1],
            most_new=size,
            rows=rows[:sequences].long(),
        )
        logits = self._logits[:sequences]
        logits.copy_(self._compute(step))
        self._choose(logits, words.view(-1, WORDS)[:sequences])

    def seconds(self, most: int) -> list[float]:
        """Return the times of steps of 1 … `most` tokens of as many rows."""
        fewest = self._sequences[0]
        return _seconds({size: self._captured[size, fewest] for size in self.sizes}, most)

    def tokens_within(self, seconds: float) -> int:
        """Return the tokens of the largest captured step that takes no longer, or else of the smallest."""
        fewest = self._sequences[0]
        brief = [size for size in self.sizes if _replayed(self._captured[size, fewest]) <= seconds]
        return max(brief, default=self.sizes[0])

    def fits(self, step: StepInputs, *, apart: bool) -> bool:
        """Return whether there is a graph for a step; not if some of its sequences decode `apart` from its prompts."""
        tokens, most = len(step.token_ids), self._sequences[-1]
        return (
            not apart
            and 1 < tokens <= max(self.sizes, default=0)
            and max(len(step.rows), len(step.past_lens)) <= most
            and step.prompt_table is None
            and step.adapters is None
        )

    def replay(self, draws: Int32s, step: StepInputs, positions: Array, tables: Int32s, cache_places: Array) -> Tensor:
        """Send a step with the words of its draws; return its logits, which the next call overwrites.

        tables i32[s, blocks of the longest sequence], cache_places [t].
        """
        tokens, count = len(step.token_ids), len(step.past_lens)
        size = next(size for size in self.sizes if size >= tokens)
        sequences = next(each for each in self._sequences if each >= max(count, len(step.rows)))
        self._staging.reverse()
        staging = self._staging[0].numpy()
        staging[:] = 0
        ids, own_positions, places, past, begins, rows, words = np.split(staging, np.cumsum(self._parts)[:-1])
        ids[:tokens], own_positions[:tokens] = step.token_ids, positions
        places[:], places[:tokens] = self._spare_place, cache_places
        past[:count] = step.past_lens
        begins[:], begins[: count + 1] = tokens, step.subsequence_begins
        rows[: len(step.rows)] = step.rows
        words[: draws.size] = draws.ravel()
        self._packed.copy_(self._staging[0], non_blocking=True)
        pinned = torch.from_numpy(tables).pin_memory()
        self._tables[:count, : tables.shape[1]] = pinned.to(self._tables.device, non_blocking=True)
        self._captured[size, sequences].replay()
        return self._logits[: len(step.rows)]
