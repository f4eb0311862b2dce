"""The runtime for NVIDIA GPUs: engines are TensorRT-LLM's, built by its own `trtllm-build`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtserve import machine, process
from trtserve.architectures import gemma3
from trtserve.artifacts import Checkpoint
from trtserve.errors import (
    BuildError,
    MachineError,
    MissingDependencyError,
    UnsupportedModelError,
    UsageError,
    counted,
)
from trtserve.interrupts import stop_signals
from trtserve.launch.container import (
    Box,
    container_name,
    image_of,
    in_container,
    remove_container,
    require_docker,
    require_installed_in,
    with_targets,
)
from trtserve.launch.gpus import Gpu, count_gpus, visible_gpu
from trtserve.machine import gibibytes
from trtserve.process import Command
from trtserve.progress import Progress
from trtserve.releases.checkpoint_config import foreign_keys, require_stages
from trtserve.releases.containers import CONTAINERS
from trtserve.releases.installed import BUILDER, OPTION, Installed, installed, interpreter, require_engine_path
from trtserve.runtimes.base import CheckpointConfig, EnginePlan
from trtserve.runtimes.build_arguments import build_arguments
from trtserve.runtimes.build_failure import explain_failure
from trtserve.runtimes.build_log import BuildLog, duration, last_lines
from trtserve.runtimes.built_engine import require_engine
from trtserve.runtimes.rank_weights import RankWeights, rank_weights
from trtserve.specs import BuildSpec

NAME = "tensorrt_llm"

# `trtllm-build` without its console script: the module behind it, which is there through 1.2.
_MODULE = "tensorrt_llm.commands.build"
_CACHE = "model.cache"
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 10.0
# PyTorch, TensorRT and CUDA in the process that builds: an allowance, not a measurement.
_PROCESS = 3 * 2**30


@dataclass(frozen=True, kw_only=True)
class TensorrtPlan(EnginePlan):
    """An engine of TensorRT-LLM `version`.

    `program` is what builds it, `arguments` are those that decide its content, `expected` is what its `build_config`
    will say. `rank` are the weights of a rank; None for a family that is not known here. `workers` ranks are built at
    once. `gpu` is the one that it is built for, None where there is none. `container` is the tag or image to build in.
    """

    version: str
    program: tuple[str, ...]
    arguments: tuple[str, ...]
    expected: Mapping[str, Any]
    workers: int
    rank: RankWeights | None = None
    gpu: Gpu | None = None
    features: tuple[str, ...] = ()
    container: str | None = None
    container_flags: tuple[str, ...] = ()

    @property
    def precision(self) -> str:
        """Precision of the weights, and what else the checkpoint fixes."""
        kv = (self.config.get("quantization") or {}).get("kv_cache_quant_algo")
        return f"{self.weights_precision} weights, {self.config['dtype']} arithmetic" + (
            f", {kv} KV cache" if kv else ""
        )

    @property
    def parallel(self) -> str:
        """The parallelism of the checkpoint in words."""
        mapping = self.config.get("mapping") or {}
        return f"tp {mapping.get('tp_size') or 1} × pp {mapping.get('pp_size') or 1}"

    @property
    def world_size(self) -> int:
        """Ranks of the checkpoint, each of which becomes an engine file."""
        mapping = self.config.get("mapping") or {}
        sizes = [int(mapping.get(f"{name}_size") or 1) for name in ("tp", "pp", "cp")]
        return max(sizes[0] * sizes[1] * sizes[2], int(mapping.get("world_size") or 1))

    def settings(self) -> dict[str, Any]:
        """The arguments, and the GPU whose kernels the engine holds."""
        return {"arguments": list(self.arguments), "gpu": self._gpu()}

    def versions(self) -> dict[str, str]:
        """With the driver, which the engine does not depend on."""
        return {**self.tools, **({"driver": self.gpu.driver} if self.gpu else {})}

    def facts(self) -> dict[str, Any]:
        """GPU and parallel mapping."""
        return {"gpu": self._gpu(), "mapping": dict(self.config.get("mapping") or {})}

    def _gpu(self) -> dict[str, str] | None:
        return None if self.gpu is None else {"name": self.gpu.name, "sm": self.gpu.sm.replace(".", "")}

    def words(self) -> str:
        """What goes beyond plain decoding, in words."""
        return ", ".join(self.features)

    def build_config(self) -> dict[str, Any]:
        """What was asked for of it."""
        return dict(self.expected)

    def config_outline(self) -> dict[str, Any]:
        """With the version, which decides the release of a repository."""
        return {"version": self.version, **super().config_outline()}

    def command(self, checkpoint: Path, folder: Path) -> Command:
        """`trtllm-build`, in its container where one is asked for."""
        tool, box = self.tool(checkpoint, folder), self.box(checkpoint, folder)
        return tool if box is None else in_container(tool, box)

    def box(self, checkpoint: Path, folder: Path) -> Box | None:
        """The container of one build, which may write the engine; None when it runs on this machine itself."""
        if self.container is None:
            return None
        given = (Path(word) for word in self.arguments if word.startswith("/") and Path(word).exists())
        return Box(
            image=image_of(self.container),
            name=container_name("build"),
            read_only=with_targets((checkpoint, *given)),
            writable=(folder,),
            flags=self.container_flags,
        )

    def tool(self, checkpoint: Path, folder: Path) -> Command:
        """`trtllm-build` itself; its timing cache goes beside the engine instead of the current folder."""
        argv = (*self.program, "--checkpoint_dir", str(checkpoint), "--output_dir", str(folder), *self.arguments)
        if "--output_timing_cache" not in self.arguments:
            argv = (*argv, "--output_timing_cache", str(folder / _CACHE))
        argv = (*argv, "--workers", str(self.workers)) if self.workers > 1 else argv
        # Nothing is read from the current folder, which a container does not have.
        return Command(argv=argv, cwd=folder if self.container else None)

    @property
    def expected_memory(self) -> int:
        """Bytes of memory that building one rank may take, by estimate."""
        return _PROCESS + 2 * (self.rank.loaded + self.rank.kept) if self.rank else 0

    @property
    def peak_memory(self) -> int:
        """Bytes of memory that the ranks which are built at once may take, by estimate."""
        return self.workers * self.expected_memory

    def memory_words(self) -> str:
        """Memory of the build in words, an estimate; of families that are not known here nobody knows it."""
        if not self.rank:
            return "memory that is not known here"
        at_once = counted(self.workers, "rank")
        return f"about {gibibytes(self.peak_memory)} of memory (an estimate), for {at_once} at a time"


def plan(config: CheckpointConfig, spec: BuildSpec) -> TensorrtPlan:
    """Arguments and limits of the engine; the memory and disk it needs.

    UsageError for a version without engines and for options that the release does not have, UnsupportedModelError for
    a model that an engine would calculate otherwise.
    """
    if spec.kv_precision != "auto":
        raise UsageError(
            f"--kv-precision {spec.kv_precision} is for the openvino runtime; with TensorRT-LLM the precision of the "
            "KV cache is a property of the checkpoint.",
            hint="Convert with --quantize fp8 for an FP8 cache, or leave it out.",
        )
    found = _builder(spec)
    release = require_engine_path(found.version)
    _require_rotation(config)
    require_stages(release, config["architecture"], config["num_hidden_layers"], _pipeline_stages(config))
    built = build_arguments(release, config, spec)
    rank, gpu = _rank_weights(config), visible_gpu()
    program, notes = _program(found)
    world = int((config.get("mapping") or {}).get("world_size") or 1)
    made = TensorrtPlan(
        runtime=NAME,
        config=config,
        limits=built.limits,
        tools=_tools(found),
        version=found.version,
        program=program,
        arguments=built.arguments,
        expected=built.expected,
        workers=spec.build_workers or 1,
        rank=rank,
        gpu=gpu,
        features=_features(spec),
        container=spec.container,
        container_flags=spec.container_flags,
        memory_bytes=rank.loaded + rank.kept if rank else 0,
        disk_bytes=rank.kept * world if rank else 0,
        serving_bytes=rank.kept * world if rank else 0,
    )
    workers, memory_notes = _workers(made, spec)
    parallel = f"Ranks are those of the checkpoint: {made.parallel}."
    told = (parallel, *notes, *_foreign(config, release), *built.notes, *memory_notes)
    # Ranks that are built at once are in memory at once.
    return replace(made, workers=workers, memory_bytes=made.memory_bytes * workers, notes=told)


def _builder(spec: BuildSpec) -> Installed:
    """The TensorRT-LLM that builds: that of the container, or of this machine."""
    if spec.container is None:
        return _require_installed(spec.trtllm_version)
    return require_installed_in(spec.container, spec.trtllm_version)


def _require_rotation(config: CheckpointConfig) -> None:
    if problem := gemma3.engine_problem(config):
        raise UnsupportedModelError(
            f"{problem[0].upper()}{problem[1:]}: its answers would be others.",
            hint="Its PyTorch backend runs the model on GPUs (--runtime llmapi), --runtime openvino on this CPU.",
        )


def _pipeline_stages(config: CheckpointConfig) -> int:
    return int((config.get("mapping") or {}).get("pp_size") or 1)


def _foreign(config: CheckpointConfig, release: str) -> Iterator[str]:
    if keys := foreign_keys(config, release):
        yield (
            f"The checkpoint is one of another release: TensorRT-LLM {release} does not know {', '.join(keys)}, and "
            f"its loader stops at them. `trtserve convert --trtllm-version {release}` makes one without."
        )


def _require_installed(version: str | None) -> Installed:
    found = installed(version)
    if found is None:
        raise MissingDependencyError(
            "The tensorrt_llm runtime builds with TensorRT-LLM, which is not installed here.",
            hint=f"Add --container {CONTAINERS[-1].tag}, which runs it in NVIDIA's container ({CONTAINERS[-1].image}), "
            f"work in that container, or name the version with {OPTION} to see the "
            "command (--dry-run). --runtime openvino builds for CPUs.",
        )
    return found


def _program(found: Installed) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What builds, and what to say about it: the package may be there without its console script."""
    if process.program(BUILDER) is not None or found.environment is None:
        return (BUILDER,), ()
    note = f"{BUILDER} is not on PATH: its module is run with the Python that has TensorRT-LLM {found.version}."
    return (str(interpreter(found)), "-m", _MODULE), (note,)


