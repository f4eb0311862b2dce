"""The checkpoint tensors of a family, derived from the names of its source tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import Part, SourceNames, Split, Target, embedding_split, fused_qkv
from trtserve.checkpoint.architectures.parts.expert_tensors import expert_targets, experts_of
from trtserve.checkpoint.architectures.parts.latent import latent_targets


def named_targets(config: CheckpointConfig, names: SourceNames, *, tied: bool) -> list[Target]:
    """Return every tensor of the unsharded checkpoint, in file order; `tied` uses the embedding as head."""
    layers = [
        target for layer in range(config.num_hidden_layers) for target in _layer(config.of_layer(layer), names, layer)
    ]
    return [*_first(config, names), *layers, *_last(config, names, tied=tied)]


def _first(config: CheckpointConfig, names: SourceNames) -> Iterator[Target]:
    vocab, hidden, split = config.vocab_size, config.hidden_size, embedding_split(config)
    name, source = "transformer.vocab_embedding.weight", f"{names.embedding}.weight"
    yield Target(name=name, sources=(source,), shape=(vocab, hidden), split=split, factor=names.factors.get(name))
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
        yield from _norm(names, "transformer.ln_embed", names.embedding_norm, hidden)
    if size := config.layer_input_size:
        rows = size * config.num_hidden_layers
        shapes = {"embed_tokens_per_layer": (vocab, rows), "per_layer_model_projection": (rows, hidden)}
        for ours, (theirs, shape) in zip(("layer_embedding", "layer_projection"), shapes.items(), strict=True):
            others = vocab - (config.layer_input_vocab or vocab) if ours == "layer_embedding" else 0
            yield Target(
                name=f"transformer.{ours}.weight",
                sources=(f"model.{theirs}.weight",),
                shape=shape,
                order=((0, vocab - others), *[(0, 1)] * others) if others else (),
            )
        yield from _norm(names, "transformer.layer_norm", "model.per_layer_projection_norm", size)
    yield from _stream_matrices(config, "entry", "altup_projections")


def _stream_matrices(config: CheckpointConfig, ours: str, theirs: str) -> Iterator[Target]:
    """Return the matrices that make the states after the first one, or lead back from them."""
    for number in range(1, config.streams):
        yield Target(
            name=f"transformer.stream_{ours}.{number}.weight",
            sources=(f"model.{theirs}.{number - 1}.weight",),
            shape=(config.hidden_size, config.hidden_size),
            last_stage=ours == "exit",
        )


def _last(config: CheckpointConfig, names: SourceNames, *, tied: bool) -> Iterator[Target]:
    """Return the tensors after the layers; a tied head may still have its own bias."""
    yield from _stream_matrices(config, "exit", "altup_unembed_projections")
    if names.final_norm is not None:
        yield from _norm(names, "transformer.ln_f", names.final_norm, config.hidden_size, last_stage=True)
    vocab = config.vocab_size
    shapes = {"weight": (vocab, config.hidden_size)} | ({"bias": (vocab,)} if "head" in names.biases else {})
    for kind, shape in shapes.items():
        yield Target(
            name=f"lm_head.{kind}",
            sources=(f"{names.embedding if tied and kind == 'weight' else names.head}.{kind}",),
            shape=shape,
            split="vocab",
            factor=names.factors.get(f"lm_head.{kind}"),
            last_stage=True,
        )


def _norm(
    names: SourceNames, name: str, source: str, size: int, *, layer: int | None = None, last_stage: bool = False
) -> Iterator[Target]:
    for kind in ("weight", "bias") if names.norm_biases else ("weight",):
        yield Target(
            name=f"{name}.{kind}",
            sources=(f"{source}.{kind}",),
            shape=(size,),
            offset=names.norm_offset if kind == "weight" else 0.0,
            layer=layer,
            last_stage=last_stage,
        )


def _layer(config: CheckpointConfig, names: SourceNames, layer: int) -> Iterator[Target]:
    ours, theirs = f"transformer.layers.{layer}.", names.layer.format(layer)
    hidden, inner = config.hidden_size, config.intermediate_size
    for name, source in names.norms.items():
        yield from _norm(names, ours + name, theirs + source, hidden, layer=layer)
    if layer in config.mixer_layers:
        yield from _mixer(names, layer)
    if layer not in config.layers_without_keys:
        yield from _attention(config, names, layer)
    if names.single and layer not in config.mlp_layers:
        return
    yield from _extras(config, names, layer)
    if names.experts is not None and layer not in experts_of(config).dense_layers:
        yield from expert_targets(config, names.experts, layer)
        return
    if names.gate_up:
        yield Target(
            name=f"{ours}mlp.fc.weight",
            sources=(f"{theirs}{names.fc}.weight",),
            shape=(2 * inner, hidden),
            split="fused",
            parts=(inner, inner),
            order=((inner, inner), (0, inner)),
            layer=layer,
        )
    else:
        yield from _linear(names, "fc", names.fc, layer, (inner, hidden))
    if names.gate is not None:
        yield from _linear(names, "gate", names.gate, layer, (inner, hidden))
    yield from _linear(names, "proj", names.proj, layer, (hidden, inner))
    if names.xielu:
        yield Target(
            name=f"{ours}mlp.xielu",
            sources=[theirs + source for source in names.xielu],
            shape=(2,),
            parts=(1, 1),
            dtype="float32",
            layer=layer,
        )


def _extras(config: CheckpointConfig, names: SourceNames, layer: int) -> Iterator[Target]:
    """Return what few families have: matrices of a layer's own input, and the factor of its result."""
    ours, theirs, hidden = f"transformer.layers.{layer}.", names.layer.format(layer), config.hidden_size
    size, count, rank = config.layer_input_size, config.streams, config.stream_rank
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    if size:
        shapes["inputs.gate.weight"] = "per_layer_input_gate.weight", (size, hidden)
        shapes["inputs.proj.weight"] = "per_layer_projection.weight", (hidden, size)
    if count:
        shapes["streams.router.weight"] = "altup.modality_router.weight", (count, hidden)
        shapes["streams.prediction.weight"] = "altup.prediction_coefs.weight", (count * count, count)
        shapes["streams.correction.weight"] = "altup.correction_coefs.weight", (count, count)
        shapes["streams.scale"] = "altup.correct_output_scale", (hidden,)
        shapes["beside.left.weight"] = "laurel.linear_left.weight", (rank, hidden)
        shapes["beside.right.weight"] = "laurel.linear_right.weight", (hidden, rank)
    for name, (source, shape) in shapes.items():
        yield Target(name=ours + name, sources=(theirs + source,), shape=shape, layer=layer)
    if names.layer_scale is not None:
        source = theirs + names.layer_scale
        yield Target(name=f"{ours}scale", sources=(source,), shape=(1,), dtype="float32", layer=layer)


