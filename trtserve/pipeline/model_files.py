"""Which files a model needs, whether they can be converted here, and where they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from trtserve.artifacts import MANIFEST, Manifest, Model, fingerprint, load_artifact
from trtserve.checkpoint.tensor_files import TensorFile
from trtserve.client.tokenizer import missing_packages
from trtserve.errors import (
    ArtifactError,
    CorruptFileError,
    MissingDependencyError,
    ModelNotFoundError,
    UnsupportedModelError,
    listing,
)
from trtserve.executor.vllm.installation import offer_of
from trtserve.files import LARGEST_TEXT, SENTENCE_TRANSFORMERS, SUBFOLDERS, is_weights, read_json_object, require_own
from trtserve.host.machine import format_bytes
from trtserve.programs.shared.tokenizer import require_bounded, require_packages
from trtserve.store import Store, hub
from trtserve.store.hub import RemoteFile, Revision
from trtserve.store.hub.calls import COMMIT
from trtserve.store.sources import Source

CONFIG = "config.json"
SINGLE = "model.safetensors"
GGUF = "model.gguf"
INDEX = "model.safetensors.index.json"
_PICKLED = "pytorch_model.bin"
_PICKLED_INDEX = "pytorch_model.bin.index.json"
SMALL_FILES = frozenset(
    {
        CONFIG,
        "hf_quant_config.json",
        "quantize_config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "chat_template.json",
    }
)
# Small files of a model that NVIDIA's tools load: configs, tokenizers, and the model's own code.
_SMALL = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"})
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_AGAIN = "Copy or pull the file again."


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """The files of a model, known before its weights are here."""

    source: Source
    files: tuple[RemoteFile, ...]  # those that a conversion or a server needs
    config: Mapping[str, Any]  # content of config.json
    revision: Revision | None = None  # of the hub
    folder: Path | None = None  # where the files are, if they are on this machine
    gguf: str | None = None  # name on the hub of the file that becomes model.gguf
    made: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # of its beginning, by their names in `files`

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def architecture(self) -> str:
        """Class name that `config.json` gives the model."""
        return str(self.config["architectures"][0])

    @property
    def pulled(self) -> tuple[RemoteFile, ...]:
        """The files that the hub has, under their names there."""
        files = (file for file in self.files if file.name not in self.made)
        return tuple(replace(file, name=self.gguf) if self.gguf and file.name == GGUF else file for file in files)

    @property
    def weight_bytes(self) -> int:
        return sum(file.size for file in self.files if is_weights(file.name))

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def fingerprint(self) -> str:
        """Hash of the model's origin and of its files' hashes.

        Weights in a user's folder count with path, size and time, not with a hash of gigabytes. The path is part of
        it because the artefact links to that folder.
        """
        origin: dict[str, Any] = {"kind": "model", "files": {file.name: file.digest for file in self.files}}
        if self.revision is not None:
            origin |= {"repository": self.revision.repository, "commit": self.revision.commit}
        elif self.source.kind == "folder":
            origin |= {"folder": str(self.folder)}
        return fingerprint(**origin)

    @property
    def manifest(self) -> Manifest:
        return Manifest(
            kind="model",
            name=self.name,
            fingerprint=self.fingerprint,
            spec={
                "source": self.source.text,
                "kind": self.source.kind,
                "location": self.source.location,
                "revision": self.source.revision,
                "commit": self.revision.commit if self.revision else None,
            }
            | ({"gguf": self.source.gguf} if self.source.gguf else {}),
            facts={
                "architecture": self.architecture,
                "weight_bytes": self.weight_bytes,
                "files": [asdict(file) for file in self.files],
            },
        )


def planned_files(
    label: str,
    files: Sequence[RemoteFile],
    read: Callable[[RemoteFile], Path],
    *,
    own_tokenizer: bool = True,
    any_architecture: bool = False,
) -> tuple[tuple[RemoteFile, ...], dict[str, Any]]:
    """Return those of `files` that are needed, and the content of `config.json`; `read` fetches a small file.

    Raises ModelNotFoundError if config or weights are missing. Raises UnsupportedModelError for a model that cannot be
    converted here, or without a tokenizer unless `own_tokenizer` is False. With `any_architecture` NVIDIA's tools will
    convert or load the model: one that our converter does not know is taken with all its small files.
    """
    from trtserve.checkpoint.architectures import architecture_of
    from trtserve.nvidia.releases.converters import convertible_family

    read_whole = {*SMALL_FILES, INDEX, _PICKLED_INDEX}
    if large := next((file for file in files if file.name in read_whole and file.size > LARGEST_TEXT), None):
        raise CorruptFileError(
            f"{large.name} of {label} has {format_bytes(large.size)}; such files are read as a whole, up to "
            f"{format_bytes(LARGEST_TEXT)}.",
            hint="Is it another file under this name? Take it from the model's own repository.",
        )
    by_name = {file.name: file for file in files}
    if CONFIG not in by_name:
        raise ModelNotFoundError(
            f"{label} has no {CONFIG}.",
            hint="Give the folder of a Hugging Face model: config.json, tokenizer and safetensors.",
        )
    config = _config(read(by_name[CONFIG]))
    known = is_convertible(config)
    if not (known or any_architecture):
        try:
            convertible_family(config)
        except UnsupportedModelError as error:
            offer = offer_of(architecture_of(config))
            raise UnsupportedModelError(error.message, hint=offer + (error.hint or "")) from None
    quantization = config.get("quantization_config")
    made = isinstance(quantization, Mapping) and quantization.get("quant_method") == "gguf"  # of a GGUF file
    weights = (
        {GGUF} if made and GGUF in by_name else _weight_names(label, by_name, read, unpickled=not any_architecture)
    )
    if own_tokenizer and not any(name in by_name for name in _TOKENIZERS):
        raise UnsupportedModelError(
            f"{label} has no tokenizer; expected one of {', '.join(_TOKENIZERS)}.",
            hint="Name a folder that has one with --tokenizer, or copy the tokenizer's files next to config.json.",
        )
    if own_tokenizer and "tokenizer.json" not in by_name and "tokenizer.model" in by_name:
        path = read(by_name["tokenizer.model"])
        try:
            require_packages(path.parent)
        except ModuleNotFoundError as error:
            raise missing_packages(path.parent, error) from None
        except ValueError as error:
            raise MissingDependencyError(str(error), hint="Install versions that work together.") from None
    vectors = any_architecture and SENTENCE_TRANSFORMERS in by_name
    every = vectors or not known
    small = {name for name in by_name if Path(name).suffix in _SMALL and "/" not in name} if every else SMALL_FILES
    patterns = SUBFOLDERS if vectors else SUBFOLDERS[:1]
    inner = {name for name in by_name if name.count("/") == 1 and any(map(PurePosixPath(name).match, patterns))}
    wanted = (small | inner | weights) - {MANIFEST}  # ours is written there
    return tuple(by_name[name] for name in sorted(wanted & by_name.keys())), config


def is_convertible(config: Mapping[str, Any]) -> bool:
    """Return whether our own converter supports a model.

    Raises UnsupportedModelError for a config without architecture.
    """
    from trtserve.checkpoint.architectures import architecture_of
    from trtserve.nvidia.releases.converters import convertible_family

    architecture_of(config)
    try:
        convertible_family(config)
    except UnsupportedModelError:
        return False
    return True


def _weight_names(
    label: str, files: Mapping[str, RemoteFile], read: Callable[[RemoteFile], Path], *, unpickled: bool
) -> set[str]:
    """Return the names of the weight files; reading PyTorch's here (`unpickled`) needs PyTorch."""
    for single, index in ((SINGLE, INDEX), (_PICKLED, _PICKLED_INDEX)):
        if unpickled and single == _PICKLED and (_PICKLED in files or _PICKLED_INDEX in files):
            from trtserve.checkpoint.tensor_files import require_torch

            require_torch()
        if single in files:
            return {single}
        if index in files:
            from trtserve.checkpoint.source import weight_map

            shards = set(weight_map(read(files[index])).values())
            if missing := sorted(shards - files.keys()):
                raise CorruptFileError(f"{index} of {label} names missing files: {', '.join(missing)}.", hint=_AGAIN)
            return shards | {index}
    found = sorted(name for name in files if name.endswith((".bin", ".pt", ".pth", ".gguf", ".h5", ".safetensors")))
    if not found:
        raise ModelNotFoundError(
            f"{label} has no weights: neither {SINGLE} nor {INDEX}, nor {_PICKLED}.",
            hint="Put the weights next to config.json, or name a model or a revision that has them.",
        )
    raise UnsupportedModelError(
        f"{label} has no {SINGLE} or {INDEX}; its weights are {', '.join(found)}.",
        hint="Look for a revision or a copy in safetensors.",
    )


