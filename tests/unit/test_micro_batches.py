"""Parts of a step that follow each other through the stages of a pipeline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trtserve.executor.engine.model import StepInputs
from trtserve.executor.torch.micro_batches import micro_batches


def step(new: list[int], past: list[int], page: int = 4) -> StepInputs:
    """Sequences with `new` tokens after `past` ones; logits are wanted of each last token, in reverse order."""
    begins = np.cumsum([0, *new]).astype(np.int32)
    counts = [-(-(a + b) // page) for a, b in zip(new, past, strict=True)]
    return StepInputs(
        token_ids=np.arange(begins[-1]) + 100,
        positions=np.concatenate([np.arange(b, a + b) for a, b in zip(new, past, strict=True)]),
        past_lens=np.array(past, np.int32),
        subsequence_begins=begins,
        block_indices=np.arange(sum(counts), dtype=np.int32)[::-1].copy(),
        block_indices_begins=np.cumsum([0, *counts]).astype(np.int32),
        max_context_len=max(a + b for a, b in zip(new, past, strict=True)),
        rows=(begins[1:] - 1)[::-1].astype(np.int32),
        long_sequences=np.array([length > 5 for length in new]),
    )


@pytest.mark.parametrize(
    ("new", "count", "least", "sizes"),
    [
        ([4, 4, 4, 4], 2, 1, [8, 8]),
        ([1] * 9, 4, 1, [2, 2, 3, 2]),
        ([12, 1, 1, 1], 2, 1, [12, 3]),
        ([1, 1, 1, 12], 3, 1, [3, 12]),
        ([4, 4], 2, 5, [8]),
        ([30], 4, 1, [30]),
    ],
)
def test_parts_have_about_as_many_tokens_each(new: list[int], count: int, least: int, sizes: list[int]) -> None:
    parts = micro_batches(step(new, [0] * len(new)), count, least=least)
    assert [len(part.step.token_ids) for part in parts] == sizes


def test_every_sequence_keeps_its_tokens_blocks_and_logits() -> None:
    new, past = [1, 6, 1, 2, 1], [7, 0, 3, 9, 0]
    whole = step(new, past)
    parts = micro_batches(whole, 3, least=1)
    assert len(parts) == 3
    sequence = 0
    for part in parts:
        inputs = part.step
        begins, blocks = inputs.subsequence_begins, inputs.block_indices_begins
        assert begins[0] == blocks[0] == 0
        for number in range(len(begins) - 1):
            tokens = slice(whole.subsequence_begins[sequence], whole.subsequence_begins[sequence + 1])
            owned = slice(whole.block_indices_begins[sequence], whole.block_indices_begins[sequence + 1])
            mine = slice(begins[number], begins[number + 1])
            np.testing.assert_array_equal(inputs.token_ids[mine], whole.token_ids[tokens])
            np.testing.assert_array_equal(inputs.positions[mine], whole.positions[tokens])
            np.testing.assert_array_equal(
                inputs.block_indices[blocks[number] : blocks[number + 1]], whole.block_indices[owned]
            )
            assert inputs.past_lens[number] == past[sequence]
            assert inputs.long_sequences is not None
            assert inputs.long_sequences[number] == (new[sequence] > 5)
            sequence += 1
        assert inputs.max_context_len == max(a + b for a, b in zip(inputs.past_lens, np.diff(begins), strict=True))
        np.testing.assert_array_equal(inputs.token_ids[inputs.rows], whole.rows[part.rows] + 100)
    assert sequence == len(new)
    np.testing.assert_array_equal(np.sort(np.concatenate([part.rows for part in parts])), np.arange(len(new)))


def test_steps_that_decode_are_divided_like_the_one_before() -> None:
    decoding = step([1] * 10, [5] * 10)

    def sizes(places: list[int], part_of: list[int]) -> list[int]:
        inputs = replace(decoding, token_ids=-1 - np.array(places))
        return [len(part.step.token_ids) for part in micro_batches(inputs, 2, least=1, part_of=np.array(part_of))]

    # The first of 11 sequences has ended: none of the others moves to the other part.
    assert sizes([*range(1, 11)], [0] * 5 + [1] * 6) == [4, 6]
    # So many have ended that the parts would be too unequal.
    assert sizes([*range(4, 14)], [0] * 7 + [1] * 7) == [5, 5]
    # A token is known: the step before says nothing of its sequence.
    assert sizes([-4, *range(9)], [0] * 7 + [1] * 3) == [5, 5]
