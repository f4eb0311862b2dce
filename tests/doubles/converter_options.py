"""Command lines of convert_checkpoint.py by family, and of quantize.py.

Forms were compared with the late scripts of examples/models (llama 368f8f2a, qwen 0df9aaf3, gemma 310decb9, phi
10c1d594, falcon 323e8460, gpt 7edbcccb) and quantize.py 059c97c1. A flag whose first release lies between 0.9 and 0.16
is taken from 0.12 on.
"""

from __future__ import annotations

from tests.doubles.flags import Flag, Release, choice, flag, optional

# Family → the folder below examples/ (0.12 – 0.19) and below examples/models/ (0.20 and later).
FOLDERS = {
    "llama": ("llama", "core/llama"),
    "qwen": ("qwen", "core/qwen"),
    "gpt": ("gpt", "core/gpt"),
    "gemma": ("gemma", "core/gemma"),
    "phi": ("phi", "core/phi"),
    "falcon": ("falcon", "contrib/falcon"),
}
MOVED: Release = (0, 20)
_AUTO: Release = (0, 15)
_NO_SHARING: Release = (0, 16)
_LATE: Release = (1, 0)

_DTYPE = (
    choice("--dtype", "float32 bfloat16 float16", "float16", until=_AUTO),
    choice("--dtype", "auto float16 bfloat16 float32", "auto", since=_AUTO),
)
_PARALLEL = (flag("--tp_size", "int", 1), flag("--pp_size", "int", 1), flag("--workers", "int", 1))
_EXPERTS = (flag("--moe_tp_size", "int", -1), flag("--moe_ep_size", "int", -1))
_EMBEDDING = (
    flag("--use_parallel_embedding", "switch"),
    Flag(names=("--embedding_sharding_dim",), kind="int", default=0),
)
_SHARING = (flag("--use_embedding_sharing", "switch", until=_NO_SHARING),)
_SMOOTH = (
    flag("--smoothquant -sq", "float"),
    flag("--per_channel", "switch"),
    flag("--per_token", "switch"),
    flag("--int8_kv_cache", "switch"),
)
_OUTPUT = (flag("--output_dir", "text", "tllm_checkpoint"),)


def _weight_only(choices: str) -> tuple[Flag, ...]:
    return (flag("--use_weight_only", "switch"), optional("--weight_only_precision", choices, "int8"))