def chosen_gguf(label: str, files: Sequence[RemoteFile], choice: str | None) -> RemoteFile | None:
    """Return the GGUF file that `choice` names, or its last part (`Q4_K_M`); without a choice the only one.

    Returns None for a repository with other weights. Raises ModelNotFoundError or UnsupportedModelError, with the list,
    when none or several fit.
    """
    # Beside the text model such a repository may have the part for images.
    found = [file for file in files if file.name.endswith(".gguf") and "mmproj" not in file.name]
    if choice is None and (not found or {SINGLE, INDEX, _PICKLED, _PICKLED_INDEX} & {file.name for file in files}):
        return None
    ends = re.compile(rf"(.*[-./])?{re.escape((choice or '').removesuffix('.gguf'))}\.gguf", re.IGNORECASE)
    fit = [file for file in found if file.name == choice] or [
        file for file in found if choice is None or ends.fullmatch(file.name)
    ]
    if len(fit) == 1:
        return fit[0]
    listed = listing([f"{file.name} ({format_bytes(file.size)})" for file in fit or found]) or "none"
    if not fit:
        raise ModelNotFoundError(
            f"{label} has no GGUF file {choice!r}.",
            hint=f"GGUF files there: {listed}. Name one, or its last part: {label}:Q4_K_M",
        )
    raise UnsupportedModelError(
        f"{label} has several GGUF files{f' that end with {choice}' if choice else ''}: {listed}.",
        hint=f"Name one of them, or its last part: {label}:{fit[0].name}",
    )


