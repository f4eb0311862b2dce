"""TensorRT-LLM checkpoint → engine: limits, features and precision are fixed, and the engine is shown to run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trtserve.artifacts import Checkpoint, Engine, Manifest, fingerprint
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.tensor_files import TensorFile
from trtserve.checkpoint.unified import read_config, require_files
from trtserve.errors import UnsupportedModelError
from trtserve.executor.runtimes import choose_runtime
from trtserve.host.machine import format_bytes, require_disk, require_memory
from trtserve.nvidia.releases import release_of
from trtserve.nvidia.releases.loaders import naming_problem
from trtserve.pipeline import MANIFEST_BYTES, StageNeeds, StageSummary, destination, summary
from trtserve.pipeline.gpu_fit import require_gpu_memory
from trtserve.pipeline.memory import build_addresses
from trtserve.progress import SILENT, Progress
from trtserve.server.engine_fit import serving_note
from trtserve.specs import BuildSpec
from trtserve.specs.command_line import PLACE, given_values
from trtserve.specs.runtime import WEIGHT_ONLY_INT4, WEIGHT_ONLY_INT8, EnginePlan, Runtime
from trtserve.store import Store, expected_seconds, publish, read_rates, timed

SCHEMA = 5


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """A build before it begins."""

    spec: BuildSpec
    checkpoint: Checkpoint
    runtime: Runtime
    engine: EnginePlan  # limits, precision, sizes: what the runtime decided
    name: str
    store: Store
    path: Path  # of the engine
    reused: bool  # it exists
    fingerprint: str

    @property
    def manifest(self) -> Manifest:
        """Manifest of the engine; a run adds what it measures."""
        engine, known = self.engine, self.checkpoint.manifest.facts if self.checkpoint.manifest else {}
        kept = {key: known[key] for key in ("parameters", "model") if key in known}
        return Manifest(
            kind="engine",
            name=self.name,
            fingerprint=self.fingerprint,
            inputs={self.checkpoint.name: self.checkpoint.fingerprint},
            spec={"runtime": engine.runtime, **asdict(engine.limits), **engine.settings()},
            tools=engine.versions(),
            facts={
                "checkpoint": str(self.checkpoint.path.absolute()),
                "built_with": given_values(self.spec, without=PLACE),
                **kept,
                **engine.facts(),
            },
        )

    @property
    def artifact(self) -> Engine:
        """The Engine that `run` returns; it need not exist yet."""
        return Engine(path=self.path, manifest=self.manifest)

    @property
    def needs(self) -> StageNeeds:
        """Disk, memory and time of a build."""
        size = self.engine.disk_bytes
        return StageNeeds(
            stage="build",
            disk=size + MANIFEST_BYTES,
            memory=self.engine.memory_bytes,
            seconds=expected_seconds(read_rates(self.store), self.engine.timed_stage, size),
        )

    def describe(self) -> StageSummary:
        """Return the stage as a dry run shows it."""
        command = self.engine.command(self.checkpoint.path, self.path)
        return summary("build", self.path, self.engine.disk_bytes, done=self.reused, command=command)

    def run(self, progress: Progress = SILENT) -> Engine:
        """Build the engine, or reuse the one that exists.

        Raises CorruptFileError, MemoryLimitError, DiskSpaceError or BuildError; nothing is left behind then.
        """
        if not self.reused:
            require_complete(self.checkpoint)
            _require_names(self.checkpoint, self.engine)
        for note in self.engine.notes:
            progress.step(note)
        if self.reused:
            progress.step(f"Engine {self.path.name} is reused")
        if (too_large := serving_note(self.engine)) is not None:
            progress.warn(too_large)

        def produce(folder: Path) -> Manifest:
            require_gpu_memory(self.engine, self.spec, progress)
            self._require_memory_and_disk(folder)
            log = self.store.root / "logs" / f"build-{self.path.name}.log"
            seconds = self.needs.seconds
            with timed(self.store, self.engine.timed_stage, self.engine.disk_bytes):
                measured = self.engine.build(self.checkpoint, folder, log=log, progress=progress, seconds=seconds)
            return replace(self.manifest, facts={**self.manifest.facts, **measured})

        return publish(Engine, self.path, self.manifest, produce)

    def _require_memory_and_disk(self, folder: Path) -> None:
        engine = self.engine
        require_memory(
            engine.memory_bytes,
            "Building this engine needs",
            lambda free: _advice(engine, self.spec, self.runtime, free),
            mapped=build_addresses(engine),
        )
        narrower = self.runtime.narrower if engine.config.quantization.algorithm is None else ""
        smaller = f"Convert with {narrower} for a smaller engine." if narrower else ""
        require_disk(folder.parent, engine.disk_bytes, "The engine", smaller=smaller)


def plan_build(
    checkpoint: Checkpoint,
    spec: BuildSpec,
    *,
    name: str | None = None,
    out: Path | None = None,
    store: Store | None = None,
    config: CheckpointConfig | None = None,
    progress: Progress = SILENT,
) -> BuildPlan:
    """Plan a build: runtime, limits, precision, sizes, destination.

    `config` is the checkpoint's config.json, for a checkpoint that is not written yet. Raises MissingDependencyError,
    UnsupportedModelError or UsageError when the engine cannot be built.
    """
    name, store = name or checkpoint.name, store or Store()
    runtime = choose_runtime(spec.runtime, progress, container=spec.container)
    engine = runtime.plan(read_config(checkpoint.path) if config is None else config, spec)
    if config is None:
        _require_names(checkpoint, engine)
    identity = fingerprint(
        stage="build",
        schema=SCHEMA,
        checkpoint=checkpoint.fingerprint,
        runtime=engine.runtime,
        tools=dict(engine.tools),
        limits=asdict(engine.limits),
        settings=engine.settings(),
    )
    path, reused = destination(Engine, name, identity, out=out, store=store)
    return BuildPlan(
        spec=spec,
        checkpoint=checkpoint,
        runtime=runtime,
        engine=engine,
        name=name,
        store=store,
        path=path,
        reused=reused,
        fingerprint=identity,
    )


def require_complete(checkpoint: Checkpoint) -> None:
    """Raise ArtifactError or CorruptFileError when a rank's file is missing or cut off; weights are not read."""
    require_files(checkpoint.path, read_config(checkpoint.path))


