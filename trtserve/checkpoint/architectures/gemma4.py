"""Gemma 4 and 3n: layers share keys and values, and each has an input of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import gemma, llama
from trtserve.checkpoint.architectures.base import (
    Decoder,
    ExpertNames,
    HfConfig,
    SourceNames,
    Streams,
    WrongConfigError,
    require_sizes,
    required,
    superset,
)
from trtserve.checkpoint.architectures.gemma import gemma_config
from trtserve.checkpoint.architectures.parts.expert_tensors import expert_counts, experts_of, softmax_experts
from trtserve.checkpoint.architectures.parts.positions import (
    attention_kinds,
    beyond_rotary,
    inverse_frequencies,
    rope_parameters,
    scaling_type,
    window_keys,
    windows_of,
)
from trtserve.errors import UnsupportedModelError

# Gemma 4 (text model): heads of another size in layers without a window, shared keys, and an input to each layer.
# Queries, keys and values are normed, the last layers may use the keys and values of earlier ones, and every layer ends
# with a factor. Experts may stand beside the MLP. The halves for images and sound are not read.

# Defaults of transformers' Gemma4TextConfig; the published `text_config` omits default values.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "global_head_dim": 512, "sliding_window": 512,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 0,
}  # fmt: skip
_EXPERTS = ExpertNames(
    router="router.proj",
    gate=None,
    up="experts.{}.gate_up_proj",
    down="experts.{}.down_proj",
    shared="mlp",
    router_norm="router.scale",
    scale="router.per_expert_scale",
    gate_first=True,
)
_EXPERT_NORMS = {
    "mlp.pre_experts_layernorm": "pre_feedforward_layernorm_2",
    "mlp.post_experts_layernorm": "post_feedforward_layernorm_2",
    "mlp.post_shared_layernorm": "post_feedforward_layernorm_1",
}
_BASES = {"sliding_attention": 10_000.0, "full_attention": 1_000_000.0}
_PATTERN = 6
_PART = 0.25


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: GemmaConfig's keys, and ours of what it lacks."""
    rope = hf.get("rope_parameters")
    hf = {**_DEFAULTS, **{key: value for key, value in hf.items() if value is not None}}
    kinds = attention_kinds(hf, lambda layer: (layer + 1) % _PATTERN)
    kinds[-1] = "full_attention"  # as in transformers
    base, part = _rotation(rope, "full_attention", "proportional")
    local_base, _ = _rotation(rope, "sliding_attention", "default")
    # The nested rotation is read above; images may see each other, text sees only what came before.
    seen = None if hf.get("use_bidirectional_attention") == "vision" else hf.get("use_bidirectional_attention")
    config = gemma_config(
        {**hf, "rope_parameters": None, "use_bidirectional_attention": seen},
        activation=hf.get("hidden_activation", "gelu_pytorch_tanh"),
        kv_heads=4,
        longest=131072,
    )
    return {
        **config,
        "use_parallel_embedding": False,
        "rotary_base": base,
        "rotary_pct": part,
        "rope_local_base_freq": local_base,
        "final_logit_softcapping": hf.get("final_logit_softcapping"),
        **full_heads(hf, kinds),
        "keys_are_values": bool(hf.get("attention_k_eq_v")),
        **shared_keys(hf, kinds),
        **_layer_inputs(hf),
        **(_experts(hf) if hf.get("enable_moe_block") else {}),
        **window_keys(windows_of(kinds, hf["sliding_window"])),
        **superset("the family Gemma 4"),
    }


def _rotation(nested: object, kind: str, expected: str) -> tuple[float, float]:
    """Return the base of a kind of layer, and which part of its pairs rotate."""
    found = nested.get(kind) if isinstance(nested, Mapping) else None
    parameters = rope_parameters({"rope_parameters": found})
    scaling = scaling_type(parameters) if found is not None else expected
    if scaling != expected or parameters.get("factor", 1.0) != 1.0:
        raise WrongConfigError(
            f"config.json has rotary scaling {scaling!r} for {kind} of this Gemma 4; expected {expected!r} without a "
            "factor."
        )
    default = _PART if found is None and kind == "full_attention" else 1.0
    part = float(parameters.get("partial_rotary_factor") or default)
    if part > 1 or (part != 1 and expected == "default"):
        raise UnsupportedModelError(f"config.json has partial_rotary_factor = {part:g} for {kind}.")
    return float(parameters.get("rope_theta") or _BASES[kind]), part


def _layer_inputs(hf: HfConfig) -> dict[str, Any]:
    size = hf["hidden_size_per_layer_input"]
    if size and hf["vocab_size_per_layer_input"] != hf["vocab_size"]:
        raise UnsupportedModelError(
            f"config.json has vocab_size_per_layer_input = {hf['vocab_size_per_layer_input']} and vocab_size = "
            f"{hf['vocab_size']}; expected equal numbers."
        )
    return {"layer_input_size": size}


