"""The stages: import, convert, build, repo, and what plans them.

They share a plan, made before anything is written, that can be described and run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypedDict, TypeVar

from trtserve.artifacts import Artifact
from trtserve.progress import SILENT, Progress
from trtserve.store import Store, reusable

MANIFEST_BYTES = 64 * 2**10  # size of the small files beside an artefact's weights, at most

StageName = Literal["import", "convert", "build", "repo", "start"]

A_co = TypeVar("A_co", bound=Artifact, covariant=True)


class StageSummary(TypedDict):
    """One stage of an import, as a dry run shows it."""

    stage: str
    action: Literal["make", "reuse"]
    path: str | None  # None while it depends on files that are not downloaded yet
    bytes: int  # that the stage would write
    command: str | None  # that the stage would run


@dataclass(frozen=True, kw_only=True)
class StageNeeds:
    """What one stage needs, or None where it is unknown, or where this machine does not run it."""

    stage: StageName
    disk: int | None  # bytes that it adds
    memory: int | None  # bytes at its peak
    seconds: float | None  # from runs measured here; None before the first


class StagePlan(Protocol[A_co]):
    """A stage before it begins: everything is decided, nothing is written."""

    @property
    def path(self) -> Path:
        """Folder of the artefact."""

    @property
    def reused(self) -> bool:
        """True when the artefact exists, so that nothing is made."""

    @property
    def needs(self) -> StageNeeds:
        """Disk, memory and time of a run that makes the artefact."""

    def describe(self) -> StageSummary:
        """Return the stage as a dry run shows it."""

    def run(self, progress: Progress = SILENT) -> A_co:
        """Make the artefact, or return the one that exists; nothing is left behind on failure."""


def summary(stage: str, path: Path | None, size: int, *, done: bool, command: object = None) -> StageSummary:
    """Return the line of a stage; one that is done writes and runs nothing."""
    return StageSummary(
        stage=stage,
        action="reuse" if done else "make",
        path=str(path) if path else None,
        bytes=0 if done else size,
        command=None if done or command is None else str(command),
    )


def destination(
    kind: type[Artifact], name: str, fingerprint: str, *, out: Path | None, store: Store
) -> tuple[Path, bool]:
    """Return the folder of an artefact, and whether the artefact is there. Raises ArtifactError for another one."""
    path = (out or store.destination(kind, name, fingerprint)).absolute()
    return path, reusable(kind, path, fingerprint) is not None
