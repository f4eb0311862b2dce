"""Artefacts: the folders that stages read and write. A `manifest.json` marks a folder as complete."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from trtserve._version import __version__
from trtserve.errors import ArtifactError
from trtserve.files import decode_as, is_below, read_as, read_json_object

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


def load_artifact(kind: type[Artifact], path: Path) -> Artifact:
    """Open `path` as an artefact of `kind`, with or without a manifest. Raises ArtifactError for another kind."""
    if not path.is_dir():
        raise ArtifactError(
            f"{path} is not a folder.",
            hint="Give a folder that trtserve made.",
        )
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