def _tools(found: Installed) -> dict[str, str]:
    container = next((each for each in CONTAINERS if each.tensorrt_llm == found.version), None)
    tools = {"tensorrt_llm": found.version, "tensorrt": found.tensorrt, "cuda": container.cuda if container else None}
    return {name: version for name, version in tools.items() if version is not None}


def _rank_weights(config: CheckpointConfig) -> RankWeights | None:
    """Checkpoints of NVIDIA's converters may be of families that our own converter does not have."""
    try:
        return rank_weights(config)
    except (UnsupportedModelError, KeyError):
        return None


def _features(spec: BuildSpec) -> tuple[str, ...]:
    words = (
        (spec.max_beam_width > 1, f"{spec.max_beam_width} beams"),
        (spec.max_draft_len > 0, f"{spec.max_draft_len} draft tokens"),
        (spec.max_prompt_embedding_table_size > 0, f"prompt tables of {spec.max_prompt_embedding_table_size} rows"),
        (spec.gather_context_logits or spec.gather_all_token_logits, "context logits"),
        (spec.gather_generation_logits or spec.gather_all_token_logits, "generation logits"),
        (spec.lora_plugin != "disable", f"adapters of rank {spec.max_lora_rank}"),
    )
    return tuple(text for present, text in words if present)


