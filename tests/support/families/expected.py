"""config.json of checkpoints as TensorRT-LLM 1.2 writes it: the keys that families share."""

from __future__ import annotations

from typing import Any

DENSE = {
    "num_experts": 0,
    "shared_expert_intermediate_size": 0,
    "top_k": 0,
    "sparse_mixer_epsilon": 0.01,
    "tp_mode": 0,
    "device_limited_n_group": 0,
    "device_limited_topk_group": 0,
    "device_limited_routed_scaling_factor": 1.0,
}

# Of a tiny model on two ranks in bfloat16, with int8 recorded.
RECORDED: dict[str, Any] = {
    "dtype": "bfloat16",
    "logits_dtype": "float32",
    "use_parallel_embedding": False,
    "embedding_sharding_dim": 0,
    "qk_layernorm": False,
    "runtime_defaults": None,
    "mapping": {
        "world_size": 2,
        "gpus_per_node": 8,
        "cp_size": 1,
        "tp_size": 2,
        "pp_size": 1,
        "moe_tp_size": 2,
        "moe_cluster_size": 1,
        "moe_ep_size": 1,
        "attn_tp_size": 2,
        "attn_cp_size": 1,
        "cp_config": {},
        "enable_attention_dp": False,
        "enable_lm_head_tp_in_adp": False,
    },
    "quantization": {
        "quant_algo": "W8A16",
        "kv_cache_quant_algo": None,
        "group_size": 128,
        "smoothquant_val": 0.5,
        "clamp_val": None,
        "use_meta_recipe": False,
        "has_zero_point": False,
        "pre_quant_scale": False,
        "exclude_modules": None,
        "mamba_ssm_cache_dtype": None,
    },
}

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "norm_epsilon": 1e-5,
    "head_size": 16,
    "rotary_embedding_dim": 16,
    "num_key_value_heads": 4,
}

QWEN: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "hidden_act": "silu",
    "norm_epsilon": 1e-6,
    "position_embedding_type": "rope_gpt_neox",
    "rotary_base": 1000000.0,
    "rotary_scaling": None,
    "mlp_bias": False,
    "disable_weight_only_quant_plugin": False,
    "num_labels": 1,
    "use_logn_attn": False,
    "seq_length": 8192,
    "moe": DENSE | {"normalization_mode": 0},
    "moe_intermediate_size": 0,
    "moe_shared_expert_intermediate_size": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}

QWEN_MOE: dict[str, Any] = {
    **QWEN,
    "hidden_act": "swiglu",
    "moe": DENSE | {"num_experts": 8, "top_k": 3, "normalization_mode": 0},
    "moe_intermediate_size": 32,
    "tie_word_embeddings": False,
}

GEMMA: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "norm_epsilon": 1e-6,
    "position_embedding_type": "rope_gpt_neox",
    "head_size": 32,
    "rotary_embedding_dim": 32,
    "rotary_base": 10000.0,
    "rotary_scaling": None,
    "attn_bias": False,
    "mlp_bias": False,
    "use_parallel_embedding": True,
    "inter_layernorms": True,
    "quantization": RECORDED["quantization"] | {"smoothquant_val": None},  # by its script
}

LLAMA: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "hidden_act": "silu",
    "position_embedding_type": "rope_gpt_neox",
    "rotary_base": 10000.0,
    "rotary_scaling": None,
    "tie_word_embeddings": False,
    "attn_bias": False,
    "mlp_bias": False,
    "has_partial_lora_mask": False,
    "residual_mlp": False,
    "disable_weight_only_quant_plugin": False,
    "remove_duplicated_kv_heads": False,
    "moe": DENSE | {"normalization_mode": None},
    "fc_after_embed": False,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "layer_idx_offset": 0,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "output_multiplier_scale": 1.0,
}

# Faults of constants (tests/support/conversion_faults.py).
ROPE_BASE = frozenset({"wrong rope base", "rope base by a hundredth"})
ROPE_SIZE = frozenset({"wrong rope size"})
ROPE_SCALING = frozenset({"rope scaling dropped", "wrong rope factor"})
SCORES = frozenset({"wrong scale of scores"})
WINDOW = frozenset({"windows dropped", "windows by one"})
LAYER_WINDOWS = WINDOW | {"windows in other layers"}
EXPERTS = frozenset({"probabilities of experts"})
