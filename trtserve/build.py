"""TensorRT-LLM checkpoint → engine: limits, features and precision are fixed, and the engine is proven to run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtserve.architectures.checkpoint import read_config, require_files
from trtserve.architectures.quantized import quant_algo
from trtserve.artifacts import Checkpoint, Engine, Manifest, fingerprint
from trtserve.capacity.gpu_room import require_gpu_room
from trtserve.capacity.needs import build_addresses
from trtserve.capacity.rates import TimedStage, expected_seconds, read_rates, timed
from trtserve.capacity.room import require_disk, require_memory
from trtserve.capacity.steps import serving_note
from trtserve.machine import gibibytes
from trtserve.progress import SILENT, Progress
from trtserve.runtimes import EnginePlan, Runtime, choose_runtime
from trtserve.runtimes.base import WEIGHT_ONLY_INT4, WEIGHT_ONLY_INT8
from trtserve.specs import BuildSpec
from trtserve.store import Store, publish, reusable
from trtserve.wording import PLACE, wishes

SCHEMA = 5


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A build before it begins: what becomes of which checkpoint, where, and whether it lies there already."""

    engine: EnginePlan
    fingerprint: str
    path: Path
    reused: bool


def find_checkpoint(name_or_folder: str, store: Store | None = None, *, progress: Progress = SILENT) -> Checkpoint:
    """The checkpoint in a folder, or that of an imported name; ModelNotFoundError when there is neither."""
    return (store or Store()).find(Checkpoint, name_or_folder, progress=progress)


def plan_build(
    checkpoint: Checkpoint,
    spec: BuildSpec,
    *,
    name: str | None = None,
    out: Path | None = None,
    store: Store | None = None,
    progress: Progress = SILENT,
) -> Plan:
    """Everything that can be known before the build: limits, precision, place, reuse."""
    return _plan(
        checkpoint,
        spec,
        choose_runtime(spec.runtime, progress, container=spec.container),
        name=name,
        out=out,
        store=store,
    )


def _plan(
    checkpoint: Checkpoint,
    spec: BuildSpec,
    runtime: Runtime[Any],
    *,
    name: str | None,
    out: Path | None,
    store: Store | None,
) -> Plan:
    engine = runtime.plan(read_config(checkpoint.path), spec)
    identity = fingerprint(
        stage="build",
        schema=SCHEMA,
        checkpoint=checkpoint.fingerprint,
        runtime=engine.runtime,
        tools=dict(engine.tools),
        limits=asdict(engine.limits),
        settings=engine.settings(),
    )
    path = (out or (store or Store()).destination(Engine, name or checkpoint.name, identity)).absolute()
    return Plan(engine=engine, fingerprint=identity, path=path, reused=reusable(Engine, path, identity) is not None)


def build_engine(
    checkpoint: Checkpoint,
    spec: BuildSpec,
    *,
    name: str | None = None,
    out: Path | None = None,
    store: Store | None = None,
    progress: Progress = SILENT,
) -> Engine:
    """Build the engine of a checkpoint, or reuse the one that was built from it for the same.

    Raises MissingDependencyError, UnsupportedModelError, UsageError, CorruptFileError, MemoryLimitError,
    DiskSpaceError or BuildError; nothing is left behind then.
    """
    runtime = choose_runtime(spec.runtime, progress, container=spec.container)
    plan = _plan(checkpoint, spec, runtime, name=name, out=out, store=store)
    if not plan.reused:
        require_whole(checkpoint)
    for note in plan.engine.notes:
        progress.step(note)
    if plan.reused:
        progress.step(f"Engine {plan.path} is reused")
    if (too_large := serving_note(plan.engine)) is not None:
        progress.warn(too_large)
    manifest = _manifest(plan, checkpoint, spec, name or checkpoint.name)

    def produce(folder: Path) -> Manifest:
        require_gpu_room(plan.engine, spec, progress)
        _require_room(plan.engine, spec, runtime, folder)
        stage, home = timed_stage(plan.engine), store or Store()
        seconds = expected_seconds(read_rates(home), stage, plan.engine.disk_bytes)
        log = home.root / "logs" / f"build-{plan.path.name}.log"
        with timed(home, stage, plan.engine.disk_bytes):
            measured = runtime.build(plan.engine, checkpoint, folder, log=log, progress=progress, seconds=seconds)
        return replace(manifest, facts={**manifest.facts, **measured})

    return publish(Engine, plan.path, manifest, produce)


