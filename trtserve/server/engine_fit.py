"""Whether an engine fits the machine that serves it: its memory, TensorRT-LLM, GPU and --world-size."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve.artifacts import Manifest, ModelRepository
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import ArtifactError, MemoryLimitError, MissingDependencyError, UsageError, counted
from trtserve.executor.runtimes import RUNTIMES, draft_memory, engine_needs_of, fitting_step
from trtserve.host.gpus import Device
from trtserve.host.machine import (
    address_space,
    available_memory,
    format_bytes,
    free_memory,
    require_memory,
    to_be_mapped,
)
from trtserve.nvidia.containers import installed_in
from trtserve.nvidia.releases import NEWEST, order
from trtserve.nvidia.releases.installed import Installed, installed, require_engine_path
from trtserve.progress import SILENT, Progress
from trtserve.repository.engines import Installation, rebuild_command, remake_command, require_matching
from trtserve.repository.profiles import BLS, DRAFT, POSTPROCESSING, PREPROCESSING
from trtserve.repository.served import ServedRepository
from trtserve.server.repositories import import_again
from trtserve.server.triton.installation import CONTAINER_TRITON, Triton, find_triton
from trtserve.specs import ConvertSpec, RepositorySpec, ServerSpec
from trtserve.specs.command_line import given_values, option_words, spec_of
from trtserve.specs.runtime import EnginePlan
from trtserve.store import Store

_LLMAPI_SINCE = "0.19"


def installed_for(spec: ServerSpec) -> Installed | None:
    """Return the TensorRT-LLM that will serve: the container's, or this machine's, or None when it is unknown."""
    if spec.container is not None:
        return installed_in(spec.container, spec.trtllm_version)
    return installed(spec.trtllm_version)


def launch_release(served: ServedRepository, spec: ServerSpec) -> str:
    """Return the release whose launch script is followed.

    It is the container's, --trtllm-version, the installed one or the repository's; the newest one for the embedded
    executor. Raises UsageError for a release that cannot serve this kind of repository.
    """
    if served.runtime is None or served.embedded:
        return NEWEST
    found = installed_for(spec)
    engine = served.core_models[0].version if served.core_models else None
    version = found.version if found is not None else served.release or engine or NEWEST
    if not served.uses_llmapi:
        return require_engine_path(version)
    if order(version) < order(_LLMAPI_SINCE):
        raise UsageError(
            f"TensorRT-LLM {version} has no LLM API model for Triton; {_LLMAPI_SINCE} was the first.",
            hint="Use a newer container: --container 26.07.",
        )
    # Releases after the last one of the tables still have this launcher.
    return NEWEST if order(version) > order(NEWEST) else require_engine_path(version)


def gpu_triton(served: ServedRepository, *, on_this_machine: bool = True) -> Triton:
    """Return the tritonserver here that has the backends; for another machine that of NVIDIA's container will do."""
    try:
        return find_triton(served.backends | {"python"}, system_first=True)
    except MissingDependencyError:
        if on_this_machine:
            raise
        return CONTAINER_TRITON


def require_fitting_engine(
    served: ServedRepository,
    spec: ServerSpec,
    progress: Progress,
    *,
    repository: Path,
    store: Store,
    gpus: Sequence[Device] = (),
) -> None:
    """Raise RepositoryError, with the command that builds it again, for an engine of other versions or another GPU.

    `gpus` are those of the machine that will serve; none where it is another one.
    """
    found = installed_for(spec)
    first = spec.gpus[0] if spec.gpus and spec.gpus[0] < len(gpus) else 0
    installation = Installation(
        tensorrt_llm=found.version if found else None,
        tensorrt=found.tensorrt if found else None,
        sm=gpus[first].capability if gpus else None,
        gpu=gpus[first].name if gpus else None,
    )
    command = import_again(repository, store)
    if command is None and served.core_models:
        command = remake_command(repository, served.core_models[0], container=spec.container)
    require_matching(served, installation, progress, remake_command=command, container=spec.container)


