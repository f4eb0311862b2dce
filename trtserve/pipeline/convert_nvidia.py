"""Conversions by NVIDIA's tools, published like our own ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from trtserve.artifacts import Model
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint import architectures
from trtserve.checkpoint.architectures import FAMILIES
from trtserve.checkpoint.tensor_files import CODES, numpy_dtype
from trtserve.errors import ConversionError, UnsupportedModelError, UsageError
from trtserve.host.machine import format_bytes, require_disk, require_memory
from trtserve.nvidia.containers import ContainerRun, ToolMemory, container_name, image_of, in_container, with_targets
from trtserve.nvidia.converters import Toolkit, find_toolkit, needs_calibration, run_converter, tool_command
from trtserve.pipeline import MANIFEST_BYTES, StageNeeds
from trtserve.pipeline.checkpoint_config import expected_config, resolve_dtype
from trtserve.pipeline.convert_own import smaller_checkpoint
from trtserve.process import Command
from trtserve.progress import Progress
from trtserve.specs import ConvertSpec
from trtserve.store import Store

# Flags that stop convert_checkpoint.py from loading the whole model.
_LOADS_LESS = ("--load_by_shard", "--save_config_only")


@dataclass(frozen=True, kw_only=True)
class NvidiaConversion:
    """A conversion by NVIDIA's convert_checkpoint.py or ModelOpt, published only when complete and quantised as asked.

    What it writes is estimated.
    """

    BY_NVIDIA: ClassVar[bool] = True

    asked: ConvertSpec  # as the user gave it
    spec: ConvertSpec  # with dtype decided
    model: Path  # folder of the model
    config: CheckpointConfig
    sizes: Sequence[int]  # bytes of each rank's file
    toolkit: Toolkit
    left_out: ClassVar[Sequence[str]] = ()
    largest_tensor: ClassVar[int] = 0

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the checkpoint, besides the model."""
        where = ("container", "container_flags", "trtllm_version", "trtllm_examples", "ignore_tensors", "keep_fp8")
        settings = {key: value for key, value in all_settings(self.spec).items() if key not in where}
        return {"spec": {**settings, "trtllm_examples": None}, "tool": self.toolkit.version}

    @property
    def source(self) -> str:
        """What is converted, in words."""
        return "by NVIDIA's tool"

    def needs(self, store: Store) -> StageNeeds:
        """Return the disk that the checkpoint takes."""
        return StageNeeds(stage="convert", disk=sum(self.sizes) + MANIFEST_BYTES, memory=None, seconds=None)

    def command(self, folder: Path) -> Command:
        """Return the command that writes the checkpoint to `folder`."""
        command, box = self._command(folder)
        return command if box is None else in_container(command, box)

    def recorded(self) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
        """Return the settings, tools and facts of the checkpoint's manifest."""
        return all_settings(self.spec), {"tensorrt_llm": self.toolkit.version}, {}

    def report(self, progress: Progress, *, reused: bool) -> None:
        """Report what a user may not expect."""
        if self.asked.gpu_sm != ConvertSpec().gpu_sm:
            progress.step("--gpu-sm makes no difference: it orders 4-bit weights (AWQ, GPTQ), and this model has none")

    def write(
        self, folder: Path, store: Store, log: Path, progress: Progress
    ) -> tuple[CheckpointConfig, dict[str, Any]]:
        """Fill `folder`; return the checkpoint's config, and facts for its manifest."""
        smaller = smaller_checkpoint(self.spec.dtype)
        if self.spec.quantize == "none":
            smaller = f"{smaller} --quantize int8 or int4 makes it smaller.".lstrip()
        require_disk(folder.parent, sum(self.sizes), "The checkpoint", smaller=smaller)
        self._require_memory()
        command, box = self._command(folder)
        ranks = len(self.sizes)
        config = run_converter(
            command, folder, world_size=ranks, memory=self._memory(), log=log, progress=progress, box=box
        )
        if self.spec.quantize != "none" and config.quantization.algorithm is None:
            raise ConversionError(
                f"--quantize {self.spec.quantize} was asked for, but the checkpoint is not quantised.",
                hint="The log has the reason.",
                log=log,
            )
        ran = command if box is None else in_container(command, box)
        size = sum(path.stat().st_size for path in folder.glob("rank*.safetensors"))
        return config, {"command": str(ran), "log": str(log), "bytes": size}

    def _command(self, folder: Path) -> tuple[Command, ContainerRun | None]:
        source = self.model.absolute()
        command = tool_command(self.toolkit, self.spec, self.config.architecture, source, folder)
        if self.toolkit.container is None:
            return command, None
        given = (Path(text) for text in (self.spec.calib_dataset or "",) if Path(text).is_absolute())
        mounted = () if self.toolkit.mounted is None else (self.toolkit.mounted,)
        box = ContainerRun(
            image=image_of(self.toolkit.container),
            name=container_name("convert"),
            read_only=with_targets((source, *mounted, *given)),
            writable=(folder,),
            flags=self.spec.container_flags,
        )
        return replace(command, cwd=folder), box

    @property
    def _parallel_ranks(self) -> int:
        return min(self.spec.workers or 1, len(self.sizes))

    def _require_memory(self) -> None:
        """Raise MemoryLimitError before the tool would be killed, unless it calibrates on a GPU or loads less."""
        if needs_calibration(self.spec) or any(flag in _LOADS_LESS for flag in self.spec.converter_flags):
            return
        parallel, rank = self._parallel_ranks, self.sizes[0]

        def advice(free: int) -> str:
            fitting = min(parallel, (free - sum(self.sizes)) // rank) if rank else 0
            fewer = f"--workers {fitting} fits. Else: " if 0 < fitting < parallel else ""
            own = "--converter own takes one tensor at a time; " if self.config.architecture in FAMILIES else ""
            return (
                f"{fewer}{own}--converter-flag=--load_by_shard, where the script has it, loads one file after another."
            )

        require_memory(
            sum(self.sizes) + parallel * rank,
            f"NVIDIA's converter holds the whole model, {format_bytes(sum(self.sizes))}, and {parallel} of the "
            f"ranks that it "
            f"makes, {format_bytes(rank)} each: it needs",
            advice,
        )

    def _memory(self) -> ToolMemory:
        parallel, rank = self._parallel_ranks, self.sizes[0]
        sizes = f", {format_bytes(sum(self.sizes))}," if rank else ""
        each = f", {format_bytes(rank)} each, {parallel} at a time (estimates);" if rank else ";"
        own = " --converter own takes one tensor at a time." if rank and not needs_calibration(self.spec) else ""
        fewer = "Convert one rank after another (--workers 1), free" if parallel > 1 else "Free"
        return ToolMemory(
            words=f"It holds the whole model{sizes} and the ranks that it makes{each}",
            advice=f"{fewer} some memory or raise its limit.{own}",
            gpu_advice="The GPU ran out of memory: free some, or use a larger GPU.",
        )


def plan_nvidia_conversion(model: Model, spec: ConvertSpec, hf: Mapping[str, Any]) -> NvidiaConversion:
    """Find NVIDIA's tool, check its options, and estimate what it will write."""
    asked = spec
    if spec.ignore_tensors:
        raise UsageError(
            "--ignore-tensors is for our own converter; NVIDIA's skip every tensor that they do not know.",
            hint="Leave it out.",
        )
    if spec.keep_fp8:
        raise UsageError("--keep-fp8 is for our own converter; NVIDIA's decides itself.", hint="Leave it out.")
    toolkit = find_toolkit(
        calibrated=needs_calibration(spec),
        examples=spec.trtllm_examples,
        container=spec.container,
        version=spec.trtllm_version,
    )
    spec = replace(spec, dtype=resolve_dtype(spec, hf))
    tool_command(toolkit, spec, architectures.architecture_of(hf), model.path, model.path)
    config = expected_config(hf, spec)
    try:
        size = architectures.parameter_count(config) * numpy_dtype(CODES[config.dtype]).itemsize
    except UnsupportedModelError:
        size = 0
    ranks = spec.ranks
    return NvidiaConversion(
        asked=asked, spec=spec, model=model.path, config=config, sizes=[size // ranks] * ranks, toolkit=toolkit
    )


def all_settings(spec: ConvertSpec) -> dict[str, Any]:
    """Return the fields of `spec` as JSON."""
    examples = str(spec.trtllm_examples) if spec.trtllm_examples else None
    lists = {name: list(getattr(spec, name)) for name in ("converter_flags", "container_flags", "ignore_tensors")}
    return {**asdict(spec), "trtllm_examples": examples, **lists}
