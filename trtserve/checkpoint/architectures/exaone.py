"""EXAONE 3, 4 and K-EXAONE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import HfConfig, SourceNames, WrongConfigError
from trtserve.checkpoint.architectures.olmo import BRANCH_NORMS
from trtserve.checkpoint.architectures.parts.expert_tensors import (
    DEEPSEEK_EXPERTS,
    deepseek_experts,
    layers_without_experts,
)
from trtserve.checkpoint.architectures.parts.positions import layer_kinds, windows_of

# EXAONE 3 and 3.5: Llama under names of its own.

_DEFAULTS = {"max_position_embeddings": 4096, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
# EXAONE's keys of config.json, and Llama's.
_KEYS = {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act"}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config."""
    return llama.own_config({_KEYS.get(key, key): value for key, value in hf.items()}, "EXAONE 3", defaults=_DEFAULTS)


def names(config: CheckpointConfig) -> SourceNames:
    plain = llama.names(config)
    return replace(
        plain,
        embedding="transformer.wte",
        layer="transformer.h.{}.",
        norms={"input_layernorm": "ln_1", "post_layernorm": "ln_2"},
        qkv=tuple(f"attn.attention.{part}_proj" for part in "qkv"),
        dense="attn.attention.out_proj",
        fc="mlp.c_fc_0",
        gate="mlp.c_fc_1",
        proj="mlp.c_proj",
        final_norm="transformer.ln_f",
        unused=("transformer.h.*.attn.attention.rotary.inv_freq",),
    )


# EXAONE 4: norms after attention and MLP and over each head; layers without a window have no positions.


def exaone4_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config, the windows, and the layers without rotation: those without a window, if any has one."""
    name = "K-EXAONE" if hf["architectures"][0] == "ExaoneMoeForCausalLM" else "EXAONE 4"
    window, pattern = hf.get("sliding_window", 4096), hf.get("sliding_window_pattern", 4)
    layers = range(int(hf["num_hidden_layers"]))
    kinds = layer_kinds(hf)
    if kinds is None and window is not None:
        if not isinstance(pattern, int) or pattern < 1:
            raise WrongConfigError(
                f"config.json has sliding_window_pattern = {pattern!r:.40} and no layer_types; expected a number."
            )
        kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in layers]
    windows = windows_of(kinds or ["full_attention"] * len(layers), window)
    config = llama.own_config(hf, name, defaults={"rms_norm_eps": 1e-5}, windows=windows)
    return config | ({} if window is None else {"unrotated_layers": [each is None for each in windows]})


def exaone4_names(config: CheckpointConfig) -> SourceNames:
    return replace(llama.names(config), norms=BRANCH_NORMS, head_norms=llama.HEAD_NORMS)


exaone4_decoder = llama.decoder_with(block="branch", qk_norm="heads")


# K-EXAONE: EXAONE 4's attention with norms before it, and DeepSeek V3's experts.

# transformers' defaults for absent keys.
_EXAONE_MOE: dict[str, Any] = {
    "num_experts": 64, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
}  # fmt: skip


def exaone_moe_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return EXAONE 4's config and the experts; `mlp_layer_types` says which layers have them."""
    hf = {**_EXAONE_MOE, **hf}
    experts = deepseek_experts(
        {**hf, "n_routed_experts": hf["num_experts"], "n_shared_experts": hf["num_shared_experts"]}
    )
    return {**exaone4_checkpoint_config(hf), **experts, **layers_without_experts(hf)}


def exaone_moe_names(config: CheckpointConfig) -> SourceNames:
    experts = replace(DEEPSEEK_EXPERTS, correction="mlp.e_score_correction_bias")
    unused = (*llama.NAMES.unused, "mtp.*")
    return replace(llama.names(config), head_norms=llama.HEAD_NORMS, experts=experts, unused=unused)


exaone_moe_decoder = llama.decoder_with(experts=True, qk_norm="heads")
