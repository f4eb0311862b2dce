"""What the stages hand to each other: folders with a `manifest.json`, whose presence means that they are complete."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trtserve import __version__
from trtserve.errors import ArtifactError
from trtserve.files import read_json_object

Kind = Literal["model", "checkpoint", "engine", "repository", "adapter"]

MANIFEST = "manifest.json"
SCHEMA = 1


def fingerprint(**parts: object) -> str:
    """Hash of everything that decides the content of an artefact: 64 hexadecimal digits of SHA-256."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of `manifest.json`.

    `inputs` maps the name of an input artefact to its fingerprint, `spec` is what the stage was asked to do,
    `tools` maps tools that shaped the content to their versions, `facts` holds what was found on the way
    (measured sizes, load time, the machine).
    """

    kind: Kind
    name: str
    fingerprint: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    tools: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA
    created: str = field(default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat())
    trtserve: str = __version__

    def write(self, folder: Path) -> None:
        """Write the manifest into `folder`, as its last file."""
        text = json.dumps(asdict(self), indent=2, default=str)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of `folder`; ArtifactError when there is none or it cannot be understood."""
        path = folder / MANIFEST
        damaged = "The folder is damaged: remove it and run the stage that makes it again."
        try:
            manifest = cls(**read_json_object(path, hint=damaged))
        except FileNotFoundError:
            raise ArtifactError(
                f"{folder} has no {MANIFEST}: it is not a complete trtserve artefact.",
                hint="Run the stage that makes it again; unfinished work is picked up.",
            ) from None
        except TypeError as error:
            raise ArtifactError(f"{path} cannot be read as a manifest: {error}.", hint=damaged) from error
        if manifest.schema != SCHEMA:
            raise ArtifactError(
                f"{path} has schema {manifest.schema}; this trtserve reads schema {SCHEMA}.",
                hint="Make the artefact again with this version.",
            )
        return manifest


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A folder on disk; `manifest` is None when another tool made it (accepted by path)."""

    path: Path
    manifest: Manifest | None = None

    @property
    def fingerprint(self) -> str:
        """The manifest's fingerprint; for a folder without one, a hash of names, sizes and times of its files."""
        if self.manifest is not None:
            return self.manifest.fingerprint
        files = sorted(entry for entry in self.path.rglob("*") if entry.is_file())
        listing = [(str(f.relative_to(self.path)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        return fingerprint(files=listing)

    @property
    def name(self) -> str:
        """The name given by the user, else one made of the folder's."""
        return self.manifest.name if self.manifest is not None else plain_name(self.path.resolve().name)


def plain_name(text: str) -> str:
    """`text` cut to the characters of a name, [A-Za-z0-9._-]."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._") or "model"


class Model(Artifact):
    """Hugging Face folder: config, tokenizer, safetensors of one revision."""


class Checkpoint(Artifact):
    """TensorRT-LLM unified checkpoint: `config.json`, `rankN.safetensors`."""


class Engine(Artifact):
    """TensorRT-LLM engine folder, or `config.json` + `rankN.xml`/`rankN.bin` for the openvino runtime."""


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
    """Open `path` as an artefact of `kind`, with or without a manifest; ArtifactError when it is another kind."""
    if not path.is_dir():
        raise ArtifactError(f"{path} is not a folder.", hint="Give the path that the previous stage printed.")
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


# Keys that only the config.json of that kind has at its top.
_CONFIG_KEYS: dict[type[Artifact], frozenset[str]] = {
    Model: frozenset({"architectures", "model_type"}),
    Checkpoint: frozenset({"architecture"}),
    Engine: frozenset({"build_config"}),
}


def looks_like(kind: type[Artifact], folder: Path) -> bool:
    """Whether `folder` holds an artefact of `kind` as far as its manifest, or the files of other tools, tell."""
    with suppress(ArtifactError):
        return Manifest.read(folder).kind == KINDS[kind]
    if kind is ModelRepository:
        return any(folder.glob("*/config.pbtxt"))
    if kind is Adapter:
        return (folder / "model.lora_weights.npy").is_file()
    # A folder of a tokenizer alone is a Hugging Face folder too.
    if kind is Model and any(folder.glob("tokenizer*")):
        return True
    try:
        config = read_json_object(folder / "config.json")
    except (FileNotFoundError, ArtifactError):
        return False
    return not _CONFIG_KEYS[kind].isdisjoint(config)
