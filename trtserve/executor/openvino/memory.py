"""Memory and disk of an OpenVINO engine, computed from its config alone.

Memory means anonymous memory (RssAnon + RssShmem); the kernel can drop pages of the engine's file, so they do not
count. Figures in comments were measured with OpenVINO 2026.4 on a CPU with AVX-512 and bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import checkpoint_targets, shares_embedding
from trtserve.checkpoint.architectures.base import Target
from trtserve.checkpoint.memory import (
    ITEM_SIZE,
    capped_score_bytes,
    kv_bytes_per_token,
    openvino_step_bytes,
    state_bytes,
)
from trtserve.checkpoint.quantized import AWQ, FP8, FP8_BLOCKS, FP8_ROWS, GPTQ, group_size, is_excluded, is_quantised
from trtserve.specs.runtime import WEIGHT_ONLY_INT4, WEIGHT_ONLY_INT8, EngineNeeds, Limits

LIBRARIES = ("numpy", "openvino")  # what a build and a serving process load
CAPPED_TOKENS = 512  # tokens of a call of a model with capped scores: those of all heads and keys are held at once
# Interpreter, trtserve, NumPy and OpenVINO before the first weight, in a build and in Triton's executor process.
BUILD_PROCESS = 38 * 2**20
SERVING_PROCESS = 30 * 2**20

# Per layer of the graph during a build: nodes, names, and heap fragmentation from weight copies.
_GRAPH_LAYER = int(0.6 * 2**20)
# The compiled graph without weights: the plugin, its kernels, and its state per layer.
_COMPILED = 14 * 2**20
_COMPILED_LAYER = int(1.05 * 2**20)
_XML_LAYER = 75_000  # text per layer in rank0.xml

_SCALE_SIZE = 4
# Bytes per weight, besides the matrix as read and as kept, while its codes are packed.
_CODES = {WEIGHT_ONLY_INT8: 1, WEIGHT_ONLY_INT4: 3, GPTQ: 3, AWQ: 3, FP8: 4, FP8_ROWS: 4, FP8_BLOCKS: 8}
_PACKS_HEAD = (WEIGHT_ONLY_INT8, WEIGHT_ONLY_INT4)
# Weights are quantised in pieces of this size, each of which temporarily needs this many bytes per weight.
_PIECE = 2**21
_PIECE_WIDTH = {WEIGHT_ONLY_INT8: 12, WEIGHT_ONLY_INT4: 16}
_EMBEDDINGS = frozenset(f"transformer.{kind}_embedding.weight" for kind in ("vocab", "position", "layer"))
_HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class _Weight:
    """A tensor on its way into the graph: element count, bytes as read, bytes as kept.

    `transient` bytes are needed while converting it; `multiplied` marks a matrix that kernels multiply both as a table
    and with vectors.
    """

    name: str
    count: int
    read: int
    kept: int
    transient: int
    multiplied: bool
    in_layer: bool


def engine_needs(config: CheckpointConfig, limits: Limits, *, compute: str, kv: str, rows: int) -> EngineNeeds:
    """Return the needs of an engine of a checkpoint `config`; `compute` is f32 or bf16, `kv` f32, f16 or u8.

    `rows` is the maximum number of tokens per step whose logits are computed.
    """
    weights = list(_weights(config))
    layers = config.num_hidden_layers
    held = SERVING_PROCESS + _COMPILED + layers * _COMPILED_LAYER + _packed(weights, compute)
    return EngineNeeds(
        disk=_file_bytes(weights, config) + layers * _XML_LAYER,
        build=BUILD_PROCESS + max(_graph_peak(weights, layers), held - SERVING_PROCESS),
        serving=held
        + openvino_step_bytes(config, limits.max_num_tokens, rows, compute)
        + capped_score_bytes(config, min(limits.max_num_tokens, CAPPED_TOKENS), limits.max_seq_len)
        + limits.max_batch_size * state_bytes(config),
        kv_per_token=kv_bytes_per_token(config, kv),
        libraries=LIBRARIES,
    )


def weight_bytes(config: CheckpointConfig) -> int:
    """Return the bytes of all weights in the engine's file; equal constants, like a tied head, are stored once."""
    return _file_bytes(list(_weights(config)), config)


