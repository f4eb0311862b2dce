"""Cut a step into parts that follow each other through the stages of a pipeline, so that all stages work at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.model import StepInputs


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some sequences of a step."""

    step: StepInputs
    rows: npt.NDArray[np.intp]
    """Where its logits belong among those of the whole step."""


def micro_batches(
    step: StepInputs, count: int, *, least: int, part_of: npt.NDArray[np.intp] | None = None
) -> list[MicroBatch]:
    """Return `count` parts with about as many tokens each; fewer where they would have less than `least` tokens.

    A sequence is not divided. `part_of` has the part of each row of the step before: a step that only decodes is
    divided likewise while its parts stay about equal, so that none needs tokens of another part.
    """
    begins = step.subsequence_begins
    tokens, sequences = int(begins[-1]), len(begins) - 1
    count = min(count, sequences, max(1, tokens // least))
    shares = tokens * np.arange(1, count) / count
    nearest = np.abs(begins[:, None] - shares).argmin(0)
    places = -1 - step.token_ids
    if part_of is not None and tokens == sequences and ((places >= 0) & (places < len(part_of))).all():
        parts = part_of[places]
        as_before = np.array([(parts <= number).sum() for number in range(count - 1)], nearest.dtype)
        nearest = np.where(np.abs(as_before - nearest) <= max(1, sequences // 8), as_before, nearest)
    edges = np.unique([0, *nearest, sequences])
    return [_part(step, int(first), int(end)) for first, end in pairwise(edges)]


def _part(step: StepInputs, first: int, end: int) -> MicroBatch:
    """Return the sequences first … end - 1 of the step."""
    begins, blocks = step.subsequence_begins, step.block_indices_begins
    token, last = int(begins[first]), int(begins[end])
    block, last_block = int(blocks[first]), int(blocks[end])
    past = step.past_lens[first:end]
    lengths = past + np.diff(begins[first : end + 1])
    wanted = step.rows
    mine = np.flatnonzero((wanted >= token) & (wanted < last))
    adapters, long = step.adapters, step.long_sequences
    if adapters is not None:
        adapters = replace(adapters, owner=adapters.owner[token:last])
    part = StepInputs(
        token_ids=step.token_ids[token:last],
        positions=step.positions[token:last],
        past_lens=past,
        subsequence_begins=begins[first : end + 1] - begins[first],
        block_indices=step.block_indices[block:last_block],
        block_indices_begins=blocks[first : end + 1] - blocks[first],
        max_context_len=int(lengths.max()),
        rows=wanted[mine] - token,
        prompt_table=step.prompt_table,
        adapters=adapters,
        long_sequences=None if long is None else long[first:end],
        states=None if step.states is None else step.states[first:end],
    )
    return MicroBatch(part, mine)