def _mixer(names: SourceNames, layer: int) -> Iterator[Target]:
    """Return the tensors of a layer with a state."""
    for tensor in names.mixer:
        yield Target(
            name=f"transformer.layers.{layer}.mixer.{tensor.name}",
            sources=[names.layer.format(layer) + source for source in tensor.sources],
            shape=tensor.shape,
            parts=tensor.parts,
            order=tensor.order,
            offset=tensor.offset,
            dtype="float32" if tensor.wide else None,
            layer=layer,
        )


def _attention(config: CheckpointConfig, names: SourceNames, layer: int) -> Iterator[Target]:
    ours, theirs = f"transformer.layers.{layer}.", names.layer.format(layer)
    own_keys = config.key_layer(layer) == layer
    counts = (config.num_attention_heads, config.num_key_value_heads)[: 2 if own_keys else 1]
    for (name, source), heads in zip(names.head_norms.items(), counts, strict=False):
        size = config.head_size
        shapes = {"shared": (size,), "each": (heads, size), "row": (heads * size,)}
        listed = heads if "{}" in source else 1
        yield Target(
            name=f"{ours}{name}.weight",
            sources=[f"{theirs}{source.format(head)}.weight" for head in range(listed)],
            parts=(size,) * heads if listed > 1 else (),
            shape=shapes[names.head_norm_weights],
            offset=names.norm_offset,
            layer=layer,
        )
    if names.latent:
        yield from latent_targets(config, theirs, layer)
    else:
        yield from _qkv(config, names, layer)
        yield from _linear(names, "dense", names.dense, layer, (config.hidden_size, fused_qkv(config)[0]))
    if names.attention_gate is not None:
        yield Target(
            name=f"{ours}attention.gate.weight",
            sources=(f"{theirs}{names.attention_gate}.weight",),
            shape=(fused_qkv(config)[0], config.hidden_size),
            split="column",
            layer=layer,
        )
    if names.sinks is not None:
        yield Target(
            name=f"{ours}attention.sinks",
            sources=(theirs + names.sinks,),
            shape=(config.num_attention_heads,),
            split="column",
            layer=layer,
        )


