"""Repositories for the vllm runtime: the five models of an engine, around a Hugging Face model as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtserve.artifacts import Engine, Model
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import CorruptFileError
from trtserve.executor.vllm.installation import SomeRelease, find_installation
from trtserve.executor.vllm.runtime import vllm_engine_config
from trtserve.files import read_json_object
from trtserve.repository.adapters import resolve_adapters
from trtserve.repository.assembling import EngineRepositoryPlan, plan_repository
from trtserve.repository.engines import own_files
from trtserve.repository.llmapi import require_weights
from trtserve.repository.options import resolve_options
from trtserve.repository.profiles import DRAFT, MODELS
from trtserve.repository.settings import settable
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.store import Store

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


def plan_vllm_repository(
    model: Model,
    spec: RepositorySpec,
    *,
    convert: ConvertSpec,
    build: BuildSpec,
    tokenizer: Path | None = None,
    out: Path | None = None,
    into: Path | None = None,
    store: Store | None = None,
) -> EngineRepositoryPlan:
    """Plan the repository of a Hugging Face model for vLLM.

    Settings that are no parameters of the Triton models are arguments of vLLM's engine. Raises UsageError for those
    that the vLLM here does not have, UnsupportedModelError for an architecture that it does not know,
    MissingDependencyError for a `--vllm-python` without vLLM, and what `plan_repository` raises.
    """
    require_weights(model.path)
    hf = read_json_object(model.path / "config.json", CorruptFileError)
    weights = sum(path.stat().st_size for path in own_files(model.path) if path.suffix in _WEIGHTS)
    return plan_repository(
        Engine(path=model.path, manifest=model.manifest),
        tokenizer or model.path,
        replace(spec, settings=split_settings(spec.settings)[0]),
        hugging_face=_config(hf, weights, spec, convert, build),
        out=out,
        into=into,
        store=store,
    )


def require_vllm_serves(
    hf: Mapping[str, Any], weights: int, spec: RepositorySpec, *, convert: ConvertSpec, build: BuildSpec
) -> EngineConfig:
    """Return the engine's config of a model with the config `hf` and `weights` bytes, before its files are here.

    Raises what `plan_vllm_repository` would raise.
    """
    config = _config(hf, weights, spec, convert, build)
    resolve_options(replace(spec, settings=split_settings(spec.settings)[0]), config)
    resolve_adapters(spec.lora, config)
    return config


def _config(
    hf: Mapping[str, Any], weights: int, spec: RepositorySpec, convert: ConvertSpec, build: BuildSpec
) -> EngineConfig:
    # Without one here, as for a container or another machine, the tables of vLLM's releases answer.
    installation = find_installation(spec.vllm_python) or SomeRelease(Path(), Path())
    settings = split_settings(spec.settings)[1]
    return vllm_engine_config(hf, weights, convert, build, settings, installation, named=spec.vllm_python)


def split_settings(settings: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the settings of the Triton models, and those of vLLM's engine."""
    own = {key for key in settings if key.partition(".")[0] in (*MODELS, DRAFT) or settable(key) == key}
    return {key: settings[key] for key in settings if key in own}, {
        key: settings[key] for key in settings if key not in own
    }
