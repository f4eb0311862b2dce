"""The interface of a runtime, which turns a checkpoint into an engine or loads a Hugging Face folder as it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from trtserve.artifacts import Checkpoint
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import UsageError
from trtserve.host.machine import format_bytes
from trtserve.process import Command
from trtserve.progress import Progress
from trtserve.specs import BuildSpec, ConvertSpec
from trtserve.specs.build import Device, DeviceName

# TensorRT-LLM's names for weight-only quantisation.
WEIGHT_ONLY_INT8 = "W8A16"
WEIGHT_ONLY_INT4 = "W4A16"
# Quantisation name prefix → storage of the matrices. FP8 is widened on devices without FP8 arithmetic.
_PRECISIONS = (("W8A", "int8"), ("W4A", "int4"), ("FP8", "fp8"))

_UNKNOWN_MAX_POSITION = 2048  # TensorRT-LLM's default for checkpoints without this key
# Scalings whose factor max_position_embeddings already includes, and dynamic scaling, which changes frequencies beyond
# it and does not work in a fixed graph.
_UNSTRETCHED = frozenset({"llama3", "longrope", "su", "dynamic"})
# Families whose max_position_embeddings also includes the factor of linear scaling.
_STRETCHED_ALREADY = frozenset({"Gemma3ForCausalLM"})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of an engine: requests per step, tokens per prompt, tokens per prompt and answer, tokens per step."""

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int


TRTLLM_LIMITS = Limits(max_batch_size=2048, max_input_len=1 << 30, max_seq_len=1 << 30, max_num_tokens=8192)
"""Defaults of the newest trtllm-build, to plan with; a build takes those of its release (`nvidia.build_arguments`)."""
CPU_LIMITS = Limits(max_batch_size=16, max_input_len=4096, max_seq_len=4096, max_num_tokens=2048)
"""Defaults of our own runtimes on CPUs, where larger steps gain nothing; longer contexts must be asked for."""
GPU_LIMITS = Limits(max_batch_size=256, max_input_len=1 << 30, max_seq_len=1 << 30, max_num_tokens=8192)
"""Defaults of our own runtimes on GPUs; the length is the model's."""


@dataclass(frozen=True, kw_only=True)
class EngineNeeds:
    """Memory and disk in bytes of an engine served from main memory: `disk` of its files, `build` the peak of a build.

    `serving` is the serving process's peak after a maximum-size step, without the KV cache, which adds `kv_per_token`
    per token. The build process and the serving process both load `libraries`. All are 0 for an engine served from
    GPUs.
    """

    disk: int = 0
    build: int = 0
    serving: int = 0
    kv_per_token: int = 0
    libraries: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EnginePlan(ABC):
    """An engine before it is built. Runtimes subclass it to add their own settings.

    `tools` maps the packages that determine the engine to their versions; `memory_bytes` and `disk_bytes` are what the
    build requires; `serving_bytes` is the memory of the process that serves it, plus `kv_bytes_per_token` for each
    token in the KV cache; `libraries` are loaded by this process, none when another one builds; `notes` explain the
    decisions.
    """

    timed_stage: ClassVar[str] = "build"
    """Key of the rate at which such builds went, from which the next duration is estimated."""

    runtime: str
    config: CheckpointConfig
    limits: Limits
    tools: Mapping[str, str]
    memory_bytes: int = 0
    disk_bytes: int = 0
    serving_bytes: int = 0
    kv_bytes_per_token: int = 0
    libraries: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def peak_memory(self) -> int:
        """Expected peak memory of the build in bytes; `memory_bytes` is its hard minimum."""
        return self.memory_bytes

    def memory_words(self) -> str:
        """Describe the build's memory."""
        return f"{format_bytes(self.peak_memory)} of memory"

    @property
    def weights_precision(self) -> str:
        """Precision of the layers' matrices: int8, int4, fp8, or the checkpoint's dtype."""
        return weights_precision(self.config)

    @property
    def needs_gpu(self) -> bool:
        """Whether the engine runs on NVIDIA GPUs."""
        return True

    @property
    @abstractmethod
    def precision(self) -> str:
        """Describe the precision of weights, arithmetic and KV cache."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """JSON values that determine the engine besides checkpoint, limits and tools; part of its fingerprint."""

    @abstractmethod
    def words(self) -> str:
        """Describe the features beyond plain decoding, or empty without any."""

    @abstractmethod
    def build_config(self) -> dict[str, Any]:
        """The keys of `build_config` in its `config.json`, besides limits, that a server's settings depend on."""

    @abstractmethod
    def build(
        self, checkpoint: Checkpoint, folder: Path, *, log: Path, progress: Progress, seconds: float | None
    ) -> dict[str, Any]:
        """Write the engine to `folder`, prove that it runs, and return measurements for the manifest.

        External programs write to `log`; `seconds` is the expected duration, None without an earlier build.
        """

    def versions(self) -> dict[str, str]:
        """Tool versions for the manifest, including those that do not determine the engine."""
        return dict(self.tools)

    def facts(self) -> dict[str, Any]:
        """Facts for the manifest besides `settings` and tools."""
        return {}

    def command(self, checkpoint: Path, folder: Path) -> Command | None:
        """Return the command that builds it from `checkpoint` into `folder`, or None."""
        del checkpoint, folder
        return None

    def config_outline(self) -> dict[str, Any]:
        """The part of the engine's future `config.json` that a server's settings depend on."""
        return {
            "pretrained_config": self.config.content,
            "build_config": {**asdict(self.limits), **self.build_config()},
        }


