"""Casts between float32, float16 and bfloat16, fast enough to keep up with a disk.

All 65,536 numbers of a 16-bit type are cast once, by NumPy and ml_dtypes; after that a cast is a lookup, and rounds
(to nearest even), overflows and keeps what is not a number exactly as theirs. Between float16 and bfloat16 few numbers
need the table: what is a normal number in both is made of its bits by whole-number arithmetic, and is finite for
certain. In ns per number on a Zen 4 of 2.6 GHz, beside the lookup of all and NumPy's and ml_dtypes' own casts: float16
to bfloat16 0.73 (0.82, 1.47), bfloat16 to float16 0.55 (0.82, 0.84), float16 to float32 0.65 (looked up; 1.93).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trtserve.architectures.tensor_files import CODES, item_size, numpy_dtype

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Numbers that are looked up at a time, and those that are computed: with fewer the calls themselves take their time,
# more leave the cache of a core. _FEW: the part of the latter that may need the table.
_LOOKED_UP = 1 << 17
_COMPUTED = 1 << 17
_FEW = 16
_SIGN = 0x8000


class Cast:
    """The cast from one floating-point type of safetensors to another, with buffers that it keeps."""

    def __init__(self, source: np.dtype[Any], wanted: np.dtype[Any]) -> None:
        codes = CODES[source.name], CODES[wanted.name]
        self._table = None if _is_plain(*codes) else _table(source, wanted)
        self._arithmetic = _ARITHMETIC[codes]() if codes in _ARITHMETIC else None
        self._indices: npt.NDArray[np.intp] | None = None

    def into(self, values: npt.NDArray[Any], out: npt.NDArray[Any]) -> bool:
        """Cast `values` into `out`; both are contiguous and of the same shape and the types of this cast.

        Returns whether all of `out` are finite where that is a type of 16 bits; of float32 nothing is asked.
        """
        import numpy as np

        if self._table is None:
            with np.errstate(over="ignore", invalid="ignore"):
                np.copyto(out, values, casting="unsafe")
        elif self._arithmetic is None:
            self._look_up(self._table, values.reshape(-1).view(np.uint16), out.reshape(-1))
        else:
            return self._compute(self._table, self._arithmetic, values.reshape(-1).view(np.uint16), out.reshape(-1))
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

    def _compute(
        self, table: npt.NDArray[Any], arithmetic: _Arithmetic, bits: npt.NDArray[np.uint16], out: npt.NDArray[Any]
    ) -> bool:
        """Between float16 and bfloat16; what is no normal number in both is looked up."""
        import numpy as np

        if odd := len(bits) % 2:  # the last one: arithmetic takes pairs
            self._look_up(table, bits[-odd:], out[-odd:])
        finite = not odd or all_finite(out[-odd:])
        bits, out = bits[: len(bits) - odd], out[: len(out) - odd]
        for first in range(0, len(bits), _COMPUTED):
            part, made = bits[first : first + _COMPUTED], out[first : first + _COMPUTED]
            others = arithmetic.into(part, made.view(np.uint16))
            if len(others) * _FEW > len(part):
                self._look_up(table, part, made)
                finite &= all_finite(made)
            elif len(others):
                made[others] = looked_up = table[part[others]]
                finite &= all_finite(looked_up)
        return finite


class _Arithmetic(ABC):
    """A cast between two types of 16 bits in whole numbers, with buffers that it keeps."""

    def __init__(self) -> None:
        import numpy as np

        self._words: npt.NDArray[np.uint16] = np.empty(_COMPUTED, np.uint16)
        self._flags: npt.NDArray[np.bool_] = np.empty(_COMPUTED, np.bool_)

    @abstractmethod
    def into(self, bits: npt.NDArray[np.uint16], out: npt.NDArray[np.uint16]) -> npt.NDArray[np.intp]:
        """Make `out` of an even number of `bits`, _COMPUTED at most; returns the places of those that it got wrong."""


class _ToFloat16(_Arithmetic):
    """bfloat16 to float16: the bits times 8, less the sign, are those of a float16 that is 2^112 times too large.

    Their exponents are biased by 127 and by 15. From 2^-14 to below 2^16 float16 has normal numbers; the largest
    bfloat16 among them, 65280, needs no rounding either.
    """

    def __init__(self) -> None:
        super().__init__()
        # Doubled, which drops the sign, the bits of 2^-14, and how far 2^16 is from there.
        self._lowest, self._range = _words((127 - 14) << 8, (14 + 16) << 8)
        self._digits, self._bias, self._sign = _words(8, -(127 - 15) << 10 & 0xFFFF, _SIGN)

    def into(self, bits: npt.NDArray[np.uint16], out: npt.NDArray[np.uint16]) -> npt.NDArray[np.intp]:
        import numpy as np

        words, flags = self._words[: len(bits)], self._flags[: len(bits)]
        np.add(bits, bits, out=words)
        np.subtract(words, self._lowest, out=words)
        np.greater_equal(words, self._range, out=flags)
        np.multiply(bits, self._digits, out=out)
        np.add(out, self._bias, out=out)
        np.bitwise_and(bits, self._sign, out=words)
        np.bitwise_or(out, words, out=out)
        return np.flatnonzero(flags)


class _ToBfloat16(_Arithmetic):
    """float16 to bfloat16: three digits fewer, rounded to nearest even, and the exponent biased by 112 more.

    Rounding adds 3 and the last digit that stays, then drops three digits. `last` below is that digit less 2, for which
    one operation is enough. 129 * 8 less makes what wraps around, or is too large, of all that is no normal number, and
    of the five smallest and the largest normal ones, which the table does as well. NumPy shifts numbers of 16 bits one
    by one, those of 32 in vectors: two are shifted at a time, and what crosses over is masked.
    """

    _LESS = 129

    def __init__(self) -> None:
        import numpy as np

        super().__init__()
        self._but_last = np.array(0xFFFEFFFE, np.uint32)
        self._shift = np.array(3, np.uint32)
        self._offset, self._range = _words(self._LESS * 8 - 5, 0x7C00 - self._LESS * 8 + 3)
        self._bias, self._kept = _words(((127 - 15) << 7) + self._LESS, 0x0FFF)
        self._magnitude, self._sign = _words(0x7FFF, _SIGN)

    def into(self, bits: npt.NDArray[np.uint16], out: npt.NDArray[np.uint16]) -> npt.NDArray[np.intp]:
        import numpy as np

        words, flags = self._words[: len(bits)], self._flags[: len(bits)]
        pairs, last = out.view(np.uint32), words.view(np.uint32)
        np.right_shift(bits.view(np.uint32), self._shift, out=last)
        np.bitwise_or(last, self._but_last, out=last)
        np.bitwise_and(bits, self._magnitude, out=out)
        np.add(out, words, out=out)
        np.subtract(out, self._offset, out=out)
        np.greater_equal(out, self._range, out=flags)
        np.right_shift(pairs, self._shift, out=pairs)
        np.bitwise_and(out, self._kept, out=out)
        np.add(out, self._bias, out=out)
        np.bitwise_and(bits, self._sign, out=words)
        np.bitwise_or(out, words, out=out)
        return np.flatnonzero(flags)


_ARITHMETIC: Mapping[tuple[str, str], type[_Arithmetic]] = {
    ("BF16", "F16"): _ToFloat16,
    ("F16", "BF16"): _ToBfloat16,
}


def _words(*numbers: int) -> Iterator[npt.NDArray[np.uint16]]:
    """Numbers as arrays: one of Python is made an array at each call."""
    import numpy as np

    return (np.array(number, np.uint16) for number in numbers)


def cast_bytes(source: str, wanted: str) -> int:
    """Bytes that a Cast between two types of safetensors (their codes) holds while few numbers need the table.

    Indices and the table, or what arithmetic needs beside it: two bytes and a truth value for each number.
    """
    if source == wanted or _is_plain(source, wanted):
        return 0
    return (3 * _COMPUTED if (source, wanted) in _ARITHMETIC else 8 * _LOOKED_UP) + (item_size(wanted) << 16)


def _is_plain(source: str, wanted: str) -> bool:
    """Whether the types' own cast is the fastest; from bfloat16 to float32 it is a shift."""
    return source == "F32" or (source, wanted) == ("BF16", "F32")


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
