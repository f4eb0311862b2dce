"""The runtime on PyTorch: engines are the checkpoint's own rank files, served by the embedded executor.

It is for NVIDIA GPUs without TensorRT-LLM; `--device cpu` runs the same code in main memory.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtserve.artifacts import Checkpoint
from trtserve.checkpoint.architectures import family, parameter_count
from trtserve.checkpoint.quantized import FP8, quant_algo
from trtserve.checkpoint.unified import with_defaults
from trtserve.errors import (
    BuildError,
    DiskSpaceError,
    MissingDependencyError,
    UnsupportedModelError,
    UsageError,
)
from trtserve.executor.embedded_config import embedded_config, write_config
from trtserve.executor.features import Features, resolve_features
from trtserve.executor.openvino.memory import kv_bytes_per_token
from trtserve.host import machine
from trtserve.host.gpus import count_gpus, visible_gpu
from trtserve.host.install_command import install_command
from trtserve.progress import Progress
from trtserve.repository.core_models import world_size
from trtserve.specs import BuildSpec
from trtserve.specs.build import Device
from trtserve.specs.runtime import (
    CheckpointConfig,
    EngineNeeds,
    EnginePlan,
    Limits,
    resolve_limits,
)
from trtserve.store import link_or_copy

NAME = "torch"
EMBEDDED = True
HAS_ENGINES = True
NEEDS_GPU = True
_ON_GPU = Limits(max_batch_size=256, max_input_len=1 << 30, max_seq_len=1 << 30, max_num_tokens=8192)
QUANTIZES = False
GPU_LIMITS: Limits | None = _ON_GPU
EXTRA = "cuda"
LIBRARIES: tuple[str, ...] = ("numpy", "torch")
TIMED_STAGE = "build"

TOKENS_PER_BLOCK = 16
"""Tokens in a block of the KV cache."""

# The CPU is for tests, where small steps are enough.
_ON_CPU = Limits(max_batch_size=16, max_input_len=4096, max_seq_len=4096, max_num_tokens=2048)
_PRECISIONS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
# Python, NumPy and PyTorch on the CPU before the first weight, measured with PyTorch 2.13.
_PROCESS = 260 * 2**20
_CONFIG_BYTES = 2**20
# Compute capability from which GPUs multiply FP8 numbers.
_FIRST_FP8 = 8.9


@dataclass(frozen=True, kw_only=True)
class TorchPlan(EnginePlan):
    """An engine for `device`; `torch` is the version that will load it here, which does not determine its content."""

    features: Features
    device: Device
    torch: str

    @property
    def compute_precision(self) -> str:
        """Type of arithmetic, keys and values."""
        return _PRECISIONS[self.config["dtype"]]

    @property
    def needs_gpu(self) -> bool:
        """Whether the engine runs on NVIDIA GPUs."""
        return self.device == "cuda"

    @property
    def precision(self) -> str:
        """Describe the precision of weights, arithmetic and KV cache."""
        return f"{self.weights_precision} weights, {self.compute_precision} arithmetic and KV cache"

    def settings(self) -> dict[str, Any]:
        """Features and device."""
        return {**self.features.record(), "device": self.device, "tokens_per_block": TOKENS_PER_BLOCK}

    def words(self) -> str:
        """Describe the features beyond plain decoding."""
        return self.features.words()

    def build_config(self) -> dict[str, Any]:
        """The features' keys of `build_config`."""
        return {**self.features.build_config(), "plugin_config": self.features.plugin_config()}

    def versions(self) -> dict[str, str]:
        """The PyTorch here."""
        return {"torch": self.torch}

    def facts(self) -> dict[str, Any]:
        """The machine and the precision."""
        return {"machine": machine.describe(), **self._precisions()}

    def config_outline(self) -> dict[str, Any]:
        """The outline plus the part specific to our engines."""
        own = {"runtime": self.runtime, "device": self.device, **self._precisions()}
        return {**super().config_outline(), "trtserve": own}

    def engine_config(self) -> dict[str, Any]:
        """Return the engine's `config.json`."""
        decoder = family(self.config["architecture"]).decoder(self.config)
        own = {
            "runtime": NAME,
            "torch": self.torch,
            "device": self.device,
            **self._precisions(),
            "windows": list(decoder.windows),
            "mlp": decoder.mlp,
            "machine": machine.describe(),
        }
        return embedded_config(self.config, self.limits, self.features, tokens_per_block=TOKENS_PER_BLOCK, own=own)

    def _precisions(self) -> dict[str, str]:
        return {"compute_precision": self.compute_precision, "kv_precision": self.compute_precision}


