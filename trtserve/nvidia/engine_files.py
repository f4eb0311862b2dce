"""Engines that `trtllm-build` writes: complete, as requested, and by which TensorRT.

Header of an engine file: trtexec of NVIDIA/TensorRT (--getPlanVersionOnly): a tag, the serialization version, which
must be 0, and TensorRT's version in bytes 24 to 27.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trtserve.errors import BuildError, counted
from trtserve.files import read_json_object
from trtserve.host.machine import format_bytes
from trtserve.nvidia.releases import release_of
from trtserve.specs.runtime import Limits

_TAG = 0x74727466
_HEADER = 28
# 4-bit engines have an eighth of a float32 checkpoint's size; a much smaller file contains no weights.
_LEAST_PART = 16
# With these flags an engine does not contain its weights.
_WITHOUT_WEIGHTS = ("--strip_plan", "--weight_streaming", "--fast_build")


def require_engine(
    folder: Path,
    checkpoint: Path,
    *,
    world_size: int,
    version: str,
    limits: Limits,
    expected: Mapping[str, Any],
    arguments: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the config.json of the engine in `folder`. Raises BuildError when it is incomplete or not as requested."""
    _require_ranks(folder, checkpoint, world_size, arguments)
    config = _read(folder / "config.json")
    found = (config["pretrained_config"].get("mapping") or {}).get("world_size", 1)
    if found != world_size:
        raise BuildError(f"config.json is for {counted(found, 'rank')}; the checkpoint has {world_size}.")
    if not _same_release(str(config.get("version")), version):
        raise BuildError(
            f"config.json says that TensorRT-LLM {config.get('version')} built the engine; expected {version}.",
            hint="Another trtllm-build comes first on PATH: set --trtllm-version to the installed version.",
        )
    build = config["build_config"]
    plugins = expected.get("plugin_config", {})
    asked = {**asdict(limits), **{name: value for name, value in expected.items() if name != "plugin_config"}}
    _require_equal(asked, build, "build_config")
    _require_equal(plugins, build.get("plugin_config") or {}, "plugin_config")
    return config


def _require_ranks(folder: Path, checkpoint: Path, world_size: int, arguments: tuple[str, ...]) -> None:
    whole = not set(arguments) & set(_WITHOUT_WEIGHTS)
    for rank in range(world_size):
        path = folder / f"rank{rank}.engine"
        if not path.is_file():
            raise BuildError(f"{path.name} is missing ({counted(world_size, 'rank')} to be built).")
        source = checkpoint / f"rank{rank}.safetensors"
        weights = source.stat().st_size if source.is_file() else 0
        if path.stat().st_size == 0 or (whole and path.stat().st_size < weights // _LEAST_PART):
            raise BuildError(
                f"{path.name} has {path.stat().st_size} bytes, too little for {format_bytes(weights)} of weights."
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        config = read_json_object(path, BuildError)
    except FileNotFoundError:
        raise BuildError("config.json is missing.") from None
    if not all(isinstance(config.get(key), dict) for key in ("pretrained_config", "build_config")):
        raise BuildError("config.json has no pretrained_config and build_config.")
    return dict(config)


def _same_release(found: str, wanted: str) -> bool:
    """Return whether versions match: `--trtllm-version 0.16` matches any 0.16.x, a full version only itself."""
    return found == wanted or (wanted.count(".") < 2 and found != "None" and release_of(found) == release_of(wanted))


def _require_equal(asked: Mapping[str, Any], found: Mapping[str, Any], where: str) -> None:
    for name, value in asked.items():
        if name in found and found[name] != value:
            raise BuildError(
                f"{where} of the engine has {name} = {found[name]}; expected {value}.",
                hint="trtllm-build changed it: read the warnings in its log.",
            )


def begins_like_an_engine(path: Path) -> bool:
    """Return whether a file starts with the tag of TensorRT engines."""
    with path.open("rb") as file:
        return file.read(4) == struct.pack("<I", _TAG)


def tensorrt_version(engine: Path) -> str | None:
    """Return the version, such as `10.14.1.48`, or None for other files."""
    with engine.open("rb") as file:
        head = file.read(_HEADER)
    if len(head) < _HEADER or struct.unpack("<II", head[:8]) != (_TAG, 0):
        return None
    return ".".join(str(part) for part in head[24:])
