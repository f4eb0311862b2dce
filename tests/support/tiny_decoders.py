"""Random decoders as descriptions and tensors for the graph builder, without files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trtserve.checkpoint.architectures.base import ClampedGate, Decoder, Experts, LatentAttention, QueryGrowth, Streams
from trtserve.checkpoint.architectures.parts.mixers import DeltaNet, Mixer, ShortConvolution, StateSpace
from trtserve.checkpoint.quantized import Int4Weight
from trtserve.executor.engine.shapes import Sizes
from trtserve.executor.openvino.weight_quantization import Packing

Array = npt.NDArray[Any]

LLAMA = Decoder(
    norm="rms",
    positions="rope",
    mlp="gated",
    activation="silu",
    attention_scale=0.25,
    rope_inv_freq=tuple(float(10000 ** (-index / 8)) for index in range(8)),
)
GPT2 = Decoder(
    norm="layer",
    positions="learned",
    mlp="plain",
    activation="gelu_tanh",
    attention_scale=0.25,
)
GPTJ = replace(
    GPT2,
    positions="rope",
    block="parallel",
    mlp_norm=None,
    rope_inv_freq=tuple(float(10000 ** (-index / 4)) for index in range(4)),
    rope_interleaved=True,
)
MIXTRAL = replace(LLAMA, mlp="experts", experts=Experts(count=6, chosen=2, renormalized=True))
GPT_OSS = replace(
    MIXTRAL,
    attention_sinks=True,
    windows=(7, None),
    experts=Experts(count=6, chosen=2, renormalized=True, clamp=ClampedGate(alpha=1.702, limit=1.0), interleaved=True),
)
DEEPSEEK = replace(
    MIXTRAL,
    experts=Experts(
        count=8,
        chosen=3,
        renormalized=True,
        scores="sigmoid",
        shared=True,
        shared_gate=False,
        groups=4,
        chosen_groups=2,
        scale=2.5,
        dense_layers=frozenset({0}),
    ),
)
LATENT = replace(
    LLAMA,
    latent=LatentAttention(rank=32, rotated=16, plain=24, value=40, epsilon=1e-6),
    rope_interleaved=True,
    attention_scale=0.15,
)
SHORT = replace(LLAMA, qk_norm="heads", mixer=ShortConvolution(width=64, taps=3), mixer_layers=frozenset({0}))
DELTA = replace(
    LLAMA,
    attention_gate=True,
    mixer=DeltaNet(key_heads=2, value_heads=4, key=16, value=8, taps=4),
    mixer_layers=frozenset({0, 2}),
)
SPACE = replace(
    LLAMA,
    mixer=StateSpace(heads=8, head=12, groups=2, state=16, taps=4, norm_groups=2),
    mixer_layers=frozenset({0, 2}),
)
BESIDE = replace(
    LLAMA,
    mixer=StateSpace(
        heads=8, head=12, groups=2, state=16, taps=4, norm_groups=0, factors=(0.5, 0.75, 1.25, 1.5, 0.9), factor=0.6
    ),
    mixer_layers=frozenset({0, 1}),
    mixer_beside=True,
    attention_factor=0.7,
    gate_factor=0.8,
    mlp_factor=1.2,
)
SINGLE = replace(
    SPACE,
    block="single",
    unrotated=(True,),
    mlp_norm=None,
    activation="relu2",
    mlp="experts",
    mixer_layers=frozenset({0}),
    mlp_layers=frozenset({1, 3}),
    experts=Experts(
        count=6,
        chosen=2,
        renormalized=True,
        scores="sigmoid",
        shared=True,
        shared_gate=False,
        gated=False,
        dense_layers=frozenset({0, 1, 2}),
    ),
)
GEMMA4 = replace(
    LLAMA,
    block="sandwich",
    qk_norm="heads",
    value_norm=True,
    windows=(7, None, 7, None),
    rope_inv_freq=(1.0, 0.1, *[0.0] * 10),
    local_rope_inv_freq=LLAMA.rope_inv_freq,
    key_layers=(0, 1, 0, 1),
    layer_inputs=8,
    layer_scales=True,
)
GEMMA4_MOE = replace(
    GEMMA4,
    mlp="experts",
    experts=Experts(count=6, chosen=2, renormalized=True, shared=True, shared_gate=False, apart=True),
)
GEMMA3N = replace(
    GEMMA4,
    block="streamed",
    layer_scales=False,
    rope_inv_freq=tuple(0.5**index for index in range(8)),
    streams=Streams(count=3, active=1),
    gate_thresholds=(0.5, None, -0.3, 1.2),
)
LLAMA4 = replace(
    MIXTRAL,
    chunked=True,
    windows=(5, None),
    unrotated=(False, True),
    rope_interleaved=True,
    qk_norm="bare",
    query_growth=QueryGrowth(beta=0.3, every=7, first=1, unrotated=True),
    experts=Experts(
        count=6,
        chosen=2,
        renormalized=False,
        scores="sigmoid",
        shared=True,
        shared_gate=False,
        scaled_inputs=True,
        dense_layers=frozenset({1}),
    ),
)
QWEN2_MOE = replace(MIXTRAL, experts=Experts(count=4, chosen=3, renormalized=False, shared=True))
ALIBI = replace(GPT2, positions="alibi", alibi_slopes=(0.25, 0.0625, 0.015625, 0.00390625))
GROUPED = Sizes(vocab=320, hidden=64, layers=2, heads=4, kv_heads=2, head=16, epsilon=1e-5)
INNER = 96
POSITIONS = 128


@dataclass(frozen=True, kw_only=True)
class TinyDecoder:
    """A decoder with random tensors; it is its own source of weights."""

    decoder: Decoder
    sizes: Sizes
    tensors: Mapping[str, Array]
    packing: Packing = None
    int4_matrices: Mapping[str, Int4Weight] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """Its sizes as the checkpoint's config has them."""
        return {
            "vocab_size": self.sizes.vocab,
            "hidden_size": self.sizes.hidden,
            "num_hidden_layers": self.sizes.layers,
            "num_attention_heads": self.sizes.heads,
            "num_key_value_heads": self.sizes.kv_heads,
            "head_size": self.sizes.head,
            "full_num_key_value_heads": self.sizes.full_kv_heads,
            "full_head_size": self.sizes.full_head,
            "intermediate_size": INNER,
        }

    def names(self) -> list[str]:
        return list(self.tensors)

    def merged(self, name: str) -> Array:
        # A copy without other references, as a checkpoint reader returns.
        return self.tensors[name].copy()

    def kind(self, name: str) -> Literal["float", "int4", "fp8"]:
        return "int4" if name in self.int4_matrices else "float"

    def int4(self, name: str) -> Int4Weight:
        return self.int4_matrices[name]


