"""Tensors as KServe v2 carries them: what a model declares, values to bytes and bytes to values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_NUMPY_NAMES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BYTES": "object",
}


def numpy_type(datatype: str) -> np.dtype[Any]:
    """NumPy's type of a Triton type (FP32 → float32; BF16 → ml_dtypes.bfloat16; BYTES → object)."""
    import numpy as np

    if datatype == "BF16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(_NUMPY_NAMES[datatype])


@dataclass(frozen=True, kw_only=True)
class TensorDescription:
    """Input or output of a model: Triton type without `TYPE_` (BYTES for strings), dims without the batch axis."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.datatype.replace('BYTES', 'STRING')} {list(self.dims)}"


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Values of one input: `shape` with the batch axis, `values` flat (an array of any shape is taken flat)."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Any] | npt.NDArray[Any]

    def raw(self) -> bytes:
        """Content in KServe's raw form: little-endian numbers; strings each behind their 4-byte length."""
        if self.datatype == "BYTES":
            encoded = [str(value).encode() for value in self.flat()]
            return b"".join(len(text).to_bytes(4, "little") + text for text in encoded)
        import numpy as np

        return np.asarray(self.values, numpy_type(self.datatype)).tobytes()

    def flat(self) -> list[Any]:
        """The values as a flat list of plain Python values."""
        if isinstance(self.values, Sequence):
            return list(self.values)
        flat: list[Any] = self.values.reshape(-1).tolist()
        return flat


def decoded(datatype: str, shape: Sequence[int], content: bytes) -> npt.NDArray[Any]:
    """The array of an output's raw content; strings are decoded as UTF-8, bytes that are not are replaced."""
    import numpy as np

    if datatype != "BYTES":
        return np.frombuffer(content, numpy_type(datatype)).reshape(tuple(shape))
    return text_array(_texts(content)).reshape(tuple(shape))


def text_array(texts: Sequence[str]) -> npt.NDArray[Any]:
    """A flat array of strings."""
    import numpy as np

    array = np.empty(len(texts), dtype=object)
    array[:] = texts
    return array


def _texts(content: bytes) -> list[str]:
    texts, start = [], 0
    while start < len(content):
        length = int.from_bytes(content[start : start + 4], "little")
        texts.append(content[start + 4 : start + 4 + length].decode(errors="replace"))
        start += 4 + length
    return texts


def generate_shape(dims: Sequence[int], count: int) -> tuple[int, ...]:
    """The shape that Triton's generate endpoint gives to `count` flat values of an input with `dims`.

    The innermost variable dim takes what the fixed ones leave; other variable dims become 1. Source: Triton's
    docs/protocol/extension_generate.md. `dims` have the batch axis (-1).
    """
    fixed = math.prod(size for size in dims if size > 0)
    rest, shape = count // fixed if fixed else 0, []
    for size in reversed(dims):
        shape.append(size if size > 0 else rest)
        rest = rest if size > 0 else 1
    return tuple(reversed(shape))
