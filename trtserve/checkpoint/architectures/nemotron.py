"""Nemotron, Arcee, Jais 2, Nemotron-H and Nemotron 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, ExpertNames, HfConfig, Part, SourceNames, superset
from trtserve.checkpoint.architectures.parts.expert_tensors import deepseek_experts, experts_of
from trtserve.checkpoint.architectures.parts.state_space import state_space, state_space_keys, state_space_tensors
from trtserve.errors import UnsupportedModelError

# Nemotron (dense), Arcee and Jais 2: Llama with a plain MLP of squared ReLU; Nemotron and Jais have layer norms.

_NEMOTRON = {"partial_rotary_factor": 0.5, "max_position_embeddings": 4096, "hidden_act": "relu2"}
_ARCEE = {"max_position_embeddings": 4096, "hidden_act": "relu2", "rms_norm_eps": 1e-5}
_JAIS = {"max_position_embeddings": 8192, "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and the kind of norm; a Nemotron's multiply by 1 + weight."""
    if hf["architectures"][0] == "NemotronForCausalLM":
        own = {"layer_norms": True, "norm_epsilon": hf.get("norm_eps", 1e-5), "norm_offset": 1.0}
        return llama.own_config(hf, "Nemotron", defaults=_NEMOTRON, partial=True) | own
    if hf["architectures"][0] == "Jais2ForCausalLM":
        own = {"layer_norms": True, "norm_epsilon": hf.get("layer_norm_eps", 1e-5)}
        return llama.own_config(hf, "Jais 2", defaults=_JAIS) | own
    return llama.own_config(hf, "Arcee", defaults=_ARCEE)


def names(config: CheckpointConfig) -> SourceNames:
    plain = llama.names(config)
    return replace(
        plain,
        fc="mlp.up_proj",
        gate=None,
        norm_biases=config.own("layer_norms", False),
        norm_offset=config.own("norm_offset", 0.0),
        biases=plain.biases - {"gate"},
    )


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(llama.decoder(config), mlp="plain", norm="layer" if config.own("layer_norms", False) else "rms")


# Nemotron-H and Nemotron 3: each layer is a state space, attention without positions, an MLP, or experts.

# transformers' defaults for absent keys.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "intermediate_size": 21504,
    "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, "ssm_state_size": 128, "mamba_num_heads": 128,
    "mamba_head_dim": 64, "mamba_hidden_act": "silu", "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001,
    "use_conv_bias": True, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}  # fmt: skip
_OLD = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_dt_min": "time_step_min"}
_OLD |= {"mamba_conv_bias": "use_conv_bias"}
_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
_EXPERTS = ExpertNames(
    router="mixer.gate",
    gate=None,
    up="mixer.experts.{}.up_proj",
    down="mixer.experts.{}.down_proj",
    shared="mixer.shared_experts",
    correction="mixer.gate.e_score_correction_bias",
    plain=True,
)


def nemotron_h_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's sizes, the kinds of layers, the state spaces, and the experts."""
    hf = {**_DEFAULTS, **hf, **{new: hf[old] for old, new in _OLD.items() if old in hf}}
    kinds = _layer_kinds(hf)
    for key, only in {"mamba_hidden_act": "silu", "mlp_hidden_act": "relu2"}.items():
        if hf[key] != only:
            raise UnsupportedModelError(f"config.json has {key} = {hf[key]!r}; this family's is {only}.")
    for key in ("moe_latent_size", "sliding_window"):
        if hf.get(key) is not None:
            raise UnsupportedModelError(
                f"config.json has {key} = {hf[key]!r}, which our runtimes do not compute for {hf['architectures'][0]}.",
                hint="The vllm runtime reads the model itself and may run it.",
            )
    if hf.get("mlp_bias") and "moe" in kinds:
        raise UnsupportedModelError("config.json has mlp_bias = true; no published Nemotron with experts has it.")
    places = {kind: [layer for layer, each in enumerate(kinds) if each == kind] for kind in set(kinds)}
    usual = {"num_hidden_layers": len(kinds), "rms_norm_eps": hf["layer_norm_epsilon"], "hidden_act": "silu"}
    experts = _experts(hf, len(kinds), places["moe"]) if "moe" in places else {}
    config = llama.own_config({**hf, **usual, "layer_types": None}, "Nemotron-H", defaults={}, windows=())
    return {
        **config,
        "hidden_act": "relu2",
        "attn_bias": False,
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        "unrotated_layers": [True],
        "mixer_layers": places.get("linear_attention", []),
        "mlp_layers": sorted([*places.get("mlp", []), *places.get("moe", [])]),
        **state_space_keys(
            heads=hf["mamba_num_heads"],
            head=hf["mamba_head_dim"],
            groups=hf["n_groups"],
            state=hf["ssm_state_size"],
            taps=hf["conv_kernel"],
            norm_groups=hf["n_groups"],
            conv_bias=hf["use_conv_bias"],
            biased=hf.get("use_bias", False),
            time_limit=[hf["time_step_min"], float("inf")],
        ),
        **experts,
        **superset(*config["superset"]),
    }


def _layer_kinds(hf: HfConfig) -> list[str]:
    """Return the kind of each layer. Raises UnsupportedModelError for unknown ones, and for none with attention."""
    listed, pattern = hf.get("layers_block_type") or hf.get("layer_types"), hf.get("hybrid_override_pattern")
    found = [_OLD_KINDS.get(kind, kind) for kind in listed or [_KINDS.get(letter, letter) for letter in pattern or ""]]
    if unknown := sorted(set(found) - set(_KINDS.values())):
        raise UnsupportedModelError(
            f"config.json has layers of the kind {unknown[0]!r}; known: {', '.join(_KINDS.values())}."
        )
    if "full_attention" not in found:
        raise UnsupportedModelError(
            f"None of this model's {len(found)} layers has attention; our runtimes need one that has.",
            hint="The vllm runtime reads the model itself and may run it.",
        )
    return found


def _experts(hf: HfConfig, layers: int, places: list[int]) -> dict[str, Any]:
    """Return the keys of experts, whose shared one has a width of its own."""
    keys = deepseek_experts({**hf, "first_k_dense_replace": 0, "num_hidden_layers": layers})
    shared = hf["moe_shared_expert_intermediate_size"]
    keys["moe"] = {**keys["moe"], "shared_expert_intermediate_size": shared}
    return {
        **keys,
        "moe_shared_expert_intermediate_size": shared,
        "dense_layers": [layer for layer in range(layers) if layer not in places],
    }


def nemotron_h_names(config: CheckpointConfig) -> SourceNames:
    biases: frozenset[Part] = frozenset({"fc", "proj"} if config.own("mlp_bias", False) else ())
    return replace(
        llama.NAMES,
        embedding="model.embeddings",
        norms={"input_layernorm": "norm"},
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        dense="mixer.o_proj",
        fc="mixer.up_proj",
        gate=None,
        proj="mixer.down_proj",
        final_norm="model.norm_f",
        biases=biases,
        mixer=state_space_tensors(config, "mixer."),
        single=True,
        experts=_EXPERTS if config.moe.num_experts else None,
        unused=(*llama.NAMES.unused, "mtp.*"),
    )


def nemotron_h_decoder(config: CheckpointConfig) -> Decoder:
    experts = experts_of(config) if config.moe.num_experts else None
    return replace(
        llama.decoder(replace(config, hidden_act="relu2")),
        mlp="experts" if experts else "plain",
        experts=experts and replace(experts, gated=False),
        block="single",
        mixer=state_space(config),
        mixer_layers=frozenset(config.mixer_layers),
        mlp_layers=frozenset(config.mlp_layers),
    )
