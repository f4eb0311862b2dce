"""The frameworks that run models for the executor, and engines that run requests: a module and a line in `MODELS` each.

The key is the runtime that an engine's `config.json` records under `trtserve.runtime`. TensorRT-LLM's own engines have
no such key.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import ArtifactError, CorruptFileError
from trtserve.files import read_json_object

if TYPE_CHECKING:
    from trtserve.executor.engine.limits import EngineOptions
    from trtserve.executor.engine.loop import RequestEngine
    from trtserve.executor.engine.model import Follower, ModelRunner


@dataclass(frozen=True, kw_only=True)
class ModelLoader:
    """How the engines of one runtime are loaded."""

    module: str
    """The module whose `load_model(engine, options)` returns a `ModelRunner` or a `RequestEngine`; only loading an
    engine imports it."""
    files: tuple[str, ...]  # the files of an engine besides `config.json`, for each rank
    names_tops: bool = False
    """Whether it returns the most likely tokens with log-probabilities; elsewhere they follow from logits."""
    draws_without_seed: bool = False
    """Whether a request without a seed, or with seed 0, is drawn at random, which is faster than with a seed."""
    ranks: bool = False
    """Whether each rank of an engine is a process of its own. Otherwise one process serves the merged shards."""


MODELS: Final[Mapping[str, ModelLoader]] = {
    "openvino": ModelLoader(module="trtserve.executor.openvino.paged_model", files=("rank{}.xml", "rank{}.bin")),
    "torch": ModelLoader(module="trtserve.executor.torch.ranked_model", files=("rank{}.safetensors",), ranks=True),
    "vllm": ModelLoader(
        module="trtserve.executor.vllm.engine", files=("model/config.json",), names_tops=True, draws_without_seed=True
    ),
}


def is_embedded_runtime(name: object) -> bool:
    """Return whether the embedded executor runs the engines of the runtime `name`."""
    return name in MODELS


def embedded_runtime(config: EngineConfig) -> str | None:
    """Return the runtime of the engine with this `config.json`, or None for an engine of TensorRT-LLM."""
    return config.trtserve.runtime if is_embedded_runtime(config.trtserve.runtime) else None


def is_embedded(config: EngineConfig) -> bool:
    """Return whether the engine with this `config.json` was built for the embedded executor."""
    return embedded_runtime(config) is not None


def device_of(config: EngineConfig) -> str | None:
    """Return `cpu` or `cuda`, where the embedded executor runs the engine, or None for an engine of TensorRT-LLM."""
    return config.trtserve.device if is_embedded(config) else None


def engine_files(config: EngineConfig, runtime: str) -> list[str]:
    """Return the names of the files of an engine of this embedded runtime, besides `config.json`."""
    ranks = config.mapping.ranks if MODELS[runtime].ranks else 1
    return [name.format(rank) for rank in range(ranks) for name in MODELS[runtime].files]


def merges_ranks(config: EngineConfig) -> bool:
    """Return whether one process serves the merged shards of the engine with this `config.json`."""
    runtime = embedded_runtime(config)
    return runtime is not None and not MODELS[runtime].ranks


def load_model(engine: Path, options: EngineOptions) -> ModelRunner | Follower | RequestEngine:
    """Load the engine with the framework of its runtime, or the part of it that belongs to this rank."""
    name = embedded_runtime(read_engine_config(engine))
    loader = importlib.import_module(MODELS[str(name)].module)
    model: ModelRunner | Follower | RequestEngine = loader.load_model(engine, options)
    return model


def read_engine_config(engine: Path) -> EngineConfig:
    """Read the `config.json` of an engine. Raises ArtifactError when it is none for the embedded executor."""
    path = engine / "config.json"
    try:
        config = EngineConfig.of(read_json_object(path, CorruptFileError, hint="Build the engine again."), path)
    except FileNotFoundError:
        raise ArtifactError(
            f"{engine} has no config.json: it is not an engine folder.", hint="Give the path that `build` printed."
        ) from None
    if not is_embedded(config):
        raise ArtifactError(
            f"{engine} is not an engine of the {', '.join(MODELS)} runtimes.",
            hint="Engines of TensorRT-LLM run in TensorRT-LLM; `trtserve build --runtime openvino` makes one for CPUs.",
        )
    return config