def _workers(plan: TensorrtPlan, spec: BuildSpec) -> tuple[int, tuple[str, ...]]:
    """How many ranks are built at once, and what to say: as many as memory and GPUs allow, or what was asked for."""
    each, free, gpus = plan.expected_memory, machine.free_memory(), count_gpus()
    fitting = free // each if each else 1  # what a family takes that is not known here, nobody knows
    notes = []
    if spec.build_workers is None:
        workers = max(1, min(plan.world_size, gpus, fitting))
        if each and 1 == workers < min(plan.world_size, gpus):
            notes.append(f"One rank after another: memory for two ({gibibytes(2 * each)}) is not free.")
    else:
        workers = min(spec.build_workers, plan.world_size)
        if gpus and workers > gpus:
            notes.append(f"trtllm-build builds {counted(gpus, 'rank')} at once, one on each GPU.")
    if each and fitting < workers:
        notes.append(
            f"Building a rank takes about {gibibytes(each)} of memory (an estimate); {gibibytes(free)} are free."
        )
    return workers, tuple(notes)


def build(
    plan: TensorrtPlan, checkpoint: Checkpoint, folder: Path, *, log: Path, progress: Progress, seconds: float | None
) -> dict[str, Any]:
    """Run `trtllm-build`, show how far it is, and read what it left; nothing of it goes on when this returns."""
    if plan.gpu is None:
        raise MachineError(
            "trtllm-build needs an NVIDIA GPU of the kind that will serve the engine; nvidia-smi finds none here.",
            hint="Build where the GPU is. `--dry-run` prints the command.",
        )
    _require_named_version(plan)
    source, free, began = checkpoint.path.absolute(), machine.free_memory(), time.monotonic()
    box = plan.box(source, folder)
    command = plan.tool(source, folder) if box is None else in_container(plan.tool(source, folder), box)
    if box is not None:
        require_docker(box)
    progress.step(str(command))
    if seconds is not None:
        progress.step(f"It takes about {duration(seconds)}, as earlier builds did.")
    code = _run(command, BuildLog(log, plan.world_size, progress, seconds=seconds), log, box)
    if code != 0:
        raise explain_failure(plan, command, code, log, free)
    _require_whole(plan, checkpoint, folder, log)
    (folder / _CACHE).unlink(missing_ok=True)
    files = [folder / f"rank{rank}.engine" for rank in range(plan.world_size)]
    return {
        "command": str(command),
        "log": str(log),
        "build_seconds": round(time.monotonic() - began, 3),
        "engine_bytes": [path.stat().st_size for path in files],
    }