def tiny_decoder(
    decoder: Decoder = LLAMA,
    sizes: Sizes = GROUPED,
    *,
    dtype: npt.DTypeLike = np.float32,
    packing: Packing = None,
    biases: bool | None = None,
    head_bias: bool = False,
    seed: int = 0,
) -> TinyDecoder:
    """Random tensors for `decoder`, large enough that every part changes the logits; `biases`: with layer norms."""
    random = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}

    def add(name: str, *shape: int, bias: bool, centre: float = 0.0) -> None:
        tensors[f"{name}.weight"] = (centre + random.normal(0, 0.15, shape)).astype(dtype)
        if bias:
            tensors[f"{name}.bias"] = random.normal(0, 0.15, shape[:1]).astype(dtype)

    layer_norm = decoder.norm == "layer"
    biases = layer_norm if biases is None else biases
    add("transformer.vocab_embedding", sizes.vocab, sizes.hidden, bias=False)
    if decoder.positions == "learned":
        add("transformer.position_embedding", POSITIONS, sizes.hidden, bias=False)
    if decoder.embedding_norm:
        add("transformer.ln_embed", sizes.hidden, bias=layer_norm, centre=1.0)
    for layer in range(sizes.layers):
        name = f"transformer.layers.{layer}"
        for norm in _norms(decoder):
            add(f"{name}.{norm}", sizes.hidden, bias=layer_norm, centre=1.0)
        own = sizes.of_layer(full=decoder.window(layer) is None)
        for norm, size in _head_norms(decoder, own, layer).items():
            add(f"{name}.attention.{norm}", size, bias=False, centre=1.0)
        for part, shape in _layer_shapes(decoder, own, layer).items():
            add(f"{name}.{part}", *shape, bias=biases and len(shape) == 2)
    tensors |= _extra_tensors(decoder, sizes, tensors, random, dtype, biases=biases)
    if decoder.block != "post":
        add("transformer.ln_f", sizes.hidden, bias=layer_norm, centre=1.0)
    add("lm_head", sizes.vocab, sizes.hidden, bias=head_bias)
    return TinyDecoder(decoder=decoder, sizes=sizes, tensors=tensors, packing=packing)


