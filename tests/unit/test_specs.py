"""Specs refuse at once what no stage could do."""

from __future__ import annotations

import pytest

from trtserve.errors import UsageError
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec


def test_sizes_are_positive() -> None:
    with pytest.raises(UsageError, match="--tp-size is 0; it must be at least 1"):
        ConvertSpec(tp_size=0)


@pytest.mark.parametrize("value", [2**31, 99999999999])
def test_sizes_fit_into_tritons_configuration(value: int) -> None:
    with pytest.raises(UsageError, match=f"--triton-max-batch-size is {value}; it must be at most 2147483647"):
        RepositorySpec(name="tiny", triton_max_batch_size=value)
    with pytest.raises(UsageError, match="--max-batch-size"):
        BuildSpec(max_batch_size=value)