def require_world_size(served: ServedRepository, spec: ServerSpec, repository: ModelRepository, needed: int) -> None:
    """Raise UsageError when --world-size is not `needed`; the hint has the commands that make such an engine."""
    if spec.world_size in (None, needed):
        return
    if spec.multi_model:
        reason = (
            "an orchestrator spawns its workers itself: 1."
            if spec.spawn_processes
            else f"an orchestrator and the ranks of its models are {needed}."
        )
        raise UsageError(
            f"--world-size is {spec.world_size}; {reason}", hint=f"Leave it out, or give --world-size {needed}."
        )
    raise UsageError(
        f"--world-size is {spec.world_size}; the engine was built for {counted(served.world_size, 'rank')}.",
        hint=rebuild_commands(served, repository, spec),
    )


def wants_rebuild(served: ServedRepository, spec: ServerSpec) -> bool:
    """Return whether --world-size needs another engine: never where one process merges all shards in main memory."""
    fixed = served.runtime is None or (served.merges_ranks and not served.starts_workers) or spec.multi_model
    return not fixed and spec.world_size not in (None, served.world_size)


def rebuild_commands(served: ServedRepository, repository: ModelRepository, spec: ServerSpec) -> str:
    """Return the commands that make an engine for --world-size, with the tools that made the present one."""
    world_size = int(spec.world_size or 1)
    if served.uses_llmapi:
        return f"Set tensor_parallel_size: {world_size} in model.yaml, or leave --world-size out."
    if repository.manifest is None:
        return (
            f"Make the checkpoint again with --tp_size {world_size} (convert_checkpoint.py), then the engine "
            "(trtllm-build), then put it into the repository; or leave --world-size out."
        )
    name, core = f"{repository.name}-tp{world_size}", served.core_models[0]
    checkpoint = _checkpoint(served.facts.get("core_models", {}).get(core.name, {}).get("built_as"))
    made = dict(checkpoint.spec) if checkpoint is not None else {}
    # Where the checkpoint is gone, its engine still states the dtype.
    made.setdefault("dtype", served.engine.model.dtype or "auto")
    convert = spec_of(
        ConvertSpec, {**made, "tp_size": world_size, "pp_size": 1, "moe_tp_size": None, "moe_ep_size": None}
    )
    model = checkpoint.facts.get("model") if checkpoint is not None else None
    source = "MODEL" if model is None else shlex.quote(str(model))
    return (
        f"trtserve convert {source} {' '.join(option_words(given_values(convert)))} --name {name} && "
        f"{rebuild_command(core, name, container=spec.container)} && "
        f"trtserve repo {name} {' '.join(option_words(_repository_options(repository)))} && "
        f"trtserve start {name}"
    )


def _repository_options(repository: ModelRepository) -> dict[str, object]:
    """Return the options of `trtserve repo` that made the repository; its tokenizer and draft engine are inside it."""
    made: Mapping[str, Any] = {} if repository.manifest is None else repository.manifest.spec
    facts: Mapping[str, Any] = {} if repository.manifest is None else repository.manifest.facts
    suffix = made.get("suffix") or ""
    tokenizer = repository.path / f"{PREPROCESSING}{suffix}" / "1" / "tokenizer"
    options: dict[str, object] = {"tokenizer": tokenizer if tokenizer.is_dir() else "MODEL"}
    if made:
        options |= given_values(spec_of(RepositorySpec, made))
    if facts.get("draft"):
        options["draft_engine"] = repository.path / f"{DRAFT}{suffix}" / "1"
    return options


def _checkpoint(folder: str | None) -> Manifest | None:
    """Return the manifest of the checkpoint that an engine was built from, if it still exists."""
    try:
        return Manifest.read(Path(folder)) if folder is not None else None
    except (ArtifactError, OSError):
        return None