def _layer_shapes(decoder: Decoder, sizes: Sizes, layer: int) -> dict[str, tuple[int, ...]]:
    mixer, shapes = decoder.mixer_of(layer), dict[str, tuple[int, ...]]()
    if layer not in decoder.mlp_layers:
        shares = decoder.key_layer(layer) != layer
        shapes = {} if mixer is None else _mixer_shapes(mixer, sizes.hidden)
        if mixer is None or decoder.mixer_beside:
            shapes |= _attention_shapes(decoder, sizes, shares=shares)
    if decoder.block != "single" or layer in decoder.mlp_layers:
        inner = _mlp_shapes(decoder, decoder.experts_of(layer), sizes.hidden)
        shapes |= {f"mlp.{part}": shape for part, shape in inner.items()}
    if decoder.layer_inputs:
        shapes |= {
            "inputs.gate": (decoder.layer_inputs, sizes.hidden),
            "inputs.proj": (sizes.hidden, decoder.layer_inputs),
            "post_inputs_layernorm": (sizes.hidden,),
        }
    if (streams := decoder.streams) is not None:
        shapes |= {
            "streams.router": (streams.count, sizes.hidden),
            "streams.prediction": (streams.count**2, streams.count),
            "streams.correction": (streams.count, streams.count),
            "streams_layernorm": (sizes.hidden,),
            "beside.left": (4, sizes.hidden),
            "beside.right": (sizes.hidden, 4),
            "post_beside_layernorm": (sizes.hidden,),
        }
    return shapes


def _head_norms(decoder: Decoder, sizes: Sizes, layer: int) -> dict[str, int]:
    """Each head has a weight of its own where the norm is of layer kind."""
    if decoder.qk_norm in (None, "bare") or decoder.mixer_of(layer) is not None:
        return {}
    several = decoder.qk_norm == "all" or decoder.norm == "layer"
    counts = {"q_layernorm": sizes.heads}
    if decoder.key_layer(layer) == layer:
        counts["k_layernorm"] = sizes.kv_heads
    return {name: heads * sizes.head if several else sizes.head for name, heads in counts.items()}


def _attention_shapes(decoder: Decoder, sizes: Sizes, *, shares: bool) -> dict[str, tuple[int, ...]]:
    latent, heads, hidden = decoder.latent, sizes.heads, sizes.hidden
    if latent is None:
        rows = (heads + (0 if shares else 2) * sizes.kv_heads) * sizes.head
        gate: dict[str, tuple[int, ...]] = (
            {"attention.gate": (heads * sizes.head, hidden)} if decoder.attention_gate else {}
        )
        return gate | {"attention.qkv": (rows, hidden), "attention.dense": (hidden, heads * sizes.head)}
    return {
        "attention.q_b": (heads * (latent.plain + latent.rotated), hidden),
        "attention.kv_a": (latent.rank + latent.rotated, hidden),
        "attention.kv_a_layernorm": (latent.rank,),
        "attention.kv_b": (heads * (latent.plain + latent.value), latent.rank),
        "attention.dense": (hidden, heads * latent.value),
    }


