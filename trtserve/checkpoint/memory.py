"""Formulas of memory, from a config's shapes: weights of a rank, keys and values of a token, values of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import checkpoint_targets, family
from trtserve.checkpoint.architectures.base import expert_size
from trtserve.checkpoint.quantized import FP8, group_size, is_excluded, is_quantised
from trtserve.checkpoint.sharding import matrix, shard, stage_layers, stage_of
from trtserve.specs.runtime import WEIGHT_ONLY_INT4, WEIGHT_ONLY_INT8, Limits, weights_precision

ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of a number by the dtype of a checkpoint
PRECISIONS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""The same types as precisions of arithmetic and KV cache."""


def cache_precision(config: CheckpointConfig, asked: str) -> str:
    """Return the precision of a GPU engine's KV cache: what was asked for; auto: the checkpoint's."""
    calibrated = config.quantization.kv_cache_quant_algo
    return asked if asked != "auto" else str(calibrated).lower() if calibrated else PRECISIONS[config.dtype]


_KV_ITEM_SIZE = {"f32": 4, "f16": 2, "bf16": 2}
# OpenVINO's uint8 caches keep a scale and a zero point (8 bytes): keys per channel of a 32-token block,
# [heads, 32 + 8, size]; values per token, [heads, 32, size + 8].
_U8_EXTRA = 8
_U8_BLOCK = 32
_BITS = {"int8": 8, "int4": 4, "fp8": 8}  # bits per code


@dataclass(frozen=True, kw_only=True)
class RankWeights:
    """Bytes of the largest rank: `loaded` from its checkpoint file, `kept` by the engine.

    Float weights that the loader quantises are loaded at full width; others have the same size in both.
    """

    loaded: int
    kept: int


def rank_weights(config: CheckpointConfig, *, float32_scales: bool = False) -> RankWeights:
    """Return the weights of a checkpoint `config` with its mapping.

    `float32_scales`: see `Runtime.float32_scales`.
    Raises UnsupportedModelError for an unknown family.
    """
    tp_size, pp_size = config.mapping.tp_size, config.mapping.pp_size
    stages = stage_layers(config.num_hidden_layers, pp_size)
    widened = config.quantization.algorithm in (WEIGHT_ONLY_INT8, WEIGHT_ONLY_INT4)
    bits = _BITS.get(weights_precision(config))
    loaded, kept = [0] * pp_size, [0] * pp_size
    for target in checkpoint_targets(config):
        stage = stage_of(target, stages)
        shape = shard(target, tp_size, 0).shape
        item = ITEM_SIZE[target.dtype or config.dtype]
        floats = held = math.prod(shape) * item
        if bits is not None and is_quantised(target) and not is_excluded(config, target):
            scales = _float32_scales if float32_scales and bits != _BITS["fp8"] else _scales
            held = math.prod(shape) * bits // 8 + scales(*matrix(shape), item, config)
        loaded[stage] += floats if widened else held
        kept[stage] += held
    return RankWeights(loaded=max(loaded), kept=max(kept))


