"""How a model fits NVIDIA GPUs: weights per rank, KV cache, and the smallest tp and pp.

These are estimates from shapes, not measurements. Weights and KV cache follow from the checkpoint's format; activations
are those of the widest layer, which later layers reuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import family
from trtserve.checkpoint.kernel_layout import require_gpu_sm
from trtserve.checkpoint.quantized import GPTQ, is_excluded
from trtserve.checkpoint.quantized_tensors import is_packed, require_divisible
from trtserve.checkpoint.rank_weights import rank_weights
from trtserve.checkpoint.sharding import check_parallel_sizes, stage_layers
from trtserve.errors import UnsupportedModelError, UsageError
from trtserve.executor.runtimes import RUNTIMES
from trtserve.executor.steps import step_flags, usual_steps
from trtserve.pipeline.planner.gpus import Gpu
from trtserve.specs import BuildSpec
from trtserve.specs.runtime import (
    TRTLLM_LIMITS,
    Limits,
    resolve_limits,
)

# Reserved for the CUDA context, libraries and NCCL's buffers: an allowance, not a measurement.
RESERVE = 2**30
# TensorRT-LLM's default of kv_cache_free_gpu_mem_fraction: the share of memory left after loading the engine.
FREE_FRACTION = 0.9
_BLOCK = 32
_GPUS_PER_NODE = 8
# GPU counts of common machines, and sizes that divide the heads and layers of some models only.
_WORLDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)

_ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
# Compute capabilities (× 10) from which GPUs have FP8 and bfloat16 arithmetic.
FIRST_FP8 = 89
FIRST_BFLOAT16 = 80


@dataclass(frozen=True, kw_only=True)
class GpuFit:
    """The largest rank: bytes of `weights` and `activations`, `kv_per_token`, and the tokens that fit.

    `sequences` have `limits.max_seq_len` tokens. All ranks cache the same tokens.
    """

    gpu: Gpu
    tp_size: int
    pp_size: int
    limits: Limits
    weights: int
    activations: int
    kv_per_token: int
    tokens: int

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
    limits = _limits(config, spec)
    weights = rank_weights(config).kept
    activations = _activations(config, limits, tp_size)
    per_token = _kv_per_token(config, tp_size, pp_size)
    free = gpu.memory - RESERVE - weights - activations
    return GpuFit(
        gpu=gpu,
        tp_size=tp_size,
        pp_size=pp_size,
        limits=limits,
        weights=weights,
        activations=activations,
        kv_per_token=per_token,
        tokens=max(0, int(FREE_FRACTION * free)) // per_token // _BLOCK * _BLOCK,
    )


def smallest_fit(config: CheckpointConfig, spec: BuildSpec, gpu: Gpu) -> GpuFit | None:
    """Return the fewest GPUs that serve one longest sequence, preferring tensor parallelism within a node."""
    for tp_size, pp_size in _parallel_sizes():
        try:
            _check_parallel_sizes(config, tp_size, pp_size)
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


def _parallel_sizes() -> Iterator[tuple[int, int]]:
    for world in _WORLDS:
        for tp_size in range(min(world, _GPUS_PER_NODE), 0, -1):
            if world % tp_size == 0:
                yield tp_size, world // tp_size


def unable(config: CheckpointConfig, gpu: Gpu) -> str | None:
    """Return why this kind of GPU cannot run the checkpoint regardless of memory, or None."""
    sm, algorithm = gpu.sm, str(config.quantization.algorithm)
    if sm is None:
        return None
    for wanted, least, present in (
        ("FP8 weights need", FIRST_FP8, algorithm.startswith("FP8")),
        ("bfloat16 needs", FIRST_BFLOAT16, config.dtype == "bfloat16"),
    ):
        if present and sm < least:
            return f"{wanted} a GPU of compute capability {least / 10:.1f} or later; {gpu.name} has {sm / 10:.1f}."
    if algorithm == GPTQ:
        try:
            require_gpu_sm(sm)
        except UnsupportedModelError as error:
            return error.message
    return None


def _check_parallel_sizes(config: CheckpointConfig, tp_size: int, pp_size: int) -> None:
    """Raise UsageError for sizes that the model is not divisible by; 4-bit matrices are split by groups."""
    check_parallel_sizes(config, tp_size, pp_size)
    if config.quantization.algorithm == GPTQ:
        targets = family(config.architecture).targets(config)
        packed = (target for target in targets if is_packed(target) and not is_excluded(config, target))
        require_divisible(packed, config.quantization.group_size, tp_size)


def _limits(config: CheckpointConfig, spec: BuildSpec) -> Limits:
    chosen = RUNTIMES.get(spec.runtime)
    return resolve_limits(config, spec, TRTLLM_LIMITS if chosen is None else chosen.gpu_limits)


def _kv_per_token(config: CheckpointConfig, tp_size: int, pp_size: int) -> int:
    """Return the KV cache's bytes per token: in the arithmetic's type, or one byte with cache scales."""
    layers = max(len(stage) for stage in stage_layers(config.num_hidden_layers, pp_size))
    heads = max(1, config.num_key_value_heads // tp_size)
    item = 1 if config.quantization.kv_cache_quant_algo else _ITEM_SIZE[config.dtype]
    return layers * heads * config.head_size * 2 * item


def _activations(config: CheckpointConfig, limits: Limits, tp_size: int) -> int:
    """Return the widest layer's values for a step of max_num_tokens, and float32 logits for every sequence."""
    inner = 2 * config.intermediate_size // tp_size
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    width = 2 * config.hidden_size + max(inner, heads * config.head_size // tp_size)
    logits = limits.max_batch_size * config.vocab_size * 4
    return limits.max_num_tokens * width * _ITEM_SIZE[config.dtype] + logits
