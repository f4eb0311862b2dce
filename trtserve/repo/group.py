"""Several models in one repository: what is added leaves the others as they are, and all of it appears at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from trtserve.artifacts import MANIFEST, Manifest, ModelRepository, fingerprint, load_artifact
from trtserve.errors import RepositoryError, UsageError
from trtserve.specs import RepositorySpec
from trtserve.store import link_or_copy, publish, reusable


def is_there(path: Path, models: tuple[str, ...], manifest: Manifest, *, into: bool) -> bool:
    """Whether the repository of `manifest` is at `path`, or, `into` the one there, whether its models are in it."""
    if into:
        return require_addable(path, models, manifest)
    return reusable(ModelRepository, path, manifest.fingerprint) is not None


def publish_models(
    path: Path, models: tuple[str, ...], manifest: Manifest, produce: Callable[[Path], None], *, into: bool
) -> ModelRepository:
    """Make the repository that `produce` fills a folder with at `path`, or, `into` the one there, add its models."""
    if into and require_addable(path, models, manifest):
        return ModelRepository(path=path, manifest=Manifest.read(path))

    def fill(folder: Path) -> Manifest | None:
        produce(folder)
        if not into:
            return None
        require_addable(path, models, manifest)  # it may have changed since
        return add_to(path, folder, manifest)

    return publish(ModelRepository, path, manifest, fill)


def require_addable(into: Path, models: tuple[str, ...], member: Manifest) -> bool:
    """Whether `member`, with the given models, is part of the repository `into` already.

    RepositoryError when one of its models has a name that is taken there, or the folder is no repository of trtserve;
    UsageError for models of another runtime, or with other paths.
    """
    known, facts = _members(_manifest(into)), member.facts
    alias = facts["alias"]
    if alias in known and known[alias]["fingerprint"] == member.fingerprint:
        return True
    _require_names(into, models, facts["suffix"])
    _require_alike(into, known, runtime=facts["runtime"], container_paths=facts["container_paths"])
    return False


def require_room(into: Path, spec: RepositorySpec, models: tuple[str, ...], *, runtime: str) -> None:
    """What `require_addable` raises, before there is anything to add; a model of this name may be the very same."""
    known = _members(_manifest(into))
    if spec.name not in known:
        _require_names(into, models, spec.suffix)
        _require_alike(into, known, runtime=runtime, container_paths=spec.container_paths)


def _require_names(into: Path, models: tuple[str, ...], suffix: str) -> None:
    if taken := [name for name in models if (into / name).exists()]:
        raise RepositoryError(
            f"{into} has a model {taken[0]} already; nothing there is overwritten.",
            hint="Give the models that are added names of their own: "
            f"--suffix {_free_suffix(into, models, suffix)} --name OTHER",
        )


def _require_alike(into: Path, known: Mapping[str, Any], *, runtime: str, container_paths: str | None) -> None:
    runtimes = {str(entry["facts"].get("runtime")) for entry in known.values()}
    if runtimes != {runtime}:
        raise UsageError(
            f"The models of {into} are for the {', '.join(sorted(runtimes))} runtime, and these for {runtime}: one "
            "server cannot be launched for both.",
            hint="Leave --into out: they become a repository of their own.",
        )
    places = {str(entry["facts"].get("container_paths")) for entry in known.values()}
    if places != {str(container_paths)}:
        raise UsageError(
            f"--container-paths {container_paths} differs from what the models of {into} were made with: "
            f"{', '.join(sorted(places))}.",
            hint="One repository is seen under one path.",
        )


def _free_suffix(into: Path, models: tuple[str, ...], suffix: str) -> str:
    """The first of _b, _c … with which no model meets another."""
    bases = [name.removesuffix(suffix) for name in models]
    endings = (f"_{letter}" for letter in ascii_lowercase[1:])
    return next((end for end in endings if not any((into / f"{base}{end}").exists() for base in bases)), "_other")


def add_to(into: Path, staging: Path, member: Manifest) -> Manifest:
    """Link every file of `into` to `staging`, where the models of `member` lie, and return the manifest of both."""
    for path in sorted(into.rglob("*")):
        target = staging / path.relative_to(into)
        if path.is_file() and path != into / MANIFEST:
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
            f"{into} was not made by trtserve, so what it holds is not known.",
            hint="Make a repository with `trtserve repo` and add to that one.",
        )
    return found


def _members(manifest: Manifest) -> dict[str, Any]:
    """Alias → {"fingerprint", "facts"} of everything that the repository of `manifest` holds."""
    return dict(manifest.facts.get("members") or {manifest.facts.get("alias", manifest.name): _entry(manifest)})


def _entry(manifest: Manifest) -> dict[str, Any]:
    facts = {key: value for key, value in manifest.facts.items() if key not in ("members", "core_models")}
    return {"fingerprint": manifest.fingerprint, "facts": facts}
