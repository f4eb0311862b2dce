"""GGUF files: header, metadata and tensors, read within bounds, and the floats that their blocks stand for.

A file has the magic `GGUF`, a version (2 or 3), the numbers of tensors and of metadata, the metadata (name, type,
value), the tensors' names, sizes, types and places, and after padding their data; numbers are little endian. Sizes are
stored with the innermost first. Source: the GGUF specification and the block layouts of ggml; no code is theirs.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.checkpoint.encodings import E2M1, Encoding
from trtserve.checkpoint.tensor_files import Entry, TensorFile, read_into
from trtserve.errors import CorruptFileError, UnsupportedModelError
from trtserve.files import LARGEST_TEXT, open_file

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]
    Blocks = npt.NDArray[np.uint8]

_MAGIC = b"GGUF"
_MOST_TENSORS, _MOST_KEYS, _LONGEST_NAME, _MOST_DIMENSIONS = 100_000, 10_000, 256, 4
_LARGEST_ALIGNMENT = 1 << 20
_MOST_LISTED = 2_000_000  # values of all lists; in memory one takes up to 60 bytes. 262,000 tokens have 1.3 million
# Metadata types: struct code, or what is read as a text or a list.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_AGAIN = "Fetch the file again, or choose another copy of it."


class GgufFile(TensorFile):
    """A GGUF file; the codes of its entries are ggml's types, their shapes have the outermost size first.

    `size` is that of the whole file where only its beginning is here.
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        self.path = path
        with open_file(path, CorruptFileError) as handle:
            size = size or os.fstat(handle.fileno()).st_size
            header = _Header(path, handle.read(min(size, LARGEST_TEXT)), size)
        self.metadata = header.metadata
        self.entries = header.entries


