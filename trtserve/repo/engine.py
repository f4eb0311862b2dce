"""What a repository reads of an engine's folder, and how it takes the engine's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtserve.artifacts import MANIFEST
from trtserve.errors import RepositoryError
from trtserve.files import read_json_object
from trtserve.store import link_or_copy
from trtserve.triton.core_models import world_size

_LIMITS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width")


def read_engine(folder: Path) -> dict[str, Any]:
    """The content of its config.json; RepositoryError for a folder that is no engine."""
    path = folder / "config.json"
    try:
        content = read_json_object(path, RepositoryError, hint="Build the engine again.")
    except FileNotFoundError:
        raise RepositoryError(
            f"{folder} is no engine: it has no config.json.", hint="Give the folder that `trtserve build` printed."
        ) from None
    if not isinstance(content.get("build_config"), dict):
        raise RepositoryError(
            f"{path} has no build_config: this is a checkpoint or a model, not an engine.",
            hint="Run `trtserve build` on the checkpoint first.",
        )
    return content


def require_engine_files(folder: Path, config: dict[str, Any], *, embedded: bool) -> None:
    """RepositoryError when a file of a rank is missing or empty: the server would tell it minutes later."""
    if lacking := lacking_files(folder, config, embedded=embedded):
        raise RepositoryError(
            f"{folder} is not a complete engine: {', '.join(lacking)} missing or empty.",
            hint="Remove the folder and build the engine again: trtserve build CHECKPOINT",
        )


def lacking_files(folder: Path, config: Mapping[str, Any], *, embedded: bool) -> list[str]:
    """Names of the files that an engine must have and that are missing or empty."""
    names = ["rank0.xml", "rank0.bin"] if embedded else [f"rank{rank}.engine" for rank in range(world_size(config))]
    return [name for name in names if not (folder / name).is_file() or (folder / name).stat().st_size == 0]


def rank_sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file of a rank."""
    found = sorted(path for path in folder.glob("rank*.*") if path.is_file())
    return {path.name: path.stat().st_size for path in found}


def is_embedded(config: Mapping[str, Any]) -> bool:
    """Whether the engine was built for the embedded executor."""
    return bool(config.get("trtserve", {}).get("runtime") == "openvino")


def limits_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The limits that a repository and its clients must know."""
    return {name: config.get("build_config", {}).get(name) for name in _LIMITS}


def link_engine(engine: Path, target: Path, *, copy: bool) -> None:
    """Put its files into the folder `target`, as hard links unless `copy`."""
    for source in sorted(engine.iterdir()):
        if source.is_file() and source.name != MANIFEST:
            link_or_copy(source, target / source.name, copy=copy)
