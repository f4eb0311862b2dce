"""Tensors in KServe v2: their declarations, and values to bytes and back."""

from __future__ import annotations

import functools
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


@functools.cache
def numpy_type(datatype: str) -> np.dtype[Any]:
    """Return the NumPy type of a Triton type (FP32 → float32; BF16 → ml_dtypes.bfloat16; BYTES → object)."""
    import numpy as np

    if datatype == "BF16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(_NUMPY_NAMES[datatype])


@dataclass(frozen=True, kw_only=True)
class TensorDescription:
    """The declaration of a model's input or output."""

    name: str
    datatype: str
    """Triton type without `TYPE_`; BYTES for strings."""
    dims: tuple[int, ...]
    """Without the batch axis."""
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.datatype.replace('BYTES', 'STRING')} {list(self.dims)}"


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """The values of one input."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    """With the batch axis."""
    values: Sequence[Any] | npt.NDArray[Any]
    """Flat; an array of any shape is flattened."""

    def raw(self) -> bytes:
        """Return the content in KServe's raw form: little-endian numbers; strings after their 4-byte length."""
        if self.datatype == "BYTES":
            encoded = [str(value).encode() for value in self.flat()]
            return b"".join(len(text).to_bytes(4, "little") + text for text in encoded)
        import numpy as np

        return np.asarray(self.values, numpy_type(self.datatype)).tobytes()

    def flat(self) -> list[Any]:
        """Return the values as a flat list of Python values."""
        if isinstance(self.values, Sequence):
            return list(self.values)
        flat: list[Any] = self.values.reshape(-1).tolist()
        return flat


def decoded(datatype: str, shape: Sequence[int], content: bytes) -> npt.NDArray[Any]:
    """Return the array of an output's raw content; invalid UTF-8 in strings is replaced."""
    import numpy as np

    if datatype != "BYTES":
        return np.frombuffer(content, numpy_type(datatype)).reshape(tuple(shape))
    return text_array(_texts(content)).reshape(tuple(shape))


def text_array(texts: Sequence[str]) -> npt.NDArray[Any]:
    """Return a flat array of strings."""
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
    """Return the shape that Triton's generate endpoint gives to `count` flat values of an input with `dims`.

    `dims` include the batch axis (-1). The innermost variable dim gets what the fixed dims leave; other variable dims
    become 1. Source: Triton's docs/protocol/extension_generate.md.
    """
    fixed = math.prod(size for size in dims if size > 0)
    rest, shape = count // fixed if fixed else 0, []
    for size in reversed(dims):
        shape.append(size if size > 0 else rest)
        rest = rest if size > 0 else 1
    return tuple(reversed(shape))