def _experts(hf: HfConfig) -> dict[str, Any]:
    """Return the keys of experts; the MLP beside them is a shared one."""
    counts = expert_counts({**hf, "num_experts_per_tok": hf.get("top_k_experts")}, "num_experts")
    shared, keys = required(hf, "intermediate_size")["intermediate_size"], softmax_experts(hf, counts, 1, shared=0)
    keys["moe"]["shared_expert_intermediate_size"] = shared
    return {**keys, "moe_shared_expert_intermediate_size": shared, "experts_apart": True}


def names(config: CheckpointConfig) -> SourceNames:
    plain, experts = gemma.gemma2_names, _EXPERTS if config.moe.num_experts else None
    inputs = {"post_inputs_layernorm": "post_per_layer_input_norm"} if config.layer_input_size else {}
    return replace(
        plain,
        norms={**plain.norms, **inputs, **(_EXPERT_NORMS if experts else {})},
        experts=experts,
        norm_offset=0.0,
        head_norms=llama.HEAD_NORMS,
        layer_scale="layer_scalar",
        values_are_keys=config.own("keys_are_values", False),
        unused=(*plain.unused, *_absent(config)),
    )


def _absent(config: CheckpointConfig) -> list[str]:
    """Return the keys and values of layers that use others' and of those whose keys are values: files may have them."""
    return [
        f"model.layers.{layer}.self_attn.{part}.weight"
        for layer in range(config.num_hidden_layers)
        if config.key_layer(layer) != layer
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    ]


