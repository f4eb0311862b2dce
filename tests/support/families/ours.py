"""Families that only our own runtimes have: TensorRT-LLM's checkpoint format lacks them (decision 21)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.families import expected
from tests.support.families.expected import LAYER_WINDOWS, ROPE_BASE, ROPE_SCALING, ROPE_SIZE, WINDOW
from tests.support.families.family import Config, Family, Shapes
from tests.support.families.llama_like import LLAMA, YARN
from tests.support.families.shards import Array, Tensors, split_qkv, split_rows, split_vocabulary


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the tensors of a family differ from Llama's."""

    norms: tuple[tuple[str, str], ...] = (
        ("input_layernorm", "input_layernorm"),
        ("post_layernorm", "post_attention_layernorm"),
    )
    """Norms of a layer: the name in the checkpoint, and the model's."""
    norm_bias: bool = False
    norm_offset: int = 0
    head_norms: tuple[str, str] | None = None
    head_norm_weights: str = "shared"
    fused_mlp: bool = False
    gate: bool = True
    xielu: bool = False


BRANCH = (
    ("post_layernorm", "post_attention_layernorm"),
    ("post_feedforward_layernorm", "post_feedforward_layernorm"),
)
SANDWICH = (
    ("input_layernorm", "input_layernorm"),
    ("post_layernorm", "post_self_attn_layernorm"),
    ("pre_feedforward_layernorm", "post_attention_layernorm"),
    ("post_feedforward_layernorm", "post_mlp_layernorm"),
)
ONE = (("input_layernorm", "input_layernorm"),)
PERI = (
    ("input_layernorm", "input_layernorm"),
    ("post_layernorm", "post_norm1"),
    ("pre_feedforward_layernorm", "post_attention_layernorm"),
    ("post_feedforward_layernorm", "post_norm2"),
)
APERTUS = (("input_layernorm", "attention_layernorm"), ("post_layernorm", "feedforward_layernorm"))
# EXAONE 3's names for Llama's.
EXAONE = (
    ("model.embed_tokens.", "transformer.wte."),
    ("model.layers.", "transformer.h."),
    ("model.norm.", "transformer.ln_f."),
    (".self_attn.o_proj.", ".attn.attention.out_proj."),
    (".self_attn.", ".attn.attention."),
    (".input_layernorm.", ".ln_1."),
    (".post_attention_layernorm.", ".ln_2."),
    (".mlp.gate_proj.", ".mlp.c_fc_0."),
    (".mlp.up_proj.", ".mlp.c_fc_1."),
    (".mlp.down_proj.", ".mlp.c_proj."),
)
QK = ("self_attn.q_norm", "self_attn.k_norm")


def layout(config: Mapping[str, Any]) -> Layout:
    kind = config["model_type"]
    if kind in ("olmo2", "olmo3"):
        return Layout(norms=BRANCH, head_norms=QK, head_norm_weights="row")
    if kind == "exaone4":
        return Layout(norms=BRANCH, head_norms=QK)
    if kind in ("cohere", "cohere2"):
        return Layout(norms=ONE, head_norms=QK if config.get("use_qk_norm") else None, head_norm_weights="each")
    if kind in ("glm", "glm4"):
        return Layout(norms=SANDWICH if kind == "glm4" else Layout.norms, fused_mlp=True)
    if kind == "hyperclovax" and config.get("use_post_norm", True):
        return Layout(norms=PERI)
    if kind == "hunyuan_v1_dense":
        return Layout(head_norms=("self_attn.query_layernorm", "self_attn.key_layernorm"))
    if kind == "apertus":
        return Layout(norms=APERTUS, head_norms=QK, gate=False, xielu=True)
    if kind == "stablelm":
        parts = "self_attn.q_layernorm.norms", "self_attn.k_layernorm.norms"
        return Layout(
            norms=ONE if config.get("use_parallel_residual") else Layout.norms,
            norm_bias=True,
            head_norms=parts if config.get("qk_layernorm") else None,
            head_norm_weights="listed",
        )
    if kind in ("nemotron", "arcee", "jais2"):
        return Layout(gate=False, norm_bias=kind != "arcee", norm_offset=int(kind == "nemotron"))
    return Layout()


