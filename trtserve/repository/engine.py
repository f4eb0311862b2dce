"""Engine folders as input of a repository: config, completeness, and linking the files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtserve.artifacts import MANIFEST
from trtserve.errors import RepositoryError
from trtserve.executor.loaders import embedded_runtime, engine_files
from trtserve.files import read_json_object, require_own
from trtserve.repository.core_models import world_size
from trtserve.store import link_or_copy

_LIMITS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width")


def read_engine(folder: Path) -> dict[str, Any]:
    """Return the content of an engine's config.json. Raises RepositoryError for a folder without an engine."""
    path = folder / "config.json"
    try:
        content = read_json_object(path, RepositoryError, hint="Build the engine again.")
    except FileNotFoundError:
        raise RepositoryError(
            f"{folder} is not an engine: it has no config.json.", hint="Give the folder that `trtserve build` printed."
        ) from None
    if not isinstance(content.get("build_config"), dict):
        raise RepositoryError(
            f"{path} has no build_config: this is a checkpoint or a model, not an engine.",
            hint="Run `trtserve build` on the checkpoint first.",
        )
    return content


def require_engine_files(folder: Path, config: dict[str, Any]) -> None:
    """Raise RepositoryError when a rank's file is missing or empty; the server would fail only minutes later."""
    if lacking := lacking_files(folder, config, executor=embedded_runtime(config)):
        raise RepositoryError(
            f"{folder} is not a complete engine: {', '.join(lacking)} missing or empty.",
            hint="Remove the folder and build the engine again: trtserve build CHECKPOINT",
        )


def lacking_files(folder: Path, config: Mapping[str, Any], *, executor: str | None) -> list[str]:
    """Return the names of an engine's files that are missing or empty; `executor` is the runtime if it is embedded."""
    own = [] if executor is None else engine_files(config, executor)
    names = own or [f"rank{rank}.engine" for rank in range(world_size(config))]
    return [name for name in names if not (folder / name).is_file() or (folder / name).stat().st_size == 0]


def rank_sizes(folder: Path) -> dict[str, int]:
    """Return file name → bytes of all ranks."""
    found = sorted(path for path in folder.glob("rank*.*") if path.is_file())
    return {path.name: path.stat().st_size for path in found}


def limits_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits that a repository and its clients must know."""
    return {name: config.get("build_config", {}).get(name) for name in _LIMITS}


def own_files(folder: Path) -> list[Path]:
    """Return the files of an engine or a model, without the manifest. Raises UsageError for a link to elsewhere."""
    found = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    for path in found:
        require_own(path, folder)
    return found


def link_engine(engine: Path, target: Path, *, copy: bool) -> None:
    """Hard-link the engine's files into the folder `target`; copy them if `copy`."""
    for source in own_files(engine):
        link_or_copy(source, target / source.name, copy=copy)
