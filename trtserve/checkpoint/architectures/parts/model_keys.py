"""The types of the keys in a model's config.json, for all families: checked before any of them is read."""

from __future__ import annotations

from collections.abc import Callable

from trtserve.checkpoint.architectures.base import HfConfig, WrongConfigError, is_number, is_size, require_sizes
from trtserve.errors import UnsupportedModelError

_SIZES = (
    *("hidden_size", "n_embd", "n_embed", "num_hidden_layers", "n_layer", "num_layers", "vocab_size"),
    *("num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads", "n_head_kv", "head_dim", "rotary_dim"),
    *("max_position_embeddings", "n_positions", "original_max_position_embeddings", "word_embed_proj_dim"),
    *("n_inner", "ffn_dim", "ffn_hidden_size", "block_ff_dim", "block_multiple_of"),
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("num_experts_per_tok", "decoder_sparse_step", "full_attention_interval"),
    *("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval"),
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("conv_L_cache", "conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim"),
    *("mamba_expand", "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_value_head_dim", "n_group", "topk_group", "moe_k", "moe_layer_interval", "global_attn_every_n_layers"),
    *("global_head_dim", "num_global_key_value_heads", "vocab_size_per_layer_input", "altup_num_inputs", "laurel_rank"),
)
_COUNTS = (
    *("max_window_layers", "num_dense_layers", "first_k_dense_replace", "num_ln_in_parallel_attn"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "shared_intermediate_size"),
    *("num_shared_experts", "moe_num_experts", "moe_num_shared_experts", "moe_layer_start_index"),
    *("num_kv_shared_layers", "hidden_size_per_layer_input", "altup_active_idx"),
)
_NUMBERS = (
    *("rope_theta", "rotary_emb_base", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct"),
    *(
        "attn_logit_softcapping",
        "query_pre_attn_scalar",
        "logit_scale",
        "routed_scaling_factor",
        "swiglu_alpha",
        "swiglu_limit",
    ),
    *("route_scale", "moe_norm_min"),
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    *("block_ffn_dim_multiplier", "time_step_min", "mamba_dt_min"),
)
_SWITCHES = (
    *("attention_bias", "mlp_bias", "qkv_bias", "bias", "use_bias", "use_qkv_bias", "conv_bias", "use_conv_bias"),
    *("attention_out_bias", "mamba_conv_bias", "mamba_proj_bias", "enable_bias", "use_expert_bias", "norm_topk_prob"),
    *("tie_word_embeddings", "tie_embedding", "use_sliding_window", "use_qk_norm", "qk_layernorm", "use_post_norm"),
    *("alibi", "multi_query", "parallel_attn", "new_decoder_architecture", "use_parallel_residual", "is_causal"),
    *("apply_residual_connection_post_layernorm", "do_layer_norm_before", "_remove_final_layer_norm"),
    *("layer_norm_elementwise_affine", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
    *("add_cross_attention", "block_auto_adjust_ff_dim", "rope_interleave", "mup_enabled"),
    *("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp", "altup_correct_scale"),
)
_WORDS = (
    *("hidden_act", "hidden_activation", "activation_function", "activation", "mamba_hidden_act", "mlp_hidden_act"),
    *("scoring_func", "topk_method", "position_embedding_type", "hybrid_override_pattern", "model_type"),
)
_DIRECTIONS = ("use_bidirectional_attention",)
_LISTS_OF_WORDS = ("layer_types", "mlp_layer_types", "layers_block_type")
_LISTS_OF_NUMBERS = ("full_attn_idxs", "mlp_only_layers", "no_rope_layers")
# null stands for an absent key elsewhere; transformers refuses it here.
_NEVER_NULL = (
    *("max_window_layers", "logit_scale", "routed_scaling_factor", "swiglu_alpha", "swiglu_limit", "time_step_min"),
    *("route_scale", "moe_norm_min", "moe_layer_start_index", "moe_layer_end_index"),
    *("n_groups", "conv_kernel", "ssm_state_size", "mamba_head_dim", "mamba_num_heads"),
    *("mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
)
_SPELLINGS = {
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_embed": "hidden_size",
}
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")


def _are(kind: type, values: object) -> bool:
    return isinstance(values, list) and all(isinstance(each, kind) for each in values)


_EXPECTED: tuple[tuple[str, Callable[[object], bool], tuple[str, ...]], ...] = (
    ("numbers of 0 or more", lambda value: is_size(value) or (type(value) is int and value == 0), _COUNTS),
    ("positive numbers", is_number, _NUMBERS),
    (
        "positive integers",
        lambda value: is_size(value) or (isinstance(value, list) and all(map(is_size, value))),
        ("moe_intermediate_size", "intermediate_size"),
    ),
    ("integers", lambda value: type(value) is int, ("sliding_window", "moe_layer_end_index")),
    ("true or false", lambda value: isinstance(value, int) and value in (0, 1), _SWITCHES),
    ("true, false, all or vision", lambda value: value in (True, False, "all", "vision"), _DIRECTIONS),
    ("words", lambda value: isinstance(value, str) and value != "", _WORDS),
    ("lists of words", lambda value: value != [] and _are(str, value), _LISTS_OF_WORDS),
    ("lists of integers", lambda value: _are(int, value), _LISTS_OF_NUMBERS),
)
KEYS = (*_SIZES, *(key for _, _, keys in _EXPECTED for key in keys))  # every key whose type is checked


def require_types(hf: HfConfig) -> None:
    """Raise UnsupportedModelError that names every key of another type than transformers reads."""
    given = {key: value for key, value in hf.items() if value is not None or key in _NEVER_NULL}
    require_sizes(given, *(key for key in _SIZES if key in given))
    for expected, fits, keys in _EXPECTED:
        wrong = [f"{key} = {given[key]!r:.80}" for key in keys if key in given and not fits(given[key])]
        if wrong:
            raise WrongConfigError(f"config.json has {', '.join(wrong)}; expected {expected}.")
    for key, other in _SPELLINGS.items():
        if key in given and given[key] != given.get(other, given[key]):
            raise WrongConfigError(
                f"config.json has {key} = {given[key]} and {other} = {given[other]}, two names of one size."
            )
    # A Nemotron-H says what each layer is instead, and a Gemma omits the default.
    omits = str(hf.get("model_type")).startswith(("nemotron_h", "gemma"))
    listed = ("layers_block_type", "hybrid_override_pattern", *(["layer_types"] if omits else []))
    if not any(key in given for key in (*_DEPTHS, *listed)):
        raise UnsupportedModelError(
            f"config.json of this {hf.get('model_type', 'unknown')} model lacks num_hidden_layers.",
            hint="Take config.json from the model's own repository.",
        )