def biases(config: Mapping[str, Any]) -> dict[str, bool]:
    """Return which matrices have a bias: `qkv`, `dense` and `mlp`."""
    kind, attention = config["model_type"], bool(config.get("attention_bias", False))
    if kind == "ernie4_5":
        return dict.fromkeys(("qkv", "dense", "mlp"), bool(config.get("use_bias")))
    if kind == "stablelm":
        return {"qkv": bool(config.get("use_qkv_bias")), "dense": False, "mlp": False}
    dense = {"glm": False, "glm4": False, "helium": False, "seed_oss": config.get("attention_out_bias", False)}
    return {"qkv": attention, "dense": dense.get(kind, attention), "mlp": bool(config.get("mlp_bias", False))}


def own_tensors(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, vocab, own = config["hidden_size"], config["intermediate_size"], config["vocab_size"], layout(config)
    heads, size, biased = config["num_attention_heads"], head_size(config), biases(config)
    counts = heads, config["num_key_value_heads"]
    kinds = ("weight", "bias") if own.norm_bias else ("weight",)
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for _, name in own.norms:
            yield from ((f"{prefix}{name}.{kind}", (hidden,)) for kind in kinds)
        for name, count in zip(own.head_norms or (), counts, strict=False):
            yield from head_norm_tensors(own.head_norm_weights, prefix + name, count, size)
        for part, count in zip("qkv", (*counts, counts[1]), strict=True):
            yield from _linear(f"{prefix}self_attn.{part}_proj", (count * size, hidden), bias=biased["qkv"])
        yield from _linear(f"{prefix}self_attn.o_proj", (hidden, heads * size), bias=biased["dense"])
        outer = {"mlp.gate_up_proj": 2 * inner} if own.fused_mlp else {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        for name, rows in outer.items():
            if own.gate or name != "mlp.gate_proj":
                yield from _linear(prefix + name, (rows, hidden), bias=biased["mlp"])
        yield from _linear(f"{prefix}mlp.down_proj", (hidden, inner), bias=biased["mlp"])
        if own.xielu:
            shapes: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
            yield from ((f"{prefix}mlp.act_fn.{name}", shape) for name, shape in shapes.items())
    yield from ((f"model.norm.{kind}", (hidden,)) for kind in kinds)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def exaone_tensors(config: Mapping[str, Any]) -> Shapes:
    for name, shape in own_tensors(config):
        yield _renamed(name), shape


def _renamed(name: str) -> str:
    for ours, theirs in EXAONE:
        name = name.replace(ours, theirs)
    return name


def exaone_ranks(source: Tensors, hf: dict[str, Any], tp: int, ep: int = 1) -> list[Tensors]:
    usual = {name: source[_renamed(name)] for name, _ in own_tensors(hf)}
    return own_ranks(usual, hf, tp, ep)


def head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def head_norm_tensors(weights: str, name: str, heads: int, size: int) -> Shapes:
    if weights == "listed":
        yield from ((f"{name}.{head}.weight", (size,)) for head in range(heads))
        return
    yield f"{name}.weight", {"shared": (size,), "each": (heads, size), "row": (heads * size,)}[weights]


def _linear(name: str, shape: tuple[int, int], *, bias: bool) -> Shapes:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]


def own_ranks(source: Tensors, hf: dict[str, Any], tp: int, ep: int = 1) -> list[Tensors]:
    """Return the expected checkpoint for tp ranks."""
    assert ep == 1
    own, ranks = layout(hf), [dict[str, Array]() for _ in range(tp)]

    def put(name: str, parts: list[Array]) -> None:
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part

    def norm(ours: str, theirs: str) -> None:
        for kind in _kinds(source, theirs):
            moved = source[f"{theirs}.{kind}"].astype(np.float32) + (own.norm_offset if kind == "weight" else 0)
            put(f"{ours}.{kind}", [moved.astype(source[f"{theirs}.{kind}"].dtype)] * tp)

    table = source["model.embed_tokens.weight"]
    put("transformer.vocab_embedding.weight", [table] * tp)
    put("lm_head.weight", split_vocabulary(table if hf["tie_word_embeddings"] else source["lm_head.weight"], tp))
    norm("transformer.ln_f", "model.norm")
    for layer in range(hf["num_hidden_layers"]):
        theirs, ours = f"model.layers.{layer}.", f"transformer.layers.{layer}."
        for one, other in own.norms:
            norm(ours + one, theirs + other)
        for name, parts in _layer(source, hf, own, theirs, tp):
            put(ours + name, parts)
    return ranks


def _layer(source: Tensors, hf: Config, own: Layout, theirs: str, tp: int) -> Iterator[tuple[str, list[Array]]]:
    """Yield the tensors of a layer, except its norms."""
    for part, name in zip("qk", own.head_norms or (), strict=False):
        yield f"attention.{part}_layernorm.weight", [_head_norm(source, theirs + name)] * tp
    for kind in _kinds(source, f"{theirs}self_attn.q_proj"):
        q, k, v = (source[f"{theirs}self_attn.{part}_proj.{kind}"] for part in "qkv")
        yield f"attention.qkv.{kind}", split_qkv(q, k, v, head_size(hf), tp)
    for one, other in (("attention.dense", "self_attn.o_proj"), ("mlp.proj", "mlp.down_proj")):
        for kind in _kinds(source, theirs + other):
            whole = source[f"{theirs}{other}.{kind}"]
            yield f"{one}.{kind}", np.split(whole, tp, axis=1) if kind == "weight" else [whole] * tp
    if own.xielu:
        numbers = [source[f"{theirs}mlp.act_fn.{name}"] for name in ("alpha_p", "alpha_n")]
        yield "mlp.xielu", [np.concatenate(numbers).astype(np.float32)] * tp
    for name, parts in _outer(source, own, theirs, tp):
        yield f"mlp.{name}", parts


def _outer(source: Tensors, own: Layout, theirs: str, tp: int) -> Iterator[tuple[str, list[Array]]]:
    """Yield the tensors before the activation."""
    if own.fused_mlp:
        gate, up = (split_rows(half, tp) for half in np.split(source[f"{theirs}mlp.gate_up_proj.weight"], 2))
        yield "fc.weight", [np.concatenate(pair) for pair in zip(up, gate, strict=True)]
        return
    for kind in _kinds(source, f"{theirs}mlp.up_proj"):
        up = split_rows(source[f"{theirs}mlp.up_proj.{kind}"], tp)
        if own.gate:
            yield f"fc.{kind}", split_rows(source[f"{theirs}mlp.gate_proj.{kind}"], tp)
            yield f"gate.{kind}", up
        else:
            yield f"fc.{kind}", up


def _head_norm(source: Tensors, name: str) -> Array:
    if f"{name}.weight" in source:
        return source[f"{name}.weight"]
    parts = [source[f"{name}.{head}.weight"] for head in range(len(source)) if f"{name}.{head}.weight" in source]
    return np.concatenate(parts)


def _kinds(source: Tensors, name: str) -> list[str]:
    return [kind for kind in ("weight", "bias") if f"{name}.{kind}" in source]


_KEPT = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_size"),
    *("max_position_embeddings", "norm_epsilon", "rotary_embedding_dim", "intermediate_size", "hidden_act"),
    *("position_embedding_type", "rotary_base", "rotary_scaling", "tie_word_embeddings", "attn_bias", "mlp_bias"),
)
EXPECTED = {key: expected.LLAMA[key] for key in _KEPT}


