"""How many bytes of weights each rank of a parallel model has, as its checkpoint holds them and as its engine does."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trtserve.architectures import family
from trtserve.architectures.base import Target
from trtserve.architectures.checkpoint import with_defaults
from trtserve.architectures.quantized import FP8, is_excluded, quant_algo
from trtserve.architectures.sharding import matrix, shard, stage_layers, stage_of
from trtserve.runtimes.base import WEIGHT_ONLY_INT4, WEIGHT_ONLY_INT8, CheckpointConfig, weights_precision
from trtserve.runtimes.openvino_memory import is_quantised

_ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
# Bits of a code.
_BITS = {"int8": 8, "int4": 4, "fp8": 8}
# Where a checkpoint does not say how many inputs share a scale: what ModelOpt and TensorRT-LLM take.
_GROUP = 128


@dataclass(frozen=True, kw_only=True)
class RankWeights:
    """Bytes of the rank that has most: `loaded` of its checkpoint's file, `kept` by the engine.

    Float weights that the loader quantises are loaded wide; others are as large in both.
    """

    loaded: int
    kept: int


def rank_weights(config: CheckpointConfig) -> RankWeights:
    """Weights of a checkpoint with `config`, its mapping included; UnsupportedModelError for an unknown family."""
    config = with_defaults(dict(config))
    mapping = config.get("mapping") or {}
    tp_size, pp_size = int(mapping.get("tp_size") or 1), int(mapping.get("pp_size") or 1)
    stages = stage_layers(config["num_hidden_layers"], pp_size)
    widened = quant_algo(config) in (WEIGHT_ONLY_INT8, WEIGHT_ONLY_INT4)
    loaded, kept = [0] * pp_size, [0] * pp_size
    for target in family(config["architecture"]).targets(config):
        stage = stage_of(target, stages)
        shape = shard(target, tp_size, 0).shape
        floats, held = math.prod(shape) * _ITEM_SIZE[target.dtype or config["dtype"]], _kept(target, shape, config)
        loaded[stage] += floats if widened else held
        kept[stage] += held
    return RankWeights(loaded=max(loaded), kept=max(kept))


def _kept(target: Target, shape: tuple[int, ...], config: CheckpointConfig) -> int:
    item = _ITEM_SIZE[target.dtype or config["dtype"]]
    bits = _BITS.get(weights_precision(config))
    if bits is None or not is_quantised(target) or is_excluded(config, target):
        return math.prod(shape) * item
    return math.prod(shape) * bits // 8 + _scales(*matrix(shape), item, config)


def _scales(rows: int, columns: int, item: int, config: CheckpointConfig) -> int:
    """Bytes of what belongs to the codes of a matrix (convert-and-build, "Quantised tensors").

    Weight-only: `per_channel_scale`. GPTQ: `weights_scaling_factor` and `zero` for each group of inputs; AWQ: the
    former, and `prequant_scaling_factor`. FP8: two scales, or one for each row. SmoothQuant: `per_channel_scale` and
    `smoother` in float32.
    """
    algorithm = str(quant_algo(config))
    groups = -(-columns // int(config["quantization"].get("group_size") or _GROUP))
    if algorithm.endswith("GPTQ"):
        return 2 * rows * groups * item
    if algorithm.endswith("AWQ"):
        return (rows * groups + columns) * item
    if algorithm.startswith("W8A8"):
        return (rows + columns) * 4
    return 8 if algorithm == FP8 else rows * item
