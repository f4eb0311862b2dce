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

from trtserve.architectures.tensor_files import numpy_dtype

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Numbers that are looked up at a time; as indices of 8 bytes they stay in the cache of a core.
_LOOKED_UP = 1 << 16
# Numbers whose exponents are biased anew at a time, and the part of them that may need the table.
_REBIASED = 1 << 18
_FEW = 16
# Bytes that a Cast holds: indices, and a table of 65,536 numbers of up to 4 bytes; of numbers that are biased anew two
# bytes and a truth value each, and four times the places (8 bytes) of those few that are looked up.
CAST_BYTES = 12 * _LOOKED_UP + 3 * _REBIASED + 4 * 8 * _REBIASED // _FEW

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
    """The cast from one floating-point type of safetensors to another, with buffers for one thread."""

    def __init__(self, source: np.dtype[Any], wanted: np.dtype[Any]) -> None:
        bfloat16, float16 = numpy_dtype("BF16"), numpy_dtype("F16")
        # From bfloat16 to float32 is a shift, which is faster than a lookup.
        plain = source.itemsize == 4 or (source == bfloat16 and wanted.itemsize == 4)
        self._table = None if plain else _table(source, wanted)
        self._rebias = _Rebias() if (source, wanted) == (bfloat16, float16) else None
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
    """New exponents for bfloat16 as float16, with buffers for one thread."""

    def __init__(self) -> None:
        import numpy as np

        self._words: npt.NDArray[np.uint16] = np.empty(_REBIASED, np.uint16)
        self._flags: npt.NDArray[np.bool_] = np.empty(_REBIASED, np.bool_)

    def into(self, bits: npt.NDArray[np.uint16], out: npt.NDArray[np.uint16]) -> npt.NDArray[np.intp] | None:
        """Make `out` of at most _REBIASED numbers; returns the places of those for which it is wrong.

        None where they are many, so that a lookup of all is faster.
        """
        import numpy as np

        words, flags = self._words[: len(bits)], self._flags[: len(bits)]
        np.multiply(bits, 2, out=words)
        np.subtract(words, _LOWEST, out=words)
        np.greater_equal(words, _RANGE, out=flags)
        if np.count_nonzero(flags) * _FEW > len(bits):
            return None
        np.multiply(bits, _DIGITS, out=out)
        np.add(out, _BIAS, out=out)
        np.bitwise_and(bits, _SIGN, out=words)
        np.bitwise_or(out, words, out=out)
        return np.flatnonzero(flags)


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
