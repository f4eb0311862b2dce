"""How many ranks a repository needs, in which mode, and what to do when the command line wants another number."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtserve.artifacts import Manifest, ModelRepository
from trtserve.errors import ArtifactError, RepositoryError, UsageError, counted
from trtserve.launch.container import installed_in
from trtserve.launch.devices import require_leader_devices, world_of
from trtserve.releases import NEWEST, order
from trtserve.releases.installed import Installed, installed, require_engine_path
from trtserve.specs import ConvertSpec, RepositorySpec, ServerSpec
from trtserve.triton.engine_match import rebuild_command
from trtserve.triton.preflight import Served
from trtserve.triton.profiles import DRAFT, PREPROCESSING
from trtserve.wording import option_words, spec_of, wishes

_LLMAPI_SINCE = "0.19"


def installed_for(spec: ServerSpec) -> Installed | None:
    """The TensorRT-LLM that will serve: the container's, or this machine's; None where it is not known."""
    if spec.container is not None:
        return installed_in(spec.container, spec.trtllm_version)
    return installed(spec.trtllm_version)


def launch_release(served: Served, spec: ServerSpec) -> str:
    """The release whose launch script is followed: the container's, --trtllm-version, what is installed, or the
    repository's.

    UsageError for a release that cannot serve this kind of repository.
    """
    found = installed_for(spec)
    engine = served.core_models[0].version if served.core_models else None
    version = found.version if found is not None else served.release or engine or NEWEST
    if served.runtime != "llmapi":
        return require_engine_path(version)
    if order(version) < order(_LLMAPI_SINCE):
        raise UsageError(f"TensorRT-LLM {version} has no llmapi model for Triton; {_LLMAPI_SINCE} was the first.")
    # Releases after the last one of the tables still have this launcher.
    return NEWEST if order(version) > order(NEWEST) else require_engine_path(version)


def ranks_of(served: Served, spec: ServerSpec) -> int:
    """Processes of one instance in the mode of `spec`, as mpirun counts them."""
    if not spec.multi_model:
        return served.world_size
    return 1 if spec.spawn_processes else world_of(served.core_models)


def pool_of(served: Served) -> int:
    """Ranks that trtllm-llmapi-launch makes one pool of; several LLMs start workers of their own, without MPI."""
    several = len(served.core_models) > 1 or served.core_models[0].instances > 1
    return 1 if several else served.world_size


def require_engine_mode(served: Served, spec: ServerSpec, *, elsewhere: bool = False) -> None:
    """UsageError or RepositoryError for a mode in which these core models cannot run.

    With `elsewhere` the GPUs are other machines', of which the caller knows more.
    """
    if served.runtime == "llmapi":
        if spec.multi_model:
            raise UsageError(
                "--multi-model is for TensorRT engines; the LLM API starts its own workers.",
                hint="Leave --multi-model out.",
            )
        return
    unknown = next((model for model in served.core_models if not model.config), None)
    if unknown is not None:
        raise RepositoryError(
            f"The engine of {unknown.name} is not on this machine, so its number of ranks is not known.",
            hint="Make the repository with the engine inside: trtserve repo ENGINE --tokenizer FOLDER",
        )
    sizes = {model.name: model.world_size for model in served.core_models}
    if not spec.multi_model and len(set(sizes.values())) > 1:
        words = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise UsageError(
            f"The engines of this repository have different world sizes ({words}); leader mode starts one number.",
            hint="Serve them in orchestrator mode: --multi-model, with gpu_device_ids of each model.",
        )
    if not spec.multi_model:
        visible = served.world_size if spec.instances > 1 else len(spec.gpus)
        require_leader_devices(served.core_models, None if elsewhere else visible)


def require_world_size(served: Served, spec: ServerSpec, repository: ModelRepository) -> None:
    """UsageError when --world-size is not what the engine and the mode need; the hint makes such an engine."""
    needed = ranks_of(served, spec)
    if spec.world_size in (None, needed):
        return
    if spec.multi_model:
        raise UsageError(
            f"--world-size is {spec.world_size}; an orchestrator "
            + (
                "spawns its workers itself: 1."
                if spec.spawn_processes
                else f"and the ranks of its models are {needed}."
            ),
            hint=f"Leave it out, or give --world-size {needed}.",
        )
    raise UsageError(
        f"--world-size is {spec.world_size}; the engine was built for {counted(served.world_size, 'rank')}.",
        hint=rebuild_commands(served, repository, spec),
    )


def wants_rebuild(served: Served, spec: ServerSpec) -> bool:
    """Whether another engine is needed for --world-size: never on the CPU, where one process merges all shards."""
    fixed = served.runtime in (None, "openvino") or spec.multi_model
    return not fixed and spec.world_size not in (None, served.world_size)


def rebuild_commands(served: Served, repository: ModelRepository, spec: ServerSpec) -> str:
    """The commands that make an engine for --world-size, in the words of whoever made the one that is there."""
    world_size = int(spec.world_size or 1)
    if served.runtime == "llmapi":
        return f"Set tensor_parallel_size: {world_size} in model.yaml, or leave --world-size out."
    if repository.manifest is None:
        return (
            f"Make the checkpoint again with --tp_size {world_size} (convert_checkpoint.py), then the engine "
            "(trtllm-build), then put it into the repository; or leave --world-size out."
        )
    other, core = f"{repository.name}-tp{world_size}", served.core_models[0]
    checkpoint = _checkpoint(served.facts.get("core_models", {}).get(core.name, {}).get("built_as"))
    convert = _conversion(checkpoint, served, world_size)
    model = checkpoint.facts.get("model") if checkpoint is not None else None
    return (
        f"trtserve convert {_word(model)} {' '.join(option_words(wishes(convert)))} --name {other} && "
        f"{rebuild_command(core, other, container=spec.container)} && "
        f"trtserve repo {other} {' '.join(option_words(_assembly(repository)))} && "
        f"trtserve start {other}"
    )


def _conversion(checkpoint: Manifest | None, served: Served, world_size: int) -> ConvertSpec:
    """That of the checkpoint, for other ranks; where it is gone, what the engine tells of it."""
    made = dict(checkpoint.spec) if checkpoint is not None else {}
    made.setdefault("dtype", served.engine.get("pretrained_config", {}).get("dtype") or "auto")
    sizes = {"tp_size": world_size, "pp_size": 1, "moe_tp_size": None, "moe_ep_size": None}
    return spec_of(ConvertSpec, {**made, **sizes})


def _assembly(repository: ModelRepository) -> dict[str, object]:
    """Options of `trtserve repo` with which the repository was made; its tokenizer and draft engine lie in it."""
    made: Mapping[str, Any] = {} if repository.manifest is None else repository.manifest.spec
    facts: Mapping[str, Any] = {} if repository.manifest is None else repository.manifest.facts
    suffix = made.get("suffix") or ""
    tokenizer = repository.path / f"{PREPROCESSING}{suffix}" / "1" / "tokenizer"
    options: dict[str, object] = {"tokenizer": tokenizer if tokenizer.is_dir() else "MODEL"}
    if made:
        options |= wishes(spec_of(RepositorySpec, made))
    if facts.get("draft"):
        options["draft_engine"] = repository.path / f"{DRAFT}{suffix}" / "1"
    return options


def _checkpoint(folder: str | None) -> Manifest | None:
    """The manifest of the checkpoint that an engine was built from, while it is there."""
    try:
        return Manifest.read(Path(folder)) if folder is not None else None
    except (ArtifactError, OSError):
        return None


def _word(path: object) -> str:
    """A path as a shell takes it; MODEL, for the user to fill in, where it is not known."""
    return "MODEL" if path is None else shlex.quote(str(path))