_BLOCK = 32  # the smallest KV cache in tokens
# Anonymous memory of processes, measured (Python 3.11, transformers 5.23, Triton 2.51).
# `trtserve start`, tritonserver, and both BLS models (the alias is the second).
_START_PROCESS = 44 * 2**20
_TRITON = 34 * 2**20
_BLS_PROCESS = 20 * 2**20
_BLS_MODELS = 2
_GATEWAY_PROCESS = 28 * 2**20  # the gateway (FastAPI and the OpenAI API) without its tokenizer
# Pre- and postprocessing, and the gateway: transformers, and tables proportional to tokenizer.json.
_TOKENIZER_PROCESS = 46 * 2**20
_TOKENIZER_FACTOR = 12
# Their helpers: one that encodes, together with its fork, and one that renders chat templates. Short and long texts
# start two of each in the gateway, and one that encodes in each preprocessing; the lanes of slow texts are left out.
_ENCODER_PROCESS = 11 * 2**20
_ENCODER_FACTOR = 13
_TEMPLATE_PROCESS = 11 * 2**20
_GATEWAY_HELPERS = 2
# Address space of tritonserver, of which it uses little memory: shared memory and threads. Measured with five models on
# two cores; with less it can neither serve nor stop.
_TRITON_ADDRESSES = 2700 * 2**20


@dataclass(frozen=True, kw_only=True)
class ServerNeeds:
    """A server: its other `processes`, `engine` without its cache, and `kv` for `kv_tokens` tokens."""

    processes: int
    engine: int
    kv: int
    kv_tokens: int

    @property
    def total(self) -> int:
        return self.processes + self.engine + self.kv