class _Header:
    """Metadata and entries, read from the first bytes of a file."""

    def __init__(self, path: Path, data: bytes, size: int) -> None:
        self._path, self._data, self._at, self._size, self._listed = path, data, 0, size, 0
        if self._take(4) != _MAGIC:
            raise self._damaged("it does not begin with GGUF")
        version = self._number("I")
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{path} has version {version} of GGUF, or is big endian; versions 2 and 3, little endian, are read.",
                hint="Convert the model again with a current llama.cpp.",
            )
        tensors, keys = self._number("Q"), self._number("Q")
        if tensors > _MOST_TENSORS or keys > _MOST_KEYS:
            raise self._damaged(f"it claims {tensors} tensors and {keys} keys")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            name = self._text(_LONGEST_NAME)
            if name in self.metadata:
                raise self._damaged(f"it has the key {name} twice")
            self.metadata[name] = self._value(self._number("I"))
        found = [self._tensor() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
            raise self._damaged(f"its alignment is {alignment!r:.40}")
        start = -(-self._at // alignment) * alignment
        self.entries = self._placed(found, start)

    def _damaged(self, what: str) -> CorruptFileError:
        return CorruptFileError(f"{self._path} is damaged: {what}.", hint=_AGAIN)

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            limit = "" if self._size <= len(self._data) else f", which is read up to {LARGEST_TEXT} bytes"
            raise self._damaged(f"{count} bytes at byte {self._at} go beyond its header{limit}")
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _text(self, longest: int = LARGEST_TEXT) -> str:
        length = self._number("Q")
        if length > longest:
            raise self._damaged(f"a text at byte {self._at} has {length} bytes")
        return self._take(length).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            raise self._damaged(f"a value at byte {self._at} has type {kind}")
        inner, count = self._number("I"), self._number("Q")
        self._listed += count
        if self._listed > _MOST_LISTED:
            raise self._damaged(f"its lists claim {self._listed} values; {_MOST_LISTED} are read")
        if inner in _NUMBERS:
            code = _NUMBERS[inner]
            return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}"))))
        if inner != _TEXT or count * 8 > len(self._data) - self._at:
            raise self._damaged(f"a list at byte {self._at} has {count} values of type {inner}")
        return [self._text() for _ in range(count)]

    def _tensor(self) -> tuple[str, tuple[int, ...], str, int]:
        name, dimensions = self._text(_LONGEST_NAME), self._number("I")
        if not 0 < dimensions <= _MOST_DIMENSIONS:
            raise self._damaged(f"the tensor {name} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        kind, place = self._number("I"), self._number("Q")
        if kind not in TYPES:
            raise UnsupportedModelError(
                f"{self._path}: the tensor {name} has ggml's type {kind}; types that are read: "
                f"{', '.join(found.name for found in TYPES.values())}.",
                hint="Choose a file such as Q4_K_M, Q8_0 or F16.",
            )
        return name, shape, TYPES[kind].name, place

    def _placed(self, found: list[tuple[str, tuple[int, ...], str, int]], start: int) -> dict[str, Entry]:
        entries, end = dict[str, Entry](), start
        for name, shape, code, place in sorted(found, key=lambda each: each[3]):
            kind = BY_NAME[code]
            if not all(0 < size < 1 << 40 for size in shape) or shape[-1] % kind.numbers:
                raise self._damaged(f"the tensor {name} is {code} {list(shape)}")
            size = math.prod(shape) // kind.numbers * kind.size
            if name in entries or start + place < end or start + place + size > self._size:
                raise self._damaged(
                    f"the tensor {name} ({size} bytes at {place}) overlaps another, or ends after the file"
                )
            entries[name] = Entry(code=code, shape=shape, begin=start + place, size=size)
            end = start + place + size
        return entries


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A ggml type: `numbers` weights in `size` bytes, and what makes floats [n, numbers] of blocks u8[n, size]."""

    name: str
    numbers: int
    size: int
    floats: Callable[[Blocks], Floats]


@dataclass(frozen=True, kw_only=True)
class GgufRows(Encoding):
    """Rows of a GGUF matrix or vector.

    `heads` > 0: the rows of each head are stored in turns, first and second half, as llama.cpp keeps Llama's queries
    and keys. `shift` is added. `logarithms`: the file has -exp of the numbers, as of Mamba's A. `in_turns`: the columns
    are put back into groups.
    """

    heads: int = 0
    shift: float = 0.0
    logarithms: bool = False
    in_turns: tuple[int, int] = (1, 1)  # columns: groups that give a part each in turn, and parts of each group

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.entry.shape

    def _rows(self, first: int, count: int) -> Floats:
        import numpy as np

        if self.logarithms:
            stored = self._stored(first, count)
            if not (stored < 0).all():
                raise CorruptFileError(f"{self.codes.where} has numbers that are not negative.", hint=_AGAIN)
            return np.log(-stored)
        if self.in_turns != (1, 1):
            groups, each = self.in_turns
            return self._stored(first, count).reshape(count, each, groups, -1).swapaxes(1, 2).reshape(count, -1)
        if not self.heads:
            return self._stored(first, count) + np.float32(self.shift)
        size = self.shape[0] // self.heads
        low, high = first // size * size, -(-(first + count) // size) * size
        stored = self._stored(low, high - low)
        halves = stored.reshape(-1, size // 2, 2, stored.shape[-1]).swapaxes(1, 2).reshape(stored.shape)
        return np.ascontiguousarray(halves[first - low : first - low + count])

    def _stored(self, first: int, count: int) -> Floats:
        import numpy as np

        entry, kind = self.codes.entry, BY_NAME[self.codes.entry.code]
        columns = entry.shape[-1] if len(entry.shape) > 1 else 1
        numbers = 1 if len(entry.shape) == 1 else kind.numbers
        each = columns // numbers * kind.size
        blocks = np.empty((count * columns // numbers, kind.size), np.uint8)
        with self.codes.file.opened() as descriptor:
            read_into(descriptor, blocks, entry.begin + first * each, self.codes.where)
        return kind.floats(blocks).reshape(count, columns)


@dataclass(frozen=True, kw_only=True)
class Joined(Encoding):
    """Rows of several matrices, one after another."""

    parts: tuple[GgufRows, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:]

    def _rows(self, first: int, count: int) -> Floats:
        import numpy as np

        found = []
        for part in self.parts:
            low, high = max(first, 0), min(first + count, part.shape[0])
            if low < high:
                found.append(part.rows(low, high - low))
            first -= part.shape[0]
        return np.concatenate(found)


@dataclass(frozen=True, kw_only=True)
class HeadsJoined(Encoding):
    """Keys and values of latent attention: of each head the rows of its key, then those of its value.

    The file has keys [heads, rank, key] and values [heads, value, rank] apart.
    """

    keys: tuple[GgufRows, ...]  # of each head [rank, key]
    values: tuple[GgufRows, ...]  # of each head [value, rank]

    @property
    def shape(self) -> tuple[int, ...]:
        (rank, key), (value, _) = self.keys[0].shape, self.values[0].shape
        return len(self.keys) * (key + value), rank

    def _rows(self, first: int, count: int) -> Floats:
        import numpy as np

        (rank, key), (value, _) = self.keys[0].shape, self.values[0].shape
        each = key + value
        low, high = first // each, -(-(first + count) // each)
        found = [
            part
            for head in range(low, high)
            for part in (self.keys[head].rows(0, rank).T, self.values[head].rows(0, value))
        ]
        return np.ascontiguousarray(np.concatenate(found)[first - low * each :][:count])


def _half(part: Blocks) -> Floats:
    """Return float16 [n, 1] of bytes [n, 2]."""
    import numpy as np

    return np.ascontiguousarray(part).view("<f2").astype(np.float32)


def _nibbles(part: Blocks) -> npt.NDArray[np.uint8]:
    """Return the low nibbles of all bytes, then the high ones: [n, m] becomes [n, 2 m]."""
    import numpy as np

    return np.concatenate([part & 15, part >> 4], -1)


def _plain(code: str) -> Callable[[Blocks], Floats]:
    def floats(blocks: Blocks) -> Floats:
        import numpy as np

        return np.ascontiguousarray(blocks).view(code).astype(np.float32)

    return floats


def _bfloat16(blocks: Blocks) -> Floats:
    import numpy as np

    wide = np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)


def _fifth_bits(part: Blocks) -> npt.NDArray[Any]:
    """Return 32 bits of four bytes, each as 0 or 16."""
    import numpy as np

    return np.unpackbits(part, axis=-1, bitorder="little") << 4


def _small(*, minimum: bool, fifth: bool) -> Callable[[Blocks], Floats]:
    """Q4_0, Q4_1, Q5_0 and Q5_1: a scale, perhaps a minimum, perhaps fifth bits, and 32 nibbles."""

    def floats(blocks: Blocks) -> Floats:
        import numpy as np

        scale, at = _half(blocks[:, :2]), 4 if minimum else 2
        codes = _nibbles(blocks[:, at + (4 if fifth else 0) :])
        if fifth:
            codes = codes | _fifth_bits(blocks[:, at : at + 4])
        if minimum:
            return codes * scale + _half(blocks[:, 2:4])
        return (codes.astype(np.float32) - (16 if fifth else 8)) * scale

    return floats


def _q8_0(blocks: Blocks) -> Floats:
    import numpy as np

    values: Floats = _half(blocks[:, :2]) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)
    return values


def _in_groups(codes: npt.NDArray[Any], scales: Floats, minima: Floats | None = None) -> Floats:
    """Return codes × scales − minima, where scales [n, groups] share the numbers of a block [n, numbers]."""
    import numpy as np

    grouped = codes.reshape(*scales.shape, -1).astype(np.float32) * scales[..., None]
    if minima is not None:
        grouped = grouped - minima[..., None]
    values: Floats = grouped.reshape(len(codes), -1)
    return values


def _six_bits(part: Blocks) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return eight scales and eight minima of six bits from 12 bytes (Q4_K and Q5_K)."""
    import numpy as np

    low, middle, high = part[:, :4], part[:, 4:8], part[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], -1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], -1)
    return scales, minima


