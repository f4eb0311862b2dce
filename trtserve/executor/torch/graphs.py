"""CUDA graphs of decode steps: one for each of a ladder of batch sizes, from packed inputs to chosen tokens."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trtserve.executor.engine.model import StepInputs
from trtserve.executor.torch.adapters import Adapters, AdapterStore, Spans
from trtserve.executor.torch.decoder import Inputs
from trtserve.executor.torch.draw_words import WORDS
from trtserve.executor.torch.step_kernels import (
    FIRST_BLOCK,
    FIRST_SPAN,
    LENGTH,
    POSITION,
    STEP_WORDS,
    TOKEN,
    unpack_step,
)

logger = logging.getLogger(__name__)

Int32s = npt.NDArray[np.int32]


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


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage now, and not in between: a model or graph that ends during a capture would make it fail."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class DecodeGraphs:
    """Captured decode steps of up to `rows` sequences, for engines with adapters without and with them.

    compute: the logits of a step. choose: writes the chosen tokens of logits and words.
    """

    def __init__(
        self,
        *,
        rows: int,
        max_position: int,
        page: int,
        spare_block: int,
        vocab: int,
        chosen: Tensor,
        adapters: AdapterStore | None,
        compute: Callable[[Inputs], Tensor],
        choose: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._page = page
        self._spare_place = spare_block * page
        self._max_position = max_position
        self._blocks = -(-max_position // page)
        self._chosen = chosen
        self._adapters = adapters
        self._compute = compute
        self._choose = choose
        words = rows * (STEP_WORDS + self._blocks)
        self._packed = torch.zeros(words, dtype=torch.int32, device=chosen.device)
        # Two are enough: a step is only packed when the one before the last has been computed.
        self._staging = [torch.zeros(words, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        # Logits of its own for every graph would be gigabytes.
        self._logits = torch.empty((rows, vocab), dtype=torch.float32, device=chosen.device)
        # Without and with adapters, by the number of rows.
        self._captured: dict[bool, dict[int, Any]] = {adapted: {} for adapted in (False, True)[: 2 if adapters else 1]}
        self._pool: Any = None

    def capture(self) -> None:
        """Capture all batch sizes, the largest first: the others use its memory.

        Raises RuntimeError with the first error of a capture that fails.
        """
        sizes = ladder(len(self._chosen))
        stream = torch.cuda.Stream()  # one for all: cuBLAS keeps a workspace of 32 MiB for each
        with _no_collection():
            for done, (size, adapted) in enumerate(itertools.product(reversed(sizes), self._captured), start=1):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):  # compile and tune, which is not allowed while capturing
                    self._run(size, adapted=adapted)
                torch.cuda.current_stream().wait_stream(stream)
                self._captured[adapted][size] = self._capture(size, stream, adapted=adapted)
                total = len(sizes) * len(self._captured)
                logger.info("Captured the decode step of %d rows, %d of %d", size, done, total)

    def _capture(self, size: int, stream: Any, *, adapted: bool) -> Any:
        """Return the graph of a step of `size` rows."""
        graph = torch.cuda.CUDAGraph()
        try:
            # With ranks a thread of NCCL makes CUDA calls meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                self._run(size, adapted=adapted)
        except Exception as error:  # noqa: BLE001 - whatever it is, it says what failed
            # PyTorch ends the capture before it lets an error through, and then only says that there was one.
            first = error.__context__ or error
            what = f"The decode step of {size} rows could not be captured as a CUDA graph"
            raise RuntimeError(f"{what}: {type(first).__name__}: {first}") from first
        self._pool = graph.pool()
        return graph

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
            adapters=Adapters(self._adapters, words[:, FIRST_SPAN:]) if adapted and self._adapters else None,
        )
        logits = self._logits[:size]
        logits.copy_(self._compute(step))
        self._choose(logits, words)

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
        self._staging.reverse()
        staging = self._staging[0].numpy()
        words = staging[: size * STEP_WORDS].reshape(size, STEP_WORDS)
        words[:, :] = 0
        words[: len(draws), :WORDS] = draws
        words[:rows, TOKEN] = step.token_ids
        words[:rows, POSITION] = positions
        words[:rows, LENGTH] = step.past_lens + 1
        words[:rows, FIRST_BLOCK] = step.block_indices_begins[:-1]
        if spans is not None:
            words[: len(spans), FIRST_SPAN:] = spans
        blocks = step.block_indices
        used = size * STEP_WORDS + len(blocks)
        staging[size * STEP_WORDS : used] = blocks
        self._packed[:used].copy_(self._staging[0][:used], non_blocking=True)
        captured[size].replay()
        return self._logits[:rows]
