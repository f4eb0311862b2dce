"""Publishing a planned repository: as a folder of its own, or added to the models of an existing repository."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from trtserve.artifacts import MANIFEST, Manifest, ModelRepository, fingerprint, load_artifact
from trtserve.errors import RepositoryError, UsageError
from trtserve.progress import SILENT, Progress
from trtserve.specs import RepositorySpec
from trtserve.store import link_or_copy, publish, reusable


@dataclass(frozen=True, kw_only=True)
class RepositoryPlan(ABC):
    """A model repository before its first file is written."""

    spec: RepositorySpec
    manifest: Manifest  # of these models, also where they are added to others
    path: Path
    reused: bool  # the repository, or its models in the one at `path`, exist
    added: bool  # the models are added to the repository at `path`

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts of the manifest."""
        return self.manifest.facts

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides the content."""
        return self.manifest.fingerprint

    @property
    @abstractmethod
    def models(self) -> tuple[str, ...]:
        """Names of all models, the alias last."""

    @abstractmethod
    def write(self, folder: Path, progress: Progress) -> None:
        """Write the models into `folder`. Raises RepositoryError for a tokenizer that does not work."""


def assemble_repository(plan: RepositoryPlan, progress: Progress = SILENT) -> ModelRepository:
    """Write the repository of `plan`, or reuse the one that exists; nothing is left behind on failure.

    Raises RepositoryError for a tokenizer that does not work, ArtifactError or DiskSpaceError when files cannot be
    written.
    """
    if plan.reused:
        progress.step(f"Model repository {plan.path.name} is reused")
    if plan.added and require_addable(plan.path, plan.models, plan.manifest):
        return ModelRepository(path=plan.path, manifest=Manifest.read(plan.path))

    def fill(folder: Path) -> Manifest | None:
        plan.write(folder, progress)
        if not plan.added:
            return None
        require_addable(plan.path, plan.models, plan.manifest)  # it may have changed since
        return add_to(plan.path, folder, plan.manifest)

    return publish(ModelRepository, plan.path, plan.manifest, fill)


def exists(path: Path, models: tuple[str, ...], manifest: Manifest, *, added: bool) -> bool:
    """Return whether the repository of `manifest` is at `path`, or whether its models were `added` to the one there."""
    if added:
        return require_addable(path, models, manifest)
    return reusable(ModelRepository, path, manifest.fingerprint) is not None


def require_addable(into: Path, models: tuple[str, ...], member: Manifest) -> bool:
    """Return whether the repository `into` contains `member`, which has these models, already.

    Raises RepositoryError when a model's name is taken, or trtserve did not make the repository. Raises UsageError for
    models of another runtime, or with other paths.
    """
    known, facts = _members(_manifest(into)), member.facts
    alias = facts["alias"]
    if alias in known and known[alias]["fingerprint"] == member.fingerprint:
        return True
    _require_names(into, models, facts["suffix"])
    _require_alike(into, known, runtime=facts["runtime"], container_paths=facts["container_paths"])
    return False


def require_addable_spec(into: Path, spec: RepositorySpec, models: tuple[str, ...], *, runtime: str) -> None:
    """Raise what `require_addable` raises, before there is anything to add; the alias may exist already."""
    known = _members(_manifest(into))
    if spec.name not in known:
        _require_names(into, models, spec.suffix)
        _require_alike(into, known, runtime=runtime, container_paths=spec.container_paths)


def _require_names(into: Path, models: tuple[str, ...], suffix: str) -> None:
    if taken := [name for name in models if (into / name).exists()]:
        raise RepositoryError(
            f"{into} has a model {taken[0]} already, which is not overwritten.",
            hint=f"Give the added models other names: --suffix {_free_suffix(into, models, suffix)} --name OTHER",
        )


def _require_alike(into: Path, known: Mapping[str, Any], *, runtime: str, container_paths: str | None) -> None:
    runtimes = {str(entry["facts"].get("runtime")) for entry in known.values()}
    if runtimes != {runtime}:
        raise UsageError(
            f"The models of {into} are for the {', '.join(sorted(runtimes))} runtime, and these for {runtime}: one "
            "server cannot run both.",
            hint="Leave --into out to make a separate repository.",
        )
    places = {str(entry["facts"].get("container_paths")) for entry in known.values()}
    if places != {str(container_paths)}:
        raise UsageError(
            f"--container-paths {container_paths} differs from what the models of {into} were made with: "
            f"{', '.join(sorted(places))}.",
            hint="One repository is seen under one path.",
        )


def _free_suffix(into: Path, models: tuple[str, ...], suffix: str) -> str:
    """Return the first of _b, _c … that makes all names unique."""
    bases = [name.removesuffix(suffix) for name in models]
    endings = (f"_{letter}" for letter in ascii_lowercase[1:])
    return next((end for end in endings if not any((into / f"{base}{end}").exists() for base in bases)), "_other")


def add_to(into: Path, staging: Path, member: Manifest) -> Manifest:
    """Link every file of `into` into `staging`, which holds the models of `member`; return the joint manifest."""
    for path in sorted(into.rglob("*")):
        target = staging / path.relative_to(into)
        if path.is_symlink():
            target.symlink_to(path.readlink())
        elif path.is_file() and path != into / MANIFEST:
            link_or_copy(path, target)
        elif path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
    present = _manifest(into)
    members = {**_members(present), member.facts["alias"]: _entry(member)}
    digests = {alias: each["fingerprint"] for alias, each in members.items()}
    cores = {**present.facts.get("core_models", {}), **member.facts["core_models"]}
    return replace(
        present,
        fingerprint=fingerprint(stage="repositories", members=digests),
        inputs={**present.inputs, **{f"{member.name}: {key}": value for key, value in member.inputs.items()}},
        facts={**present.facts, "core_models": cores, "members": members},
    )


def _manifest(into: Path) -> Manifest:
    found = load_artifact(ModelRepository, into).manifest
    if found is None:
        raise RepositoryError(
            f"{into} was not made by trtserve, so its models are unknown.",
            hint="Make a repository with `trtserve repo` and add to that one.",
        )
    return found


def _members(manifest: Manifest) -> dict[str, Any]:
    """Return alias → {"fingerprint", "facts"} of every member of the repository."""
    return dict(manifest.facts.get("members") or {manifest.facts.get("alias", manifest.name): _entry(manifest)})


def _entry(manifest: Manifest) -> dict[str, Any]:
    facts = {key: value for key, value in manifest.facts.items() if key not in ("members", "core_models")}
    return {"fingerprint": manifest.fingerprint, "facts": facts}