def weights_precision(config: CheckpointConfig) -> str:
    """Describe the precision of the layers' matrices of a checkpoint or engine config."""
    algorithm = str(config.quantization.quant_algo)
    return next((words for start, words in _PRECISIONS if algorithm.startswith(start)), config.dtype)


Requirement = Literal["triton", "gpu", "pytorch", "tensorrt_llm", "engines", "llm_api", "vllm"]
"""What a machine must have: the wheel's Triton and its Python stub; NVIDIA GPUs; PyTorch with CUDA; TensorRT-LLM,
installed or in a container; what builds and serves its engines; the Triton model of its LLM API; vLLM."""


class Runtime:
    """A way to serve models. A new one is a subclass in one file, and one line in `executor.runtimes.RUNTIMES`.

    By itself it loads Hugging Face folders on NVIDIA GPUs. A runtime with engines overrides `plan`, one that serves
    from main memory also `device` and `memory_of`.
    """

    name: ClassVar[str]
    requirements: ClassVar[frozenset[Requirement]]  # what `trtserve doctor` looks for on its behalf
    extra: ClassVar[str] = ""  # extra of trtserve that installs what it needs here
    folder_loader: ClassVar[str] = ""
    """What loads a Hugging Face folder, so that nothing is converted or built; empty for a runtime with engines."""
    folder_as_engine: ClassVar[bool] = False  # whether the Triton models of an engine serve such a folder
    narrower: ClassVar[str] = ""  # options of `convert` with which float weights become smaller in its engines
    float32_scales: ClassVar[bool] = False
    """Whether its engines keep the scales of int8 and int4 codes in float32, those of int4 for each group of inputs."""
    latent_once: ClassVar[bool] = False
    """Whether the cache holds the vector of latent attention once, not as key and again as value."""
    fp8_cache: ClassVar[bool] = False
    """Whether `--kv-precision fp8` is for it."""
    rounds_fp8_inputs: ClassVar[bool] = False
    """Whether the inputs of FP8 matrices are rounded to FP8, whose 3 bits of mantissa count as int8."""
    ranges: ClassVar[Mapping[Device, Mapping[str, tuple[int, ...]]]] = {
        "cpu": {"max_batch_size": (1, 2, 4, 8, 16, 32), "max_num_tokens": (256, 1024, 2048)},
        "cuda": {
            "max_batch_size": (32, 64, 128, 256, 512),
            "max_num_tokens": (2048, 4096, 8192, 16384),
            "tp_size": (1, 2, 4, 8),
        },
    }
    """What `tune` tries unless a setup file says otherwise; nothing that makes answers worse."""
    gpu_limits: ClassVar[Limits] = TRTLLM_LIMITS  # default limits on GPUs; the model may allow less

    devices: ClassVar[tuple[DeviceName, ...]] = ("cuda",)  # what `--device` may be

    def device(self, asked: DeviceName | None = None) -> Device:
        """Return where its engines run when `--device` is `asked`."""
        del asked
        return "cuda"

    def require_model(self, hf: Mapping[str, Any]) -> None:
        """Raise UnsupportedModelError for a model that it cannot load, even if NVIDIA's tools can convert it."""

    def without_unused(self, spec: ConvertSpec) -> ConvertSpec:
        """Return `spec` without the options that a conversion for this runtime does not use."""
        return spec

    @property
    def keeps_fp8(self) -> bool:
        """Whether an import for this machine keeps FP8 codes with scales of channels or blocks."""
        return False

    @property
    def unused_build_options(self) -> tuple[str, ...]:
        """Fields of BuildSpec that it refuses."""
        return ()

    def plan(self, config: CheckpointConfig, spec: BuildSpec) -> EnginePlan:
        """Plan the engine of a checkpoint.

        Raises MissingDependencyError, UnsupportedModelError or UsageError when it cannot be built.
        """
        del config, spec
        raise UsageError(
            f"The {self.name} runtime has no engines: {self.folder_loader} loads the Hugging Face folder, so there is "
            "nothing to convert or build.",
            hint=f"Use `trtserve import MODEL --runtime {self.name}`, which downloads the model and assembles its "
            "repository.",
        )

    def matrix_speed(self) -> tuple[float, float]:
        """Measure bytes/s of weights that are multiplied with one row, and operations/s with many rows.

        Raises UsageError for a runtime whose kernels are not at hand here.
        """
        raise UsageError(
            f"The kernels of the {self.name} runtime cannot be measured alone.",
            hint="Measure `--runtime openvino` or `torch`; without figures `tune` learns from its trials.",
        )

    def memory_of(self, config: EngineConfig) -> EngineNeeds:
        """Return the memory that the engine with this `config.json` needs on this machine."""
        del config
        return EngineNeeds()

    def require_device(self, spec: BuildSpec) -> None:
        """Raise UsageError when `spec` asks for a device that the runtime does not have."""
        if spec.device not in (None, *self.devices):
            other = "torch" if spec.device in ("cpu", "cuda") else "openvino"
            instead = "" if spec.device == "npu" else f", or choose --runtime {other} --device {spec.device}"
            raise UsageError(
                f"--device {spec.device}: the {self.name} runtime takes {', '.join(self.devices)}.",
                hint=f"Leave out --device{instead}.",
            )


