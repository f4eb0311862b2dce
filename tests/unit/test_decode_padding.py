"""Padding of a lone decode step with dummy tokens: its inputs, and when it is used."""

from __future__ import annotations

import time

import numpy as np
import pytest

from trtserve.executor.decode_padding import StepInputs, fastest_step_size, pad_decode_step, single_token_step


def _as_lists(step: StepInputs) -> list[object]:
    return [value if isinstance(value, int) else value.tolist() for value in step]


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
    assert _as_lists(pad_decode_step(step, 3, 9)) == [
        [17, 0, 0],
        [40, 0, 1],
        [40, 0, 1],
        [0, 1, 2, 3],
        [5, 2, 9, 9],
        [0, 2, 3, 4],
        41,
        [0, 0, 0],
    ]
    assert pad_decode_step(step, 1, 9) is step


def test_padding_may_have_the_longest_context() -> None:
    assert pad_decode_step(single_token_step(4), 6, 4).max_context_len == 5


@pytest.mark.parametrize(
    ("seconds", "best"),
    [({1: 1.0, 2: 0.9, 6: 0.8}, 6), ({1: 1.0, 2: 0.8, 6: 0.9}, 2), ({1: 1.0, 2: 0.96, 6: 1.2}, 1)],
)
def test_padding_is_used_only_if_it_is_faster(
    seconds: dict[int, float], best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of a size, which compiles its kernels, and single slow steps do not count."""
    now, turns = 0.0, dict.fromkeys(seconds, 0)

    def run(size: int) -> None:
        nonlocal now
        turns[size] += 1
        now += seconds[size] * {1: 100, 3: 5}.get(turns[size], 1)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert fastest_step_size(run) == best
    assert len(set(turns.values())) == 1
