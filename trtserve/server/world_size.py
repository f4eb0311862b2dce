"""What to do when --world-size is not the number of ranks that a repository's engine has."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtserve.artifacts import Manifest, ModelRepository
from trtserve.errors import ArtifactError, UsageError, counted
from trtserve.repository.engine_match import rebuild_command
from trtserve.repository.preflight import Served
from trtserve.repository.profiles import DRAFT, PREPROCESSING
from trtserve.specs import ConvertSpec, RepositorySpec, ServerSpec
from trtserve.specs.command_line import given_values, option_words, spec_of


def require_world_size(served: Served, spec: ServerSpec, repository: ModelRepository, needed: int) -> None:
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


def wants_rebuild(served: Served, spec: ServerSpec) -> bool:
    """Return whether --world-size needs another engine: never where one process merges all shards."""
    fixed = served.runtime is None or served.merges_ranks or spec.multi_model
    return not fixed and spec.world_size not in (None, served.world_size)


def rebuild_commands(served: Served, repository: ModelRepository, spec: ServerSpec) -> str:
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
    made.setdefault("dtype", served.engine.get("pretrained_config", {}).get("dtype") or "auto")
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
