"""The runtime on PyTorch: engines are the checkpoint's own rank files, served by the embedded executor.

It is for NVIDIA GPUs without TensorRT-LLM; `--device cpu` runs the same code in main memory.
"""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtserve.artifacts import Checkpoint
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.checkpoint.architectures import family, parameter_count
from trtserve.checkpoint.memory import (
    ITEM_SIZE,
    PRECISIONS,
    cache_precision,
    kv_bytes_per_token,
    state_bytes,
    torch_step_bytes,
)
from trtserve.checkpoint.quantized import AWQ, FP8, FP8_BY_TOKEN, GPTQ
from trtserve.errors import DiskSpaceError, MissingDependencyError, UnsupportedModelError, UsageError
from trtserve.executor.embedded import (
    EmbeddedPlan,
    EmbeddedRuntime,
    compute_token,
    limits_of,
    resolve_features,
    write_config,
)
from trtserve.host import machine
from trtserve.host.gpus import count_gpus, visible_gpu
from trtserve.host.machine import install_command
from trtserve.nvidia.gpu_findings import FIRST_FP8, missing_fp8
from trtserve.progress import Progress
from trtserve.specs import BuildSpec
from trtserve.specs.build import Device, DeviceName
from trtserve.specs.runtime import (
    CPU_LIMITS,
    GPU_LIMITS,
    WEIGHT_ONLY_INT4,
    WEIGHT_ONLY_INT8,
    EngineNeeds,
    Limits,
    resolve_limits,
)
from trtserve.store import link_or_copy

_LIBRARIES = ("numpy", "torch")
TOKENS_PER_BLOCK = 16
"""Tokens in a block of the KV cache."""

# Python, NumPy and PyTorch on the CPU before the first weight, measured with PyTorch 2.13.
_PROCESS = 260 * 2**20
_CONFIG_BYTES = 2**20
_SUPPORTED = (WEIGHT_ONLY_INT8, WEIGHT_ONLY_INT4, GPTQ, AWQ, FP8, *FP8_BY_TOKEN)


@dataclass(frozen=True, kw_only=True)
class TorchPlan(EmbeddedPlan):
    """An engine for `device`; `torch` is the version that will load it here, which does not determine its content."""

    torch: str

    @property
    def precision(self) -> str:
        compute, kv = self.compute_precision, self.kv_precision
        return (
            f"{self.weights_precision} weights, {compute} arithmetic{' and' if kv == compute else f', {kv}'} KV cache"
        )

    def settings(self) -> dict[str, Any]:
        narrow = {"kv_precision": self.kv_precision} if self.kv_precision != self.compute_precision else {}
        return {**self.features.record(), **narrow, "device": self.device, "tokens_per_block": TOKENS_PER_BLOCK}

    def versions(self) -> dict[str, str]:
        return {"torch": self.torch}

    def own(self) -> dict[str, str]:
        return {"device": self.device}

    def build(
        self, checkpoint: Checkpoint, folder: Path, *, log: Path, progress: Progress, seconds: float | None
    ) -> dict[str, Any]:
        """Write config.json and the rank files, hard links to the checkpoint's, then run a token through them."""
        del log, seconds  # no external program runs, and linking takes no time
        write_config(folder, self.engine_config(tokens_per_block=TOKENS_PER_BLOCK))
        files = [f"rank{rank}.safetensors" for rank in range(self.config.mapping.ranks)]
        _require_room(checkpoint.path, folder, files)
        for name in files:
            link_or_copy(checkpoint.path / name, folder / name)
        progress.step(f"Loading the engine: {self.precision}")
        return {"weights_bytes": sum((folder / name).stat().st_size for name in files), **_prove(folder, len(files))}


