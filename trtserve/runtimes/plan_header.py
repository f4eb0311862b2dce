"""The first bytes of a TensorRT engine: which TensorRT wrote it.

Source: trtexec of NVIDIA/TensorRT (--getPlanVersionOnly): a tag, the version of the serialization, which must be 0, and
the version of TensorRT in bytes 24 to 27.
"""

from __future__ import annotations

import struct
from pathlib import Path

_TAG = 0x74727466
_SIZE = 28


def begins_like_an_engine(path: Path) -> bool:
    """Whether a file begins with the tag of TensorRT's engines."""
    with path.open("rb") as file:
        return file.read(4) == struct.pack("<I", _TAG)


def tensorrt_version(engine: Path) -> str | None:
    """`10.14.1.48`; None for a file that is no TensorRT engine of that form."""
    with engine.open("rb") as file:
        head = file.read(_SIZE)
    if len(head) < _SIZE or struct.unpack("<II", head[:8]) != (_TAG, 0):
        return None
    return ".".join(str(part) for part in head[24:])
