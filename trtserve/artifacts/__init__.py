"""Artefacts: the folders that stages read and write. A `manifest.json` marks a folder as complete.

Its checksums are compared when the artefact is checked, reused or served. Reading is what costs time, so a checksum is
remembered with the file's device, inode, size and time of change. Hard links share it: the engine in a repository is
the engine in its own folder.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from trtserve._version import __version__
from trtserve.errors import ArtifactError, TrtserveError
from trtserve.files import decode_as, is_below, open_file, read_as, read_json_object, write_json

A = TypeVar("A", bound="Artifact")
Kind = Literal["model", "checkpoint", "engine", "repository", "adapter"]

MANIFEST = "manifest.json"
SCHEMA = 1


def fingerprint(**parts: object) -> str:
    """Return the SHA-256 hash, 64 hexadecimal digits, of everything that decides the content of an artefact."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of `manifest.json`."""

    kind: Kind
    name: str
    fingerprint: str
    inputs: Mapping[str, str] = field(default_factory=dict)  # name of an input artefact → its fingerprint
    spec: Mapping[str, Any] = field(default_factory=dict)  # settings of the stage
    tools: Mapping[str, str] = field(default_factory=dict)  # tool that shaped the content → its version
    facts: Mapping[str, Any] = field(default_factory=dict)  # measured results: sizes, times, the machine
    files: Mapping[str, str] = field(default_factory=dict)  # path → SHA-256; of what is served, when it was made
    schema: int = SCHEMA
    created: str = field(default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat())
    trtserve: str = __version__

    def write(self, folder: Path) -> None:
        """Write the manifest into `folder`, as its last file."""
        text = json.dumps(asdict(self), indent=2, default=str)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of `folder`. Raises ArtifactError when it is missing or cannot be understood."""
        path = folder / MANIFEST
        damaged = "The folder is damaged: remove it and run the stage that makes it again."
        try:
            manifest = read_as(path, cls, "a manifest", hint=damaged)
        except FileNotFoundError:
            raise ArtifactError(
                f"{folder} has no {MANIFEST}: it is not a complete trtserve artefact.",
                hint="Run the stage that makes it again; unfinished work is picked up.",
            ) from None
        if manifest.schema != SCHEMA:
            raise ArtifactError(
                f"{path} has schema {manifest.schema}; this trtserve reads schema {SCHEMA}.",
                hint="Make the artefact again with this version.",
            )
        decode_as(dict(manifest.facts), _Facts, "the facts of a manifest", path, hint=damaged, tolerant=True)
        if outside := [name for name in manifest.files if not is_below(name)]:
            raise ArtifactError(
                f"{path} lists {outside[0][:200]!r}, which is not the name of a file below its folder.",
                hint="trtserve did not write it: do not use the folder.",
            )
        return manifest


_Text = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]*$", max_length=4096)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 62)]


@dataclass(frozen=True, kw_only=True)
class _PartFacts:
    """What is read of the facts of a repository, or of one of its members, and of other artefacts."""

    alias: _Text | None = None
    suffix: _Text | None = None
    runtime: _Text | None = None
    release: _Text | None = None
    container_paths: _Text | None = None
    vocab_size: _Number | None = None
    limits: dict[str, _Number | None] | None = None
    machine: dict[str, Any] | None = None
    gpu: dict[str, Any] | None = None
    model: _Text | None = None
    checkpoint: _Text | None = None
    targets: list[_Text] | None = None
    max_rank: _Number | None = None
    parameters: _Number | None = None
    kv_bytes_per_token: _Number | None = None


@dataclass(frozen=True, kw_only=True)
class _MemberFacts:
    facts: _PartFacts


@dataclass(frozen=True, kw_only=True)
class _CoreFacts:
    engine: _Text | None = None
    world_size: _Number | None = None
    gpu_device_ids: _Text | None = None
    origin: dict[str, _Text] | None = None
    built_as: _Text | None = None
    parameters: _Number | None = None
    files: dict[_Text, _Number | None] | None = None


@dataclass(frozen=True, kw_only=True)
class _Facts(_PartFacts):
    members: dict[_Text, _MemberFacts] | None = None
    core_models: dict[_Text, _CoreFacts] | None = None


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A folder on disk; `manifest` is None when another tool made it."""

    path: Path
    manifest: Manifest | None = None

    @property
    def fingerprint(self) -> str:
        """The manifest's fingerprint, or a hash of the files' names, sizes and times if there is no manifest."""
        if self.manifest is not None:
            return self.manifest.fingerprint
        files = sorted(entry for entry in self.path.rglob("*") if entry.is_file())
        listing = [(str(f.relative_to(self.path)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        return fingerprint(files=listing)

    @property
    def name(self) -> str:
        """The name in the manifest, or one derived from the folder's name."""
        return self.manifest.name if self.manifest is not None else plain_name(self.path.resolve().name)


def plain_name(text: str) -> str:
    """Return `text` reduced to the characters that a name may have: [A-Za-z0-9._-]."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._") or "model"


class Model(Artifact):
    """Hugging Face folder: config, tokenizer, safetensors of one revision."""


class Checkpoint(Artifact):
    """TensorRT-LLM unified checkpoint: `config.json`, `rankN.safetensors`."""


class Engine(Artifact):
    """TensorRT-LLM engine folder, or `config.json` with the files of an embedded runtime (`executor.loaders`)."""


class ModelRepository(Artifact):
    """Triton model repository."""


class Adapter(Artifact):
    """LoRA adapter in TensorRT-LLM's layout: `model.lora_weights.npy`, `model.lora_config.npy`."""


KINDS: dict[type[Artifact], Kind] = {
    Model: "model",
    Checkpoint: "checkpoint",
    Engine: "engine",
    ModelRepository: "repository",
    Adapter: "adapter",
}

_TAKEN_BY: dict[str, str] = {
    "model": "trtserve convert",
    "checkpoint": "trtserve build",
    "engine": "trtserve repo",
    "repository": "trtserve start --model-repository",
    "adapter": "trtserve repo --lora NAME=FOLDER",
}


def load_artifact(kind: type[A], path: Path) -> A:
    """Open `path` as an artefact of `kind`, with or without a manifest. Raises ArtifactError for another kind."""
    if not path.is_dir():
        raise ArtifactError(f"{path} is not a folder.", hint="Give a folder that trtserve made.")
    if not (path / MANIFEST).exists():
        return kind(path=path)
    manifest = Manifest.read(path)
    if manifest.kind != KINDS[kind]:
        taken_by = _TAKEN_BY.get(manifest.kind, "another command")
        raise ArtifactError(
            f"{path} is of kind {manifest.kind}; expected {KINDS[kind]}.",
            hint=f"A folder of this kind is for: {taken_by}. `trtserve list` shows what is here.",
        )
    return kind(path=path, manifest=manifest)


# Top-level keys that identify the config.json of each kind.
_CONFIG_KEYS: dict[type[Artifact], frozenset[str]] = {
    Model: frozenset({"architectures", "model_type"}),
    Checkpoint: frozenset({"architecture"}),
    Engine: frozenset({"build_config"}),
}


def looks_like(kind: type[Artifact], folder: Path) -> bool:
    """Return whether `folder` seems to hold an artefact of `kind`, by its manifest or by the files of other tools."""
    with suppress(ArtifactError):
        return Manifest.read(folder).kind == KINDS[kind]
    if kind is ModelRepository:
        return any(folder.glob("*/config.pbtxt"))
    if kind is Adapter:
        return (folder / "model.lora_weights.npy").is_file()
    # A folder with only a tokenizer counts as a Hugging Face folder too.
    if kind is Model and any(folder.glob("tokenizer*")):
        return True
    try:
        config = read_json_object(folder / "config.json")
    except (FileNotFoundError, ArtifactError):
        return False
    return not _CONFIG_KEYS[kind].isdisjoint(config)


_CHUNK = 1 << 20
# What Triton reads as a configuration may be edited by hand.
EDITABLE = "config.pbtxt"
_MOST_REMEMBERED = 20_000


class Checksums:
    """SHA-256 of files."""

    def __init__(self, memory: Path | None = None) -> None:
        """Remember them in the file `memory`; None: read every file."""
        self._memory = memory
        self._known: dict[str, str] = {}
        if memory is not None:
            with suppress(OSError, ArtifactError):
                self._known = read_json_object(memory)

    def of(self, files: Collection[Path]) -> dict[Path, str]:
        """Return the checksum of each file that can be read; several are read at once."""
        before = len(self._known)
        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            found = dict(zip(files, pool.map(self._checksum, files), strict=True))
        if self._memory is not None and len(self._known) != before:
            with suppress(TrtserveError, OSError):  # what cannot be remembered is read again
                self._memory.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._memory, dict(list(self._known.items())[-_MOST_REMEMBERED:]))
        return {path: checksum for path, checksum in found.items() if checksum is not None}

    def _checksum(self, path: Path) -> str | None:
        try:
            with open_file(path) as handle:
                status = os.fstat(handle.fileno())
                key = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
                if key not in self._known:
                    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
                    while size := handle.readinto(buffer):
                        digest.update(buffer[:size])
                    self._known[key] = digest.hexdigest()
                return self._known[key]
        except (OSError, ArtifactError):
            return None


def with_checksums(manifest: Manifest, folder: Path, checksums: Checksums) -> Manifest:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST]
    return replace(manifest, files={str(path.relative_to(folder)): text for path, text in checksums.of(files).items()})


def damages(artifact: Artifact, checksums: Checksums) -> Mapping[Path, str]:
    """Return the files that are not as they were when the artefact was made → what is wrong with them.

    Empty without a manifest, and for artefacts whose manifest has no checksums.
    """
    if artifact.manifest is None:
        return {}
    recorded = {artifact.path / name: text for name, text in artifact.manifest.files.items()}
    recorded = {path: text for path, text in recorded.items() if path.name != EDITABLE}
    present = checksums.of(list(recorded))
    found = {path: "is missing, or cannot be read" for path in recorded if path not in present}
    changed = [path for path, text in present.items() if text != recorded[path]]
    return found | dict.fromkeys(changed, "has another content than when it was made")


def accept_change(path: Path) -> None:
    """Record the checksum of a file of an artefact that trtserve itself has changed."""
    for folder in path.parents:
        if not (folder / MANIFEST).is_file():
            continue
        manifest, name = Manifest.read(folder), str(path.relative_to(folder))
        if name in manifest.files:
            replace(manifest, files={**manifest.files, name: Checksums().of([path])[path]}).write(folder)
        return
