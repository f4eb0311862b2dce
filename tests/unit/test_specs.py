"""Specs refuse at once what no stage could do."""

from __future__ import annotations

import pytest

from trtserve.errors import UsageError
from trtserve.specs import BenchSpec, BuildSpec, ConvertSpec, RepositorySpec


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
    ("given", "message"),
    [
        ({"request_rate": 0.0}, "--request-rate is 0.0; it must be above 0"),
        ({"request_rate": 1e-308}, "--request-rate is 1e-308; it must be above 1e-09"),
        ({"timeout": 1e300}, "--timeout is 1e\\+300; it must be at most 1000000000"),
        ({"input_stdev": float("inf")}, "--input-stdev is inf; it must be at most 1000000000"),
        ({"input_stdev": float("nan")}, "--input-stdev is nan; it must be at least 0"),
    ],
    ids=str,
)
def test_times_and_rates_overflow_nowhere(given: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BenchSpec(**given)  # type: ignore[arg-type]
