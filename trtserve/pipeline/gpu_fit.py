"""How a model fits NVIDIA GPUs: weights per rank, KV cache, the smallest tp and pp; a guard and notes about that.

These are estimates from shapes, not measurements. Weights and KV cache follow from the checkpoint's format; activations
are those of the widest layer, which later layers reuse.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import checkpoint_targets
from trtserve.checkpoint.architectures.gemma import engine_problem
from trtserve.checkpoint.memory import cache_precision, gpu_step_bytes, kv_bytes_per_token, rank_weights
from trtserve.checkpoint.quantized import GPTQ, HOPPER, is_excluded
from trtserve.checkpoint.quantized_tensors import is_packed, require_divisible
from trtserve.checkpoint.sharding import check_parallel_sizes
from trtserve.errors import MemoryLimitError, UnsupportedModelError, UsageError, counted
from trtserve.executor.engine.limits import DEFAULT_DEVICE_FRACTION
from trtserve.executor.runtimes import RUNTIMES, step_flags, usual_steps
from trtserve.host.gpus import gpus_now, list_gpus, visible_devices, visible_gpu
from trtserve.host.machine import format_bytes
from trtserve.nvidia.gpu_findings import capability_words, kernels_note, larger_than_a_gpu
from trtserve.nvidia.releases.loaders import superset_problem
from trtserve.progress import SILENT, Progress
from trtserve.specs import BuildSpec
from trtserve.specs.runtime import TRTLLM_LIMITS, EnginePlan, Limits, resolve_limits

RESERVE = 2**30  # reserved for the CUDA context, libraries and NCCL's buffers: an allowance, not a measurement
# TensorRT-LLM's default of kv_cache_free_gpu_mem_fraction: the share of memory left after loading the engine.
FREE_FRACTION = 0.9
_BLOCK = 32
_GPUS_PER_NODE = 8
# GPU counts of common machines, and sizes that divide the heads and layers of some models only.
_WORLDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
_PARALLEL_SIZES = [
    (size, world // size) for world in _WORLDS for size in range(min(world, _GPUS_PER_NODE), 0, -1) if world % size == 0
]


@dataclass(frozen=True, kw_only=True)
class GpuFit:
    """The largest rank: bytes of `weights` and `activations`, `kv_per_token`, and the tokens that fit.

    Adapters may take `adapter_memory` bytes of what the cache leaves. `sequences` have `limits.max_seq_len` tokens. All
    ranks cache the same tokens.
    """

    gpu: Gpu
    tp_size: int
    pp_size: int
    limits: Limits
    weights: int
    activations: int
    kv_per_token: int
    tokens: int
    adapter_memory: int

    @property
    def ranks(self) -> int:
        """GPUs that share the model."""
        return self.tp_size * self.pp_size

    @property
    def sequences(self) -> int:
        """Longest sequences that the cache holds at once."""
        return self.tokens // self.limits.max_seq_len

    @property
    def fits(self) -> bool:
        """True when at least one longest sequence fits."""
        return self.sequences > 0


def fit_gpu(config: CheckpointConfig, spec: BuildSpec, gpu: Gpu) -> GpuFit:
    """Return what a checkpoint `config`, with its mapping, needs on each of its GPUs."""
    tp_size, pp_size = config.mapping.tp_size, config.mapping.pp_size
    limits, runtime = _limits(config, spec), RUNTIMES.get(spec.runtime)
    scales, once = (False, False) if runtime is None else (runtime.float32_scales, runtime.latent_once)
    weights = rank_weights(config, float32_scales=scales).kept
    activations = gpu_step_bytes(config, limits, tp_size)
    precision = cache_precision(config, spec.kv_precision)
    per_token = kv_bytes_per_token(config, precision, tp_size=tp_size, pp_size=pp_size, latent_once=once)
    free = max(0, gpu.memory - RESERVE - weights - activations)
    return GpuFit(
        gpu=gpu,
        tp_size=tp_size,
        pp_size=pp_size,
        limits=limits,
        weights=weights,
        activations=activations,
        kv_per_token=per_token,
        tokens=int(FREE_FRACTION * free) // per_token // _BLOCK * _BLOCK,
        adapter_memory=0 if spec.lora_plugin == "disable" else int(DEFAULT_DEVICE_FRACTION * free),
    )


def smallest_fit(config: CheckpointConfig, spec: BuildSpec, gpu: Gpu) -> GpuFit | None:
    """Return the fewest GPUs that serve one longest sequence, preferring tensor parallelism within a node."""
    for tp_size, pp_size in _PARALLEL_SIZES:
        try:
            check_parallel_sizes(config, tp_size, pp_size)
            if config.quantization.algorithm == GPTQ:
                targets = checkpoint_targets(config)
                packed = (target for target in targets if is_packed(target) and not is_excluded(config, target))
                require_divisible(packed, config.quantization.group_size, tp_size)
        except UsageError:
            continue
        asked = config.mapping.moe_ep_size
        shares = asked if tp_size % asked == 0 else 1
        mapping = {
            **(config.content.get("mapping") or {}),
            "moe_tp_size": tp_size // shares,
            "moe_ep_size": shares,
            "tp_size": tp_size,
            "pp_size": pp_size,
            "world_size": tp_size * pp_size,
        }
        fit = fit_gpu(config.changed(mapping=mapping), spec, gpu)
        if fit.fits:
            return fit
    return None


def fitting_step(config: CheckpointConfig, spec: BuildSpec, gpu: Gpu) -> str | None:
    """Return the closest --max-batch-size and --max-num-tokens with which one sequence fits, or None."""
    limits, beams = _limits(config, spec), spec.max_beam_width
    asked = limits.max_batch_size, limits.max_num_tokens
    for batch, tokens in usual_steps(*asked, beams=beams):
        if fit_gpu(config, replace(spec, max_batch_size=batch, max_num_tokens=tokens), gpu).fits:
            return step_flags(asked, (batch, tokens))
    return None


def shorter_fit(config: CheckpointConfig, spec: BuildSpec, gpu: Gpu) -> int | None:
    """Return the longest --max-seq-len with which one sequence fits, or None when not even one block does."""
    fit = fit_gpu(config, replace(spec, max_seq_len=None, max_input_len=None), gpu)
    return min(fit.tokens, fit.limits.max_seq_len) or None


def _limits(config: CheckpointConfig, spec: BuildSpec) -> Limits:
    chosen = RUNTIMES.get(spec.runtime)
    return resolve_limits(config, spec, TRTLLM_LIMITS if chosen is None else chosen.gpu_limits)


def require_gpu_memory(engine: EnginePlan, spec: BuildSpec, progress: Progress = SILENT) -> None:
    """Raise MemoryLimitError when the weights of one rank exceed the largest GPU here.

    That much is certain. Everything beyond the weights is an estimate, so a cache too small for one sequence is only
    reported. Engines that stream weights from the host and unknown families are not checked.
    """
    if not engine.needs_gpu or "--weight_streaming" in spec.builder_flags:
        return
    memory = max((gpu.memory for gpu in list_gpus()), default=0)
    if not memory:
        return
    gpu = Gpu(name="this machine's GPU", memory=memory)
    try:
        fit = fit_gpu(engine.config, spec, gpu)
    except UnsupportedModelError:
        return
    ranks = fit.ranks
    subject = "The engine" if ranks == 1 else f"Each of {ranks} ranks"
    if (problem := larger_than_a_gpu(subject, fit.weights, memory)) is not None:
        raise MemoryLimitError(problem, hint=f"{_narrower(engine, spec, gpu)} `trtserve plan` shows the details.")
    if not fit.fits:
        step = fitting_step(engine.config, spec, gpu)
        progress.step(
            f"An estimate: no sequence of {fit.limits.max_seq_len} tokens fits this machine's GPU next to "
            f"{format_bytes(fit.weights)} of weights and {format_bytes(fit.activations)} of activations. "
            + (f"{step} would fit." if step else _narrower(engine, spec, gpu))
        )


def _narrower(engine: EnginePlan, spec: BuildSpec, gpu: Gpu) -> str:
    """Name conversion options whose ranks are small enough."""
    smallest = smallest_fit(engine.config, spec, gpu)
    ways = [f"--tp-size {smallest.tp_size} --pp-size {smallest.pp_size} would fit by estimate"] if smallest else []
    if engine.config.quantization.algorithm is None and (narrower := RUNTIMES[engine.runtime].narrower):
        ways.append(f"{narrower} makes the weights smaller")
    return f"Convert with one of: {', '.join(ways)}." if ways else "Use a GPU with more memory, or a smaller model."


def gpu_notes(config: CheckpointConfig, asked: GpuFit, gpu: Gpu) -> Iterator[str]:
    ranks = asked.ranks
    if gpu.here is not None and gpu.here < ranks:
        yield f"{ranks} ranks; {counted(gpu.here, 'GPU')} can be seen"
    # The layout of 4-bit weights depends on the GPU generation; the default is Ampere's.
    if config.quantization.algorithm == GPTQ and gpu.sm is not None and gpu.sm >= HOPPER:
        yield f"convert with --gpu-sm {gpu.sm}, which the order of 4-bit weights depends on"
    if beyond := superset_problem(config):
        yield f"{beyond.what}: take --runtime torch or vllm"
    if problem := engine_problem(config):
        yield f"{problem}: take --runtime llmapi"
    if gpu.sm is not None and (note := kernels_note(gpu.name, capability_words(gpu.sm))):
        yield note


_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A kind of GPU: `memory` is the total in bytes available to programs, excluding ECC.

    `sm` is its compute capability × 10, or None when only a memory size was given. `here` is the number of GPUs of this
    machine if it is one of them, and then `memory` is its free memory.
    """

    name: str
    memory: int
    sm: int | None = None
    here: int | None = None


