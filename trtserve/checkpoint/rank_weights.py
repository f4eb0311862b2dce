"""Bytes of weights per rank of a parallel model, in its checkpoint and in its engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import family
from trtserve.checkpoint.quantized import FP8, is_excluded, is_quantised
from trtserve.checkpoint.sharding import (
    matrix,
    shard,
    stage_layers,
    stage_of,
)
from trtserve.specs.runtime import (
    WEIGHT_ONLY_INT4,
    WEIGHT_ONLY_INT8,
    weights_precision,
)

_ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
# Bits per code.
_BITS = {"int8": 8, "int4": 4, "fp8": 8}


@dataclass(frozen=True, kw_only=True)
class RankWeights:
    """Bytes of the largest rank: `loaded` from its checkpoint file, `kept` by the engine.

    Float weights that the loader quantises are loaded at full width; others have the same size in both.
    """

    loaded: int
    kept: int


def rank_weights(config: CheckpointConfig) -> RankWeights:
    """Return the weights of a checkpoint `config` with its mapping.

    Raises UnsupportedModelError for an unknown family.
    """
    tp_size, pp_size = config.mapping.tp_size, config.mapping.pp_size
    stages = stage_layers(config.num_hidden_layers, pp_size)
    widened = config.quantization.algorithm in (WEIGHT_ONLY_INT8, WEIGHT_ONLY_INT4)
    bits = _BITS.get(weights_precision(config))
    loaded, kept = [0] * pp_size, [0] * pp_size
    for target in family(config.architecture).targets(config):
        stage = stage_of(target, stages)
        shape = shard(target, tp_size, 0).shape
        item = _ITEM_SIZE[target.dtype or config.dtype]
        floats = held = math.prod(shape) * item
        if bits is not None and is_quantised(target) and not is_excluded(config, target):
            held = math.prod(shape) * bits // 8 + _scales(*matrix(shape), item, config)
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
