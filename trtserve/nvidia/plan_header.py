"""The header of a TensorRT engine file: the TensorRT version that wrote it.

Format: trtexec of NVIDIA/TensorRT (--getPlanVersionOnly): a tag, the serialization version, which must be 0, and
TensorRT's version in bytes 24 to 27.
"""

from __future__ import annotations

import struct
from pathlib import Path

_TAG = 0x74727466
_SIZE = 28


def begins_like_an_engine(path: Path) -> bool:
    """Return whether a file starts with the tag of TensorRT engines."""
    with path.open("rb") as file:
        return file.read(4) == struct.pack("<I", _TAG)


def tensorrt_version(engine: Path) -> str | None:
    """Return the version, such as `10.14.1.48`, or None for other files."""
    with engine.open("rb") as file:
        head = file.read(_SIZE)
    if len(head) < _SIZE or struct.unpack("<II", head[:8]) != (_TAG, 0):
        return None
    return ".".join(str(part) for part in head[24:])