def _mixer_shapes(mixer: Mixer, hidden: int) -> dict[str, tuple[int, ...]]:
    if isinstance(mixer, ShortConvolution):
        shapes: dict[str, tuple[int, ...]] = {"in_proj": (3 * mixer.width, hidden), "out_proj": (hidden, mixer.width)}
    elif isinstance(mixer, DeltaNet):
        shapes = {
            "in_proj": (mixer.channels + mixer.values, hidden),
            "gates": (2 * mixer.value_heads, hidden),
            "norm": (mixer.value,),
            "out_proj": (hidden, mixer.values),
        }
    else:
        rows = mixer.inner + mixer.channels + mixer.heads
        shapes = {"in_proj": (rows, hidden), "out_proj": (hidden, mixer.inner)}
        shapes |= {"norm": (mixer.inner,)} if mixer.norm_groups else {}
    return {f"mixer.{name}": shape for name, shape in ({"conv": (mixer.channels, mixer.taps)} | shapes).items()}


def _extra_tensors(
    decoder: Decoder,
    sizes: Sizes,
    matrices: Mapping[str, Array],
    random: np.random.Generator,
    dtype: npt.DTypeLike,
    *,
    biases: bool,
) -> dict[str, Array]:
    """Return what is no matrix of layers: biases of experts, corrections of routers, sinks of attention."""
    shapes: dict[str, tuple[int, ...]] = {}
    if size := decoder.layer_inputs:
        shapes["transformer.layer_embedding.weight"] = (sizes.vocab, size * sizes.layers)
        shapes["transformer.layer_projection.weight"] = (size * sizes.layers, sizes.hidden)
        shapes["transformer.layer_norm.weight"] = (size,)
    shapes |= _stream_shapes(decoder, sizes)
    for layer in range(sizes.layers):
        name, experts = f"transformer.layers.{layer}", decoder.experts_of(layer)
        mixer = decoder.mixer_of(layer)
        if mixer is not None and not isinstance(mixer, ShortConvolution):
            heads = mixer.value_heads if isinstance(mixer, DeltaNet) else mixer.heads
            shapes |= {f"{name}.mixer.{part}": (heads,) for part in ("decay", "time_bias")}
            if isinstance(mixer, StateSpace):
                shapes |= {f"{name}.mixer.skip": (heads,), f"{name}.mixer.conv.bias": (mixer.channels,)}
        if decoder.activation == "xielu":
            shapes[f"{name}.mlp.xielu"] = (2,)
        if decoder.layer_scales:
            shapes[f"{name}.scale"] = (1,)
        if decoder.attention_sinks:
            shapes[f"{name}.attention.sinks"] = (sizes.heads,)
        lone = decoder.block != "single" or layer in decoder.mlp_layers
        if experts is not None and (experts.apart or (experts.scores == "sigmoid" and lone)):
            shapes[f"{name}.mlp.router.{'scale' if experts.apart else 'correction'}"] = (experts.count,)
        if experts is not None and biases:
            shapes |= {
                f"{name}.mlp.{part}.bias": (*matrices[f"{name}.mlp.{part}.weight"].shape[:2], 1)
                for part in ("fc", "proj")
            }
    return {name: random.normal(0, 0.3, shape).astype(dtype) for name, shape in shapes.items()}