def plan(config: CheckpointConfig, spec: BuildSpec) -> TorchPlan:
    """Plan the engine: device, limits, precision, memory and disk."""
    version, device = _torch_version(), spec.device or "cuda"
    if device == "cuda" and not count_gpus():
        raise UsageError(
            "The torch runtime runs on NVIDIA GPUs, and this machine has none.",
            hint="Build on a machine with a GPU, or with --device cpu, which is slow.",
        )
    config = with_defaults(dict(config))
    _require_supported(config, spec, device)
    features, remarks = resolve_features(config, spec)
    limits = resolve_limits(config, spec, _ON_CPU if device == "cpu" else _ON_GPU)
    needs = _needs(config, limits) if device == "cpu" else EngineNeeds(disk=0, build=0, serving=0, kv_per_token=0)
    return TorchPlan(
        runtime=NAME,
        config=config,
        limits=limits,
        features=features,
        device=device,
        torch=version,
        tools={},
        memory_bytes=needs.build,
        disk_bytes=_CONFIG_BYTES,
        serving_bytes=needs.serving,
        kv_bytes_per_token=needs.kv_per_token,
        notes=remarks,
    )


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise MissingDependencyError(
            "The torch runtime needs PyTorch, which is not installed.", hint=install_command(EXTRA)
        ) from None


def cuda_version() -> str | None:
    """Return the CUDA version that the installed PyTorch is built for, or None without it. Imports nothing."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    version = re.search(r"^cuda.*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return version and version[1]


def _require_supported(config: CheckpointConfig, spec: BuildSpec, device: Device) -> None:
    algorithm = quant_algo(config)
    if algorithm not in (None, FP8):
        raise UnsupportedModelError(
            f"The checkpoint is quantised with {algorithm}; the torch runtime runs float weights and {FP8}.",
            hint="Convert the original model without --quantize.",
        )
    gpu = visible_gpu() if device == "cuda" else None
    if algorithm == FP8 and gpu is not None and float(gpu.capability) < _FIRST_FP8:
        raise UnsupportedModelError(
            f"The checkpoint is quantised with {FP8}, which needs a GPU of compute capability {_FIRST_FP8} or later; "
            f"{gpu.name} has {gpu.capability}.",
            hint="Convert the original model without --quantize, or use a newer GPU.",
        )
    if (config.get("quantization") or {}).get("kv_cache_quant_algo") is not None:
        raise UnsupportedModelError(
            "The checkpoint carries scales for a quantised KV cache, which the torch runtime does not use.",
            hint="Convert the original model without KV cache quantisation.",
        )
    own = _PRECISIONS[config["dtype"]]
    if spec.kv_precision not in ("auto", own):
        raise UsageError(
            f"--kv-precision {spec.kv_precision}: the torch runtime keeps keys and values in the type of the weights, "
            f"{own}.",
            hint="Leave out --kv-precision, or convert with another --dtype.",
        )


def needs_of(config: Mapping[str, Any]) -> EngineNeeds | None:
    """Return the needs of an existing engine for the CPU from its `config.json`, or None for one on GPUs."""
    if config["trtserve"]["device"] == "cuda":
        return None
    build = config["build_config"]
    limits = Limits(**{name: int(build[name]) for name in Limits.__dataclass_fields__})
    return _needs(with_defaults(dict(config["pretrained_config"])), limits)


def _needs(config: CheckpointConfig, limits: Limits) -> EngineNeeds:
    """Return the memory of an engine on the CPU. The weights stay in the mapped file, which does not count.

    A gated MLP joins two of its matrices, which is a copy. A step has the scores of all heads, and values of the widths
    of model and MLP, in float32.
    """
    item, tokens = _ITEM_SIZE[config["dtype"]], limits.max_num_tokens
    hidden, inner, layers = (int(config[key]) for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    gated = family(config["architecture"]).decoder(config).mlp == "gated"
    joined = 2 * layers * hidden * inner * item if gated else 0
    scores = 3 * int(config["num_attention_heads"]) * tokens * limits.max_seq_len
    step = 4 * (scores + tokens * (4 * hidden + 4 * inner) + limits.max_batch_size * int(config["vocab_size"]))
    return EngineNeeds(
        disk=parameter_count(config) * item,
        build=_PROCESS + joined,
        serving=_PROCESS + joined + step,
        kv_per_token=kv_bytes_per_token(config, _PRECISIONS[config["dtype"]]),
    )


def build(
    plan: TorchPlan, checkpoint: Checkpoint, folder: Path, *, log: Path, progress: Progress, seconds: float | None
) -> dict[str, Any]:
    """Write config.json and the rank files, which are hard links to the checkpoint's, then run a token through them."""
    del log, seconds  # no external program runs, and linking takes no time
    config = plan.engine_config()
    write_config(folder, config)
    files = [f"rank{rank}.safetensors" for rank in range(world_size(config))]
    _require_room(checkpoint.path, folder, files)
    for name in files:
        link_or_copy(checkpoint.path / name, folder / name)
    progress.step(f"Loading the engine: {plan.precision}")
    return {"weights_bytes": sum((folder / name).stat().st_size for name in files), **_prove(folder, plan)}


