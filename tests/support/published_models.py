"""Models as they are published: the keys and nulls of their config.json, the names and leftovers of their files.

Sizes are those of the tiny models; everything else is as the repository on the hub has it. Facts: the repositories'
own config.json and safetensors headers, and what transformers and llama.cpp pass over when they read such files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Leftover = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Published:
    """`config` of a model of a tiny `family`; `plain` is what that family's config has to say to be the same model.

    `leftovers` are tensors that no conversion needs, `{}` for the number of a layer: type and shape. The files' names
    lack the prefix `bare`, and `copied_head` is the name of a copy of the embedding table in them.
    """

    family: str
    config: Mapping[str, Any]
    plain: Mapping[str, Any] = field(default_factory=dict)
    leftovers: Mapping[str, Leftover] = field(default_factory=dict)
    bare: str = ""
    copied_head: str | None = None

    @property
    def dtype(self) -> str:
        """Return the type of the weights: float32 when the config names none, as for GPT-2."""
        return str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32")


_SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
_LLAMA: dict[str, Any] = _SIZES | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "initializer_range": 0.02,
    "intermediate_size": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
    "use_cache": True,
}  # fmt: skip
_LLAMA2: dict[str, Any] = _LLAMA | {
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 4096, "pretraining_tp": 1, "rope_scaling": None,
    "torch_dtype": "float16", "transformers_version": "4.31.0.dev0",
}  # fmt: skip
_LLAMA31: dict[str, Any] = _LLAMA | {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "max_position_embeddings": 131072, "mlp_bias": False, "pretraining_tp": 1,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
}  # fmt: skip
_LLAMA3_KEYS = ("rope_scaling", "rope_theta", "max_position_embeddings", "tie_word_embeddings")
_MISTRAL: dict[str, Any] = _LLAMA | {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 32768, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
}  # fmt: skip
_NEMO: dict[str, Any] = _MISTRAL | {
    "head_dim": 32, "attention_dropout": 0.0, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
    "sliding_window": None,
}  # fmt: skip
_MIXTRAL: dict[str, Any] = _MISTRAL | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "attention_dropout": 0.0,
    "num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02, "sliding_window": None,
}  # fmt: skip
_QWEN2: dict[str, Any] = _LLAMA | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "max_position_embeddings": 32768, "max_window_layers": 24, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_mrope": False, "use_sliding_window": False,
}  # fmt: skip
_QWEN2_MOE: dict[str, Any] = {key: value for key, value in _QWEN2.items() if key != "use_mrope"} | {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "max_position_embeddings": 8192,
    "max_window_layers": 21, "tie_word_embeddings": False, "decoder_sparse_step": 1, "moe_intermediate_size": 32,
    "norm_topk_prob": False, "num_experts": 8, "num_experts_per_tok": 3, "output_router_logits": False,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 96,
}  # fmt: skip
_QWEN3: dict[str, Any] = _QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "eos_token_id": 151645,
    "head_dim": 32, "max_position_embeddings": 40960, "max_window_layers": 28, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None,
}  # fmt: skip
_QWEN3_MOE: dict[str, Any] = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
    "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 32, "norm_topk_prob": True,
    "num_experts": 8, "num_experts_per_tok": 3, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}  # fmt: skip
_GEMMA: dict[str, Any] = {key: value for key, value in _LLAMA.items() if key != "tie_word_embeddings"} | {
    "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "head_dim": 32, "hidden_act": "gelu",
    "hidden_activation": None, "max_position_embeddings": 8192, "num_key_value_heads": 1, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "transformers_version": "4.38.0.dev0",
}  # fmt: skip
_GEMMA2: dict[str, Any] = _GEMMA | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid", "eos_token_id": [1, 107], "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 3,
    "num_key_value_heads": 2, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_GEMMA3: dict[str, Any] = {
    key: value for key, value in _GEMMA2.items() if key not in ("hidden_act", "transformers_version")
} | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": None,
    "eos_token_id": [1, 106], "final_logit_softcapping": None, "max_position_embeddings": 32768,
    "rope_local_base_freq": 10000, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
}  # fmt: skip
_GEMMA3_270M: dict[str, Any] = {key: value for key, value in _GEMMA3.items() if key != "sliding_window_pattern"} | {
    "_sliding_window_pattern": 6, "layer_types": ["sliding_attention"] * 3, "use_bidirectional_attention": False,
    "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0,
}  # fmt: skip
_PHI2: dict[str, Any] = _SIZES | {
    "architectures": ["PhiForCausalLM"], "model_type": "phi", "attention_dropout": 0.0, "bos_token_id": 50256,
    "embd_pdrop": 0.0, "eos_token_id": 50256, "hidden_act": "gelu_new", "initializer_range": 0.02,
    "intermediate_size": 128, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "num_key_value_heads": 4,
    "partial_rotary_factor": 0.4, "qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.37.0",
    "use_cache": True,
}  # fmt: skip
_PHI3: dict[str, Any] = _LLAMA | {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rope_scaling": None,
    "rope_theta": 10000.0, "sliding_window": 2047, "torch_dtype": "bfloat16", "transformers_version": "4.40.2",
}  # fmt: skip
_SHORT = [1.0, 1.02, 1.03, 1.05, 1.1, 1.25, 1.4, 2.0]
_LONG = [1.05, 1.2, 1.6, 3.0, 9.0, 27.0, 45.0, 64.0]
_PHI3_LONG: dict[str, Any] = _PHI3 | {
    "max_position_embeddings": 131072, "sliding_window": 262144,
    "rope_scaling": {"long_factor": _LONG, "short_factor": _SHORT, "type": "longrope"},
}  # fmt: skip
_PHI4_MINI: dict[str, Any] = _PHI3_LONG | {
    "bos_token_id": 199999, "eos_token_id": 199999, "pad_token_id": 199999, "full_attn_mod": 1,
    "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "partial_rotary_factor": 0.75,
    "rope_scaling": {"long_factor": _LONG[:6], "short_factor": _SHORT[:6], "type": "longrope"},
    "tie_word_embeddings": True,
}  # fmt: skip
_PHI3_KEYS = ("max_position_embeddings", "original_max_position_embeddings", "rope_scaling", "sliding_window")
_GPT_SUMMARY: dict[str, Any] = {
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
}  # fmt: skip
_GPT2: dict[str, Any] = _GPT_SUMMARY | {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 512, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "resid_pdrop": 0.1,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 320,
}  # fmt: skip
_GPTJ: dict[str, Any] = _GPT_SUMMARY | {
    "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0, "bos_token_id": 50256,
    "embd_pdrop": 0.0, "eos_token_id": 50256, "gradient_checkpointing": False, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gptj", "n_embd": 64, "n_head": 4, "n_inner": None, "n_layer": 2,
    "n_positions": 2048, "resid_pdrop": 0.0, "rotary": True, "rotary_dim": 8, "scale_attn_weights": True,
    "tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer", "transformers_version": "4.18.0.dev0",
    "use_cache": True, "vocab_size": 320,
}  # fmt: skip
_PYTHIA: dict[str, Any] = _SIZES | {
    "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
    "initializer_range": 0.02, "intermediate_size": 256, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
    "model_type": "gpt_neox", "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
    "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True, "use_parallel_residual": True,
}  # fmt: skip
_OPT: dict[str, Any] = _SIZES | {
    "_name_or_path": "opt-125m", "_remove_final_layer_norm": False, "activation_dropout": 0.0,
    "activation_function": "relu", "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2,
    "do_layer_norm_before": True, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 128, "init_std": 0.02, "layerdrop": 0.0,
    "max_position_embeddings": 512, "model_type": "opt", "pad_token_id": 1, "prefix": "</s>", "torch_dtype": "float16",
    "transformers_version": "4.21.0.dev0", "use_cache": True, "word_embed_proj_dim": 64,
}  # fmt: skip
_BLOOM: dict[str, Any] = {
    "apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"], "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_dropout": 0.0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True,
    "model_type": "bloom", "n_embed": 64, "n_inner": None, "n_layer": 2, "num_attention_heads": 4, "offset_alibi": 100,
    "pad_token_id": 3, "pretraining_tp": 1, "seq_length": 2048, "skip_bias_add": True, "skip_bias_add_qkv": False,
    "transformers_version": "4.20.0", "unk_token_id": 0, "use_cache": True, "vocab_size": 320,
}  # fmt: skip
_FALCON: dict[str, Any] = _SIZES | {
    "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0, "auto_map": {"AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM"}, "bias": False,
    "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": True, "new_decoder_architecture": False,
    "parallel_attn": True, "torch_dtype": "bfloat16", "transformers_version": "4.27.4", "use_cache": True,
}  # fmt: skip
_REFINED_WEB: dict[str, Any] = {
    "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["RWForCausalLM"],
    "attention_dropout": 0.0, "auto_map": {"AutoModelForCausalLM": "modelling_RW.RWForCausalLM"}, "bias": False,
    "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 64, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "RefinedWeb", "n_head": 4, "n_head_kv": 2, "n_layer": 2,
    "parallel_attn": True, "torch_dtype": "bfloat16", "transformers_version": "4.27.4", "use_cache": True,
    "vocab_size": 320,
}  # fmt: skip
_FALCON_11B: dict[str, Any] = _FALCON | {
    "activation": "gelu", "ffn_hidden_size": 256, "max_position_embeddings": 8192, "new_decoder_architecture": True,
    "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "rope_scaling": None, "rope_theta": 500042.0,
    "tie_word_embeddings": False,
}  # fmt: skip
_STARCODER2: dict[str, Any] = _SIZES | {
    "activation_function": "gelu", "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1,
    "attention_softmax_in_fp32": True, "bos_token_id": 0, "embedding_dropout": 0.1, "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.018042, "intermediate_size": 128,
    "layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384, "mlp_type": "default", "model_type": "starcoder2",
    "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_key_value_heads": 2, "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True,
    "sliding_window": 4096, "torch_dtype": "bfloat16", "transformers_version": "4.37.0.dev0", "use_bias": True,
    "use_cache": True,
}  # fmt: skip

_INV_FREQ: dict[str, Leftover] = {"model.layers.{}.self_attn.rotary_emb.inv_freq": ("F32", (8,))}
_MASK: Leftover = ("U8", (1, 1, 8, 8))


def _same(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """The keys with which a tiny family's config equals the published one."""
    return {key: config[key] for key in keys if key in config}