def _require_names(checkpoint: Checkpoint, engine: EnginePlan) -> None:
    """Raise UnsupportedModelError when TensorRT-LLM is to read tensors that are named as in another release."""
    file, version = checkpoint.path / "rank0.safetensors", engine.tools.get("tensorrt_llm")
    if version is None or not file.is_file():
        return
    problem = naming_problem(TensorFile(file).entries, engine.config.architecture, release_of(version))
    if problem is not None:
        raise UnsupportedModelError(
            f"{checkpoint.path} does not load in TensorRT-LLM {version}: {problem.what}.", hint=problem.fix
        )


def _advice(engine: EnginePlan, spec: BuildSpec, runtime: Runtime, free: int) -> str:
    """Return the first of these that fits: fewer ranks at once, narrower weights, more ranks."""
    alone = replace(spec, build_workers=1)
    if spec.build_workers not in (None, 1) and runtime.plan(engine.config, alone).memory_bytes <= free:
        return "Build one rank after another: --workers 1 (of import: --build-workers 1)."
    int8, int4 = ({"quantization": {"quant_algo": algorithm}} for algorithm in (WEIGHT_ONLY_INT8, WEIGHT_ONLY_INT4))
    half = {"dtype": "bfloat16"}
    mapping = engine.config.mapping
    tp_size = mapping.tp_size
    split = {**(engine.config.content.get("mapping") or {}), "tp_size": 2 * tp_size, "world_size": 2 * mapping.ranks}
    quantised = (
        ("--quantize int8", int8),
        ("--dtype bfloat16 --quantize int8", {**int8, **half}),
        ("--quantize int4", int4),
        ("--dtype bfloat16 --quantize int4", {**int4, **half}),
    )
    narrower = ("--dtype bfloat16", half), *(quantised if runtime.narrower else ())
    # Weights that are quantised already cannot be narrowed: that takes the original model.
    floats = engine.config.quantization.algorithm in (None, WEIGHT_ONLY_INT8, WEIGHT_ONLY_INT4)
    for flags, changes in (*(narrower if floats else ()), (f"--tp-size {2 * tp_size}", {"mapping": split})):
        needed = runtime.plan(engine.config.changed(**changes), spec).memory_bytes
        if needed <= min(free, engine.memory_bytes - 1):
            return f"Convert with {flags}: the build would need {format_bytes(needed)}."
    return "No setting makes it fit here: free some memory, or take a smaller model or a larger machine."
