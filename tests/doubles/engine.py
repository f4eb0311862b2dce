"""Engine folders of the doubles: config.json as upstream's EngineConfig writes it, rankN.engine with a readable magic.

A real `.engine` is opaque; ours begins with a line of JSON that names rank,
release, TensorRT version and SM, so that the double of the server can refuse what the real one refuses. Before it
comes what TensorRT writes: a tag, a zero, and the version of TensorRT in bytes 24 to 27.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

MAGIC = b"ftrt\0\0\0\0TRTSERVE DOUBLE\n"


@dataclass(frozen=True, kw_only=True)
class EngineHeader:
    """The first lines of a rankN.engine."""

    rank: int
    world_size: int
    tensorrt_llm: str
    tensorrt: str
    sm: int
    size: int  # bytes after the header


class EngineError(Exception):
    """A file that is not a complete engine of a double."""


def write_engine(path: Path, header: EngineHeader) -> None:
    """Write one rank's engine: magic, header, and the number of bytes in the header."""
    with path.open("wb") as file:
        file.write(MAGIC)
        file.write(_version(header.tensorrt))
        file.write(json.dumps(asdict(header)).encode() + b"\n")
        file.write(bytes(header.size))


def _version(text: str) -> bytes:
    """`10.9.0.34` → its four numbers, one byte each."""
    return bytes(int(part) for part in text.split(".")[:4] if part.isdigit()).ljust(4, b"\0")


def read_engine(path: Path) -> EngineHeader:
    """Header of one rank's engine; EngineError for a file that is cut off or something else."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise EngineError("Magic tag does not match")
        file.read(4)
        try:
            header = EngineHeader(**json.loads(file.readline()))
        except (TypeError, ValueError):
            raise EngineError("Header is damaged") from None
        rest = path.stat().st_size - file.tell()
    if rest != header.size:
        raise EngineError(f"Expected {header.size} bytes after the header, found {rest}")
    return header


def write_config(folder: Path, version: str, pretrained: dict[str, Any], build: dict[str, Any]) -> None:
    """Write config.json with its three keys, indent 4; rank 0 of a build does that."""
    config = {"version": version, "pretrained_config": pretrained, "build_config": build}
    (folder / "config.json").write_text(json.dumps(config, indent=4), encoding="utf-8")


def read_engine_config(folder: Path) -> dict[str, Any]:
    """The object of an engine folder's config.json."""
    return cast("dict[str, Any]", json.loads((folder / "config.json").read_text(encoding="utf-8")))