def _family(architecture: str, kind: str, words: str, config: Config, keys: Config, **fields: Any) -> Family:
    return Family(
        tensors=exaone_tensors if kind == "exaone" else own_tensors,
        ranks=exaone_ranks if kind == "exaone" else own_ranks,
        config=LLAMA.config | {"architectures": [architecture], "model_type": kind, "pad_token_id": 0} | config,
        expected=EXPECTED | {"superset": [f"the family {words}"]} | keys,
        nvidia=False,
        **fields,
    )


SHARDS: tuple[Config, ...] = (
    {"vocab_size": 323, "num_key_value_heads": 1},
    {"num_key_value_heads": 4, "tie_word_embeddings": True},
    {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
)
BIASED: Config = {"attention_bias": True, "mlp_bias": True}

OURS: dict[str, Family] = {
    "smollm3": _family(
        "SmolLM3ForCausalLM",
        "smollm3",
        "SmolLM3",
        {"num_hidden_layers": 4},
        {"num_hidden_layers": 4, "unrotated_layers": [False, False, False, True]},
        shards=SHARDS,
        logits=(
            {},
            {"no_rope_layers": [0, 1, 0, 1], "rope_scaling": YARN, **BIASED},
            {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 24},
        ),
        constants=ROPE_BASE,
    ),
    "granite": _family(
        "GraniteForCausalLM",
        "granite",
        "Granite",
        {
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "logits_scaling": 8.0,
        },
        {
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "logits_scaling": 8.0,
        },
        shards=SHARDS,
        logits=({}, {"residual_multiplier": 1.5, "embedding_multiplier": 1, **BIASED, "rope_scaling": YARN}),
        constants=ROPE_BASE,
    ),
    "olmo2": _family(
        "Olmo2ForCausalLM",
        "olmo2",
        "OLMo 2",
        {"rms_norm_eps": 1e-6},
        {"norm_epsilon": 1e-6},
        shards=(SHARDS[0], SHARDS[1]),
        logits=({}, {"num_key_value_heads": 4, "attention_bias": True}),
        int4=0.5,
        constants=ROPE_BASE,
    ),
    "olmo3": _family(
        "Olmo3ForCausalLM",
        "olmo3",
        "OLMo 3",
        {"rope_theta": 500000.0, "num_hidden_layers": 4, "sliding_window": 24, "rope_scaling": YARN},
        {
            "num_hidden_layers": 4,
            "rotary_base": 500000.0,
            "rotary_scaling": YARN,
            "rope_local_base_freq": 500000.0,
            "max_attention_window": [24, 24, 24, None],
            "superset": ["the family OLMo 3", "rotary scaling 'yarn'"],
        },
        shards=(SHARDS[1],),
        logits=(
            {},
            {
                "layer_types": ["full_attention", "sliding_attention"] * 2,
                "rope_scaling": None,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                },
            },
        ),
        int4=0.5,
        constants=ROPE_BASE | ROPE_SCALING | LAYER_WINDOWS | {"wrong local rope base"},
    ),
    "exaone4": _family(
        "Exaone4ForCausalLM",
        "exaone4",
        "EXAONE 4",
        {"num_hidden_layers": 4, "sliding_window": 24, "sliding_window_pattern": 4},
        {
            "num_hidden_layers": 4,
            "max_attention_window": [24, 24, 24, None],
            "unrotated_layers": [False, False, False, True],
        },
        shards=(SHARDS[0], SHARDS[1]),
        logits=({}, {"sliding_window": None, "layer_types": ["full_attention"] * 4}, {"sliding_window_pattern": 2}),
        int4=0.5,
        constants=ROPE_BASE | LAYER_WINDOWS,
    ),
    "cohere": _family(
        "CohereForCausalLM",
        "cohere",
        "Cohere",
        {"layer_norm_eps": 1e-5, "logit_scale": 0.25},
        {"logit_scale": 0.25, "qk_layernorm": False},
        shards=(SHARDS[0], SHARDS[1] | {"use_qk_norm": True}),
        logits=({}, {"use_qk_norm": True, "attention_bias": True}, {"use_qk_norm": True, "num_key_value_heads": 1}),
        constants=ROPE_BASE,
    ),
    "cohere2": _family(
        "Cohere2ForCausalLM",
        "cohere2",
        "Cohere 2",
        {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "num_hidden_layers": 4, "sliding_window": 24},
        {
            "logit_scale": 0.25,
            "num_hidden_layers": 4,
            "max_attention_window": [24, 24, 24, None],
            "unrotated_layers": [False, False, False, True],
        },
        shards=(SHARDS[1],),
        logits=({}, {"sliding_window_pattern": 2, "attention_bias": True, "head_dim": 32}),
        constants=ROPE_BASE | LAYER_WINDOWS,
    ),
    "glm": _family(
        "GlmForCausalLM",
        "glm",
        "GLM-4",
        {"head_dim": 16, "attention_bias": True, "partial_rotary_factor": 0.5},
        {"attn_bias": True, "rotary_pct": 0.5, "rotary_embedding_dim": 8, "inter_layernorms": False},
        shards=(SHARDS[0], SHARDS[1] | {"attention_bias": False}),
        logits=({}, {"attention_bias": False, "head_dim": 32, "partial_rotary_factor": 1.0}),
        constants=ROPE_BASE | ROPE_SIZE,
    ),
    "glm4": _family(
        "Glm4ForCausalLM",
        "glm4",
        "GLM-4-0414",
        {"head_dim": 16, "attention_bias": False},
        {"rotary_pct": 0.5, "rotary_embedding_dim": 8, "inter_layernorms": True},
        shards=(SHARDS[1] | {"attention_bias": True},),
        logits=({}, {"attention_bias": True}),
        int4=0.5,
        constants=ROPE_BASE | ROPE_SIZE,
    ),
    "seed_oss": _family(
        "SeedOssForCausalLM",
        "seed_oss",
        "Seed-OSS",
        {"head_dim": 16, "attention_bias": True},
        {"attn_bias": True, "attention_out_bias": False},
        shards=({"attention_out_bias": True, "mlp_bias": True}, SHARDS[0], SHARDS[1]),
        logits=({}, {"attention_out_bias": True, "mlp_bias": True, "attention_bias": False, "rope_scaling": YARN}),
        constants=ROPE_BASE,
    ),
    "hunyuan_v1_dense": _family(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        "Hunyuan",
        {"head_dim": 16, "rope_scaling": {"type": "dynamic", "alpha": 8.0, "factor": 1.0}},
        {"rotary_base": 10000.0 * 8 ** (16 / 14)},
        shards=(SHARDS[0], SHARDS[1]),
        logits=({}, {"rope_scaling": None, "attention_bias": True, "head_dim": 32}),
        constants=ROPE_BASE,
    ),
    "ernie4_5": _family(
        "Ernie4_5ForCausalLM",
        "ernie4_5",
        "ERNIE 4.5",
        {"head_dim": 16},
        {},
        shards=(SHARDS[0] | {"use_bias": True}, SHARDS[1]),
        logits=({}, {"use_bias": True, "head_dim": 32}),
        constants=ROPE_BASE,
    ),
    "helium": _family(
        "HeliumForCausalLM",
        "helium",
        "Helium",
        {"head_dim": 16},
        {},
        shards=(SHARDS[0], SHARDS[1]),
        logits=({}, {"attention_bias": True, "mlp_bias": True}),
        constants=ROPE_BASE,
    ),
    "stablelm": _family(
        "StableLmForCausalLM",
        "stablelm",
        "StableLM",
        {"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
        {
            "rotary_pct": 0.25,
            "rotary_embedding_dim": 4,
            "use_parallel_residual": False,
            "qk_layernorm": False,
        },
        shards=(SHARDS[0] | {"use_qkv_bias": True, "qk_layernorm": True}, SHARDS[1] | {"use_parallel_residual": True}),
        logits=(
            {},
            {"use_qkv_bias": True, "qk_layernorm": True, "partial_rotary_factor": 0.5},
            {"use_parallel_residual": True, "qk_layernorm": True, "num_key_value_heads": 1},
        ),
        constants=ROPE_BASE | ROPE_SIZE,
    ),
    "nemotron": _family(
        "NemotronForCausalLM",
        "nemotron",
        "Nemotron",
        {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        {
            "hidden_act": "relu2",
            "rotary_pct": 0.5,
            "rotary_embedding_dim": 8,
            "layer_norms": True,
            "norm_offset": 1.0,
        },
        shards=SHARDS,
        logits=({}, BIASED | {"head_dim": 32}),
        int4=0.5,  # the square of the ReLU widens errors
        constants=ROPE_BASE | ROPE_SIZE,
    ),
    "arcee": _family(
        "ArceeForCausalLM",
        "arcee",
        "Arcee",
        {"hidden_act": "relu2"},
        {"hidden_act": "relu2"},
        shards=(SHARDS[0] | BIASED, SHARDS[1]),
        logits=({}, BIASED | {"rope_scaling": YARN}),
        constants=ROPE_BASE,
    ),
    "apertus": _family(
        "ApertusForCausalLM",
        "apertus",
        "Apertus",
        {"hidden_act": "xielu"},
        {
            "hidden_act": "xielu",
            "rotary_base": 12e6,
            "rotary_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
        shards=(SHARDS[0], SHARDS[1] | {"attention_bias": True}),
        logits=({}, {"attention_bias": True, "head_dim": 32, "rope_scaling": YARN}),
        constants=ROPE_BASE | ROPE_SCALING,
    ),
    "jais2": _family(
        "Jais2ForCausalLM",
        "jais2",
        "Jais 2",
        {"hidden_act": "relu2", "layer_norm_eps": 1e-5, **BIASED},
        {"hidden_act": "relu2", "layer_norms": True, "attn_bias": True, "mlp_bias": True},
        shards=(SHARDS[0], SHARDS[1]),
        logits=({"num_key_value_heads": 4}, {"attention_bias": False, "mlp_bias": False, "head_dim": 32}),
        constants=ROPE_BASE,
    ),
    "internlm3": _family(
        "InternLM3ForCausalLM",
        "internlm3",
        "InternLM 3",
        {"head_dim": 16},
        {},
        shards=(SHARDS[0] | BIASED, SHARDS[1]),
        logits=({}, BIASED | {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}),
        constants=ROPE_BASE,
    ),
    "iquestcoder": _family(
        "IQuestCoderForCausalLM",
        "iquestcoder",
        "IQuest-Coder",
        {"head_dim": 16},
        {},
        shards=(SHARDS[1],),
        constants=ROPE_BASE,
    ),
    "exaone": _family(
        "ExaoneForCausalLM",
        "exaone",
        "EXAONE 3",
        {},
        {},
        shards=(SHARDS[0], SHARDS[1]),
        logits=({}, {"rope_scaling": YARN}),
        constants=ROPE_BASE,
    ),
    "hyperclovax": _family(
        "HyperCLOVAXForCausalLM",
        "hyperclovax",
        "HyperCLOVA X",
        {"residual_multiplier": 0.5, "logits_scaling": 0.25, "embedding_multiplier": 3.0, "attention_multiplier": 0.2},
        {
            "residual_multiplier": 0.5,
            "logits_scaling": 0.25,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "logits_multiplied": True,
            "inter_layernorms": True,
        },
        shards=(SHARDS[1],),
        logits=({}, {"use_post_norm": False, "attention_multiplier": None, "head_dim": 32}),
        int4=0.5,
        constants=ROPE_BASE,
    ),
    "ministral": _family(
        "MinistralForCausalLM",
        "ministral",
        "Ministral",
        {"sliding_window": 24, "head_dim": 16},
        {"max_attention_window": [24, 24]},
        shards=(SHARDS[1],),
        logits=(
            {},
            {"layer_types": ["sliding_attention", "full_attention"]},
            {"layer_types": ["full_attention"] * 2, "head_dim": 32},
        ),
        constants=ROPE_BASE | WINDOW,
    ),
    "ministral3": _family(
        "Ministral3ForCausalLM",
        "ministral3",
        "Ministral 3",
        {"head_dim": 16, "rope_parameters": YARN | {"rope_theta": 1e6, "llama_4_scaling_beta": 0.3}},
        {
            "rotary_base": 1e6,
            "rotary_scaling": YARN | {"llama_4_scaling_beta": 0.3},
            "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": 64,
            "superset": ["the family Ministral 3", "rotary scaling 'yarn'"],
        },
        shards=(SHARDS[1],),
        logits=(
            {},
            {
                "rope_parameters": YARN
                | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4},
                "sliding_window": 24,
            },
        ),
        constants=ROPE_BASE | ROPE_SCALING | {"wrong original positions"},
    ),
    "cwm": _family(
        "CwmForCausalLM",
        "cwm",
        "CWM",
        {"num_hidden_layers": 4, "sliding_window": 24, "head_dim": 16},
        {
            "num_hidden_layers": 4,
            "rotary_base": 1e6,
            "rotary_scaling": {
                "rope_type": "llama3",
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
            "max_attention_window": [None, 24, 24, 24],
        },
        shards=(SHARDS[1],),
        logits=({}, {"rope_scaling": {"rope_type": "default"}, "layer_types": ["sliding_attention"] * 4}),
        constants=ROPE_BASE | ROPE_SCALING | LAYER_WINDOWS,
    ),
}
