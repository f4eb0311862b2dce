"""Whether an engine fits the TensorRT-LLM, GPU and --world-size that serve it, and how to make one that does."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtserve.artifacts import Manifest, ModelRepository
from trtserve.errors import ArtifactError, MissingDependencyError, UsageError, counted
from trtserve.host.gpus import Device
from trtserve.nvidia.containers import installed_in
from trtserve.nvidia.releases import NEWEST, order
from trtserve.nvidia.releases.installed import Installed, installed, require_engine_path
from trtserve.progress import Progress
from trtserve.repository.engines import Installation, rebuild_command, remake_command, require_matching
from trtserve.repository.profiles import DRAFT, PREPROCESSING
from trtserve.repository.served import ServedRepository
from trtserve.server.repositories import import_again
from trtserve.server.triton.installation import CONTAINER_TRITON, Triton, find_triton
from trtserve.specs import ConvertSpec, RepositorySpec, ServerSpec
from trtserve.specs.command_line import given_values, option_words, spec_of
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
    """Return whether --world-size needs another engine: never where one process merges all shards."""
    fixed = served.runtime is None or served.merges_ranks or spec.multi_model
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