# MiB of `memory.total` in nvidia-smi (ECC and the driver may reduce the advertised size), and the compute capability.
_TABLE = {
    "t4-16gb": (15360, 75),
    "v100-16gb": (16384, 70),
    "v100-32gb": (32768, 70),
    "a10-24gb": (23028, 86),
    "a10g-24gb": (23028, 86),
    "l4-24gb": (23034, 89),
    "a30-24gb": (24576, 80),
    "a2-16gb": (15356, 86),
    "rtx4060ti-16gb": (16380, 89),
    "rtx4070-12gb": (12282, 89),
    "rtx4080-16gb": (16376, 89),
    "rtx5070-12gb": (12227, 120),
    "rtx5070ti-16gb": (16303, 120),
    "rtx5080-16gb": (16303, 120),
    "rtx3090-24gb": (24576, 86),
    "rtx4090-24gb": (24564, 89),
    "rtx5090-32gb": (32607, 120),
    "a40-48gb": (46068, 86),
    "l20-48gb": (46068, 89),
    "l40-48gb": (46068, 89),
    "l40s-48gb": (46068, 89),
    "rtxa6000-48gb": (49140, 86),
    "rtx6000ada-48gb": (49140, 89),
    "a100-40gb": (40960, 80),
    "a100-80gb": (81920, 80),
    "a800-80gb": (81920, 80),
    "h800-80gb": (81559, 90),
    "h100-80gb": (81559, 90),
    "h100nvl-94gb": (95830, 90),
    "h20-96gb": (97871, 90),
    "rtxpro6000-96gb": (97887, 120),
    "gh200-96gb": (97871, 90),
    "h200-141gb": (143771, 90),
    "b200-180gb": (183359, 100),
    "gb200-186gb": (189471, 100),
    "b300-288gb": (275040, 103),
}
GPUS = {name: Gpu(name=name, memory=mebibytes * _MIB, sm=sm) for name, (mebibytes, sm) in _TABLE.items()}

