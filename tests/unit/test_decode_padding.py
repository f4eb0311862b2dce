"""Small steps: how long they take, and padding with dummy tokens, its inputs and when it is used."""

from __future__ import annotations

import time
from dataclasses import fields

import numpy as np
import pytest

from trtserve.executor.engine.model import StepInputs, single_sequence
from trtserve.executor.openvino.paged_model import (
    SIZES,
    least,
    measure_steps,
    pad_step,
    padded_sizes,
    seconds_of_each,
)


def _as_lists(step: StepInputs) -> list[object]:
    values = (getattr(step, field.name) for field in fields(step))
    return [value if isinstance(value, int) else value.tolist() for value in values if value is not None]


def test_padding_tokens_have_their_own_places_in_the_spare_block() -> None:
    step = StepInputs(
        token_ids=np.array([17]),
        positions=np.array([40]),
        past_lens=np.array([40], dtype=np.int32),
        subsequence_begins=np.array([0, 1], dtype=np.int32),
        block_indices=np.array([5, 2], dtype=np.int32),
        block_indices_begins=np.array([0, 2], dtype=np.int32),
        max_context_len=41,
        rows=np.array([0], dtype=np.int32),
    )
    assert _as_lists(pad_step(step, 3, 9)) == [
        [17, 0, 0],
        [40, 0, 1],
        [40, 0, 1],
        [0, 1, 2, 3],
        [5, 2, 9, 9],
        [0, 2, 3, 4],
        41,
        [0, 0, 0],
    ]
    assert pad_step(step, 1, 9) is step


def test_padding_may_have_the_longest_context() -> None:
    assert pad_step(single_sequence([0], [4]), 6, 4).max_context_len == 5


def test_a_draft_is_padded_behind_its_last_row() -> None:
    assert _as_lists(pad_step(single_sequence([0] * 3, [4]), 5, 9)) == [
        [0, 0, 0, 0, 0],
        [0, 1, 2, 0, 1],
        [0, 0, 1],
        [0, 3, 4, 5],
        [4, 9, 9],
        [0, 1, 2, 3],
        3,
        [0, 1, 2, 2, 2],
    ]


@pytest.mark.parametrize(
    ("rounds", "sizes"),
    [
        ([{1: 1.0, 2: 0.9, 6: 0.8}], [6, 6, 6, 6, 5, 6]),
        ([{1: 1.0, 2: 0.8, 6: 0.9}], [2, 2, 3, 4, 5, 6]),
        ([{1: 1.0, 2: 0.96, 6: 1.2}], [1, 2, 3, 4, 5, 6]),
        # Not in the second round: the first one was disturbed.
        ([{1: 5.0, 2: 0.8, 6: 0.9}, {1: 0.8, 2: 0.81, 6: 0.9}], [1, 2, 3, 4, 5, 6]),
    ],
)
def test_padding_is_used_only_if_it_is_faster(rounds: list[dict[int, float]], sizes: list[int]) -> None:
    assert padded_sizes(rounds) == sizes


def test_sizes_between_the_measured_ones_are_interpolated() -> None:
    assert seconds_of_each({1: 1.0, 2: 3.0, 6: 5.0}) == [1.0, 3.0, 3.5, 4.0, 4.5, 5.0]


def test_first_and_slow_steps_of_a_size_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one compiles its kernels, and a slow one was disturbed."""
    now, turns = 0.0, dict.fromkeys(SIZES, 0)

    def run(size: int) -> None:
        nonlocal now
        turns[size] += 1
        now += size * {1: 0.25, 3: 5}.get(turns[size], 1)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    rounds = measure_steps(run)
    assert least(rounds) == {size: pytest.approx(size) for size in SIZES}
    assert set(turns.values()) == {len(rounds) + 1}