class TorchRuntime(EmbeddedRuntime):
    """PyTorch on GPUs, where each rank is a process of its own."""

    name = "torch"
    requirements = EmbeddedRuntime.requirements | {"gpu", "pytorch"}
    extra = "cuda"
    narrower = "--quantize int8 or int4"
    float32_scales = True
    latent_once = True
    fp8_cache = True
    rounds_fp8_inputs = True
    devices = ("cpu", "cuda")
    gpu_limits = GPU_LIMITS

    def matrix_speed(self) -> tuple[float, float]:
        from trtserve.executor.torch.speed import matrix_speed

        return matrix_speed()

    @property
    def keeps_fp8(self) -> bool:
        gpu = visible_gpu()
        return gpu is not None and round(10 * float(gpu.capability)) >= FIRST_FP8

    def device(self, asked: DeviceName | None = None) -> Device:
        return "cpu" if asked == "cpu" else "cuda"

    def plan(self, config: CheckpointConfig, spec: BuildSpec) -> TorchPlan:
        self.require_device(spec)
        device = self.device(spec.device)
        version = _torch_version(device)
        limits = resolve_limits(config, spec, CPU_LIMITS if device == "cpu" else self.gpu_limits)
        if device == "cuda" and not count_gpus():
            raise UsageError(
                "The torch runtime runs on NVIDIA GPUs, and this machine has none.",
                hint="Build on a machine with a GPU, or with --device cpu, which is slow.",
            )
        kv_precision = cache_precision(config, spec.kv_precision)
        _require_supported(config, kv_precision, device)
        features, remarks = resolve_features(config, spec)
        needs = _needs(config, limits, kv_precision) if device == "cpu" else EngineNeeds()
        return TorchPlan(
            runtime=self.name,
            config=config.completed(),
            limits=limits,
            features=features,
            device=device,
            compute_precision=PRECISIONS[config.dtype],
            kv_precision=kv_precision,
            torch=version,
            tools={},
            memory_bytes=needs.build,
            disk_bytes=_CONFIG_BYTES,
            serving_bytes=needs.serving,
            kv_bytes_per_token=needs.kv_per_token,
            libraries=_LIBRARIES,
            notes=remarks,
        )

    def memory_of(self, config: EngineConfig) -> EngineNeeds:
        """Return the needs of an existing engine for the CPU from its `config.json`; 0 for one on GPUs."""
        if config.trtserve.device == "cuda":
            return EngineNeeds()
        return _needs(config.model, limits_of(config), config.trtserve.kv_precision)


def _torch_version(device: Device) -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        without = device == "cuda" and not count_gpus()
        raise MissingDependencyError(
            "The torch runtime needs PyTorch, which is not installed.",
            hint="This machine has no NVIDIA GPU: use --runtime openvino."
            if without
            else install_command(TorchRuntime.extra),
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


def _require_supported(config: CheckpointConfig, kv_precision: str, device: Device) -> None:
    algorithm = config.quantization.algorithm
    if algorithm is not None and algorithm not in _SUPPORTED:
        raise UnsupportedModelError(
            f"The checkpoint is quantised with {algorithm}; the torch runtime runs float weights and "
            f"{', '.join(_SUPPORTED)}.",
            hint="Convert the original model without --quantize, or with --quantize int8 or int4.",
        )
    if algorithm not in (None, FP8) and config.moe.num_experts:
        raise UnsupportedModelError(
            f"The checkpoint is quantised with {algorithm}; the torch runtime runs mixtures of experts with float "
            f"weights and {FP8}.",
            hint="Convert the original model without --quantize.",
        )
    gpu = visible_gpu() if device == "cuda" else None
    cache = kv_precision == "fp8"
    problem = None
    if gpu is not None:
        problem = missing_fp8(config, gpu.name, round(10 * float(gpu.capability)), cache=cache)
    if problem is not None:
        raise UnsupportedModelError(
            problem,
            hint="Convert the original model without --quantize, build without --kv-precision, or use a newer GPU.",
        )
    if config.quantization.kv_cache_quant_algo not in (None, FP8):
        raise UnsupportedModelError(
            f"The checkpoint carries scales for a {config.quantization.kv_cache_quant_algo} KV cache; the torch "
            "runtime uses those for FP8 only.",
            hint="Convert the original model without KV cache quantisation, and build with --kv-precision fp8.",
        )
    own = PRECISIONS[config.dtype]
    if kv_precision not in (own, "fp8"):
        raise UsageError(
            f"--kv-precision {kv_precision}: the torch runtime keeps keys and values in the type of the weights, "
            f"{own}, or in fp8.",
            hint="Leave out --kv-precision, or convert with another --dtype.",
        )
    if cache and family(config.architecture).decoder(config).latent is not None:
        raise UnsupportedModelError(
            f"{config.architecture} has latent attention, whose cache the torch runtime keeps in {own} only.",
            hint="Build without --kv-precision.",
        )


def _needs(config: CheckpointConfig, limits: Limits, kv_precision: str) -> EngineNeeds:
    """Return the memory of an engine on the CPU. The weights stay in the mapped file, which does not count.

    A gated MLP joins two of its matrices, which is a copy.
    """
    item = ITEM_SIZE[config.dtype]
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    gated = family(config.architecture).decoder(config).mlp == "gated"
    held = _PROCESS + (2 * layers * hidden * inner * item if gated else 0)
    return EngineNeeds(
        disk=parameter_count(config) * item,
        build=held,
        serving=held + torch_step_bytes(config, limits) + limits.max_batch_size * state_bytes(config),
        kv_per_token=kv_bytes_per_token(config, kv_precision, latent_once=True),
        libraries=_LIBRARIES,
    )


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


def _prove(folder: Path, ranks: int) -> dict[str, Any]:
    """Check the tensors of every rank, and compute a token where one process is enough; return how long it took."""
    from trtserve.executor.torch.model import check_ranks, load_model

    check_ranks(folder)
    if ranks > 1:
        return {"tokens_per_block": TOKENS_PER_BLOCK}
    started = time.monotonic()
    return compute_token(load_model(folder, None), started)