def _pairs(part: Blocks) -> npt.NDArray[Any]:
    """Return nibbles of 32 bytes at a time, low ones first: 128 bytes become 256 codes."""
    import numpy as np

    each = part.reshape(len(part), -1, 32)
    codes: npt.NDArray[Any] = np.stack([each & 15, each >> 4], 2)
    return codes.reshape(len(part), -1)


def _q4_k(blocks: Blocks) -> Floats:
    scales, minima = _six_bits(blocks[:, 4:16])
    return _in_groups(_pairs(blocks[:, 16:]), _half(blocks[:, :2]) * scales, _half(blocks[:, 2:4]) * minima)


def _q5_k(blocks: Blocks) -> Floats:
    import numpy as np

    scales, minima = _six_bits(blocks[:, 4:16])
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    codes = _pairs(blocks[:, 48:]) | fifth.reshape(len(blocks), -1)
    return _in_groups(codes, _half(blocks[:, :2]) * scales, _half(blocks[:, 2:4]) * minima)


def _twos(part: Blocks) -> npt.NDArray[Any]:
    """Return four codes of two bits for each byte: of 32 bytes the lowest bits, then the next."""
    import numpy as np

    each = part.reshape(len(part), -1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return each.reshape(len(part), -1)


def _q2_k(blocks: Blocks) -> Floats:
    scales = blocks[:, :16]
    whole, minimum = _half(blocks[:, 80:82]), _half(blocks[:, 82:84])
    return _in_groups(_twos(blocks[:, 16:80]), whole * (scales & 15), minimum * (scales >> 4))


def _q3_k(blocks: Blocks) -> Floats:
    import numpy as np

    part = blocks[:, 96:108]
    low = np.concatenate([part[:, :8] & 15, part[:, :8] >> 4], -1)
    high = (part[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(len(blocks), -1)
    scales = (low | high << 4).astype(np.int8) - np.int8(32)
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(blocks), -1)
    codes = _twos(blocks[:, 32:96]).astype(np.int8) - (third ^ 1).astype(np.int8) * np.int8(4)
    return _in_groups(codes, _half(blocks[:, 108:]) * scales)


def _q6_k(blocks: Blocks) -> Floats:
    import numpy as np

    low = blocks[:, :128].reshape(-1, 2, 64)
    low = np.concatenate([low & 15, low >> 4], -1).reshape(len(blocks), -1)
    high = _twos(blocks[:, 128:192])
    codes = (low | high << 4).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return _in_groups(codes, _half(blocks[:, 208:]) * scales)


# Numbers of IQ4_NL and IQ4_XS.
_UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4_nl(blocks: Blocks) -> Floats:
    import numpy as np

    values: Floats = _half(blocks[:, :2]) * np.asarray(_UNEVEN, np.float32)[_nibbles(blocks[:, 2:])]
    return values


def _iq4_xs(blocks: Blocks) -> Floats:
    import numpy as np

    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], -1).reshape(len(blocks), -1)
    scales = _half(blocks[:, :2]) * ((low | high << 4).astype(np.float32) - 32)
    nibbles = _nibbles(blocks[:, 8:].reshape(-1, 16)).reshape(len(blocks), -1)
    return _in_groups(np.asarray(_UNEVEN, np.float32)[nibbles], scales)