def _scales(rows: int, columns: int, item: int, config: CheckpointConfig) -> int:
    """Return the bytes of a matrix's scales.

    Weight-only: `per_channel_scale`. GPTQ: `weights_scaling_factor` and `zero` per group of inputs; AWQ: the former,
    and `prequant_scaling_factor`. FP8: two scales, or one per row. SmoothQuant: `per_channel_scale` and `smoother` in
    float32.
    """
    algorithm = str(config.quantization.algorithm)
    groups = -(-columns // config.quantization.group_size)
    if algorithm.endswith("GPTQ"):
        return 2 * rows * groups * item
    if algorithm.endswith("AWQ"):
        return (rows * groups + columns) * item
    if algorithm.startswith("W8A8"):
        return (rows + columns) * 4
    return 8 if algorithm == FP8 else rows * item


def _float32_scales(rows: int, columns: int, item: int, config: CheckpointConfig) -> int:
    """Return the bytes of a matrix's scales, and of zero points, in the torch runtime."""
    del item
    algorithm = config.quantization.algorithm
    if algorithm == WEIGHT_ONLY_INT8:
        return 4 * rows
    if algorithm == WEIGHT_ONLY_INT4:
        return 4 * rows * columns // group_size(columns)
    return 5 * rows * -(-columns // config.quantization.group_size)


def kv_bytes_per_token(
    config: CheckpointConfig, precision: str, *, tp_size: int = 1, pp_size: int = 1, latent_once: bool = False
) -> int:
    """Return the bytes of a token's keys and values on the largest rank, by default of the whole model.

    `precision` is f32, f16 or bf16, u8 (OpenVINO's), or another one of a byte, such as fp8. `latent_once`: see
    `Runtime.latent_once`.
    """
    once = latent_once and family(config.architecture).decoder(config).latent is not None
    layers = [
        config.of_layer(layer)
        for layer in range(config.num_hidden_layers)
        if layer not in config.layers_without_keys and config.key_layer(layer) == layer
    ]

    def of_layer(config: CheckpointConfig) -> int:
        size = config.head_size
        keys = values = size * _KV_ITEM_SIZE.get(precision, 1)
        if precision == "u8":
            keys, values = size * (_U8_BLOCK + _U8_EXTRA) // _U8_BLOCK, size + _U8_EXTRA
        return max(1, config.num_key_value_heads // tp_size) * (keys if once else keys + values)

    return sum(sorted(map(of_layer, layers), reverse=True)[: -(-len(layers) // pp_size)])


def state_bytes(config: CheckpointConfig) -> int:
    """Return the bytes of a sequence's states in all layers, in float32."""
    if not config.mixer_layers:
        return 0
    mixer = family(config.architecture).decoder(config).mixer
    return 4 * len(config.mixer_layers) * sum(math.prod(table) for table in (mixer.tables if mixer else ()))


def gpu_step_bytes(config: CheckpointConfig, limits: Limits, tp_size: int) -> int:
    """Return a rank's values of the widest layer in the largest step, and float32 logits for every sequence."""
    inner = 2 * config.intermediate_size // tp_size
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    width = 2 * config.hidden_size + max(inner, heads * config.head_size // tp_size)
    return limits.max_num_tokens * width * ITEM_SIZE[config.dtype] + _logits(config, limits.max_batch_size)


def torch_step_bytes(config: CheckpointConfig, limits: Limits) -> int:
    """Return PyTorch's bytes on the CPU: scores of all heads, and values of the widths of model and MLP, in float32."""
    scores = 3 * config.num_attention_heads * limits.max_num_tokens * limits.max_seq_len
    width = 4 * (1 + config.streams) * config.hidden_size + 4 * config.intermediate_size
    return 4 * (scores + limits.max_num_tokens * width) + _logits(config, limits.max_batch_size)


def openvino_step_bytes(config: CheckpointConfig, tokens: int, rows: int, compute: str) -> int:
    """Return the plugin's bytes for intermediate values, in its arithmetic type, and for float32 logits of `rows`.

    Per token: four values of the MLP's inner width, four of the model's width, and two (three in bfloat16) of the width
    of q, k and v together. Buffers are shared between operations but never freed.
    """
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    fused = max(config.head_size, config.full_head_size) * heads
    inner = config.intermediate_size
    if experts := config.moe.num_experts:  # a step computes all of them
        inner = experts * expert_size(config) + config.moe_shared_expert_intermediate_size
    wide = (
        4 * inner
        + 4 * (1 + config.streams) * config.hidden_size
        + 2 * config.layer_input_size * config.num_hidden_layers
    )
    numbers, item = (wide + 2 * fused, 4) if compute == "f32" else (wide + 3 * fused, 2)
    return tokens * numbers * item + _logits(config, rows)


def capped_score_bytes(config: CheckpointConfig, tokens: int, keys: int) -> int:
    """Return the bytes of scores with a cap or in chunks, in three steps of float32; 0 for a model without."""
    decoder = family(config.architecture).decoder(config)
    if decoder.attention_softcap is None and not decoder.has_chunks(keys):
        return 0
    return 3 * 4 * config.num_attention_heads * tokens * keys


def _logits(config: CheckpointConfig, rows: int) -> int:
    return rows * config.vocab_size * 4