_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def find_gpu(name: str) -> Gpu:
    """Return the GPU with this name, with or without its size if unambiguous; UsageError suggests similar names.

    Only letters and digits count, and vendor words are ignored: `NVIDIA GeForce RTX 4090` is rtx4090-24gb.
    """
    key = _plain(name)
    found = [gpu for gpu in GPUS.values() if key in (_plain(gpu.name), gpu.name.partition("-")[0])]
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(gpu.name for gpu in found)
        raise UsageError(f"--gpu {name} is the name of several GPUs.", hint=f"Did you mean {names}?")
    plain = {word: known for known in GPUS for word in (_plain(known), known.partition("-")[0])}
    close = [plain[near] for near in difflib.get_close_matches(key, plain, n=3)]
    hint = f"Did you mean {' or '.join(dict.fromkeys(close))}?" if close else f"Known: {', '.join(GPUS)}."
    raise UsageError(f"--gpu {name} is not a known GPU.", hint=f"{hint} Or give its memory: --gpu-memory 80GB.")


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


def parse_size(text: str, flag: str) -> int:
    """Parse a size such as 80GB (10^9) or 79.6GiB (2^30).

    Raises UsageError for anything else, including a missing unit.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise UsageError(f"{flag} is {text!r}; expected a size such as 80GB or 79.6GiB.")
    return int(float(match[1]) * _UNITS[match[2]])


def own_gpu(ranks: int) -> Gpu | None:
    """Return the GPU with the least free memory among the first `ranks` visible ones, or None without nvidia-smi.

    The ranks take the first GPUs in $CUDA_VISIBLE_DEVICES.
    """
    gpu, devices = visible_gpu(), visible_devices()
    if gpu is None or not devices:
        return None
    taken = [each.free for each in gpus_now() if each.memory and each.index in devices[:ranks]]
    if not taken:
        return None
    sm = int(float(gpu.capability) * 10)
    return Gpu(name=f"this machine's {gpu.name}", memory=min(taken), sm=sm, here=len(devices))
