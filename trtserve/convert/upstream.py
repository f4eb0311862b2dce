"""Conversions that NVIDIA's tools carry out, published as our own ones are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtserve.architectures import FAMILIES
from trtserve.architectures.checkpoint import read_config
from trtserve.artifacts import Checkpoint, Manifest, Model
from trtserve.capacity.room import require_disk, require_memory, smaller_checkpoint
from trtserve.convert.plan import Destination, Plan, all_wishes
from trtserve.convert.proof import Proof, planned_proof
from trtserve.errors import ConversionError, UsageError
from trtserve.launch.container import Box, container_name, image_of, in_container, with_targets
from trtserve.machine import gibibytes
from trtserve.process import Command
from trtserve.progress import Progress
from trtserve.specs import CheckSpec
from trtserve.store import Store, publish
from trtserve.upstream import Toolkit, ToolMemory, needs_calibration, run_tool, tool_command

# Flags of convert_checkpoint.py with which it does not hold the whole model.
_LOADS_LESS = ("--load_by_shard", "--save_config_only")


def upstream_command(model: Model, plan: Plan, folder: Path) -> Command:
    """The command that makes the checkpoint in `folder`; UsageError when our own converter does."""
    command, box = _command(model, plan, folder)
    return command if box is None else in_container(command, box)


def _command(model: Model, plan: Plan, folder: Path) -> tuple[Command, Box | None]:
    """The tool's own command, and the container that it runs in, if any."""
    if plan.toolkit is None:
        raise UsageError("Our own converter runs no command.")
    source = model.path.absolute()
    command = tool_command(plan.toolkit, plan.spec, plan.config["architecture"], source, folder)
    if plan.toolkit.container is None:
        return command, None
    given = (Path(text) for text in (plan.spec.calib_dataset or "",) if Path(text).is_absolute())
    mounted = () if plan.toolkit.mounted is None else (plan.toolkit.mounted,)
    box = Box(
        image=image_of(plan.toolkit.container),
        name=container_name("convert"),
        read_only=with_targets((source, *mounted, *given)),
        writable=(folder,),
        flags=plan.spec.container_flags,
    )
    return replace(command, cwd=folder), box


def convert_upstream(
    model: Model,
    plan: Plan,
    toolkit: Toolkit,
    name: str,
    place: Destination,
    store: Store,
    verify: CheckSpec | None,
    progress: Progress,
) -> Checkpoint:
    """Let NVIDIA's tool fill the artefact; it is published only when it is a whole checkpoint of the kind wanted.

    With `verify` a checkpoint that is reused is compared with the model too.
    """
    manifest = Manifest(
        kind="checkpoint",
        name=name,
        fingerprint=plan.fingerprint,
        inputs={model.name: model.fingerprint},
        spec=all_wishes(plan.spec),
        tools={"tensorrt_llm": toolkit.version},
        facts={"model": str(model.path.absolute())},
    )
    if place.reused:
        progress.step(f"Checkpoint {place.path} is reused")

    proven: list[Proof] = []

    def produce(folder: Path) -> Manifest:
        log = store.root / "logs" / f"convert-{place.path.name}.log"
        config, facts = _produce(model, plan, folder, log, progress)
        if verify is not None:
            proven.append(planned_proof(config, model, verify, place, progress, windows=False))
            facts["check"] = proven[0].require(folder)
        return replace(manifest, facts={**manifest.facts, **facts})

    checkpoint = publish(Checkpoint, place.path, manifest, produce)
    if verify is None or proven:
        return checkpoint
    config = read_config(checkpoint.path)
    return planned_proof(config, model, verify, place, progress, windows=False).of_published(checkpoint)


def _produce(
    model: Model, plan: Plan, folder: Path, log: Path, progress: Progress
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Fill `folder`: the config of the checkpoint, and what its manifest is to know of the run."""
    smaller = smaller_checkpoint(plan.spec.dtype)
    if plan.spec.quantize == "none":
        smaller = f"{smaller} --quantize int8 or int4 makes it smaller.".lstrip()
    require_disk(folder.parent, plan.total_bytes, "The checkpoint", smaller=smaller)
    _require_memory(plan)
    command, box = _command(model, plan, folder)
    ranks = len(plan.sizes)
    config = run_tool(command, folder, world_size=ranks, memory=_memory(plan), log=log, progress=progress, box=box)
    _require_quantised(plan, config, log)
    ran = command if box is None else in_container(command, box)
    return config, {"command": str(ran), "log": str(log), "bytes": _bytes_of(folder)}


def _at_once(plan: Plan) -> int:
    """How many ranks NVIDIA's converter makes at a time."""
    return min(plan.spec.workers or 1, len(plan.sizes))


def _require_memory(plan: Plan) -> None:
    """MemoryLimitError before the tool is killed; what calibrates has the model on a GPU, and some flags load less."""
    if needs_calibration(plan.spec) or any(flag in _LOADS_LESS for flag in plan.spec.converter_flags):
        return
    at_once, rank = _at_once(plan), plan.sizes[0]

    def advice(free: int) -> str:
        fitting = min(at_once, (free - plan.total_bytes) // rank) if rank else 0
        fewer = f"--workers {fitting} fits. Else: " if 0 < fitting < at_once else ""
        own = "--converter own takes one tensor at a time; " if plan.config["architecture"] in FAMILIES else ""
        return f"{fewer}{own}--converter-flag=--load_by_shard, where the script has it, loads one file after another."

    require_memory(
        plan.total_bytes + at_once * rank,
        f"NVIDIA's converter holds the whole model, {gibibytes(plan.total_bytes)}, and {at_once} of the ranks that it "
        f"makes, {gibibytes(rank)} each: it needs",
        advice,
    )


def _memory(plan: Plan) -> ToolMemory:
    """NVIDIA's converters load the whole model, and each worker has the rank that it makes beside it."""
    at_once = _at_once(plan)
    rank = plan.sizes[0]
    sizes = f", {gibibytes(plan.total_bytes)}," if rank else ""
    each = f", {gibibytes(rank)} each, {at_once} at a time (estimates);" if rank else ";"
    own = " --converter own takes one tensor at a time." if rank and not needs_calibration(plan.spec) else ""
    fewer = "Convert one rank after another (--workers 1), free" if at_once > 1 else "Free"
    return ToolMemory(
        words=f"It holds the whole model{sizes} and the ranks that it makes{each}",
        advice=f"{fewer} some memory or raise its limit.{own}",
    )


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("rank*.safetensors"))


def _require_quantised(plan: Plan, config: Mapping[str, Any], log: Path) -> None:
    found = (config.get("quantization") or {}).get("quant_algo")
    if plan.spec.quantize != "none" and found in (None, "NO_QUANT"):
        raise ConversionError(
            f"--quantize {plan.spec.quantize} was asked for, and the checkpoint is not quantised.",
            hint="Read the log for the reason.",
            log=log,
        )
