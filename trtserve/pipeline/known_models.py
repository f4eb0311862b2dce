"""Models without their weights: the shapes of those with an alias (known_models.yaml), and headers of safetensors."""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve.checkpoint.architectures import checkpoint_targets, described, text_model
from trtserve.checkpoint.placement import source_shapes
from trtserve.checkpoint.source import INDEX
from trtserve.errors import CorruptFileError, UnsupportedModelError
from trtserve.files import LARGEST_TEXT, is_weights
from trtserve.pipeline.checkpoint_config import checkpoint_config
from trtserve.pipeline.model import ModelPlan
from trtserve.pipeline.model_files import CONFIG, GGUF, SINGLE, ModelFiles, stored_files
from trtserve.progress import Progress
from trtserve.specs import ConvertSpec
from trtserve.store import Store, hub
from trtserve.store.hub import RemoteFile
from trtserve.store.sources import ALIASES, Source

CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model whose shapes ship with trtserve."""

    alias: str
    repository: str  # hub id
    licence: str  # as the hub names it
    gated: bool  # the hub asks to accept it first
    config: Mapping[str, Any]  # the values of config.json that decide the shapes

    @functools.cached_property
    def parameters(self) -> int:
        """Number of parameters; tied matrices count once."""
        return sum(map(math.prod, _shapes(self.config).values()))

    @property
    def source_bytes(self) -> int:
        """Size of the weights on the hub."""
        return self.parameters * _BYTES[CODES[self.config["torch_dtype"]]]


@functools.cache
def known_models() -> tuple[KnownModel, ...]:
    """Return all models that have an alias."""
    import yaml

    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    table = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tuple(
        KnownModel(
            alias=alias,
            repository=repository,
            licence=table[repository]["licence"],
            gated=bool(table[repository].get("gated")),
            config=table[repository]["config"],
        )
        for alias, repository in ALIASES.items()
    )


def plan_known_model(source: Source, store: Store) -> ModelPlan | None:
    """Plan a model from its shipped shapes.

    Returns None for one without an alias, with a revision, or in the store already.
    """
    known = next((each for each in known_models() if each.repository == source.location), None)
    if source.kind != "hub" or source.revision or source.gguf or known is None:
        return None
    if stored_files(source, store, offline=True) is not None:
        return None
    size = max(end for entry in tensor_table(known.config).values() for end in entry["data_offsets"])
    file = RemoteFile(name=SINGLE, size=size, digest="")
    found = ModelFiles(source=source, files=(file,), config=known.config)
    return ModelPlan(**vars(found), store=store, path=store.root, reused=False, missing_bytes=size)


def tensor_table(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the header of the one safetensors file that a model with this config.json would have."""
    code, end, table = CODES[config["torch_dtype"]], 0, {}
    for name, shape in _shapes(config).items():
        begin, end = end, end + math.prod(shape) * _BYTES[code]
        table[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    return table


def _shapes(config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    return _shapes_of(json.dumps(dict(config), sort_keys=True))


@functools.cache
def _shapes_of(config: str) -> Mapping[str, tuple[int, ...]]:
    hf = text_model(json.loads(config))
    return source_shapes(checkpoint_targets(described(hf, checkpoint_config(hf, ConvertSpec()))))


def outline_model(plan: ModelPlan, folder: Path, progress: Progress) -> None:
    """Fill `folder` with what `plan_conversion` reads from a model that is not here: config, index, and headers.

    The weight files have their full size but are sparse, so that they use no disk.
    """
    (folder / CONFIG).write_text(json.dumps(dict(plan.config)), encoding="utf-8")
    if (revision := plan.revision) is None:
        _write_outline(folder / SINGLE, tensor_table(plan.config))
        return
    if plan.gguf is not None:
        begun = hub.cached_file(revision, plan.pulled[0]) or hub.pull_beginning(
            revision, plan.pulled[0], plan.store.download(revision.repository, revision.commit), token=plan.token
        )
        with (folder / GGUF).open("wb") as handle, begun.open("rb") as beginning:
            handle.write(beginning.read(LARGEST_TEXT))
            handle.truncate(plan.pulled[0].size)
        return
    places: dict[str, str] = {}
    weights = [file for file in plan.files if is_weights(file.name)]
    if any(file.name.endswith(".bin") for file in weights):
        raise UnsupportedModelError(
            f"The weights of {revision.repository} are .bin files; their tensors cannot be listed without a download.",
            hint="Pull the model first (import --download-only), then plan it by its name.",
        )
    with progress.task(f"Reading {len(weights)} headers of {revision.repository}", total=len(weights)) as task:
        for file in weights:
            table = hub.tensor_table(revision, file)
            places |= dict.fromkeys(table, file.name)
            _write_outline(folder / file.name, table)
            task.advance(1)
    if any(file.name == INDEX for file in plan.files):
        (folder / INDEX).write_text(json.dumps({"weight_map": places}), encoding="utf-8")


def _write_outline(path: Path, table: dict[str, dict[str, Any]]) -> None:
    text = json.dumps(table).encode()
    size = max((int(entry["data_offsets"][1]) for entry in table.values()), default=0)
    if size < 0:
        raise CorruptFileError(f"The header of {path.name} names negative offsets.")
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        handle.truncate(8 + len(text) + size)
