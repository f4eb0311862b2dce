"""Repositories of pooling models, which make vectors or scores of texts: one model in the shape of NVIDIA's `vllm`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtserve.artifacts import Manifest, Model, ModelRepository, fingerprint
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.checkpoint.architectures import architecture_of
from trtserve.errors import UsageError
from trtserve.executor.vllm.arguments import BACKEND, MODEL_FOLDER, MODEL_JSON, PYTHON, kv_per_token
from trtserve.executor.vllm.installation import VllmInstallation
from trtserve.files import SENTENCE_TRANSFORMERS
from trtserve.progress import Progress
from trtserve.repository.engines import own_files
from trtserve.repository.programs import VERSION, root_of
from trtserve.repository.publishing import RepositoryPlan, exists
from trtserve.specs import BuildSpec, RepositorySpec
from trtserve.specs.command_line import given_values
from trtserve.store import Store, link_or_copy

SCHEMA = 1
_CONFIG = 'backend: "vllm"\ninstance_group [{ kind: KIND_MODEL }]\n'
# Fields of RepositorySpec that mean something for a model in this shape.
_TAKEN = ("settings", "vllm_python", "absolute_paths", "container_paths", "copy")


def pools(hf: Mapping[str, Any], files: Collection[str], spec: RepositorySpec, installation: VllmInstallation) -> bool:
    """Return whether vLLM makes vectors with a model: as --set runner says, else by its files and its architecture."""
    if (runner := spec.settings.get("runner", "auto")) != "auto":
        return runner == "pooling"
    name = architecture_of(hf)
    return SENTENCE_TRANSFORMERS in files or name in installation.pooling - installation.architectures


@dataclass(frozen=True, kw_only=True)
class PoolingRepositoryPlan(RepositoryPlan):
    """A repository with one model."""

    model: Model
    arguments: Mapping[str, Any]  # of vLLM's engine
    python: str  # the interpreter that has vLLM, if the user named one

    @property
    def models(self) -> tuple[str, ...]:
        return (self.spec.name,)

    def write(self, folder: Path, progress: Progress) -> None:
        progress.step(f"Assembling model repository {self.spec.name} of a pooling model")
        version = folder / self.spec.name / VERSION
        version.mkdir(parents=True)
        text = json.dumps(self.python, ensure_ascii=False)
        named = f'parameters {{ key: "{PYTHON}" value {{ string_value: {text} }} }}\n' if self.python else ""
        (version.parent / "config.pbtxt").write_text(_CONFIG + named, encoding="utf-8")
        place = f"{root_of(self.spec, self.path)}{self.spec.name}/{VERSION}/{MODEL_FOLDER}"
        content = json.dumps({"model": place, **self.arguments}, indent=1)
        (version / MODEL_JSON).write_text(content + "\n", encoding="utf-8")
        for file in own_files(self.model.path):
            link_or_copy(file, version / MODEL_FOLDER / file.relative_to(self.model.path), copy=self.spec.copy)


def plan_pooling_repository(
    model: Model, spec: RepositorySpec, config: EngineConfig, build: BuildSpec, *, out: Path | None, store: Store | None
) -> PoolingRepositoryPlan:
    """Plan the repository of a pooling model; `config` is that of the vllm runtime.

    Raises UsageError for options that mean nothing for it.
    """
    if meaningless := sorted(given_values(spec).keys() - {*_TAKEN}):
        raise UsageError(
            f"--{meaningless[0].replace('_', '-')} has no meaning for a pooling model: it makes no text.",
            hint="--set runner=generate serves it as a model that does.",
        )
    arguments = pooling_arguments(config, build)
    place = (out or (store or Store()).root) if spec.absolute_paths else None
    origin = {"model": model.fingerprint, "arguments": arguments}
    asked = asdict(replace(spec, copy=False))
    digest = fingerprint(stage="pooling", schema=SCHEMA, spec=asked, place=str(place), **origin)
    facts = {
        "alias": spec.name,
        "suffix": "",
        "streaming": True,
        "runtime": config.trtserve.runtime,
        "triton_backend": BACKEND,
        "world_size": config.mapping.ranks,
        "container_paths": spec.container_paths,
    }
    inputs = {"model": model.fingerprint}
    manifest = Manifest(
        kind="repository", name=spec.name, fingerprint=digest, inputs=inputs, spec=asdict(spec), facts=facts
    )
    path = (out or (store or Store()).destination(ModelRepository, spec.name, digest)).absolute()
    reused = exists(path, (spec.name,), manifest, added=False)
    return PoolingRepositoryPlan(
        spec=spec,
        manifest=manifest,
        path=path,
        reused=reused,
        added=False,
        model=model,
        arguments=arguments,
        python=config.trtserve.vllm_python,
    )


def pooling_arguments(config: EngineConfig, build: BuildSpec) -> dict[str, Any]:
    """Return vLLM's arguments; those that the user gave win. vLLM chooses its own limits, but on a CPU."""
    sizes = {"tensor_parallel_size": config.mapping.tp_size, "pipeline_parallel_size": config.mapping.pp_size}
    found: dict[str, Any] = {"runner": "pooling", **{name: size for name, size in sizes.items() if size > 1}}
    limits = build
    if config.trtserve.device == "cpu":
        limits = replace(build, max_seq_len=config.build.max_seq_len, max_batch_size=config.build.max_batch_size)
        # A text has its answer in the step that reads it, so two of the longest are enough.
        found["kv_cache_memory_bytes"] = 2 * config.build.max_seq_len * kv_per_token(config)
    named = {
        "max_model_len": limits.max_seq_len,
        "max_num_seqs": limits.max_batch_size,
        "max_num_batched_tokens": limits.max_num_tokens,
    }
    own = {name: value for name, value in config.trtserve.engine_arguments.items() if value != -1}
    return {**found, **{name: value for name, value in named.items() if value is not None}, **own}
