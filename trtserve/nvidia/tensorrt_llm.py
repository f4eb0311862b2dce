"""The runtime for NVIDIA GPUs: TensorRT-LLM engines, built by its own `trtllm-build`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtserve import process
from trtserve.artifacts import Checkpoint
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import gemma
from trtserve.checkpoint.memory import RankWeights, rank_weights
from trtserve.errors import BuildError, MachineError, MissingDependencyError, UnsupportedModelError, UsageError, counted
from trtserve.host import machine
from trtserve.host.gpus import Device, count_gpus, visible_gpu
from trtserve.host.machine import format_bytes
from trtserve.nvidia.build_arguments import BuildLog, build_arguments, duration
from trtserve.nvidia.containers import (
    ContainerRun,
    ToolMemory,
    announce,
    container_name,
    image_of,
    in_container,
    last_lines,
    require_installed_in,
    run_tool,
    with_targets,
)
from trtserve.nvidia.engine_files import require_engine
from trtserve.nvidia.releases.containers import all_containers, latest_container
from trtserve.nvidia.releases.installed import BUILDER, OPTION, Installed, installed, interpreter, require_engine_path
from trtserve.nvidia.releases.loaders import foreign_keys, model_problems, superset_problem
from trtserve.process import Command
from trtserve.progress import Progress
from trtserve.specs import BuildSpec
from trtserve.specs.runtime import EnginePlan, Runtime

# `trtllm-build` without its console script: the module behind it, which exists up to 1.2.
_MODULE = "tensorrt_llm.commands.build"
_CACHE = "model.cache"
_PROCESS = 3 * 2**30  # PyTorch, TensorRT and CUDA in the building process: an allowance, not a measurement


@dataclass(frozen=True, kw_only=True)
class TensorrtPlan(EnginePlan):
    """An engine of TensorRT-LLM `version`.

    `program` builds it, `arguments` determine its content, `expected` is its future `build_config`. `rank` holds one
    rank's weights, None for an unknown family. `workers` ranks are built in parallel. `gpu` is the target GPU, if any.
    `container` is the tag or image to build in.
    """

    timed_stage = "trtllm-build"

    version: str
    program: tuple[str, ...]
    arguments: tuple[str, ...]
    expected: Mapping[str, Any]
    workers: int
    rank: RankWeights | None = None
    gpu: Device | None = None
    features: tuple[str, ...] = ()
    container: str | None = None
    container_flags: tuple[str, ...] = ()

    @property
    def precision(self) -> str:
        """Precision of the weights, and what else the checkpoint determines."""
        kv = self.config.quantization.kv_cache_quant_algo
        return f"{self.weights_precision} weights, {self.config.dtype} arithmetic" + (f", {kv} KV cache" if kv else "")

    @property
    def parallel(self) -> str:
        """Describe the checkpoint's parallelism."""
        return f"tp {self.config.mapping.tp_size} × pp {self.config.mapping.pp_size}"

    @property
    def world_size(self) -> int:
        """Number of ranks, each with its own engine file."""
        return self.config.mapping.ranks

    def settings(self) -> dict[str, Any]:
        """The arguments, and the GPU whose kernels the engine contains."""
        return {"arguments": list(self.arguments), "gpu": self._gpu()}

    def versions(self) -> dict[str, str]:
        """Tool versions, plus the driver's, which does not affect the engine."""
        return {**self.tools, **({"driver": self.gpu.driver} if self.gpu else {})}

    def facts(self) -> dict[str, Any]:
        """GPU and parallel mapping."""
        return {"gpu": self._gpu(), "mapping": dict(self.config.content.get("mapping") or {})}

    def _gpu(self) -> dict[str, str] | None:
        return None if self.gpu is None else {"name": self.gpu.name, "sm": self.gpu.capability.replace(".", "")}

    def words(self) -> str:
        """Describe the features beyond plain decoding."""
        return ", ".join(self.features)

    def build_config(self) -> dict[str, Any]:
        """The requested values of `build_config`."""
        return dict(self.expected)

    def config_outline(self) -> dict[str, Any]:
        """The outline with the version, which determines a repository's release."""
        return {"version": self.version, **super().config_outline()}

    def command(self, checkpoint: Path, folder: Path) -> Command:
        """Return the `trtllm-build` command, in its container when one is requested."""
        tool, box = self.tool(checkpoint, folder), self.box(checkpoint, folder)
        return tool if box is None else in_container(tool, box)

    def box(self, checkpoint: Path, folder: Path) -> ContainerRun | None:
        """Return the container of a build, with write access to the engine folder, or None on this machine."""
        if self.container is None:
            return None
        given = (Path(word) for word in self.arguments if word.startswith("/") and Path(word).exists())
        return ContainerRun(
            image=image_of(self.container),
            name=container_name("build"),
            read_only=with_targets((checkpoint, *given)),
            writable=(folder,),
            flags=self.container_flags,
        )

    def tool(self, checkpoint: Path, folder: Path) -> Command:
        """Return `trtllm-build` itself; its timing cache goes next to the engine instead of the current folder."""
        argv = (*self.program, "--checkpoint_dir", str(checkpoint), "--output_dir", str(folder), *self.arguments)
        if "--output_timing_cache" not in self.arguments:
            argv = (*argv, "--output_timing_cache", str(folder / _CACHE))
        argv = (*argv, "--workers", str(self.workers)) if self.workers > 1 else argv
        # The current folder does not exist in a container, and nothing is read from it.
        return Command(argv=argv, cwd=folder if self.container else None)

    @property
    def expected_memory(self) -> int:
        """Estimated memory in bytes to build one rank."""
        return _PROCESS + 2 * (self.rank.loaded + self.rank.kept) if self.rank else 0

    @property
    def peak_memory(self) -> int:
        """Estimated memory in bytes of the ranks built in parallel."""
        return self.workers * self.expected_memory

    def memory_words(self) -> str:
        """Describe the estimated memory; unknown for families that we do not support."""
        if not self.rank:
            return "memory that is not known here"
        at_once = counted(self.workers, "rank")
        return f"about {format_bytes(self.peak_memory)} of memory (an estimate), for {at_once} at a time"

    def build(
        self, checkpoint: Checkpoint, folder: Path, *, log: Path, progress: Progress, seconds: float | None
    ) -> dict[str, Any]:
        """Run `trtllm-build`, report its progress and verify the result; none of its processes outlives this call."""
        if self.gpu is None:
            raise MachineError(
                "trtllm-build needs an NVIDIA GPU of the kind that will serve the engine; nvidia-smi finds none.",
                hint="Build on the GPU machine; `--dry-run` prints the command.",
            )
        here = installed() if self.container is None else None
        if here is not None and here.version != self.version:
            raise UsageError(
                f"{OPTION} is {self.version}, but TensorRT-LLM {here.version} is installed and would build the engine.",
                hint=f"Omit {OPTION}, or build in the --container of that version.",
            )
        source, began = checkpoint.path.absolute(), time.monotonic()
        box = self.box(source, folder)
        command = announce(self.tool(source, folder), box, progress)
        if seconds is not None:
            progress.step(f"It takes about {duration(seconds)}, as earlier builds did.")
        follow = BuildLog(log, self.world_size, progress, seconds=seconds).follow
        run_tool(BUILDER, command, follow=follow, memory=self._memory(), log=log, failure=BuildError, box=box)
        _require_whole(self, checkpoint, folder, log)
        (folder / _CACHE).unlink(missing_ok=True)
        files = [folder / f"rank{rank}.engine" for rank in range(self.world_size)]
        return {
            "command": str(command),
            "log": str(log),
            "build_seconds": round(time.monotonic() - began, 3),
            "engine_bytes": [path.stat().st_size for path in files],
        }

    def _memory(self) -> ToolMemory:
        """Describe the memory of a build, for the error that it ran out."""
        each = f"about {format_bytes(self.expected_memory)} for each rank, {self.workers} at a time"
        one = "Build one rank after another (--workers 1), free" if self.workers > 1 else "Free"
        return ToolMemory(
            words=f"It needs {each} (an estimate), and",
            advice=f"{one} some memory or raise its limit, or convert with a larger --tp-size ({self.parallel} now): "
            "each rank is smaller then.",
            gpu_advice="The GPU is out of memory: free some, or build with smaller --max-batch-size and "
            "--max-num-tokens.",
        )


