"""Conversions by NVIDIA's tools, published like our own ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trtserve.artifacts import Checkpoint, Manifest
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import FAMILIES
from trtserve.checkpoint.unified import read_config
from trtserve.errors import ConversionError, UsageError
from trtserve.host.machine import format_bytes
from trtserve.host.resources import require_disk, require_memory
from trtserve.nvidia.containers import (
    ContainerRun,
    container_name,
    image_of,
    in_container,
    with_targets,
)
from trtserve.nvidia.converters import Toolkit, needs_calibration, run_converter, tool_command
from trtserve.nvidia.tool_run import ToolMemory
from trtserve.pipeline.convert.conversion_plan import ConversionPlan, smaller_checkpoint
from trtserve.pipeline.convert.verification import Verification
from trtserve.process import Command
from trtserve.progress import Progress
from trtserve.store import publish

# Flags that stop convert_checkpoint.py from loading the whole model.
_LOADS_LESS = ("--load_by_shard", "--save_config_only")


def converter_command(plan: ConversionPlan, folder: Path) -> Command:
    """Return the command that writes the checkpoint to `folder`. Raises UsageError for a plan of our own converter."""
    if plan.toolkit is None:
        raise UsageError("Our own converter runs no command.")
    command, box = _command(plan, plan.toolkit, folder)
    return command if box is None else in_container(command, box)


def _command(plan: ConversionPlan, toolkit: Toolkit, folder: Path) -> tuple[Command, ContainerRun | None]:
    """Return the tool's own command, and the container that it runs in, if any."""
    source = plan.model.path.absolute()
    command = tool_command(toolkit, plan.spec, plan.config.architecture, source, folder)
    if toolkit.container is None:
        return command, None
    given = (Path(text) for text in (plan.spec.calib_dataset or "",) if Path(text).is_absolute())
    mounted = () if toolkit.mounted is None else (toolkit.mounted,)
    box = ContainerRun(
        image=image_of(toolkit.container),
        name=container_name("convert"),
        read_only=with_targets((source, *mounted, *given)),
        writable=(folder,),
        flags=plan.spec.container_flags,
    )
    return replace(command, cwd=folder), box


def run_nvidia_conversion(plan: ConversionPlan, toolkit: Toolkit, progress: Progress) -> Checkpoint:
    """Let NVIDIA's tool write the checkpoint; publish it only when it is complete and quantised as asked for."""
    manifest, verification = plan.manifest, list[Verification]()

    def produce(folder: Path) -> Manifest:
        log = plan.store.root / "logs" / f"convert-{plan.path.name}.log"
        config, facts = _run(plan, toolkit, folder, log, progress)
        if plan.verify is not None:
            verification.append(Verification(plan, config, plan.verify, progress, windows=False))
            facts["check"] = verification[0].figures(folder)
        return replace(manifest, facts={**manifest.facts, **facts})

    checkpoint = publish(Checkpoint, plan.path, manifest, produce)
    if plan.verify is None or verification:
        return checkpoint
    config = read_config(checkpoint.path)
    return Verification(plan, config, plan.verify, progress, windows=False).published(checkpoint)


def _run(
    plan: ConversionPlan, toolkit: Toolkit, folder: Path, log: Path, progress: Progress
) -> tuple[CheckpointConfig, dict[str, Any]]:
    """Fill `folder`; return the checkpoint's config, and facts for its manifest."""
    smaller = smaller_checkpoint(plan.spec.dtype)
    if plan.spec.quantize == "none":
        smaller = f"{smaller} --quantize int8 or int4 makes it smaller.".lstrip()
    require_disk(folder.parent, plan.total_bytes, "The checkpoint", smaller=smaller)
    _require_memory(plan)
    command, box = _command(plan, toolkit, folder)
    ranks = len(plan.sizes)
    config = run_converter(command, folder, world_size=ranks, memory=_memory(plan), log=log, progress=progress, box=box)
    if plan.spec.quantize != "none" and config.quantization.algorithm is None:
        raise ConversionError(
            f"--quantize {plan.spec.quantize} was asked for, but the checkpoint is not quantised.",
            hint="The log has the reason.",
            log=log,
        )
    ran = command if box is None else in_container(command, box)
    size = sum(path.stat().st_size for path in folder.glob("rank*.safetensors"))
    return config, {"command": str(ran), "log": str(log), "bytes": size}


def _parallel_ranks(plan: ConversionPlan) -> int:
    """Return how many ranks NVIDIA's converter writes at a time."""
    return min(plan.spec.workers or 1, len(plan.sizes))


def _require_memory(plan: ConversionPlan) -> None:
    """Raise MemoryLimitError before the tool would be killed, unless it calibrates on a GPU or loads less."""
    if needs_calibration(plan.spec) or any(flag in _LOADS_LESS for flag in plan.spec.converter_flags):
        return
    parallel, rank = _parallel_ranks(plan), plan.sizes[0]

    def advice(free: int) -> str:
        fitting = min(parallel, (free - plan.total_bytes) // rank) if rank else 0
        fewer = f"--workers {fitting} fits. Else: " if 0 < fitting < parallel else ""
        own = "--converter own takes one tensor at a time; " if plan.config.architecture in FAMILIES else ""
        return f"{fewer}{own}--converter-flag=--load_by_shard, where the script has it, loads one file after another."

    require_memory(
        plan.total_bytes + parallel * rank,
        f"NVIDIA's converter holds the whole model, {format_bytes(plan.total_bytes)}, and {parallel} of the "
        f"ranks that it "
        f"makes, {format_bytes(rank)} each: it needs",
        advice,
    )


def _memory(plan: ConversionPlan) -> ToolMemory:
    """Describe the memory of NVIDIA's converter: the whole model, and one rank for each worker."""
    parallel, rank = _parallel_ranks(plan), plan.sizes[0]
    sizes = f", {format_bytes(plan.total_bytes)}," if rank else ""
    each = f", {format_bytes(rank)} each, {parallel} at a time (estimates);" if rank else ";"
    own = " --converter own takes one tensor at a time." if rank and not needs_calibration(plan.spec) else ""
    fewer = "Convert one rank after another (--workers 1), free" if parallel > 1 else "Free"
    return ToolMemory(
        words=f"It holds the whole model{sizes} and the ranks that it makes{each}",
        advice=f"{fewer} some memory or raise its limit.{own}",
        gpu_advice="The GPU ran out of memory: free some, or use a larger GPU.",
    )