def decoder(config: CheckpointConfig) -> Decoder:
    rotated = int(config.own("rotary_pct", 1.0) * config.full_head_size // 2)
    whole = inverse_frequencies(config.full_head_size, config.rotary_base, None)
    experts = experts_of(config) if config.moe.num_experts else None
    return replace(
        gemma.decoder(config),
        mlp="experts" if experts else "gated",
        experts=experts,
        block="sandwich",
        qk_norm="heads",
        value_norm=True,
        attention_scale=1.0,
        # Pairs that do not rotate have frequency 0: they are the last of all pairs of a head.
        rope_inv_freq=(*whole[:rotated], *[0.0] * (len(whole) - rotated)),
        local_rope_inv_freq=inverse_frequencies(
            config.head_size, config.own("rope_local_base_freq", _BASES["sliding_attention"]), None
        ),
        windows=config.max_attention_window,
        key_layers=tuple(config.key_layer(layer) for layer in range(config.num_hidden_layers)),
        layer_inputs=config.layer_input_size,
        layer_scales=True,
        logits_softcap=config.own_or_none("final_logit_softcapping", float),
    )


# Gemma 3n (text model): four states of each token, of which layers see one, and an input to each layer.
# The last layers use the keys and values of earlier ones, and the first MLPs count only what is far above the mean of
# their gates. The halves for images and sound are not read.

# Defaults of transformers' Gemma3nTextConfig; the published `text_config` omits default values.
_GEMMA3N: dict[str, Any] = {
    "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "sliding_window": 512, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 15, "altup_num_inputs": 4, "altup_active_idx": 0,
    "altup_correct_scale": True, "laurel_rank": 64,
}  # fmt: skip
_GEMMA3N_PATTERN = 5
_SPARSE, _SPARSE_LAYERS = 0.95, 10


def gemma3n_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return GemmaConfig's keys, and ours of the states, the inputs of layers and the shared keys."""
    softcap = hf.get("final_logit_softcapping", 30.0)  # null: none
    hf = {**_GEMMA3N, **{key: value for key, value in hf.items() if value is not None}}
    layers = required(hf, "num_hidden_layers")["num_hidden_layers"]
    hf["intermediate_size"] = _one_width(hf["intermediate_size"], layers)
    require_sizes(hf, "hidden_size_per_layer_input", "altup_num_inputs", "laurel_rank", "vocab_size_per_layer_input")
    if not hf["altup_correct_scale"] or hf["altup_active_idx"] >= hf["altup_num_inputs"]:
        raise WrongConfigError(
            f"config.json has altup_correct_scale = {hf['altup_correct_scale']} and altup_active_idx = "
            f"{hf['altup_active_idx']} of {hf['altup_num_inputs']}; expected true and one of them."
        )
    if hf["vocab_size_per_layer_input"] > hf["vocab_size"]:
        raise WrongConfigError(
            f"config.json has vocab_size_per_layer_input = {hf['vocab_size_per_layer_input']} and vocab_size = "
            f"{hf['vocab_size']}; expected at most as many."
        )
    kinds = attention_kinds(hf, lambda layer: (layer + 1) % _GEMMA3N_PATTERN)
    base, scaling, local_base = gemma.rotations(hf)
    activation = hf.get("hidden_activation", "gelu_pytorch_tanh")
    return {
        **gemma_config({**hf, "rope_parameters": None}, activation=activation, kv_heads=2, longest=32768),
        "use_parallel_embedding": False,
        "rotary_base": base,
        "rotary_scaling": None,
        "rope_local_base_freq": local_base,
        **({gemma.FULL_ATTENTION_SCALING: scaling} if scaling else {}),
        "final_logit_softcapping": softcap,
        **shared_keys(hf, kinds),
        "layer_input_size": hf["hidden_size_per_layer_input"],
        "layer_input_vocab": hf["vocab_size_per_layer_input"],
        "streams": hf["altup_num_inputs"],
        "active_stream": hf["altup_active_idx"],
        "stream_rank": hf["laurel_rank"],
        "gate_sparsity": _sparsity(hf.get("activation_sparsity_pattern"), layers),
        **window_keys(windows_of(kinds, hf["sliding_window"])),
        **superset("the family Gemma 3n", *beyond_rotary(scaling)),
    }


def _one_width(width: object, layers: int) -> object:
    """Return the width of all MLPs, which config.json may have for each layer."""
    if not isinstance(width, list):
        return width
    if len(width) != layers or len(set(width)) != 1:
        raise WrongConfigError(
            f"config.json has intermediate_size = {width!r:.80}; expected the same size for each of {layers} layers."
        )
    return width[0]


def _sparsity(shares: object, layers: int) -> list[float]:
    """Return the share of each layer's gate that does not count."""
    sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
    found = [_SPARSE] * sparse + [0.0] * (layers - sparse) if shares is None else shares
    if (
        not isinstance(found, list)
        or len(found) != layers
        or not all(isinstance(share, float | int) and 0 <= share < 1 for share in found)
    ):
        raise WrongConfigError(
            f"config.json has activation_sparsity_pattern = {shares!r:.80}; expected a number from 0 to below 1 for "
            f"each of {layers} layers."
        )
    return [float(share) for share in found]


def gemma3n_names(config: CheckpointConfig) -> SourceNames:
    plain = names(config)
    own = {"post_beside_layernorm": "laurel.post_laurel_norm", "streams_layernorm": "altup.router_norm"}
    return replace(plain, norms={**plain.norms, **own}, layer_scale=None)


def gemma3n_decoder(config: CheckpointConfig) -> Decoder:
    return replace(
        gemma.gemma3_decoder(config),
        block="streamed",
        value_norm=True,
        attention_scale=1.0,
        windows=config.max_attention_window,
        key_layers=tuple(config.key_layer(layer) for layer in range(config.num_hidden_layers)),
        layer_inputs=config.layer_input_size,
        streams=Streams(count=config.streams, active=config.own("active_stream", 0)),
        gate_thresholds=tuple(NormalDist().inv_cdf(share) if share else None for share in config.gate_sparsity),
    )


def full_heads(hf: HfConfig, kinds: list[str]) -> dict[str, int]:
    """Return the sizes of layers without a window; transformers 5 saves them for each of these."""
    plain = {
        "head_dim": hf["global_head_dim"],
        "num_key_value_heads": (hf.get("num_global_key_value_heads") if hf.get("attention_k_eq_v") else None)
        or hf["num_key_value_heads"],
    }
    if (saved := hf.get("per_layer_config")) is not None:
        full = {str(layer) for layer, kind in enumerate(kinds) if kind == "full_attention"}
        usual = {"head_dim": hf.get("head_dim"), "num_key_value_heads": hf["num_key_value_heads"]}
        each = list(saved.values()) if isinstance(saved, Mapping) else []
        if not each or saved.keys() != full or not isinstance(each[0], Mapping) or any(one != each[0] for one in each):
            raise WrongConfigError(
                "config.json has a per_layer_config of this Gemma 4 that is not the same object for each layer without "
                "a window, and for no other."
            )
        plain = {**usual, **each[0]}
    if unknown := sorted(plain.keys() - {"head_dim", "num_key_value_heads"}):
        raise UnsupportedModelError(f"config.json has per_layer_config with {', '.join(unknown)}.")
    require_sizes(plain, *plain)
    return {"full_head_size": plain["head_dim"], "full_num_key_value_heads": plain["num_key_value_heads"]}


def shared_keys(hf: HfConfig, kinds: list[str]) -> dict[str, Any]:
    """Return how many of the last layers use the keys and values of earlier ones, and whether their MLPs are wider."""
    count = hf["num_kv_shared_layers"]
    if not 0 <= count < len(kinds) or set(kinds[: len(kinds) - count]) != set(kinds):
        raise WrongConfigError(
            f"config.json has num_kv_shared_layers = {count} of {len(kinds)} layers; expected a layer of each kind "
            "before them."
        )
    return {"shared_key_layers": count, "shared_wide_mlp": bool(hf.get("use_double_wide_mlp") and count)}