def _config(path: Path) -> dict[str, Any]:
    return read_json_object(path, CorruptFileError, hint=_AGAIN)


def folder_files(source: Source, *, own_tokenizer: bool = True, any_architecture: bool = False) -> ModelFiles:
    """Return the files of a model in a folder, the demo's included.

    Raises CorruptFileError when a weight file is cut off.
    """
    folder = Path(source.location)
    try:
        Manifest.read(folder)
    except ArtifactError:
        pass  # none, or that of another tool
    else:
        load_artifact(Model, folder)  # raises for a checkpoint, engine or repository of ours
    found = (*folder.iterdir(), *(path for pattern in SUBFOLDERS for path in folder.glob(pattern)))
    names = sorted(path.relative_to(folder).as_posix() for path in found if path.is_file())
    listed = [RemoteFile(name=name, size=(folder / name).stat().st_size, digest="") for name in names]
    files, config = planned_files(
        str(folder),
        listed,
        lambda file: folder / file.name,
        own_tokenizer=own_tokenizer,
        any_architecture=any_architecture,
    )
    for file in files:
        require_own(folder / file.name, folder)
    if own_tokenizer:
        try:
            require_bounded(folder)
        except ValueError as error:
            raise UnsupportedModelError(
                f"{folder} cannot be served: {error}.", hint="--tokenizer takes the folder of another tokenizer."
            ) from None
    hashed = source.kind == "demo"
    return ModelFiles(
        source=source, folder=folder, config=config, files=tuple(_local_file(folder, f.name, hashed) for f in files)
    )


def _local_file(folder: Path, name: str, hashed: bool) -> RemoteFile:
    path = folder / name
    stat = path.stat()
    if path.suffix == ".safetensors":
        TensorFile(path)
    digest = f"time:{stat.st_mtime_ns}:{stat.st_size}"
    if hashed or not is_weights(path.name):
        digest = hub.digest_of(path, "sha256")
    return RemoteFile(name=name, size=stat.st_size, digest=digest)


def stored_files(source: Source, store: Store, *, offline: bool) -> ModelFiles | None:
    """Return the files of a pulled model in the store: of a pinned commit, or when `offline` of any revision."""
    pinned = source.revision is not None and COMMIT.fullmatch(source.revision)
    if not pinned and not offline:
        return None
    wanted = ("commit", source.revision) if pinned else ("revision", source.revision)
    pulled = ((model.manifest, model.path) for model in store.complete(Model) if model.manifest is not None)
    matching = [
        (manifest, path)
        for manifest, path in pulled
        if manifest.spec.get("location") == source.location
        and manifest.spec.get(wanted[0]) == wanted[1]
        and manifest.spec.get("gguf") == source.gguf
    ]
    if not matching:
        return None
    manifest, folder = max(matching, key=lambda pair: pair[0].created)
    try:
        files = tuple(RemoteFile(**file) for file in manifest.facts["files"])
        revision = Revision(repository=source.location, commit=manifest.spec["commit"], files=files)
    except (LookupError, TypeError) as error:
        raise ArtifactError(
            f"{folder / MANIFEST} does not list the files of a model: {type(error).__name__}: {error}.",
            hint="The folder is damaged: remove it and import the model again.",
        ) from error
    config = _config(folder / CONFIG)
    return ModelFiles(source=source, files=files, config=config, revision=revision, folder=folder)
