"""Sharding: the rows and columns of each tensor on each rank, by the rules of TensorRT-LLM's unified checkpoint.

Ranks are numbered with tensor parallelism fastest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import Target, expert_size
from trtserve.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A block of the unsharded tensor; a rank's tensor is its pieces stacked on dimension 0, then zero rows if any.

    Vectors count as one-column matrices.
    """

    first_row: int
    rows: int
    first_column: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a target on one tensor-parallel rank; values of `shape` outside all pieces are zero."""

    shape: tuple[int, ...]
    pieces: Sequence[Piece]


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a tensor seen as a matrix; experts are stacked."""
    return (shape[0], 1) if len(shape) == 1 else (math.prod(shape[:-1]), shape[-1])


def shard(target: Target, tp_size: int, tp_rank: int, ep_size: int = 1) -> Shard:
    """Return the part of `target` on a tensor-parallel rank; `ep_size` ranks divide the experts."""
    rows, columns = matrix(target.shape)
    if target.split in ("expert_column", "expert_row", "experts"):
        return _experts(target, tp_size // ep_size, ep_size, tp_rank)
    if target.split in ("qkv", "fused"):
        return _fused(target, tp_size, tp_rank)
    if target.split == "vocab":
        return _vocabulary(target, tp_size, tp_rank)
    if target.split == "column":
        rows //= tp_size
        return _single(target, Piece(first_row=tp_rank * rows, rows=rows, first_column=0, columns=columns))
    if target.split == "row":
        columns //= tp_size
        return _single(target, Piece(first_row=0, rows=rows, first_column=tp_rank * columns, columns=columns))
    if target.split == "first_rank" and tp_rank > 0:
        return Shard(shape=target.shape, pieces=())
    return _single(target, Piece(first_row=0, rows=rows, first_column=0, columns=columns))


def _single(target: Target, piece: Piece) -> Shard:
    shape = (piece.rows,) if len(target.shape) == 1 else (piece.rows, piece.columns)
    return Shard(shape=shape, pieces=(piece,))


def _vocabulary(target: Target, tp_size: int, tp_rank: int) -> Shard:
    """Split into ceil(rows / tp) rows per rank; the last ranks are padded with zeros."""
    rows, columns = matrix(target.shape)
    each = -(-rows // tp_size)
    first = min(tp_rank * each, rows)
    count = min(each, rows - first)
    pieces = [Piece(first_row=first, rows=count, first_column=0, columns=columns)] if count else []
    return Shard(shape=(each, *target.shape[1:]), pieces=pieces)


def _fused(target: Target, tp_size: int, tp_rank: int) -> Shard:
    """Take the rank's heads of each part; with fewer heads than ranks, tp / heads ranks hold each head."""
    _, columns = matrix(target.shape)
    pieces, offset, size = [], 0, target.head_size or 1
    for part in target.parts:
        heads = part // size
        first = tp_rank * heads // tp_size
        rows = max(1, heads // tp_size) * size
        start = offset + first * size
        pieces.append(Piece(first_row=start, rows=rows, first_column=0, columns=columns))
        offset += part
    return Shard(shape=(sum(piece.rows for piece in pieces), *target.shape[1:]), pieces=pieces)


def _experts(target: Target, moe_tp_size: int, ep_size: int, tp_rank: int) -> Shard:
    """Take the rank's experts and the rank's part of each; neighbouring ranks hold different experts.

    Rank numbers follow TensorRT-LLM's `Mapping.moe_tp_rank` and `moe_ep_rank`.
    """
    moe_tp_rank, ep_rank = divmod(tp_rank, ep_size)
    count, outputs, columns = target.shape
    held = count // ep_size
    if target.split == "experts":
        piece = Piece(first_row=ep_rank * held * outputs, rows=held * outputs, first_column=0, columns=columns)
        return Shard(shape=(held, outputs, columns), pieces=(piece,))
    if target.split == "expert_row":
        width = columns // moe_tp_size
        rows = held * outputs
        piece = Piece(first_row=ep_rank * rows, rows=rows, first_column=moe_tp_rank * width, columns=width)
        return Shard(shape=(held, outputs, width), pieces=(piece,))
    offset, pieces = ep_rank * held * outputs, []
    each = len(target.parts) // count
    for part in target.parts[ep_rank * held * each : (ep_rank + 1) * held * each]:
        rows = part // moe_tp_size
        pieces.append(Piece(first_row=offset + moe_tp_rank * rows, rows=rows, first_column=0, columns=columns))
        offset += part
    return Shard(shape=(held, outputs // moe_tp_size, columns), pieces=pieces)


def moe_parallel_sizes(tp_size: int, moe_tp_size: int | None, moe_ep_size: int | None) -> tuple[int, int]:
    """Return over how many ranks each expert is split, and how many ranks divide the experts.

    As in TensorRT-LLM's `Mapping`, a missing size follows from the other; with neither, each expert is split over all
    ranks. Raises UsageError when their product is not `tp_size`.
    """
    if moe_tp_size is None:
        moe_tp_size = tp_size if moe_ep_size is None else tp_size // moe_ep_size
    if moe_ep_size is None:
        moe_ep_size = tp_size // moe_tp_size
    if moe_tp_size * moe_ep_size != tp_size:
        raise UsageError(
            f"--tp-size {tp_size} must equal --moe-tp-size × --moe-ep-size = {moe_tp_size} × {moe_ep_size}.",
            hint="Set only one of them; the other follows.",
        )
    return moe_tp_size, moe_ep_size


def stage_layers(layers: int, pp_size: int) -> list[range]:
    """Return the layers of each pipeline stage; the first (layers mod pp) stages have one more (TensorRT-LLM ≥ 1.0)."""
    each, extra = divmod(layers, pp_size)
    starts = [stage * each + min(stage, extra) for stage in range(pp_size + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def stage_of(target: Target, stages: Sequence[range]) -> int:
    """Return the pipeline stage that holds a target."""
    if target.layer is None:
        return len(stages) - 1 if target.last_stage else 0
    return next(index for index, layers in enumerate(stages) if target.layer in layers)


def older_name(name: str) -> str:
    """Return a tensor's name in checkpoints of TensorRT-LLM up to 0.15."""
    return name.replace(".mlp.shared_expert", ".shared_expert")


def name_in_stage(target: Target, stages: Sequence[range]) -> str:
    """Return a target's name in its rank file, where each stage numbers its layers from 0."""
    if target.layer is None:
        return target.name
    local = target.layer - stages[stage_of(target, stages)].start
    return target.name.replace(f".layers.{target.layer}.", f".layers.{local}.", 1)


def check_parallel_sizes(config: CheckpointConfig, tp_size: int, pp_size: int, ep_size: int = 1) -> None:
    """Raise UsageError with the valid sizes when the model cannot be split as requested."""
    problem = _tensor_parallel_problem(config, tp_size, ep_size)
    if problem:
        sizes = range(ep_size, config.num_attention_heads + 1, ep_size)
        working = [size for size in sizes if not _tensor_parallel_problem(config, size, ep_size)]
        raise UsageError(
            f"--tp-size {tp_size} does not fit this model: {problem}.",
            hint=f"Sizes that fit: {', '.join(map(str, working))}.",
        )
    hidden = config.hidden_size
    if config.use_parallel_embedding and config.embedding_sharding_dim == 1 and hidden % tp_size:
        raise UsageError(
            f"--embedding-sharding-dim 1 does not fit: the hidden size {hidden} is not divisible by {tp_size}.",
            hint="Split the vocabulary instead: --embedding-sharding-dim 0.",
        )
    if pp_size > 1 and (config.shared_key_layers or config.layer_input_size):
        raise UsageError(
            f"--pp-size {pp_size} does not fit this model: its layers use what earlier stages have.",
            hint="Use --tp-size.",
        )
    layers = config.num_hidden_layers
    if pp_size > layers:
        raise UsageError(
            f"--pp-size {pp_size} does not fit this model: it has {layers} layers.",
            hint=f"Sizes that fit: 1{f' … {layers}' if layers > 1 else ''}.",
        )


def _tensor_parallel_problem(config: CheckpointConfig, tp_size: int, ep_size: int) -> str | None:
    heads = config.num_attention_heads
    if heads % tp_size:
        return f"its {heads} attention heads do not divide by {tp_size}"
    for kv_heads in {config.num_key_value_heads, config.full_num_key_value_heads or config.num_key_value_heads}:
        if kv_heads >= tp_size and kv_heads % tp_size:
            return f"its {kv_heads} key/value heads do not divide by {tp_size}"
        if kv_heads < tp_size and tp_size % kv_heads:
            return f"its {kv_heads} key/value heads cannot be repeated evenly over {tp_size} ranks"
    if config.moe.num_experts and (problem := _experts_problem(config, tp_size, ep_size)):
        return problem
    inner = 0 if config.moe.num_experts and not config.dense_layers else config.intermediate_size
    return f"its intermediate size {inner} does not divide by {tp_size}" if inner % tp_size else None


def _experts_problem(config: CheckpointConfig, tp_size: int, ep_size: int) -> str | None:
    count, inner, moe_tp_size = config.moe.num_experts, expert_size(config), tp_size // ep_size
    if count % ep_size:
        return f"its {count} experts do not divide by --moe-ep-size {ep_size}"
    if inner % moe_tp_size:
        return f"its experts' intermediate size {inner} does not divide by --moe-tp-size {moe_tp_size}"
    shared = config.moe_shared_expert_intermediate_size
    return f"its shared expert's intermediate size {shared} does not divide by {tp_size}" if shared % tp_size else None
