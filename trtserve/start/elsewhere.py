"""The files of a repository that another place serves: a container, the nodes of a cluster, a volume."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from trtserve.artifacts import ModelRepository
from trtserve.check.repository import require_sound
from trtserve.launch.container import known_container
from trtserve.progress import Progress
from trtserve.specs import ServerSpec
from trtserve.start.mentions import unseen_paths

_PATH = re.compile(r"(?<![^=:,\s])/[^=:,\s]+")


def _flag_paths(flags: Iterable[str]) -> tuple[Path, ...]:
    """Absolute paths that flags of docker name: what is mounted by them is seen inside alone."""
    return tuple(Path(text) for flag in flags for text in _PATH.findall(flag))


def require_sound_elsewhere(
    repository: ModelRepository, spec: ServerSpec, progress: Progress, *, volume: Path | None = None
) -> None:
    """RepositoryError for faults with which Triton does not come up, as where it is served on this machine.

    A `volume`, what flags mount, and an image of somebody's own may have files that are not here. Where the repository
    names such a file its check would be a guess: it is left out, which is said.
    """
    folders = _flag_paths(spec.container_flags) + (() if volume is None else (volume,))
    if spec.container is not None and known_container(spec.container) is None:
        folders = (Path("/"),)
    hidden = next((path for path in _unseen(repository) if any(path.is_relative_to(each) for each in folders)), None)
    if hidden is None:
        require_sound(repository, progress)
    else:
        progress.warn(
            f"The repository names {hidden}, which is not on this machine: its files are not checked before the start. "
            "Run `trtserve check` where that is."
        )


def _unseen(repository: ModelRepository) -> Iterator[Path]:
    """Files that the repository names and that are not here, less those that lie in it under another path."""
    facts = repository.manifest.facts if repository.manifest is not None else {}
    members = [facts, *(entry["facts"] for entry in (facts.get("members") or {}).values())]
    inside = [Path(each["container_paths"]) for each in members if each.get("container_paths")]
    return (path for path in unseen_paths(repository.path) if not any(path.is_relative_to(each) for each in inside))
