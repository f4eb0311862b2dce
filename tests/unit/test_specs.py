"""Specs refuse at once what no stage could do."""

from __future__ import annotations

import pytest

from trtserve.errors import UsageError
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec, Sampling


def test_sizes_are_positive() -> None:
    with pytest.raises(UsageError, match="--tp-size is 0; it must be at least 1"):
        ConvertSpec(tp_size=0)


@pytest.mark.parametrize("value", [2**31, 99999999999])
def test_sizes_fit_into_tritons_configuration(value: int) -> None:
    with pytest.raises(UsageError, match=f"--triton-max-batch-size is {value}; it must be at most 2147483647"):
        RepositorySpec(name="tiny", triton_max_batch_size=value)
    with pytest.raises(UsageError, match="--max-batch-size"):
        BuildSpec(max_batch_size=value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperature": -1.0}, "--temperature is -1.0; it must be at least 0"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"temperature": float("inf")}, "--temperature is inf"),
        ({"top_k": -1}, "--top-k is -1"),
        ({"top_p": 5.0}, "--top-p is 5.0; it must be 0 .off. … 1"),
        ({"seed": -1}, "--seed is -1"),
        ({"seed": 2**64}, "--seed is"),
    ],
)
def test_sampling_is_checked(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_bounds_of_sampling_are_allowed() -> None:
    assert Sampling(temperature=0, top_k=0, top_p=0, seed=2**64 - 1).top_k == 0
    assert Sampling(top_p=1).top_p == 1
