"""What a runtime is: a module that turns a checkpoint into an engine of its kind, and knows the machine it needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from trtserve.artifacts import Checkpoint
from trtserve.errors import UsageError
from trtserve.machine import gibibytes
from trtserve.process import Command
from trtserve.progress import Progress
from trtserve.specs import BuildSpec

CheckpointConfig = Mapping[str, Any]

# TensorRT-LLM's names of weight-only quantisation.
WEIGHT_ONLY_INT8 = "W8A16"
WEIGHT_ONLY_INT4 = "W4A16"
# How the names of quantisations begin, and what matrices are kept as; FP8 is widened where nothing multiplies with it.
_PRECISIONS = (("W8A", "int8"), ("W4A", "int4"), ("FP8", "fp8"))

# Releases of TensorRT-LLM take this where a checkpoint does not say it.
_UNKNOWN_MAX_POSITION = 2048
# Kinds of rotary scaling whose factor is part of max_position_embeddings already, or that change their frequencies
# beyond it (dynamic), which no fixed graph can.
_UNSTRETCHED = frozenset({"llama3", "longrope", "su", "yarn", "dynamic"})
# Families whose max_position_embeddings counts the factor of linear scaling too.
_STRETCHED_ALREADY = frozenset({"Gemma3ForCausalLM"})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of an engine: requests per step, tokens of a prompt, of prompt and answer, and of one step."""

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int


@dataclass(frozen=True, kw_only=True)
class EnginePlan(ABC):
    """An engine before it is built; each runtime adds what it alone knows.

    `tools` maps packages to their versions, as far as they decide the engine; `memory_bytes` and `disk_bytes` are what
    the build needs, `serving_bytes` the memory of the process that serves the engine, beside `kv_bytes_per_token` for
    each token in its cache; `notes` say what was decided.
    """

    runtime: str
    config: CheckpointConfig
    limits: Limits
    tools: Mapping[str, str]
    memory_bytes: int = 0
    disk_bytes: int = 0
    serving_bytes: int = 0
    kv_bytes_per_token: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def peak_memory(self) -> int:
        """Bytes of memory that the build is expected to take; `memory_bytes` are those without which it cannot work."""
        return self.memory_bytes

    def memory_words(self) -> str:
        """Memory of the build in words."""
        return f"{gibibytes(self.peak_memory)} of memory"

    @property
    def weights_precision(self) -> str:
        """Precision of the layers' matrices: int8, int4, fp8, or the checkpoint's dtype."""
        return weights_precision(self.config)

    @property
    @abstractmethod
    def precision(self) -> str:
        """Precision of weights, arithmetic and KV cache in words."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What decides the engine beside checkpoint, limits and tools, as JSON holds it: part of its fingerprint."""

    @abstractmethod
    def words(self) -> str:
        """What the engine is built for beyond plain decoding; empty when nothing is."""

    @abstractmethod
    def build_config(self) -> dict[str, Any]:
        """The keys of `build_config` in its `config.json`, beside limits, that decide the settings of a server."""

    def versions(self) -> dict[str, str]:
        """What its manifest records of tools: those that decide it, and others that were there."""
        return dict(self.tools)

    def facts(self) -> dict[str, Any]:
        """What its manifest says of it beside `settings` and tools."""
        return {}

    def command(self, checkpoint: Path, folder: Path) -> Command | None:
        """The program that builds it from `checkpoint` into `folder`; None when none is run."""
        del checkpoint, folder
        return None

    def config_outline(self) -> dict[str, Any]:
        """What decides the settings of a server in the `config.json` that the engine will have."""
        return {
            "pretrained_config": dict(self.config),
            "build_config": {**asdict(self.limits), **self.build_config()},
        }


def weights_precision(config: CheckpointConfig) -> str:
    """Precision of the layers' matrices of a checkpoint or engine with this config, in words."""
    algorithm = str((config.get("quantization") or {}).get("quant_algo"))
    return next((words for start, words in _PRECISIONS if algorithm.startswith(start)), str(config["dtype"]))


P = TypeVar("P", bound=EnginePlan)


class Runtime(Protocol[P]):
    """One module per runtime."""

    NAME: str

    def plan(self, config: CheckpointConfig, spec: BuildSpec) -> P:
        """Limits and settings of the engine of a checkpoint.

        MissingDependencyError, UnsupportedModelError or UsageError when it cannot be built.
        """

    def build(
        self, plan: P, checkpoint: Checkpoint, folder: Path, *, log: Path, progress: Progress, seconds: float | None
    ) -> dict[str, Any]:
        """Fill `folder` with the engine, prove that it is one, and return what was measured.

        A program that is run writes to `log`; `seconds` is how long an earlier build lets expect, None without one.
        """


def longest_sequence(config: CheckpointConfig) -> int:
    """Positions that the model can tell apart: max_position_embeddings, times the factor of linear rope scaling.

    TensorRT-LLM's rule for max_seq_len (`trtllm-build`); scalings that count their factor in already are left alone,
    and so is dynamic scaling, for which a longer --max-seq-len is refused.
    """
    positions = int(config.get("max_position_embeddings") or _UNKNOWN_MAX_POSITION)
    scaling = config.get("rotary_scaling") or {}
    kind = scaling.get("type") or scaling.get("rope_type")
    if kind is None or kind in _UNSTRETCHED or config.get("architecture") in _STRETCHED_ALREADY:
        return positions
    return int(positions * float(scaling.get("factor", 1.0)))


def resolve_limits(config: CheckpointConfig, spec: BuildSpec, defaults: Limits) -> Limits:
    """The limits that `spec` asks for, checked against the model and each other; UsageError with the numbers.

    `defaults` are cut to what the model and the given limits allow, the given limits never are.
    """
    longest = longest_sequence(config)
    max_seq_len = spec.max_seq_len or min(defaults.max_seq_len, longest)
    if max_seq_len > longest:
        raise UsageError(
            f"--max-seq-len is {max_seq_len}; the model knows {longest} positions.",
            hint=f"Choose --max-seq-len {longest} or less.",
        )
    max_input_len = spec.max_input_len or min(defaults.max_input_len, max_seq_len)
    if max_input_len > max_seq_len:
        raise UsageError(
            f"--max-input-len is {max_input_len}, more than the {max_seq_len} tokens of prompt and answer together.",
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