def _stream_shapes(decoder: Decoder, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    if decoder.streams is None:
        return {}
    ends = [
        f"transformer.stream_{end}.{n}.weight" for end in ("entry", "exit") for n in range(1, decoder.streams.count)
    ]
    scales = [f"transformer.layers.{layer}.streams.scale" for layer in range(sizes.layers)]
    return {**dict.fromkeys(ends, (sizes.hidden, sizes.hidden)), **dict.fromkeys(scales, (sizes.hidden,))}


def _mlp_shapes(decoder: Decoder, experts: Experts | None, hidden: int) -> dict[str, tuple[int, ...]]:
    if experts is not None:
        return _expert_shapes(experts, hidden)
    parts = ("fc", "gate") if decoder.gated else ("fc",)
    inner = 2 * INNER if decoder.mlp == "fused" else INNER
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(parts, (inner, hidden))
    return shapes | {"proj": (hidden, INNER)}


def _expert_shapes(experts: Experts, hidden: int) -> dict[str, tuple[int, ...]]:
    count, outer = experts.count, 2 * INNER if experts.gated else INNER
    shared = {"fc": (outer, hidden), "proj": (hidden, INNER)}
    return {
        "router": (count, hidden),
        "fc": (count, outer, hidden),
        "proj": (count, hidden, INNER),
        **({f"shared_expert.{part}": shape for part, shape in shared.items()} if experts.shared else {}),
        **(dict.fromkeys(_APART, (hidden,)) if experts.apart else {}),
        **({"shared_expert_gate": (1, hidden)} if experts.shared and experts.shared_gate else {}),
    }


_APART = "router_norm", "pre_experts_layernorm", "post_experts_layernorm", "post_shared_layernorm"


def _norms(decoder: Decoder) -> list[str]:
    around = [
        *([] if decoder.block == "branch" else ["input_layernorm"]),
        *(["pre_feedforward_layernorm"] if decoder.block in ("sandwich", "streamed") else []),
        *(["post_feedforward_layernorm"] if decoder.block in ("sandwich", "branch", "streamed") else []),
    ]
    return ([] if decoder.mlp_norm is None else [decoder.mlp_norm]) + around


# Every property of a decoder that the graph builder supports, at least once.
DECODERS: dict[str, TinyDecoder] = {
    "llama": tiny_decoder(),
    "llama, biases": tiny_decoder(biases=True),
    "llama, every head its own": tiny_decoder(sizes=replace(GROUPED, kv_heads=4)),
    "llama, one key head": tiny_decoder(sizes=replace(GROUPED, kv_heads=1, layers=1)),
    "llama, window": tiny_decoder(replace(LLAMA, windows=(7,))),
    "llama, window over blocks": tiny_decoder(replace(LLAMA, windows=(33,))),
    "llama, gelu": tiny_decoder(replace(LLAMA, activation="gelu", attention_scale=0.5)),
    "llama, neighbouring pairs": tiny_decoder(replace(LLAMA, rope_interleaved=True)),
    "llama, windows in turn": tiny_decoder(replace(LLAMA, windows=(7, None))),
    "llama, window with its own rotation": tiny_decoder(
        replace(LLAMA, windows=(7, None), local_rope_inv_freq=tuple(100.0 ** (-index / 8) for index in range(8)))
    ),
    "llama, normed queries and keys": tiny_decoder(replace(LLAMA, qk_norm="heads")),
    "llama, queries and keys normed over all heads": tiny_decoder(replace(LLAMA, qk_norm="all")),
    "llama, queries and keys normed after rotation": tiny_decoder(replace(LLAMA, qk_norm="rotated")),
    "llama, norms after attention and MLP": tiny_decoder(
        replace(LLAMA, block="branch", qk_norm="all", residual_scale=0.6)
    ),
    "llama, layers without positions": tiny_decoder(replace(LLAMA, unrotated=(False, True), windows=(7, None))),
    "llama, growing queries": tiny_decoder(replace(LLAMA, query_growth=QueryGrowth(beta=0.3, every=8))),
    "llama, factors": tiny_decoder(replace(LLAMA, residual_scale=0.7, logits_scale=0.25, rope_scale=1.2)),
    "llama, norms on both sides": tiny_decoder(replace(LLAMA, block="sandwich", residual_scale=0.6)),
    "llama, scaled embeddings": tiny_decoder(replace(LLAMA, embedding_scale=8.0)),
    "llama, capped logits": tiny_decoder(replace(LLAMA, logits_softcap=0.5)),
    "gemma2, capped scores": tiny_decoder(
        replace(LLAMA, attention_softcap=0.5, block="sandwich", windows=(7, None)), replace(GROUPED, layers=3)
    ),
    "gemma4, heads of two sizes, shared keys, inputs of layers": tiny_decoder(
        GEMMA4, replace(GROUPED, layers=4, full_kv_heads=1, full_head=24)
    ),
    "gemma3n, streams and sparse gates": tiny_decoder(GEMMA3N, replace(GROUPED, layers=4)),
    "gemma4, experts beside an MLP": tiny_decoder(
        GEMMA4_MOE, replace(GROUPED, layers=4, full_kv_heads=1, full_head=24)
    ),
    "llama, int8": tiny_decoder(packing="int8"),
    "llama, int4": tiny_decoder(packing="int4"),
    "llama, float16": tiny_decoder(dtype=np.float16),
    "gpt2": tiny_decoder(GPT2, replace(GROUPED, kv_heads=4)),
    "gptj, part of a head rotated": tiny_decoder(GPTJ, replace(GROUPED, kv_heads=4), head_bias=True),
    "cohere, a weight for each head": tiny_decoder(
        replace(GPTJ, mlp="gated", activation="silu", qk_norm="heads", residual_scale=0.7), replace(GROUPED, kv_heads=2)
    ),
    "apertus, xielu": tiny_decoder(replace(LLAMA, mlp="plain", activation="xielu", qk_norm="heads"), GROUPED),
    "nemotron, relu2": tiny_decoder(replace(GPT2, activation="relu2"), replace(GROUPED, kv_heads=4)),
    "gpt_neox, two norms side by side": tiny_decoder(
        replace(GPTJ, mlp_norm="mlp_layernorm", rope_interleaved=False), replace(GROUPED, kv_heads=4), packing="int8"
    ),
    "falcon, alibi, one key head": tiny_decoder(replace(ALIBI, block="parallel"), replace(GROUPED, kv_heads=1)),
    "bloom, alibi, embeddings normed": tiny_decoder(
        replace(ALIBI, embedding_norm=True), replace(GROUPED, kv_heads=4), head_bias=True
    ),
    "opt, norms after": tiny_decoder(replace(GPT2, block="post", activation="relu"), replace(GROUPED, kv_heads=4)),
    "phi3, fused halves": tiny_decoder(replace(LLAMA, mlp="fused")),
    "llama4, chunks, bare norms, experts with scaled inputs": tiny_decoder(LLAMA4),
    "mixtral": tiny_decoder(MIXTRAL),
    "mixtral, int8": tiny_decoder(MIXTRAL, packing="int8"),
    "mixtral, int4": tiny_decoder(MIXTRAL, packing="int4"),
    "mixtral, float16": tiny_decoder(MIXTRAL, dtype=np.float16),
    "qwen2_moe, shared expert": tiny_decoder(QWEN2_MOE),
    "qwen2_moe, shared expert, int8": tiny_decoder(QWEN2_MOE, packing="int8"),
    "gpt-oss, sinks, clamped gates, biases of experts": tiny_decoder(GPT_OSS, biases=True),
    "gpt-oss, int8": tiny_decoder(GPT_OSS, biases=True, packing="int8"),
    "deepseek, groups of experts, a dense layer": tiny_decoder(DEEPSEEK),
    "deepseek, latent attention": tiny_decoder(LATENT, replace(GROUPED, kv_heads=1, head=48)),
    "deepseek, latent attention, int8": tiny_decoder(LATENT, replace(GROUPED, kv_heads=1, head=48), packing="int8"),
    "lfm2, short convolutions": tiny_decoder(SHORT),
    "lfm2, short convolutions, int8": tiny_decoder(SHORT, packing="int8"),
    "qwen3-next, delta nets, gated attention": tiny_decoder(DELTA, replace(GROUPED, layers=3)),
    "nemotron-h, single blocks": tiny_decoder(SINGLE, replace(GROUPED, layers=4)),
    "falcon-h1, state spaces beside attention, factors": tiny_decoder(BESIDE),
    "mamba 2, groups": tiny_decoder(SPACE, replace(GROUPED, layers=3)),
    "mamba 2, the gate after the norm, no positions": tiny_decoder(
        replace(
            SPACE,
            unrotated=(True,),
            mixer=replace(SPACE.mixer, norm_groups=1, norm_first=True, time_limit=(0.4, 1.2)),  # type: ignore[type-var]
        ),
        replace(GROUPED, layers=3),
    ),
    "gpt2, relu, int8": tiny_decoder(replace(GPT2, activation="relu"), replace(GROUPED, kv_heads=4), packing="int8"),
}