def longest_sequence(config: CheckpointConfig) -> int:
    """Return the model's maximum positions: max_position_embeddings, times the factor of linear rope scaling.

    This is TensorRT-LLM's rule for max_seq_len. Scalings that already include their factor are not multiplied, nor is
    dynamic scaling, which rules out a larger --max-seq-len. Configs with yarn say either the original positions or all.
    """
    positions = config.max_position_embeddings or _UNKNOWN_MAX_POSITION
    scaling = config.rotary_scaling or {}
    kind = scaling.get("type") or scaling.get("rope_type")
    if kind == "yarn":
        original = float(scaling.get("original_max_position_embeddings") or positions)
        return max(positions, int(original * float(scaling.get("factor") or 1.0)))
    if kind is None or kind in _UNSTRETCHED or config.architecture in _STRETCHED_ALREADY:
        return positions
    return int(positions * float(scaling.get("factor", 1.0)))


def resolve_limits(config: CheckpointConfig, spec: BuildSpec, defaults: Limits) -> Limits:
    """Return the limits that `spec` requests, checked against the model. Raises UsageError when they do not fit.

    `defaults` are reduced to what the model and the requested limits allow; requested limits never are.
    """
    longest = longest_sequence(config)
    max_seq_len = spec.max_seq_len or min(defaults.max_seq_len, longest)
    if max_seq_len > longest:
        raise UsageError(
            f"--max-seq-len is {max_seq_len}; the model has {longest} positions.",
            hint=f"Choose --max-seq-len {longest} or less.",
        )
    max_input_len = spec.max_input_len or min(defaults.max_input_len, max_seq_len)
    if max_input_len > max_seq_len:
        raise UsageError(
            f"--max-input-len is {max_input_len}, more than --max-seq-len {max_seq_len} (prompt and answer together).",
            hint=f"Choose --max-input-len {max_seq_len} or less, or a larger --max-seq-len.",
        )
    max_batch_size = spec.max_batch_size or defaults.max_batch_size
    least = max_batch_size * spec.max_beam_width
    max_num_tokens = spec.max_num_tokens or max(least, min(defaults.max_num_tokens, max_batch_size * max_seq_len))
    if max_num_tokens < least:
        each = "token" if spec.max_beam_width == 1 else f"token for each of {spec.max_beam_width} beams"
        raise UsageError(
            f"--max-num-tokens is {max_num_tokens}, but each of {max_batch_size} requests needs one {each} per step.",
            hint=f"Choose --max-num-tokens {least} or more, or a smaller --max-batch-size.",
        )
    return Limits(
        max_batch_size=max_batch_size,
        max_input_len=max_input_len,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
    )