def _qkv(config: CheckpointConfig, names: SourceNames, layer: int) -> Iterator[Target]:
    parts: tuple[int, ...] = fused_qkv(config)
    head_size = config.head_size
    order = _grouped_order(config.num_attention_heads, config.num_key_value_heads, head_size)
    of_gates, of_queries = (
        tuple((start * head_size, head_size) for start in range(first, 2 * config.num_attention_heads, 2))
        for first in (1, 0)
    )
    others = tuple((number, 0, rows) for number, rows in enumerate(parts[1:], start=1))
    sources = list(names.qkv)
    if names.values_are_keys and config.sees_all(layer):
        sources[2] = sources[1]
    if config.key_layer(layer) != layer:
        parts, sources = parts[:1], sources[:1]
    if names.gated_queries:
        yield Target(
            name=f"transformer.layers.{layer}.attention.gate.weight",
            sources=(f"{names.layer.format(layer)}{names.qkv[0]}.weight",),
            shape=(parts[0], config.hidden_size),
            split="column",
            order=of_gates,
            layer=layer,
        )
    for kind in ("weight", "bias") if "qkv" in names.biases else ("weight",):
        yield Target(
            name=f"transformer.layers.{layer}.attention.qkv.{kind}",
            sources=[f"{names.layer.format(layer)}{source}.{kind}" for source in sources],
            shape=(sum(parts), config.hidden_size) if kind == "weight" else (sum(parts),),
            split="qkv",
            parts=parts,
            head_size=head_size,
            order=order if names.grouped else (),
            runs=(*((0, *run) for run in of_queries), *others) if names.gated_queries else (),
            transpose=names.transposed and kind == "weight",
            layer=layer,
        )


@lru_cache(maxsize=8)
def _grouped_order(heads: int, kv_heads: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return the runs of all queries, then keys, then values in a tensor of groups [q … q, k, v], one per k/v head."""
    queries = heads // kv_heads * size
    starts = range(0, kv_heads * (queries + 2 * size), queries + 2 * size)
    parts = ((0, queries), (queries, size), (queries + size, size))
    return tuple((start + first, rows) for first, rows in parts for start in starts)


def _linear(names: SourceNames, part: Part, source: str, layer: int, shape: tuple[int, int]) -> Iterator[Target]:
    """Return a matrix and its bias; `fc` and `gate` are split over their outputs, the others over their inputs."""
    split: Split = "column" if part in ("fc", "gate") else "row"
    of_bias: Split = "first_rank" if part == "proj" and names.first_rank_bias else "replicated"
    kinds = {"weight": split} | ({"bias": "column" if split == "column" else of_bias} if part in names.biases else {})
    place = "attention.dense" if part == "dense" else f"mlp.{part}"
    for kind, how in kinds.items():
        yield Target(
            name=f"transformer.layers.{layer}.{place}.{kind}",
            sources=(f"{names.layer.format(layer)}{source}.{kind}",),
            shape=shape if kind == "weight" else shape[:1],
            split=how,
            transpose=names.transposed and kind == "weight",
            layer=layer,
        )
