"""What llama.cpp calls families and their tensors, and the metadata of a GGUF file.

A row of `FAMILIES` says how a family's file differs from its Hugging Face folder. Names are those of the public package
`gguf` (its constants and tensor mapping).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trtserve.checkpoint.gguf import GgufFile
from trtserve.errors import CorruptFileError, UnsupportedModelError

AGAIN = "Fetch the file again, or choose another copy of it."
OTHER = "Choose the original model, in safetensors."
_MOST_LAYERS = 10_000
_EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}


@dataclass(frozen=True, kw_only=True)
class GgufFamily:
    """How llama.cpp keeps a family: the class in transformers, and what differs from Llama."""

    architecture: str
    model_type: str
    permuted: bool = False  # rows of q and k
    norm_shift: float = 0.0  # llama.cpp stores the norms of Gemma and Qwen3-Next plus one
    own_head_size: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)  # of a layer, with names of their own
    outer: Mapping[str, str] = field(default_factory=dict)  # outside the layers; {} stands for the number in a stack
    joined: Mapping[str, tuple[str, str]] = field(
        default_factory=dict
    )  # of a layer: what follows its rows, both's name
    experts: Mapping[str, str] = field(
        default_factory=lambda: _EXPERTS
    )  # of a layer; {} stands for the expert's number
    keys: Mapping[str, str] = field(default_factory=dict)  # of config.json, and their names in the metadata
    config: Mapping[str, Any] = field(default_factory=dict)  # what is the same for all models
    present: Mapping[str, str] = field(default_factory=dict)  # key of config.json: true where a layer has this


_AFTER_BOTH = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SANDWICH = {**_AFTER_BOTH, "ffn_norm": "pre_feedforward_layernorm"}
_BIASED = {"attention_bias": "attn_q.bias"}
_GEMMA: dict[str, Any] = {"norm_shift": -1.0, "own_head_size": True}
_MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_MAMBA_KEYS = {
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_conv": "ssm.conv_kernel",
}
_GRANITE_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
}
_GRANITE_EXPERTS: dict[str, Any] = {
    "permuted": True,
    "joined": {
        "ffn_gate": ("ffn_up", "shared_mlp.input_linear"),
        "ffn_gate_shexp": ("ffn_up_shexp", "shared_mlp.input_linear"),
        "ffn_gate_exps": ("ffn_up_exps", "block_sparse_moe.experts.{}.input_linear"),
    },
    "experts": {"ffn_down_exps": "block_sparse_moe.experts.{}.output_linear"},
}
_GRANITE_MODULES = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_down": "shared_mlp.output_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_LAYER_INPUTS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_OUTER_INPUTS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DELTA_NET = {
    "post_attention_norm": "post_attention_layernorm",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_APART_INPUTS = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}
FAMILIES = {
    "llama": GgufFamily(
        architecture="LlamaForCausalLM",
        model_type="llama",
        permuted=True,
        present=_BIASED,
        config={"hidden_act": "silu"},
    ),
    "qwen2": GgufFamily(architecture="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen2moe": GgufFamily(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        modules=_SHARED_EXPERT,
        keys={"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        config={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen3": GgufFamily(architecture="Qwen3ForCausalLM", model_type="qwen3", own_head_size=True),
    "qwen3moe": GgufFamily(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        own_head_size=True,
        config={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen3next": GgufFamily(
        architecture="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        own_head_size=True,
        norm_shift=-1.0,
        modules={
            **_SHARED_EXPERT,
            **_DELTA_NET,
            "ssm_in": "linear_attn.in_proj_qkvz",  # of files of 2025, where the rows have transformers' order
            "attn_qkv": "linear_attn.in_proj_qkvz",
            "ssm_ba": "linear_attn.in_proj_ba",
        },
        config={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen35": GgufFamily(
        architecture="Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        own_head_size=True,
        norm_shift=-1.0,
        modules={**_DELTA_NET, **_APART_INPUTS},
    ),
    "qwen35moe": GgufFamily(
        architecture="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        own_head_size=True,
        norm_shift=-1.0,
        modules={**_SHARED_EXPERT, **_DELTA_NET, **_APART_INPUTS},
    ),
    "deepseek2": GgufFamily(  # or DeepSeek V3, by its routers
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        modules={
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
            **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
        },
    ),
    "gemma": GgufFamily(architecture="GemmaForCausalLM", model_type="gemma", **_GEMMA),
    "gemma2": GgufFamily(architecture="Gemma2ForCausalLM", model_type="gemma2", modules=_SANDWICH, **_GEMMA),
    "gemma3": GgufFamily(architecture="Gemma3ForCausalLM", model_type="gemma3_text", modules=_SANDWICH, **_GEMMA),
    "gemma4": GgufFamily(
        architecture="Gemma4ForCausalLM",
        model_type="gemma4_text",
        modules={
            **_SANDWICH,
            **_LAYER_INPUTS,
            "layer_output_scale": "layer_scalar",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        outer=_OUTER_INPUTS,
        experts={"ffn_gate_up_exps": "experts.{}.gate_up_proj", "ffn_down_exps": "experts.{}.down_proj"},
        keys={"top_k_experts": "expert_used_count"},
    ),
    "gemma3n": GgufFamily(
        architecture="Gemma3nForCausalLM",
        model_type="gemma3n_text",
        own_head_size=True,
        modules={
            **_SANDWICH,
            **_LAYER_INPUTS,
            "altup_correct_coef": "altup.correction_coefs",
            "altup_correct_scale": "altup.correct_output_scale",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        outer={
            **_OUTER_INPUTS,
            "altup_proj": "model.altup_projections.{}",
            "altup_unembd_proj": "model.altup_unembed_projections.{}",
        },
        keys={"altup_num_inputs": "altup.num_inputs", "altup_active_idx": "altup.active_idx"},
    ),
    "phi3": GgufFamily(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        modules={"ffn_up": "mlp.gate_up_proj"},
        keys={"original_max_position_embeddings": "rope.scaling.original_context_length"},
    ),
    "gpt-oss": GgufFamily(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        own_head_size=True,
        modules={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        keys={"sliding_window": "attention.sliding_window"},
        present=_BIASED,
    ),
    "granite": GgufFamily(
        architecture="GraniteForCausalLM",
        model_type="granite",
        permuted=True,
        keys=_GRANITE_KEYS,
        present=_BIASED,
    ),
    "granitehybrid": GgufFamily(
        architecture="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        modules={**_MAMBA, **_GRANITE_MODULES},
        keys={**_GRANITE_KEYS, **_MAMBA_KEYS},
        config={"num_local_experts": 0, "position_embedding_type": "nope"},
        present={"mamba_conv_bias": "ssm_conv1d.bias"},
        **_GRANITE_EXPERTS,
    ),
    "llama4": GgufFamily(  # the sizes of its chunks, and which layers rotate, are llama.cpp's constants
        architecture="Llama4ForCausalLM",
        model_type="llama4_text",
        own_head_size=True,
        modules={
            "ffn_gate_inp": "feed_forward.router",
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            **{f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        },
        experts={f"ffn_{part}_exps": f"feed_forward.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
        keys={
            "interleave_moe_layer_step": "interleave_moe_layer_step",
            "intermediate_size": "expert_feed_forward_length",
            "intermediate_size_mlp": "feed_forward_length",
        },
        config={
            "attention_chunk_size": 8192,
            "no_rope_layer_interval": 4,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        present=_BIASED,
    ),
    "granitemoe": GgufFamily(
        architecture="GraniteMoeSharedForCausalLM",
        model_type="granitemoeshared",
        modules=_GRANITE_MODULES,
        keys=_GRANITE_KEYS,
        **_GRANITE_EXPERTS,
    ),
    "smollm3": GgufFamily(
        architecture="SmolLM3ForCausalLM", model_type="smollm3", permuted=True, config={"no_rope_layer_interval": 4}
    ),
    "glm4": GgufFamily(
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        own_head_size=True,
        modules={
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        present=_BIASED,
    ),
    "lfm2": GgufFamily(
        architecture="Lfm2ForCausalLM",
        model_type="lfm2",
        outer={"token_embd_norm": "model.embedding_norm"},
        modules={
            "attn_norm": "operator_norm",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "attn_output": "self_attn.out_proj",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
        },
        keys={"conv_L_cache": "shortconv.l_cache", "norm_eps": "attention.layer_norm_rms_epsilon"},
        config={"block_auto_adjust_ff_dim": False},
    ),
    "falcon-h1": GgufFamily(  # its factors are in the weights
        architecture="FalconH1ForCausalLM",
        model_type="falcon_h1",
        own_head_size=True,
        outer={"output_norm": "model.final_layernorm"},
        modules={
            "ffn_norm": "pre_ff_layernorm",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            **_MAMBA,
        },
        keys={"mamba_d_ssm": "ssm.inner_size", **_MAMBA_KEYS},
        present={
            **_BIASED,
            "mlp_bias": "ffn_gate.bias",
            "mamba_conv_bias": "ssm_conv1d.bias",
            "mamba_rms_norm": "ssm_norm.weight",
        },
    ),
    "olmo2": GgufFamily(architecture="Olmo2ForCausalLM", model_type="olmo2", modules=_AFTER_BOTH),
    "exaone4": GgufFamily(
        architecture="Exaone4ForCausalLM",
        model_type="exaone4",
        modules=_AFTER_BOTH,
        keys={"sliding_window": "attention.sliding_window"},
    ),
    "seed_oss": GgufFamily(
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        own_head_size=True,
        modules={"post_attention_norm": "post_attention_layernorm"},
        present={**_BIASED, "attention_out_bias": "attn_output.bias"},
    ),
    "ernie4_5": GgufFamily(
        architecture="Ernie4_5ForCausalLM",
        model_type="ernie4_5",
        own_head_size=True,
        present={"use_bias": "attn_q.bias"},
    ),
    "hunyuan-dense": GgufFamily(
        architecture="HunYuanDenseV1ForCausalLM",
        model_type="hunyuan_v1_dense",
        own_head_size=True,
        modules={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "hunyuan-moe": GgufFamily(
        architecture="HunYuanMoEV1ForCausalLM",
        model_type="hunyuan_v1_moe",
        own_head_size=True,
        modules={
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg",
            **{f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
        },
        keys={"moe_topk": "expert_used_count", "num_shared_expert": "expert_shared_count"},
    ),
    "cohere2": GgufFamily(
        architecture="Cohere2ForCausalLM",
        model_type="cohere2",
        keys={
            "layer_norm_eps": "attention.layer_norm_epsilon",
            "logit_scale": "logit_scale",
            "sliding_window": "attention.sliding_window",
        },
        config={"sliding_window_pattern": 4},
        present=_BIASED,
    ),
}
# llama.cpp calls it granitehybrid; it is the one that rotates.
BAMBA = GgufFamily(
    architecture="BambaForCausalLM",
    model_type="bamba",
    permuted=True,
    outer={"output_norm": "model.final_layernorm"},
    modules={
        **_MAMBA,
        "ffn_norm": "pre_ff_layernorm",
        **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    },
    keys=_MAMBA_KEYS,
    present={
        **_BIASED,
        "mlp_bias": "ffn_gate.bias",
        "mamba_conv_bias": "ssm_conv1d.bias",
        "mamba_proj_bias": "ssm_in.bias",
    },
)
MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names in a layer of a family like Llama."""
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class Metadata:
    """Metadata of a GGUF file, with the keys of its architecture; each is checked for its type."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))
        if self.architecture not in FAMILIES:
            raise UnsupportedModelError(
                f"{file.path} holds a model of the architecture {self.architecture:.80}; GGUF files are read for "
                f"{', '.join(FAMILIES)}.",
                hint=OTHER,
            )
        if (parts := file.metadata.get("split.count", 1)) != 1:
            raise UnsupportedModelError(
                f"{file.path} is one of {parts!r:.80} parts.",
                hint="Join them with llama.cpp's llama-gguf-split --merge, and import the result.",
            )
        bamba = self.architecture == "granitehybrid" and self.get("rope.scaling.finetuned", bool, False)
        self.family = BAMBA if bamba else FAMILIES[self.architecture]

    def get(self, key: str, kind: Any, default: Any = None) -> Any:
        """Return a value, of the architecture unless the key begins with `tokenizer` or `general`."""
        name = key if key.startswith(("tokenizer.", "general.")) else f"{self.architecture}.{key}"
        value = self.file.metadata.get(name, default)
        if value is not default and (not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))):
            raise CorruptFileError(f"{self.file.path}: {name} is {value!r:.80}.", hint=AGAIN)
        return value

    def size(self, key: str) -> int:
        value, limit = self.get(key, int), _MOST_LAYERS if key == "block_count" else 1 << 31
        if value is None or not 0 < value < limit:
            raise CorruptFileError(f"{self.file.path}: {self.architecture}.{key} is {value!r:.80}.", hint=AGAIN)
        return int(value)

    @property
    def layers(self) -> int:
        """Layers of the model, without those that predict further tokens, which some files have after them."""
        return self.size("block_count") - self.whole("nextn_predict_layers")

    def whole(self, key: str) -> int:
        """Return a count that some files have as a float; 0 without it."""
        value = self.get(key, int | float, 0)
        if value not in range(_MOST_LAYERS):
            raise CorruptFileError(f"{self.file.path}: {self.architecture}.{key} is {value!r:.80}.", hint=AGAIN)
        return int(value)

    def token(self, word: str) -> int | None:
        """Return the number of a special token; None without it, and for one that no text has, as in llama.cpp."""
        number, tokens = self.get(f"tokenizer.ggml.{word}_token_id", int), self.get("tokenizer.ggml.tokens", list, [])
        return number if number is not None and 0 <= number < len(tokens) else None

    def own_keys(self) -> dict[str, Any]:
        """Return what `GgufFamily.keys` and `present` say of config.json."""
        numbers = {key: self.get(name, int | float) for key, name in self.family.keys.items()}
        found = {key: number for key, number in numbers.items() if number is not None}
        of_layers = {name.partition("blk.")[2].partition(".")[2] for name in self.file.entries}
        return found | {key: name in of_layers for key, name in self.family.present.items()}

    def kv_heads_of_layers(self) -> list[int]:
        """Return the heads of keys and values of each layer: 0 for layers without attention."""
        key = "attention.head_count_kv"
        listed = self.file.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(listed, list):
            return [self.size(key if listed is not None else "attention.head_count")] * self.size("block_count")
        wrong = [each for each in listed if type(each) is not int or not 0 <= each < 1 << 31]
        if wrong or not any(listed):
            raise CorruptFileError(
                f"{self.file.path}: {self.architecture}.{key} has {(wrong or listed)[0]!r:.80}.", hint=AGAIN
            )
        if len(listed) != self.size("block_count"):
            raise CorruptFileError(
                f"{self.file.path}: {self.architecture}.{key} has {len(listed)} values for {self.size('block_count')} "
                "layers.",
                hint=AGAIN,
            )
        return listed

    def smallest(self, key: str) -> int:
        """Return a size that some files list for each layer: the smallest of them."""
        listed = self.file.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(listed, list):
            return self.size(key)
        if not listed or any(type(each) is not int or not 0 < each < 1 << 31 for each in listed):
            raise CorruptFileError(f"{self.file.path}: {self.architecture}.{key} is {listed!r:.80}.", hint=AGAIN)
        return int(min(listed))

    def sliding_layers(self) -> list[bool]:
        """Return which layers have a window. Raises UnsupportedModelError when the file does not say it."""
        pattern = self.get("attention.sliding_window_pattern", list, [])
        if len(pattern) != self.size("block_count") or any(type(each) is not bool for each in pattern):
            raise UnsupportedModelError(f"{self.file.path} does not say which layers have a window.", hint=OTHER)
        return list(pattern)

    def kv_heads(self) -> int:
        """Return the heads of keys and values, which some files list for each layer."""
        found = self.kv_heads_of_layers()
        if self.architecture == "gemma4":
            return next((heads for heads, slides in zip(found, self.sliding_layers(), strict=True) if slides), found[0])
        without = {0} if self.architecture in ("lfm2", "granitehybrid") else set[int]()
        if len(counts := set(found) - without) != 1:
            raise UnsupportedModelError(f"{self.file.path} has layers with different numbers of heads.", hint=OTHER)
        return counts.pop()