def _mxfp4(blocks: Blocks) -> Floats:
    import numpy as np

    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 127)
    values: Floats = np.asarray(E2M1, np.float32)[_nibbles(blocks[:, 1:])] * scale
    return values


TYPES: dict[int, Kind] = {
    number: Kind(name=name, numbers=numbers, size=size, floats=floats)
    for number, name, numbers, size, floats in (
        (0, "F32", 1, 4, _plain("<f4")),
        (1, "F16", 1, 2, _plain("<f2")),
        (30, "BF16", 1, 2, _bfloat16),
        (2, "Q4_0", 32, 18, _small(minimum=False, fifth=False)),
        (3, "Q4_1", 32, 20, _small(minimum=True, fifth=False)),
        (6, "Q5_0", 32, 22, _small(minimum=False, fifth=True)),
        (7, "Q5_1", 32, 24, _small(minimum=True, fifth=True)),
        (8, "Q8_0", 32, 34, _q8_0),
        (10, "Q2_K", 256, 84, _q2_k),
        (11, "Q3_K", 256, 110, _q3_k),
        (12, "Q4_K", 256, 144, _q4_k),
        (13, "Q5_K", 256, 176, _q5_k),
        (14, "Q6_K", 256, 210, _q6_k),
        (20, "IQ4_NL", 32, 18, _iq4_nl),
        (23, "IQ4_XS", 256, 136, _iq4_xs),
        (39, "MXFP4", 32, 17, _mxfp4),
    )
}
"""ggml's types by their numbers in a file."""
BY_NAME = {kind.name: kind for kind in TYPES.values()}
