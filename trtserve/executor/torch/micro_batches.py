"""Cut a step into parts that follow each other through the stages of a pipeline, so that all stages work at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.batch import ModelInputs


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some sequences of a step."""

    inputs: ModelInputs
    """Arguments of `Model.forward`."""
    rows: npt.NDArray[np.intp]
    """Where its logits belong among those of the whole step."""


def micro_batches(inputs: ModelInputs, count: int, *, least: int) -> list[MicroBatch]:
    """Return `count` parts with about as many tokens each; fewer where they would have less than `least` tokens.

    A sequence is not divided.
    """
    begins = inputs["subsequence_begins"]
    tokens, sequences = int(begins[-1]), len(begins) - 1
    count = min(count, sequences, max(1, tokens // least))
    shares = tokens * np.arange(1, count) / count
    nearest = np.abs(begins[:, None] - shares).argmin(0)
    edges = np.unique([0, *nearest, sequences])
    return [_part(inputs, int(first), int(end)) for first, end in pairwise(edges)]


def _part(inputs: ModelInputs, first: int, end: int) -> MicroBatch:
    """Return the sequences first … end - 1 of the step."""
    begins, blocks = inputs["subsequence_begins"], inputs["block_indices_begins"]
    token, last = int(begins[first]), int(begins[end])
    block, last_block = int(blocks[first]), int(blocks[end])
    past = inputs["past_lens"][first:end]
    lengths = past + np.diff(begins[first : end + 1])
    wanted = inputs["rows"]
    mine = np.flatnonzero((wanted >= token) & (wanted < last))
    part = ModelInputs(
        token_ids=inputs["token_ids"][token:last],
        positions=inputs["positions"][token:last],
        past_lens=past,
        subsequence_begins=begins[first : end + 1] - begins[first],
        block_indices=inputs["block_indices"][block:last_block],
        block_indices_begins=blocks[first : end + 1] - blocks[first],
        max_context_len=int(lengths.max()),
        rows=wanted[mine] - token,
    )
    if "prompt_table" in inputs:
        part["prompt_table"] = inputs["prompt_table"]
    if (adapters := inputs.get("adapters")) is not None:
        masks = {name: mask[token:last] for name, mask in adapters.masks.items()}
        part["adapters"] = replace(adapters, masks=masks)
    if "long_sequences" in inputs:
        part["long_sequences"] = inputs["long_sequences"][first:end]
    return MicroBatch(part, mine)