def _require_room(source: Path, folder: Path, files: list[str]) -> None:
    """Raise DiskSpaceError when the files must be copied to another file system that is too small."""
    if source.stat().st_dev == folder.stat().st_dev:
        return
    needed, free = sum((source / name).stat().st_size for name in files), shutil.disk_usage(folder).free
    if needed > free:
        raise DiskSpaceError(
            f"The weights in {source} must be copied, because {folder.parent} is on another file system: they take "
            f"{machine.format_bytes(needed)}, and {machine.format_bytes(free)} are free.",
            hint="Build on the file system of the checkpoint, or free some space.",
        )


def _prove(folder: Path, plan: TorchPlan) -> dict[str, Any]:
    """Check the tensors of every rank, and compute a token where one process is enough; return how long it took."""
    import numpy as np

    from trtserve.executor.torch.model import check_ranks, load_model

    check_ranks(folder)
    facts = {"tokens_per_block": TOKENS_PER_BLOCK}
    if world_size({"pretrained_config": plan.config}) > 1:
        return facts
    started = time.monotonic()
    model = load_model(folder, None)
    model.allocate(1)
    logits = model.forward(
        token_ids=np.zeros(1, dtype=np.int64),
        positions=np.zeros(1, dtype=np.int64),
        past_lens=np.zeros(1, dtype=np.int32),
        subsequence_begins=np.array([0, 1], dtype=np.int32),
        block_indices=np.zeros(1, dtype=np.int32),
        block_indices_begins=np.array([0, 1], dtype=np.int32),
        max_context_len=1,
        rows=np.zeros(1, dtype=np.int32),
    )
    if not np.isfinite(logits).all():
        raise BuildError(
            "The engine computes non-finite logits.",
            hint="The weights overflow in this precision or are damaged; convert with another --dtype.",
        )
    return {
        **facts,
        "load_seconds": round(time.monotonic() - started, 3),
        "kv_bytes_per_token": model.bytes_per_block // model.tokens_per_block,
    }