class TensorrtLlmRuntime(Runtime):
    """TensorRT engines, built by `trtllm-build` and served by the backend of the same release."""

    name = "tensorrt_llm"
    requirements = frozenset({"gpu", "tensorrt_llm", "engines"})
    narrower = "--quantize int8 or int4"

    def plan(self, config: CheckpointConfig, spec: BuildSpec) -> TensorrtPlan:
        """Plan the engine: arguments, limits, memory and disk.

        Raises UsageError for a version without engines and for options that the release lacks, UnsupportedModelError
        for a model that an engine would compute differently.
        """
        self.require_device(spec)
        if problem := superset_problem(config):
            raise UnsupportedModelError(f"{problem.what[0].upper()}{problem.what[1:]}.", hint=problem.fix)
        if spec.kv_precision != "auto":
            raise UsageError(
                f"--kv-precision {spec.kv_precision} is for the openvino and torch runtimes; with TensorRT-LLM the "
                "checkpoint sets the precision of the KV cache.",
                hint="Omit --kv-precision; convert with --quantize fp8 for an FP8 cache.",
            )
        found = (
            _require_installed(spec.trtllm_version)
            if spec.container is None
            else require_installed_in(spec.container, spec.trtllm_version)
        )
        release = require_engine_path(found.version)
        _require_supported(config, release)
        built = build_arguments(release, config, spec)
        rank, gpu = _rank_weights(config), visible_gpu()
        program, notes = _program(found)
        world = config.mapping.ranks
        container = next((each for each in all_containers() if each.tensorrt_llm == found.version), None)
        tools = {
            "tensorrt_llm": found.version,
            "tensorrt": found.tensorrt,
            "cuda": container.cuda if container else None,
        }
        made = TensorrtPlan(
            runtime=self.name,
            config=config,
            limits=built.limits,
            tools={name: version for name, version in tools.items() if version is not None},
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
        told = (parallel, *notes, *_foreign_notes(config, release), *built.notes, *memory_notes)
        # Ranks built in parallel are in memory together.
        return replace(made, workers=workers, memory_bytes=made.memory_bytes * workers, notes=told)


def _require_supported(config: CheckpointConfig, release: str) -> None:
    if problem := gemma.engine_problem(config):
        raise UnsupportedModelError(
            f"{problem[0].upper()}{problem[1:]}: its answers would be wrong.",
            hint="Use --runtime llmapi (TensorRT-LLM's PyTorch backend) on GPUs, or --runtime openvino on this CPU.",
        )
    if problems := model_problems(config, release):
        error = UsageError if problems[0].option else UnsupportedModelError
        raise error(
            f"The checkpoint does not load in TensorRT-LLM {release}: {problems[0].what}.", hint=problems[0].fix
        )


def _foreign_notes(config: CheckpointConfig, release: str) -> Iterator[str]:
    if keys := foreign_keys(config, release):
        yield (
            f"The checkpoint was made for another release: the loader of TensorRT-LLM {release} refuses the keys "
            f"{', '.join(keys)}. `trtserve convert --trtllm-version {release}` makes one without them."
        )


def _require_installed(version: str | None) -> Installed:
    found = installed(version)
    if found is None:
        raise MissingDependencyError(
            "The tensorrt_llm runtime needs TensorRT-LLM, which is not installed.",
            hint=f"Add --container {latest_container().tag}, which runs it in NVIDIA's container "
            f"({latest_container().image}), work in that container, or name the version with {OPTION} to see the "
            "command (--dry-run). --runtime openvino builds for CPUs.",
        )
    return found


def _program(found: Installed) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the builder and a note: the package may be installed without its console script."""
    if process.program(BUILDER) is not None or found.environment is None:
        return (BUILDER,), ()
    note = f"{BUILDER} is not on PATH: its module is run with the Python that has TensorRT-LLM {found.version}."
    return (str(interpreter(found)), "-m", _MODULE), (note,)


def _rank_weights(config: CheckpointConfig) -> RankWeights | None:
    """Return a rank's weights, or None for a family that only NVIDIA's converters support."""
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
    """Return how many ranks to build in parallel, and a note: as many as memory and GPUs allow, or as requested."""
    each, free, gpus = plan.expected_memory, machine.free_memory(), count_gpus()
    fitting = free // each if each else 1  # unknown family: no estimate
    notes = []
    if spec.build_workers is None:
        workers = max(1, min(plan.world_size, gpus, fitting))
        if each and 1 == workers < min(plan.world_size, gpus):
            notes.append(f"One rank after another: memory for two ({format_bytes(2 * each)}) is not free.")
    else:
        workers = min(spec.build_workers, plan.world_size)
        if gpus and workers > gpus:
            notes.append(f"trtllm-build builds {counted(gpus, 'rank')} at once, one on each GPU.")
    if each and fitting < workers:
        notes.append(
            f"Building a rank takes about {format_bytes(each)} of memory (an estimate); {format_bytes(free)} are free."
        )
    return workers, tuple(notes)


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
            f"trtllm-build exited with 0, but its result is not the requested engine: {error.message} Its last "
            f"lines:\n{last_lines(log)}",
            hint=error.hint or "Read the log; the usual cause is too little memory or disk.",
            log=log,
        ) from error


class LlmapiRuntime(Runtime):
    """TensorRT-LLM's LLM API, in a Triton model of its own."""

    name = "llmapi"
    requirements = frozenset({"gpu", "tensorrt_llm", "llm_api"})
    folder_loader = "TensorRT-LLM's PyTorch backend"
