"""How many bytes of weights each rank of a parallel model has, as its checkpoint holds them and as its engine does."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trtserve.architectures import family
from trtserve.architectures.base import Target
from trtserve.architectures.checkpoint import with_defaults
from trtserve.architectures.sharding import matrix, shard, stage_layers, stage_of
from trtserve.runtimes.base import CheckpointConfig, weights_precision
from trtserve.runtimes.openvino_memory import is_quantised

_ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
_QUANTISED_BITS = {"int8": 8, "int4": 4, "fp8": 8}


@dataclass(frozen=True, kw_only=True)
class RankWeights:
    """Bytes of the rank that has most: `loaded` in the dtype of the checkpoint, `kept` by the engine."""

    loaded: int
    kept: int


def rank_weights(config: CheckpointConfig) -> RankWeights:
    """Weights of a checkpoint with `config`, its mapping included; UnsupportedModelError for an unknown family."""
    config = with_defaults(dict(config))
    mapping = config.get("mapping") or {}
    tp_size, pp_size = int(mapping.get("tp_size") or 1), int(mapping.get("pp_size") or 1)
    stages = stage_layers(config["num_hidden_layers"], pp_size)
    loaded, kept = [0] * pp_size, [0] * pp_size
    for target in family(config["architecture"]).targets(config):
        stage = stage_of(target, stages)
        shape = shard(target, tp_size, 0).shape
        loaded[stage] += math.prod(shape) * _ITEM_SIZE[target.dtype or config["dtype"]]
        kept[stage] += _kept(target, shape, config)
    return RankWeights(loaded=max(loaded), kept=max(kept))


def _kept(target: Target, shape: tuple[int, ...], config: CheckpointConfig) -> int:
    item = _ITEM_SIZE[target.dtype or config["dtype"]]
    bits = _QUANTISED_BITS.get(weights_precision(config))
    if bits is not None and is_quantised(target):
        return math.prod(shape) * bits // 8 + matrix(shape)[0] * item
    return math.prod(shape) * item