PUBLISHED: dict[str, Published] = {
    "llama-7b": Published(
        family="llama",
        config={key: value for key, value in _LLAMA2.items() if key not in ("num_key_value_heads", "rope_scaling")}
        | {"max_position_embeddings": 2048, "max_sequence_length": 2048, "pad_token_id": 0},
        plain={"num_key_value_heads": 4, "max_position_embeddings": 2048},
        leftovers=_INV_FREQ,
    ),
    "Llama-2-7b-hf": Published(
        family="llama", config=_LLAMA2, plain={"max_position_embeddings": 4096}, leftovers=_INV_FREQ
    ),
    "Llama-3.1-8B-Instruct": Published(family="llama", config=_LLAMA31, plain=_same(_LLAMA31, *_LLAMA3_KEYS)),
    "Llama-3.2-1B": Published(
        family="llama",
        config=_LLAMA31 | {"head_dim": 16, "eos_token_id": 128001, "tie_word_embeddings": True},
        plain=_same(_LLAMA31, *_LLAMA3_KEYS) | {"tie_word_embeddings": True},
        copied_head="lm_head.weight",
    ),
    "a Llama with its table of Meta's": Published(
        family="llama",
        config=_LLAMA2,
        plain={"max_position_embeddings": 4096},
        leftovers={"rope.freqs": ("BF16", (8,)), "model.rotary_emb.inv_freq": ("F32", (8,))},
    ),
    "Mistral-7B-v0.1": Published(
        family="mistral", config=_MISTRAL, plain={"max_position_embeddings": 32768, "sliding_window": 4096}
    ),
    "Mistral-Nemo": Published(
        family="mistral", config=_NEMO, plain=_same(_NEMO, "head_dim", "max_position_embeddings", "rope_theta")
    ),
    "Mixtral-8x7B-v0.1": Published(
        family="mixtral", config=_MIXTRAL, plain=_same(_MIXTRAL, "max_position_embeddings", "rope_theta")
    ),
    "Qwen2.5-0.5B": Published(
        family="qwen2", config=_QWEN2, plain={"max_position_embeddings": 32768, "tie_word_embeddings": True}
    ),
    "Qwen1.5-MoE-A2.7B": Published(family="qwen2_moe", config=_QWEN2_MOE, plain={"max_position_embeddings": 8192}),
    "Qwen3-0.6B": Published(
        family="qwen3", config=_QWEN3, plain={"max_position_embeddings": 40960}, copied_head="lm_head.weight"
    ),
    "Qwen3-30B-A3B": Published(family="qwen3_moe", config=_QWEN3_MOE, plain={"max_position_embeddings": 40960}),
    "gemma-2b": Published(family="gemma", config=_GEMMA, plain={"rms_norm_eps": 1e-6, "max_position_embeddings": 8192}),
    "gemma-2-2b-it": Published(
        family="gemma2",
        config=_GEMMA2,
        plain=_same(_GEMMA2, "query_pre_attn_scalar", "sliding_window", "max_position_embeddings"),
        copied_head="lm_head.weight",
    ),
    "gemma-3-1b-it": Published(
        family="gemma3",
        config=_GEMMA3,
        plain=_same(_GEMMA3, "query_pre_attn_scalar", "sliding_window", "sliding_window_pattern", "rope_scaling")
        | _same(_GEMMA3, "final_logit_softcapping", "attn_logit_softcapping", "max_position_embeddings"),
    ),
    "gemma-3-270m": Published(
        family="gemma3",
        config=_GEMMA3_270M,
        plain=_same(_GEMMA3, "query_pre_attn_scalar", "sliding_window", "sliding_window_pattern", "rope_scaling")
        | _same(_GEMMA3, "final_logit_softcapping", "attn_logit_softcapping", "max_position_embeddings"),
    ),
    "phi-2": Published(
        family="phi", config=_PHI2, plain=_same(_PHI2, "partial_rotary_factor", "max_position_embeddings")
    ),
    "phi-1_5": Published(
        family="phi",
        config=_PHI2 | {"num_key_value_heads": None, "partial_rotary_factor": 0.5},
        plain={"max_position_embeddings": 2048},
        leftovers=_INV_FREQ,
    ),
    "Phi-3-mini-4k-instruct": Published(family="phi3", config=_PHI3, plain=_same(_PHI3, *_PHI3_KEYS)),
    "Phi-3-mini-128k-instruct": Published(
        family="phi3_long", config=_PHI3_LONG, plain=_same(_PHI3_LONG, *_PHI3_KEYS), leftovers=_INV_FREQ
    ),
    "Phi-4-mini-instruct": Published(
        family="phi3_long",
        config=_PHI4_MINI,
        plain=_same(_PHI4_MINI, *_PHI3_KEYS, "partial_rotary_factor", "tie_word_embeddings"),
    ),
    "gpt2": Published(
        family="gpt2", config=_GPT2, leftovers={"h.{}.attn.bias": ("F32", (1, 1, 8, 8))}, bare="transformer."
    ),
    "distilgpt2": Published(
        family="gpt2",
        config=_GPT2 | {"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
        leftovers={"transformer.h.{}.attn.bias": _MASK, "transformer.h.{}.attn.masked_bias": ("F32", ())},
        copied_head="lm_head.weight",
    ),
    "gpt-j-6b": Published(
        family="gptj",
        config=_GPTJ,
        plain={"n_positions": 2048},
        leftovers={"transformer.h.{}.attn.bias": _MASK, "transformer.h.{}.attn.masked_bias": ("F32", ())},
    ),
    "pythia-160m": Published(
        family="gpt_neox",
        config=_PYTHIA,
        plain={"max_position_embeddings": 2048},
        leftovers={
            "gpt_neox.layers.{}.attention.bias": _MASK,
            "gpt_neox.layers.{}.attention.masked_bias": ("F16", ()),
            "gpt_neox.layers.{}.attention.rotary_emb.inv_freq": ("F16", (2,)),
        },
    ),
    "gpt-neox-20b": Published(
        family="gpt_neox",
        config=_PYTHIA | {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "hidden_act": "gelu_fast"},
        plain={"max_position_embeddings": 2048, "hidden_act": "gelu_fast"},
        leftovers={
            "gpt_neox.layers.{}.attention.bias": ("BOOL", (1, 1, 8, 8)),
            "gpt_neox.layers.{}.attention.masked_bias": ("F32", ()),
            "gpt_neox.layers.{}.attention.rotary_emb.inv_freq": ("F32", (2,)),
        },
    ),
    "opt-125m": Published(family="opt", config=_OPT, leftovers={"decoder.version": ("F32", (1,))}, bare="model."),
    "opt-350m": Published(
        family="opt",
        config=_OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
        plain={"do_layer_norm_before": False, "word_embed_proj_dim": 32},
        leftovers={"model.decoder.version": ("F32", (1,))},
        copied_head="lm_head.weight",
    ),
    "bloom-560m": Published(family="bloom", config=_BLOOM, bare="transformer."),
    "a BLOOM with its head": Published(
        family="bloom", config=_BLOOM | {"torch_dtype": "bfloat16"}, copied_head="lm_head.weight"
    ),
    "falcon-7b": Published(
        family="falcon",
        config=_FALCON,
        plain={"max_position_embeddings": 2048},
        leftovers={"transformer.h.{}.self_attention.rotary.inv_freq": ("BF16", (8,))},
        copied_head="lm_head.weight",
    ),
    "falcon-40b as RefinedWeb": Published(
        family="falcon_new",
        config=_REFINED_WEB,
        plain={"max_position_embeddings": 2048},
        copied_head="lm_head.weight",
    ),
    "falcon-rw-1b": Published(
        family="falcon_rw",
        config=_FALCON | {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
        plain={"max_position_embeddings": 2048},
    ),
    "falcon-11B": Published(
        family="falcon_new",
        config=_FALCON_11B,
        plain=_same(_FALCON_11B, "max_position_embeddings", "num_ln_in_parallel_attn", "rope_theta")
        | {"tie_word_embeddings": False},
    ),
    "starcoder2-3b": Published(
        family="starcoder2",
        config=_STARCODER2,
        plain=_same(_STARCODER2, "max_position_embeddings", "rope_theta", "sliding_window"),
        copied_head="lm_head.weight",
    ),
    "starcoder2-15b": Published(
        family="starcoder2",
        config=_STARCODER2 | {"num_key_value_heads": 4, "tie_word_embeddings": False},
        plain=_same(_STARCODER2, "max_position_embeddings", "rope_theta", "sliding_window")
        | {"num_key_value_heads": 4, "tie_word_embeddings": False},
    ),
}
