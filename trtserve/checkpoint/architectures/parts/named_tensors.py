"""Tensors of families with irregular names: a family lists its source names, this module derives the targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import Split, Target, embedding_split, fused_qkv

Part = Literal["qkv", "dense", "fc", "proj", "head"]


@dataclass(frozen=True, kw_only=True)
class SourceNames:
    """Source names of a family, without `.weight` and `.bias`.

    `layer` is a layer's prefix with `{}` for its number. `norms` maps a layer's checkpoint names to source names. `qkv`
    is three names or one fused tensor; `grouped` means that the fused tensor holds the queries of a key/value head, its
    key and its value, then those of the next. `biases` lists the matrices with a bias; `norm_biases` says whether norms
    have one. With `gate_up`, `fc` holds gate and up of a gated MLP, which the checkpoint stores in the other order.
    With `first_rank_bias`, the bias of `proj` is on rank 0 only. The table `positions` starts with `unused_positions`
    rows that no token uses.
    """

    embedding: str
    layer: str
    norms: Mapping[str, str]
    qkv: Sequence[str]
    dense: str
    fc: str
    proj: str
    head: str
    final_norm: str | None
    biases: frozenset[Part] = frozenset()
    norm_biases: bool = True
    grouped: bool = False
    gate_up: bool = False
    first_rank_bias: bool = False
    positions: str | None = None
    unused_positions: int = 0
    embedding_norm: str | None = None


def named_targets(config: CheckpointConfig, names: SourceNames, *, tied: bool) -> list[Target]:
    """Return every tensor of the unsharded checkpoint, in file order; `tied` uses the embedding as head."""
    layers = [target for layer in range(config.num_hidden_layers) for target in _layer(config, names, layer)]
    return [*_first(config, names), *layers, *_last(config, names, tied=tied)]


def _first(config: CheckpointConfig, names: SourceNames) -> Iterator[Target]:
    vocab, hidden, split = config.vocab_size, config.hidden_size, embedding_split(config)
    name = "transformer.vocab_embedding.weight"
    yield Target(name=name, sources=(f"{names.embedding}.weight",), shape=(vocab, hidden), split=split)
    if names.positions is not None:
        rows = config.max_position_embeddings
        yield Target(
            name="transformer.position_embedding.weight",
            sources=(f"{names.positions}.weight",),
            shape=(rows, hidden),
            order=((names.unused_positions, rows),) if names.unused_positions else (),
            split=split,
        )
    if names.embedding_norm is not None:
        yield from _norm(config, names, "transformer.ln_embed", names.embedding_norm)


def _last(config: CheckpointConfig, names: SourceNames, *, tied: bool) -> Iterator[Target]:
    """Return the tensors after the layers; a tied head may still have its own bias."""
    if names.final_norm is not None:
        yield from _norm(config, names, "transformer.ln_f", names.final_norm, last_stage=True)
    vocab = config.vocab_size
    shapes = {"weight": (vocab, config.hidden_size)} | ({"bias": (vocab,)} if "head" in names.biases else {})
    for kind, shape in shapes.items():
        source = names.embedding if tied and kind == "weight" else names.head
        yield Target(name=f"lm_head.{kind}", sources=(f"{source}.{kind}",), shape=shape, split="vocab", last_stage=True)


def _norm(
    config: CheckpointConfig,
    names: SourceNames,
    name: str,
    source: str,
    *,
    layer: int | None = None,
    last_stage: bool = False,
) -> Iterator[Target]:
    for kind in ("weight", "bias") if names.norm_biases else ("weight",):
        yield Target(
            name=f"{name}.{kind}",
            sources=(f"{source}.{kind}",),
            shape=(config.hidden_size,),
            layer=layer,
            last_stage=last_stage,
        )


def _layer(config: CheckpointConfig, names: SourceNames, layer: int) -> Iterator[Target]:
    ours, theirs = f"transformer.layers.{layer}.", names.layer.format(layer)
    for name, source in names.norms.items():
        yield from _norm(config, names, ours + name, theirs + source, layer=layer)
    yield from _qkv(config, names, layer)
    hidden, inner, queries = config.hidden_size, config.intermediate_size, fused_qkv(config)[0]
    yield from _linear(names, "dense", layer, (hidden, queries), split="row", bias_split="replicated")
    yield from _fc(config, names, layer)
    bias_split: Split = "first_rank" if names.first_rank_bias else "replicated"
    yield from _linear(names, "proj", layer, (hidden, inner), split="row", bias_split=bias_split)


def _qkv(config: CheckpointConfig, names: SourceNames, layer: int) -> Iterator[Target]:
    parts, head_size = fused_qkv(config), config.head_size
    order = _grouped_order(config.num_attention_heads, config.num_key_value_heads, head_size)
    for kind in ("weight", "bias") if "qkv" in names.biases else ("weight",):
        yield Target(
            name=f"transformer.layers.{layer}.attention.qkv.{kind}",
            sources=[f"{names.layer.format(layer)}{source}.{kind}" for source in names.qkv],
            shape=(sum(parts), config.hidden_size) if kind == "weight" else (sum(parts),),
            split="qkv",
            parts=parts,
            head_size=head_size,
            order=order if names.grouped else (),
            layer=layer,
        )


def _grouped_order(heads: int, kv_heads: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return the runs of all queries, then keys, then values in a tensor of groups [q … q, k, v], one per k/v head."""
    queries = heads // kv_heads * size
    starts = range(0, kv_heads * (queries + 2 * size), queries + 2 * size)
    parts = ((0, queries), (queries, size), (queries + size, size))
    return tuple((start + first, rows) for first, rows in parts for start in starts)


def _fc(config: CheckpointConfig, names: SourceNames, layer: int) -> Iterator[Target]:
    hidden, inner = config.hidden_size, config.intermediate_size
    if not names.gate_up:
        yield from _linear(names, "fc", layer, (inner, hidden), split="column", bias_split="column")
        return
    yield Target(
        name=f"transformer.layers.{layer}.mlp.fc.weight",
        sources=(f"{names.layer.format(layer)}{names.fc}.weight",),
        shape=(2 * inner, hidden),
        split="fused",
        parts=(inner, inner),
        order=((inner, inner), (0, inner)),
        layer=layer,
    )


_PLACES: Mapping[Part, str] = {"dense": "attention.dense", "fc": "mlp.fc", "proj": "mlp.proj"}


def _linear(
    names: SourceNames, part: Part, layer: int, shape: tuple[int, int], *, split: Split, bias_split: Split
) -> Iterator[Target]:
    sources: Mapping[Part, str] = {"dense": names.dense, "fc": names.fc, "proj": names.proj}
    kinds = {"weight": split} | ({"bias": bias_split} if part in names.biases else {})
    for kind, how in kinds.items():
        yield Target(
            name=f"transformer.layers.{layer}.{_PLACES[part]}.{kind}",
            sources=(f"{names.layer.format(layer)}{sources[part]}.{kind}",),
            shape=shape if kind == "weight" else shape[:1],
            split=how,
            layer=layer,
        )