def whole_model_bytes(config: CheckpointConfig, tokens: int) -> int:
    """Return the peak of a graph built in memory that computes `tokens` tokens in float32 (ReferenceModel).

    It owns its weights in addition to the copies packed for the kernels.
    """
    weights, layers = list(_weights(config)), config.num_hidden_layers
    graph = sum(weight.kept for weight in weights) + layers * _GRAPH_LAYER
    compiled = _COMPILED + layers * _COMPILED_LAYER + _packed(weights, "f32")
    calculated = graph + compiled + openvino_step_bytes(config, tokens, tokens, "f32")
    return max(_graph_peak(weights, layers), calculated)


def _weights(config: CheckpointConfig) -> Iterator[_Weight]:
    """Return the weights in the order in which the graph takes them."""
    algorithm = config.quantization.algorithm
    group = config.quantization.group_size
    for target in checkpoint_targets(config):
        item = ITEM_SIZE[target.dtype or config.dtype]
        if target.name == _HEAD and algorithm in _PACKS_HEAD:
            yield _weight(target, item, WEIGHT_ONLY_INT8, group)
        else:
            packed = algorithm in _CODES and is_quantised(target) and not is_excluded(config, target)
            yield _weight(target, item, algorithm if packed else None, group)


def _weight(target: Target, item: int, algorithm: str | None, group: int) -> _Weight:
    count = math.prod(target.shape)
    is_matrix, in_layer = len(target.shape) > 1, target.layer is not None
    read = kept = transient = count * item
    if algorithm:
        kept = _packed_bytes(target, count, algorithm, group)
        rounded = count + min(count, _PIECE) * _PIECE_WIDTH.get(algorithm, 0)
        transient = read + max(rounded, _CODES[algorithm] * count + kept)
    if target.split == "expert_row":
        # Expert matrices are copied side by side.
        transient += read
    return _Weight(
        name=target.name,
        count=count,
        read=read,
        kept=kept,
        transient=transient,
        multiplied=is_matrix and target.name not in _EMBEDDINGS,
        in_layer=in_layer,
    )


def _packed_bytes(target: Target, count: int, algorithm: str, group: int) -> int:
    """Return the bytes of a matrix and its scales (experts have their own); `group` is GPTQ's and AWQ's group size."""
    inputs = target.shape[-1]
    if algorithm.startswith(FP8):
        return 2 * count
    if algorithm == WEIGHT_ONLY_INT8:
        return count + count // inputs * _SCALE_SIZE
    if algorithm == WEIGHT_ONLY_INT4:
        return count // 2 + count // group_size(inputs) * _SCALE_SIZE
    zeros = 0.5 if algorithm == GPTQ else 0
    return count // 2 + int(count // (group or inputs) * (_SCALE_SIZE + zeros))


def _file_bytes(weights: list[_Weight], config: CheckpointConfig) -> int:
    total = sum(weight.kept for weight in weights)
    if config.quantization.algorithm in _PACKS_HEAD:
        # A packed head is not a copy of the embedding.
        return total
    return total - (next(weight.kept for weight in weights if weight.name == _HEAD) if shares_embedding(config) else 0)


def _graph_peak(weights: list[_Weight], layers: int) -> int:
    """Return the peak while building: a copy of every weight, plus the one being copied or quantised as read."""
    held = peak = 0
    for weight in weights:
        peak = max(peak, held + max(weight.transient, weight.read + weight.kept))
        held += weight.kept
    return peak + layers * _GRAPH_LAYER


def _packed(weights: list[_Weight], compute: str) -> int:
    """Return the bytes of packed matrices, which kernels pack at first use; embeddings stay in the mapped file.

    float32 arithmetic packs some matrices twice for steps of 16 – 256 tokens: all of the layers' when narrower than
    float32, otherwise the last one of each MLP. Measured after steps of all sizes.
    """
    multiplied = [weight for weight in weights if weight.multiplied]
    total = sum(weight.kept for weight in multiplied)
    if compute != "f32":
        return total
    narrow = (weight for weight in multiplied if weight.in_layer and weight.kept < 4 * weight.count)
    wide = (weight for weight in multiplied if weight.kept == 4 * weight.count and ".mlp.proj." in weight.name)
    return total + sum(weight.kept for weight in (*narrow, *wide))
