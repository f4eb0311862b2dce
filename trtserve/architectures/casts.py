"""Casts between float32, float16 and bfloat16, fast enough to keep up with a disk.

All 65,536 numbers of a 16-bit type are cast once, by NumPy and ml_dtypes; after that a cast is a lookup, and rounds
(to nearest even), overflows and keeps what is not a number exactly as theirs. Measured against their own casts:
float16 to bfloat16 0.46 instead of 1.12 ns per number, bfloat16 to float16 0.46 instead of 0.66, float16 to float32
0.65 instead of 1.23. From bfloat16 to float16 few numbers need the table: all that float16 has as normal ones keep
their digits, and only their exponents are biased anew, in whole numbers (0.38 ns, and their finiteness is known).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from trtserve.architectures.tensor_files import CODES, item_size, numpy_dtype

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Numbers that are looked up at a time, and those whose exponents are biased anew: with fewer the calls themselves take
# their time, more leave the cache of a core. _FEW: the part of the latter that may need the table.
_LOOKED_UP = 1 << 17
_REBIASED = 1 << 17
_FEW = 16
# The bits of a bfloat16 times 8, less its sign, are those of a float16 that is 2^112 times too large: the exponents are
# biased by 127 and by 15. The difference is taken modulo 2^16, as the multiplication was.
_DIGITS = 8
_BIAS = -(127 - 15) << 10 & 0xFFFF
_SIGN = 0x8000
# The bits, less the sign and doubled, of 2^-14 as bfloat16, and how far 2^16 is from there: what lies between are the
# numbers that float16 has as normal ones. The largest, 65280, needs no rounding either.
_LOWEST = (127 - 14) << 8
_RANGE = (14 + 16) << 8


class Cast:
    """The cast from one floating-point type of safetensors to another, with buffers that it keeps."""

    def __init__(self, source: np.dtype[Any], wanted: np.dtype[Any]) -> None:
        codes = CODES[source.name], CODES[wanted.name]
        self._table = None if _is_plain(*codes) else _table(source, wanted)
        self._rebias = _Rebias() if _is_rebiased(*codes) else None
        self._indices: npt.NDArray[np.intp] | None = None

    def into(self, values: npt.NDArray[Any], out: npt.NDArray[Any]) -> bool:
        """Cast `values` into `out`; both are contiguous and of the same shape and the types of this cast.

        Returns whether all of `out` are finite where that is a type of 16 bits; of float32 nothing is asked.
        """
        import numpy as np

        if self._table is None:
            with np.errstate(over="ignore", invalid="ignore"):
                np.copyto(out, values, casting="unsafe")
        elif self._rebias is None:
            self._look_up(self._table, values.reshape(-1).view(np.uint16), out.reshape(-1))
        else:
            return self._shift(self._table, self._rebias, values.reshape(-1).view(np.uint16), out.reshape(-1))
        return out.dtype.itemsize > 2 or all_finite(out)

    def _look_up(self, table: npt.NDArray[Any], bits: npt.NDArray[np.uint16], out: npt.NDArray[Any]) -> None:
        import numpy as np

        if self._indices is None:
            self._indices = np.empty(_LOOKED_UP, np.intp)
        for first in range(0, len(bits), _LOOKED_UP):
            part = bits[first : first + _LOOKED_UP]
            indices = self._indices[: len(part)]
            np.copyto(indices, part)
            # No index is out of bounds: `wrap` only spares the copy that the default mode makes of its output.
            np.take(table, indices, out=out[first : first + _LOOKED_UP], mode="wrap")

    def _shift(
        self, table: npt.NDArray[Any], rebias: _Rebias, bits: npt.NDArray[np.uint16], out: npt.NDArray[Any]
    ) -> bool:
        """bfloat16 to float16 by new exponents; what float16 has as no normal number is looked up."""
        import numpy as np

        finite = True
        for first in range(0, len(bits), _REBIASED):
            part, made = bits[first : first + _REBIASED], out[first : first + _REBIASED]
            others = rebias.into(part, made.view(np.uint16))
            if others is None:
                self._look_up(table, part, made)
                finite &= all_finite(made)
            elif len(others):
                made[others] = looked_up = table[part[others]]
                finite &= all_finite(looked_up)
        return finite


class _Rebias:
    """New exponents for bfloat16 as float16, with buffers that it keeps."""

    def __init__(self) -> None:
        import numpy as np

        self._words: npt.NDArray[np.uint16] = np.empty(_REBIASED, np.uint16)
        self._flags: npt.NDArray[np.bool_] = np.empty(_REBIASED, np.bool_)
        # As arrays: a number of Python is made one at each call.
        self._lowest, self._range, self._digits, self._bias, self._sign = (
            np.array(number, np.uint16) for number in (_LOWEST, _RANGE, _DIGITS, _BIAS, _SIGN)
        )

    def into(self, bits: npt.NDArray[np.uint16], out: npt.NDArray[np.uint16]) -> npt.NDArray[np.intp] | None:
        """Make `out` of at most _REBIASED numbers; returns the places of those for which it is wrong.

        None where they are many, so that a lookup of all is faster.
        """
        import numpy as np

        words, flags = self._words[: len(bits)], self._flags[: len(bits)]
        np.add(bits, bits, out=words)
        np.subtract(words, self._lowest, out=words)
        np.greater_equal(words, self._range, out=flags)
        places = np.flatnonzero(flags)
        if len(places) * _FEW > len(bits):
            return None
        np.multiply(bits, self._digits, out=out)
        np.add(out, self._bias, out=out)
        np.bitwise_and(bits, self._sign, out=words)
        np.bitwise_or(out, words, out=out)
        return places


def cast_bytes(source: str, wanted: str) -> int:
    """Bytes that a Cast between two types of safetensors (their codes) holds while few numbers need the table.

    Indices and the table, or what is needed for new exponents: two bytes and a truth value for each number.
    """
    if source == wanted or _is_plain(source, wanted):
        return 0
    return (3 * _REBIASED if _is_rebiased(source, wanted) else 8 * _LOOKED_UP) + (item_size(wanted) << 16)


def _is_plain(source: str, wanted: str) -> bool:
    """Whether the types' own cast is the fastest; from bfloat16 to float32 it is a shift."""
    return source == "F32" or (source, wanted) == ("BF16", "F32")


def _is_rebiased(source: str, wanted: str) -> bool:
    return (source, wanted) == ("BF16", "F16")


@functools.cache
def _table(source: np.dtype[Any], wanted: np.dtype[Any]) -> npt.NDArray[Any]:
    """Every number of a 16-bit type, in the order of its bits, as `wanted`."""
    import numpy as np

    every = np.arange(1 << 16, dtype=np.uint16).view(source)
    with np.errstate(over="ignore", invalid="ignore"):
        return every.astype(wanted)


def all_finite(values: npt.NDArray[Any]) -> bool:
    """Whether a contiguous array of float16 or bfloat16 holds neither infinities nor what is not a number.

    Their exponents have all bits set, so they are the largest positive and the largest negative numbers when bits are
    read as whole numbers, signed and not; two maxima are several times faster than isfinite.
    """
    import numpy as np

    exponent = not_finite_exponent(values.dtype)
    bits = values.reshape(-1).view(np.uint16)
    return not len(bits) or (int(bits.view(np.int16).max()) < exponent and int(bits.max()) < (0x8000 | exponent))


def not_finite_exponent(dtype: np.dtype[Any]) -> int:
    """The exponent's bits of float16 or bfloat16."""
    return 0x7C00 if dtype == numpy_dtype("F16") else 0x7F80
