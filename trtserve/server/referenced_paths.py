"""Files outside a model repository that its configurations name, which a container or another machine must have too."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from trtserve.artifacts import ModelRepository
from trtserve.nvidia.containers import known_container
from trtserve.progress import Progress
from trtserve.repository.check import require_sound
from trtserve.repository.preflight import Served
from trtserve.specs import ServerSpec

_STRING = re.compile(r"""string_value:\s*["'](/[^"']+)["']""")
_YAML = re.compile(r"""^(?:model|tokenizer):\s*["']?(/[^"'\s#]+)""", re.MULTILINE)
_PATH_IN_FLAG = re.compile(r"(?<![^=:,\s])/[^=:,\s]+")


def named_paths(repository: Path) -> tuple[Path, ...]:
    """Return the absolute paths in the configurations that exist here and are outside the repository, each once."""
    return tuple(path for path in _outside(repository) if path.exists())


def engine_paths(repository: ModelRepository, served: Served) -> tuple[Path, ...]:
    """Return the paths outside the repository that its core models need: named files and engine folders."""
    return named_paths(repository.path) + tuple(core.engine for core in served.core_models if core.engine)


def hub_cache() -> Path | None:
    """Return the folder of the Hugging Face hub's downloads, for models named by their id, or None if there is none."""
    folder = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return folder if folder.is_dir() else None


def require_sound_files(
    repository: ModelRepository, spec: ServerSpec, progress: Progress, *, volume: Path | None = None
) -> None:
    """Raise RepositoryError for faults that keep Triton from starting.

    A `volume`, mounts in docker flags, and a user's own image may have files that are not on this machine. Where the
    repository names such a file the check would be a guess, so a warning replaces it.
    """
    folders = [Path(text) for flag in spec.container_flags for text in _PATH_IN_FLAG.findall(flag)]
    if volume is not None:
        folders.append(volume)
    if spec.container is not None and known_container(spec.container) is None:
        folders = [Path("/")]
    hidden = next((path for path in _missing(repository) if any(path.is_relative_to(each) for each in folders)), None)
    if hidden is None:
        require_sound(repository, progress)
    else:
        progress.warn(
            f"The repository names {hidden}, which is not on this machine: its files are not checked before the start. "
            "Run `trtserve check` where that file exists."
        )


def _missing(repository: ModelRepository) -> Iterator[Path]:
    """Yield named files that are not on this machine, except for those in the repository under another path."""
    facts = repository.manifest.facts if repository.manifest is not None else {}
    members = [facts, *(entry["facts"] for entry in (facts.get("members") or {}).values())]
    inside = [Path(each["container_paths"]) for each in members if each.get("container_paths")]
    for path in _outside(repository.path):
        if not path.exists() and not any(path.is_relative_to(each) for each in inside):
            yield path


def _outside(repository: Path) -> Iterator[Path]:
    texts = [(path, _STRING) for path in repository.glob("*/config.pbtxt")]
    texts += [(path, _YAML) for path in repository.glob("*/1/model.yaml")]
    named = (Path(text) for path, pattern in texts for text in pattern.findall(path.read_text(encoding="utf-8")))
    # Files of the image keep their meaning there, even where this machine has them too.
    own = (repository.absolute(), Path("/opt/tritonserver"))
    yield from dict.fromkeys(path for path in named if not any(path.is_relative_to(folder) for folder in own))