def _require_named_version(plan: TensorrtPlan) -> None:
    """UsageError when --trtllm-version names another TensorRT-LLM than the one that would build."""
    here = installed() if plan.container is None else None
    if here is not None and here.version != plan.version:
        raise UsageError(
            f"{OPTION} is {plan.version}, and TensorRT-LLM {here.version} is installed here, which would build.",
            hint=f"Leave {OPTION} out, or build in the --container of that version; --dry-run only shows the command.",
        )


def _run(command: Command, follow: BuildLog, log: Path, box: Box | None) -> int | None:
    """The exit code; Ctrl-C, SIGTERM and SIGHUP end the program with us."""
    with stop_signals() as signals:
        builder = process.spawn(command, log=log, bound=True)
        try:
            while builder.alive():
                if signals():
                    raise KeyboardInterrupt
                follow.follow()
                time.sleep(_POLL_SECONDS)
            follow.follow()
            return process.exit_code(builder)
        finally:
            process.stop(builder, grace=_GRACE_SECONDS)
            if box is not None:
                remove_container(box.name)


def _require_whole(plan: TensorrtPlan, checkpoint: Checkpoint, folder: Path, log: Path) -> None:
    try:
        require_engine(
            folder,
            checkpoint.path,
            world_size=plan.world_size,
            version=plan.version,
            limits=plan.limits,
            expected=plan.expected,
            arguments=plan.arguments,
        )
    except BuildError as error:
        raise BuildError(
            f"trtllm-build ended without an error, but what it left is not the engine: {error.message} Its last "
            f"lines:\n{last_lines(log)}",
            hint=error.hint or "Read the log; too little memory or disk is the usual reason.",
            log=log,
        ) from error
