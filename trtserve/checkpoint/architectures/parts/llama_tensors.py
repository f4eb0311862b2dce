"""Tensors of families whose layers are built and named like Llama's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import Target, embedding_split, fused_qkv
from trtserve.checkpoint.architectures.parts.expert_tensors import ExpertNames, expert_targets

_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Optional parts of a family's layers: biases, norms of queries and keys, norms on both sides of the MLP.

    `norm_offset` is added to the weights of all norms. `experts` names the experts that replace the MLP.
    """

    qkv_bias: bool = False
    dense_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    feedforward_norms: bool = False
    norm_offset: float = 0.0
    experts: ExpertNames | None = None


def llama_targets(config: CheckpointConfig, parts: Parts) -> list[Target]:
    """Return every tensor of the unsharded checkpoint, in file order."""
    vocab, hidden = config.vocab_size, config.hidden_size
    embedding = Target(
        name="transformer.vocab_embedding.weight",
        sources=(_EMBEDDING,),
        shape=(vocab, hidden),
        split=embedding_split(config),
    )
    layers = [target for layer in range(config.num_hidden_layers) for target in _layer(config, parts, layer)]
    norm = Target(
        name="transformer.ln_f.weight",
        sources=("model.norm.weight",),
        shape=(hidden,),
        offset=parts.norm_offset,
        last_stage=True,
    )
    head = _EMBEDDING if config.own("tie_word_embeddings", False) else "lm_head.weight"
    lm_head = Target(name="lm_head.weight", sources=(head,), shape=(vocab, hidden), split="vocab", last_stage=True)
    return [embedding, *layers, norm, lm_head]


def llama_unused(config: CheckpointConfig) -> Sequence[str]:
    """Return position tables of old exports, and the head when embeddings are tied."""
    patterns = ["model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "rope.freqs"]
    return [*patterns, "lm_head.weight"] if config.own("tie_word_embeddings", False) else patterns


def _layer(config: CheckpointConfig, parts: Parts, layer: int) -> Iterator[Target]:
    hidden = config.hidden_size
    yield _norm("input_layernorm", "input_layernorm", hidden, parts, layer)
    yield from attention_targets(config, parts, layer)
    yield _norm("post_layernorm", "post_attention_layernorm", hidden, parts, layer)
    if parts.feedforward_norms:
        yield _norm("pre_feedforward_layernorm", "pre_feedforward_layernorm", hidden, parts, layer)
    if parts.experts is None:
        yield from _mlp(config, parts, layer)
    else:
        yield from expert_targets(config, parts.experts, layer)
    if parts.feedforward_norms:
        yield _norm("post_feedforward_layernorm", "post_feedforward_layernorm", hidden, parts, layer)


def _norm(ours: str, theirs: str, size: int, parts: Parts, layer: int) -> Target:
    return Target(
        name=f"transformer.layers.{layer}.{ours}.weight",
        sources=(f"model.layers.{layer}.{theirs}.weight",),
        shape=(size,),
        offset=parts.norm_offset,
        layer=layer,
    )


def attention_targets(config: CheckpointConfig, parts: Parts, layer: int) -> Iterator[Target]:
    """Return the tensors of one layer's attention."""
    hidden, head_size, rows = config.hidden_size, config.head_size, fused_qkv(config)
    ours, theirs = f"transformer.layers.{layer}.attention.", f"model.layers.{layer}.self_attn."
    for kind in ("weight", "bias") if parts.qkv_bias else ("weight",):
        yield Target(
            name=f"{ours}qkv.{kind}",
            sources=[f"{theirs}{part}_proj.{kind}" for part in "qkv"],
            shape=(sum(rows), hidden) if kind == "weight" else (sum(rows),),
            split="qkv",
            parts=rows,
            head_size=head_size,
            layer=layer,
        )
    yield from _row(f"{ours}dense", f"{theirs}o_proj", (hidden, rows[0]), layer, bias=parts.dense_bias)
    if parts.head_norms:
        yield _norm("attention.q_layernorm", "self_attn.q_norm", head_size, parts, layer)
        yield _norm("attention.k_layernorm", "self_attn.k_norm", head_size, parts, layer)


def _mlp(config: CheckpointConfig, parts: Parts, layer: int) -> Iterator[Target]:
    """Return the MLP's tensors: `fc` is the activated branch (gate_proj), `gate` is up_proj."""
    hidden, inner = config.hidden_size, config.intermediate_size
    ours, theirs = f"transformer.layers.{layer}.mlp.", f"model.layers.{layer}.mlp."
    for name, source in (("fc", "gate_proj"), ("gate", "up_proj")):
        for kind in ("weight", "bias") if parts.mlp_bias else ("weight",):
            yield Target(
                name=f"{ours}{name}.{kind}",
                sources=(f"{theirs}{source}.{kind}",),
                shape=(inner, hidden) if kind == "weight" else (inner,),
                split="column",
                layer=layer,
            )
    yield from _row(f"{ours}proj", f"{theirs}down_proj", (hidden, inner), layer, bias=parts.mlp_bias)


def _row(ours: str, theirs: str, shape: tuple[int, int], layer: int, *, bias: bool) -> Iterator[Target]:
    """Return a matrix split over its inputs; every rank holds its bias."""
    yield Target(name=f"{ours}.weight", sources=(f"{theirs}.weight",), shape=shape, split="row", layer=layer)
    if bias:
        yield Target(name=f"{ours}.bias", sources=(f"{theirs}.bias",), shape=shape[:1], layer=layer)