def server_processes(*, tokenizers: int = 2, bls: int = 1, tokenizer_bytes: int = 0) -> int:
    """Return the memory of a server's processes except the engine's; `tokenizer_bytes` is tokenizer.json's size.

    `tokenizers` counts processes of pre- and postprocessing; every second one has a helper.
    """
    each = _TOKENIZER_PROCESS + _TOKENIZER_FACTOR * tokenizer_bytes
    others = _START_PROCESS + _TRITON + _GATEWAY_PROCESS + _BLS_MODELS * bls * _BLS_PROCESS
    encoders = _GATEWAY_HELPERS + -(-tokenizers // 2)
    helpers = encoders * encoder_memory(tokenizer_bytes) + _GATEWAY_HELPERS * _TEMPLATE_PROCESS
    return others + (tokenizers + 1) * each + helpers


def encoder_memory(tokenizer_bytes: int) -> int:
    """Return the memory of a process that encodes texts; `tokenizer_bytes` is tokenizer.json's size."""
    return _ENCODER_PROCESS + _ENCODER_FACTOR * tokenizer_bytes


def server_needs(
    engine: EngineConfig,
    *,
    kv_tokens: int | None = None,
    draft: EngineConfig | None = None,
    tokenizers: int = 2,
    bls: int = 1,
    tokenizer_bytes: int = 0,
) -> ServerNeeds:
    """Return what a server of an engine `config.json` needs, with `kv_tokens` of cache, or one sequence's."""
    needs = engine_needs_of(engine)
    tokens = -(-(kv_tokens or engine.build.max_seq_len) // _BLOCK) * _BLOCK
    processes = server_processes(tokenizers=tokenizers, bls=bls, tokenizer_bytes=tokenizer_bytes)
    return ServerNeeds(
        processes=processes + (draft_memory(draft, kv_tokens) if draft else 0),
        engine=needs.serving,
        kv=tokens * needs.kv_per_token,
        kv_tokens=tokens,
    )


def fitting_tokens(needs: ServerNeeds, kv_per_token: int, free: int) -> int:
    """Return the tokens of KV cache, in full blocks, that fit `free` bytes next to everything else."""
    return max(0, free - needs.processes - needs.engine) // kv_per_token // _BLOCK * _BLOCK


def needs_of(served: ServedRepository) -> ServerNeeds:
    """Return what a server of a repository needs in main memory."""
    return server_needs(
        served.engine,
        kv_tokens=served.kv_tokens,
        draft=served.draft or None,
        tokenizers=sum(served.instances.get(model, 0) for model in (PREPROCESSING, POSTPROCESSING)),
        bls=served.instances.get(BLS, 1),
        tokenizer_bytes=served.tokenizer_bytes,
    )


def require_servable(served: ServedRepository, name: str, progress: Progress = SILENT, *, copies: int = 1) -> None:
    """Raise MemoryLimitError when the embedded executor and Triton's processes do not fit the free memory.

    An explicit cache size must fit completely. Otherwise the executor shrinks its cache, and with it the longest
    sequence: then one block must fit, and a shorter sequence is a warning.
    """
    if served.runtime is None or served.needs_gpus or served.backend == "vllm":  # whose model may be on the hub
        return
    space = address_space()
    if space is not None and space.limit < _TRITON_ADDRESSES:
        raise MemoryLimitError(
            f"Triton reserves {format_bytes(_TRITON_ADDRESSES)} of addresses, most of them without memory; "
            f"ulimit -v allows each process {format_bytes(space.limit)}.",
            hint="Raise the limit: ulimit -v unlimited.",
        )
    needs = needs_of(served)
    explicit = served.kv_tokens is not None
    per_token = needs.kv // needs.kv_tokens
    least = needs.kv if explicit else _BLOCK * per_token
    engine = engine_needs_of(served.engine)
    mapped = to_be_mapped(*engine.libraries, files=engine.disk)
    require_memory(
        copies * (needs.processes + needs.engine + least),
        f"Serving {f'each of {copies} instances of ' if copies > 1 else ''}{name} takes {format_bytes(needs.engine)} "
        f"for the engine, {format_bytes(least)} for its KV cache and {format_bytes(needs.processes)} for Triton: "
        "it needs",
        lambda free: _advice(served.engine, needs, per_token, free, explicit=explicit),
        mapped=mapped,
    )
    fitting = fitting_tokens(needs, per_token, available_memory(mapped).free // copies)
    if fitting < needs.kv_tokens:
        progress.warn(
            f"Memory remains for a KV cache of {fitting} tokens; one sequence of max_seq_len has {needs.kv_tokens}."
        )


def serving_note(engine: EnginePlan) -> str | None:
    """Return a note when an engine can be built but not served from the currently free memory.

    Returns None for runtimes that serve from GPUs.
    """
    if engine.needs_gpu:
        return None
    around, free = server_processes() + _BLOCK * engine.kv_bytes_per_token, free_memory()
    needed = engine.serving_bytes + around
    if needed <= free:
        return None
    smaller = fitting_step(EngineConfig.of(engine.config_outline()), free - around)
    return (
        f"Serving this engine will take {format_bytes(needed)} of memory (max_batch_size "
        f"{engine.limits.max_batch_size}, "
        f"max_num_tokens {engine.limits.max_num_tokens}), but only {format_bytes(free)} are free"
        f"{f'; {smaller} would fit' if smaller else ''}."
    )


def _advice(engine: EngineConfig, needs: ServerNeeds, per_token: int, free: int, *, explicit: bool) -> str:
    tokens = fitting_tokens(needs, per_token, free)
    if explicit and tokens:
        return f"--max-tokens-in-paged-kv-cache {tokens} of `trtserve repo` or `import` would fit."
    smaller = fitting_step(engine, free - needs.processes - _BLOCK * per_token)
    if smaller:
        return f"{smaller} of `trtserve build` or `import` would fit."
    narrower = RUNTIMES[engine.trtserve.runtime].narrower
    quantised = f"with {narrower}, or " if narrower else ""
    return f"Free some memory, or import {quantised}a smaller model."
