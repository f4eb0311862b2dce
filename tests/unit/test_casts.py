"""Casts between the floating-point types: every number of the 16-bit types, and what rounds in float32."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from trtserve.checkpoint.casts import Cast, all_finite

TYPES: list[np.dtype[Any]] = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]

Floats = npt.NDArray[Any]


def cast(values: Floats, wanted: np.dtype[Any]) -> Floats:
    out: Floats = np.empty(values.shape, wanted)
    Cast(values.dtype, wanted).into(values, out)
    return out


def every(kind: np.dtype[Any]) -> Floats:
    """All numbers of a 16-bit type; of float32 those of bfloat16, each with the ends that rounding tells apart."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    if kind.itemsize == 2:
        return bits.view(kind)
    ends = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return ((bits.astype(np.uint32) << 16)[:, None] | ends).reshape(-1).view(np.float32)


@pytest.mark.parametrize("wanted", TYPES, ids=str)
@pytest.mark.parametrize("source", TYPES, ids=str)
def test_casts_equal_numpy_and_ml_dtypes_for_every_value(source: np.dtype[Any], wanted: np.dtype[Any]) -> None:
    values = every(source)
    with np.errstate(all="ignore"):
        expected = values.astype(wanted)
    assert cast(values, wanted).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("number", "bits"),
    [
        (65280.0, 0x7BF8),  # the largest bfloat16 that float16 can hold
        (2.0**-14, 0x0400),
        (-(2.0**-24), 0x8001),
        (2.0**-25, 0x0000),  # half of the smallest number: to even
        (1.5 * 2.0**-24, 0x0002),  # between 1 and 2 of them: to even
        (2.5 * 2.0**-24, 0x0002),
        (65536.0, 0x7C00),
        (float("-inf"), 0xFC00),
        (-0.0, 0x8000),
    ],
)
def test_bfloat16_rounds_to_the_nearest_even_float16(number: float, bits: int) -> None:
    values = np.array([number], ml_dtypes.bfloat16)
    assert float(values[0]) == number
    assert int(cast(values, np.dtype(np.float16)).view(np.uint16)[0]) == bits


def test_nan_stays_nan() -> None:
    values = np.array([0x7FC0, 0x7F81, 0xFFFF], np.uint16).view(ml_dtypes.bfloat16)
    assert np.isnan(cast(values, np.dtype(np.float16))).all()


def test_arrays_larger_than_one_lookup() -> None:
    values = np.tile(every(TYPES[1])[:0x7C00], 5)[:-5]
    assert cast(values, TYPES[2]).tobytes() == values.astype(ml_dtypes.bfloat16).tobytes()


def test_few_values_out_of_float16_range() -> None:
    """Both ways from bfloat16 to float16: arithmetic with some lookups, then lookups alone."""
    normal = every(TYPES[2])[0x3880:0x4780]
    values = np.concatenate([np.repeat(np.concatenate([normal, -normal]), 40), np.zeros(9, TYPES[2]), every(TYPES[2])])
    assert_cast_with_some_of_every_number(values, TYPES[1])


def test_few_subnormal_float16_values() -> None:
    """Both ways from float16 to bfloat16, and one number after the last pair."""
    normal = every(TYPES[1])[0x0400:0x7C00]
    values = np.concatenate([np.repeat(np.concatenate([normal, -normal]), 6), every(TYPES[1])[:0x0400]])
    values = np.concatenate([values, np.zeros(1 << 17, TYPES[1]), np.ones(1, TYPES[1])])
    assert_cast_with_some_of_every_number(values, TYPES[2])


def assert_cast_with_some_of_every_number(values: Floats, wanted: np.dtype[Any]) -> None:
    values[::1000] = np.resize(every(values.dtype)[::7], len(values[::1000]))
    with np.errstate(all="ignore"):
        expected = values.astype(wanted)
    assert len(values) > 1 << 18
    assert cast(values, wanted).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("source", "number"),
    [
        (TYPES[2], 65536.0),
        (TYPES[2], -3e38),
        (TYPES[2], float("inf")),
        (TYPES[2], float("nan")),
        (TYPES[1], float("-inf")),
        (TYPES[1], float("nan")),
    ],
    ids=str,
)
@pytest.mark.parametrize("others", [0.0, 0.5], ids=["looked up", "computed"])
@pytest.mark.parametrize("place", [0, 70_000, 300_000])
def test_one_non_finite_value_is_reported(source: np.dtype[Any], number: float, others: float, place: int) -> None:
    wanted = TYPES[1] if source == TYPES[2] else TYPES[2]
    values = np.full(300_001, others, source)
    out = np.empty(values.shape, wanted)
    convert = Cast(source, wanted)
    assert convert.into(values, out)
    values[place] = number
    assert not convert.into(values, out)
    assert np.flatnonzero(~np.isfinite(out)).tolist() == [place]


@pytest.mark.parametrize("kind", TYPES[1:], ids=str)
def test_every_non_finite_value_is_detected(kind: np.dtype[Any]) -> None:
    values = every(kind)
    finite = np.isfinite(values.astype(np.float32))
    assert all_finite(np.ascontiguousarray(values[finite]))
    assert all_finite(values[:0])
    seen = [not all_finite(values[index : index + 1]) for index in np.flatnonzero(~finite)]
    assert all(seen)
    assert len(seen) == (2048 if kind == np.float16 else 256)