_LLAMA = (
    flag("--model_dir", "text"),
    flag("--meta_ckpt_dir", "text"),
    flag("--cp_size", "int", 1),
    *(flag(f"--{name}", "int") for name in ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd", "inter_size")),
    *(flag(f"--{name}", "int") for name in ("n_kv_head", "multiple_of")),
    flag("--ffn_dim_multiplier", "float"),
    flag("--rms_norm_eps", "float", 1e-06),
    flag("--hidden_act", "text", "silu"),
    flag("--rotary_base", "float", 10000.0),
    *_weight_only("int8 int4 int8_gptq int4_gptq int4_awq"),
    flag("--disable_weight_only_quant_plugin", "switch"),
    *_SMOOTH,
    *(flag(f"--{name}", "switch") for name in ("fp8_kv_cache", "use_fp8", "use_fp8_rowwise")),
    flag("--use_meta_fp8_rowwise_recipe", "switch", since=_NO_SHARING),
    flag("--use_qserve", "switch", since=_NO_SHARING),
    flag("--use_nvfp4", "switch", since=_LATE),
    flag("--per_group", "switch"),
    flag("--group_size", "int", 128),
    flag("--quant_ckpt_path", "text"),
    flag("--calib_dataset", "text", "ccdv/cnn_dailymail"),
    flag("--calib_size", "int", 512),
    flag("--calib_max_seq_length", "int", 512),
    flag("--load_by_shard", "switch"),
    flag("--load_model_on_cpu", "switch"),
    *(flag(f"--{name}", "int", 0) for name in ("moe_num_experts", "moe_top_k")),
    flag("--moe_renorm_mode", "int", 1),
    flag("--save_config_only", "switch"),
    flag("--remove_duplicated_kv_heads", "switch"),
    flag("--log_level", "text", "info"),
    *_DTYPE,
    *_PARALLEL,
    *_EXPERTS,
    *_EMBEDDING,
    *_SHARING,
    *_OUTPUT,
)
_QWEN = (
    flag("--model_dir", "text", required=True),
    flag("--cp_size", "int", 1, since=_LATE),
    *_weight_only("int8 int4 int4_gptq"),
    flag("--disable_weight_only_quant_plugin", "switch"),
    *_SMOOTH,
    flag("--per_group", "switch"),
    flag("--group_size", "int", 128),
    flag("--calib_dataset", "text", "ccdv/cnn_dailymail"),
    flag("--load_model_on_cpu", "switch"),
    *_DTYPE,
    *_PARALLEL,
    *_EXPERTS,
    *_EMBEDDING,
    *_SHARING,
    *_OUTPUT,
)
_GPT = (
    flag("--model_dir", "text"),
    flag("--nemo_ckpt_path", "text"),
    choice("--gpt_variant", "gpt2 santacoder starcoder starcoder2 persimmon kosmos-2 nemotron"),
    *_weight_only("int8 int4"),
    *_SMOOTH,
    flag("--calib_dataset", "text", "lambada"),
    flag("--dataset_cache_dir", "text"),
    flag("--load_model_on_cpu", "switch"),
    flag("--nemo_rename_key", "texts"),
    flag("--log_level", "text", "info"),
    *_DTYPE,
    *_PARALLEL,
    *_EMBEDDING,
    *_SHARING,
    *_OUTPUT,
)
_GEMMA = (
    choice("--ckpt-type", "jax keras torch hf"),
    flag("--model-dir", "text", required=True, until=_LATE),
    flag("--model-dir --model_dir", "text", required=True, since=_LATE),
    flag("--output-model-dir", "text", required=True, until=_LATE),
    flag("--output-model-dir --output_dir", "text", required=True, since=_LATE),
    flag("--world-size", "int", 1),
    choice("--use-weight-only-with-precision", "int8 int4 w4a8_awq w4a16_awq", until=_LATE),
    flag("--use_weight_only", "switch", since=_LATE),
    choice("--weight_only_precision --use-weight-only-with-precision", "int8 int4 w4a8_awq w4a16_awq", since=_LATE),
    flag("--use-int8-weight-only-embedding", "switch"),
    flag("--enable_fp8", "switch"),
    flag("--fp8_kv_cache", "switch"),
    flag("--quant_ckpt_path", "text"),
    flag("--calib_dataset", "text", "ccdv/cnn_dailymail"),
    flag("--use_smooth_quant", "switch"),
    flag("--calibrate_kv_cache -kv", "switch", until=_NO_SHARING),
    flag("--int8_kv_cache --calibrate_kv_cache -kv", "switch", since=_NO_SHARING),
    flag("--per_channel", "switch"),
    flag("--per_token", "switch"),
    flag("--use_smooth_quant_plugin -sq", "float", until=_NO_SHARING),
    flag("--smoothquant --use_smooth_quant_plugin -sq", "float", since=_NO_SHARING),
    flag("--tokenizer_dir", "text"),
    flag("--load_model_on_cpu", "switch"),
    *_DTYPE,
)
_PHI = (flag("--model_dir", "text"), *_weight_only("int8 int4"), *_DTYPE, *_PARALLEL, *_EXPERTS, *_OUTPUT)
_FALCON = (
    flag("--model_dir", "text"),
    *_weight_only("int8 int4"),
    flag("--load_by_shard", "switch"),
    flag("--log_level", "text", "info"),
    *_DTYPE,
    *_PARALLEL,
    *_EMBEDDING,
    *_SHARING,
    *_OUTPUT,
)
FAMILIES = {"llama": _LLAMA, "qwen": _QWEN, "gpt": _GPT, "gemma": _GEMMA, "phi": _PHI, "falcon": _FALCON}

_FORMATS = "fp8 int8_sq int4_awq w4a8_awq int8_wo int4_wo full_prec"
QUANTIZE = (
    flag("--model_dir", "text"),
    flag("--nemo_ckpt_path", "text"),
    choice("--decoder_type", "gptnext llama", "gptnext"),
    choice("--device", "cuda cpu", "cuda"),
    choice("--device_map", "auto sequential cpu gpu", "auto", since=_LATE),
    flag("--calib_dataset", "text", "cnn_dailymail"),
    flag("--calib_tp_size", "int", 1),
    flag("--calib_pp_size", "int", 1),
    *_DTYPE,
    choice("--qformat", _FORMATS, "full_prec", until=_LATE),
    choice("--qformat", _FORMATS + " nvfp4", "full_prec", since=_LATE),
    flag("--seed", "int", 1234),
    flag("--tokenizer_max_seq_length", "int", 2048),
    flag("--batch_size", "int", 1),
    flag("--calib_size", "int", 512),
    flag("--calib_max_seq_length", "int", 512),
    flag("--output_dir", "text", "exported_model"),
    flag("--tp_size", "int", 1),
    flag("--pp_size", "int", 1),
    flag("--cp_size", "int", 1),
    flag("--awq_block_size", "int", 128),
    choice("--kv_cache_dtype", "int8 fp8"),
    flag("--quantize_lm_head", "switch", since=_LATE),
    flag("--num_medusa_heads", "int", 4),
    flag("--num_medusa_layers", "int", 1),
    flag("--max_draft_len", "int", 63),
    flag("--medusa_hidden_act", "text", "silu"),
    flag("--medusa_model_dir", "text"),
    flag("--quant_medusa_head", "switch"),
    flag("--autoq_format", "text"),
    flag("--auto_quantize_bits", "float"),
    choice("--export_format", "tensorrt_llm hf", "tensorrt_llm", since=_LATE),
)