def require_whole(checkpoint: Checkpoint) -> None:
    """ArtifactError or CorruptFileError when a rank's file is missing or cut off; no weight is read."""
    require_files(checkpoint.path, read_config(checkpoint.path))


def _manifest(plan: Plan, checkpoint: Checkpoint, spec: BuildSpec, name: str) -> Manifest:
    engine = plan.engine
    return Manifest(
        kind="engine",
        name=name,
        fingerprint=plan.fingerprint,
        inputs={checkpoint.name: checkpoint.fingerprint},
        spec={"runtime": engine.runtime, **asdict(engine.limits), **engine.settings()},
        tools=engine.versions(),
        facts={
            "checkpoint": str(checkpoint.path.absolute()),
            "built_with": wishes(spec, without=PLACE),
            **engine.facts(),
        },
    )


def timed_stage(engine: EnginePlan) -> TimedStage:
    """Under what the time of its build is remembered: TensorRT's builder is slower by orders of magnitude."""
    return "build" if engine.runtime == "openvino" else "trtllm-build"


def _require_room(engine: EnginePlan, spec: BuildSpec, runtime: Runtime[Any], folder: Path) -> None:
    require_memory(
        engine.memory_bytes,
        "Building this engine needs",
        lambda free: _advice(engine, spec, runtime, free),
        mapped=build_addresses(engine),
    )
    floats = quant_algo(engine.config) is None
    smaller = "Convert with --quantize int8 or int4: the engine is smaller then." if floats else ""
    require_disk(folder.parent, engine.disk_bytes, "The engine", smaller=smaller)


def _advice(engine: EnginePlan, spec: BuildSpec, runtime: Runtime[Any], free: int) -> str:
    """Fewer ranks at once; else narrower weights, and more ranks where each is built alone: both when converting."""
    alone = replace(spec, build_workers=1)
    if spec.build_workers not in (None, 1) and runtime.plan(engine.config, alone).memory_bytes <= free:
        return "Build one rank after another: --workers 1 (of import: --build-workers 1)."
    int8, int4 = ({"quantization": {"quant_algo": algorithm}} for algorithm in (WEIGHT_ONLY_INT8, WEIGHT_ONLY_INT4))
    half = {"dtype": "bfloat16"}
    mapping = dict(engine.config.get("mapping") or {})
    tp_size, world = int(mapping.get("tp_size") or 1), int(mapping.get("world_size") or 1)
    split = {**mapping, "tp_size": 2 * tp_size, "world_size": 2 * world}
    # Of weights that are quantised already, coarser ones are made from the original model only.
    narrower = (
        ("--dtype bfloat16", half),
        ("--quantize int8", int8),
        ("--dtype bfloat16 --quantize int8", {**int8, **half}),
        ("--quantize int4", int4),
        ("--dtype bfloat16 --quantize int4", {**int4, **half}),
    )
    floats = quant_algo(engine.config) in (None, WEIGHT_ONLY_INT8, WEIGHT_ONLY_INT4)
    for flags, changes in (*(narrower if floats else ()), (f"--tp-size {2 * tp_size}", {"mapping": split})):
        needed = runtime.plan({**engine.config, **changes}, spec).memory_bytes
        if needed <= min(free, engine.memory_bytes - 1):
            return f"Convert with {flags}: the build would need {gibibytes(needed)}."
    return "No setting makes it fit here: free some memory, or take a smaller model or a larger machine."
