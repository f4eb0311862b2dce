"""Several models in one repository: what is added leaves the others as they are, and all of it appears at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from trtserve.artifacts import MANIFEST, Manifest, ModelRepository, fingerprint, load_artifact
from trtserve.errors import RepositoryError, UsageError
from trtserve.store import link_or_copy


def require_addable(into: Path, models: tuple[str, ...], member: Manifest) -> bool:
    """Whether `member`, with the given models, is part of the repository `into` already.

    RepositoryError when one of its models has a name that is taken there, or the folder is no repository of trtserve.
    """
    present = _manifest(into)
    known = _members(present)
    alias = member.facts["alias"]
    if alias in known and known[alias]["fingerprint"] == member.fingerprint:
        return True
    if taken := [name for name in models if (into / name).exists()]:
        raise RepositoryError(
            f"{into} has a model {taken[0]} already; nothing there is overwritten.",
            hint="Give the models of this engine names of their own: "
            f"--suffix {_free_suffix(into, models, member.facts['suffix'])} --name OTHER",
        )
    places = {str(entry["facts"].get("container_paths")) for entry in known.values()}
    if places != {str(member.facts["container_paths"])}:
        raise UsageError(
            f"--container-paths {member.facts['container_paths']} differs from what the models of {into} were made "
            f"with: {', '.join(sorted(places))}.",
            hint="One repository is seen under one path.",
        )
    return False


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
