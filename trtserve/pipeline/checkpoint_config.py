"""`config.json` of a checkpoint as a release writes it, from the Hugging Face config and the ConvertSpec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint import architectures
from trtserve.checkpoint.architectures.base import HfConfig, superset
from trtserve.checkpoint.quantized import require_gpu_sm
from trtserve.checkpoint.sharding import check_parallel_sizes, moe_parallel_sizes
from trtserve.checkpoint.supported import SourceQuantization, keepable_fp8, source_quantization, widened_by
from trtserve.errors import UnsupportedModelError, UsageError
from trtserve.nvidia.releases.converters import convertible_family
from trtserve.nvidia.releases.installed import require_engine_path
from trtserve.nvidia.releases.loaders import (
    STRICT,
    keys_of_release,
    problems,
    shares_head,
    shares_table,
    smoothquant_val,
)
from trtserve.specs import ConvertSpec

# Weight-only quantisation is recorded while the weights stay floats: TensorRT-LLM's loader (preprocess_weights →
# weight_only_quantize_dict) quantises the qkv, dense, fc, gate and proj weights that are not int8 yet, and so does the
# openvino runtime's builder.
_QUANT_ALGO = {
    "none": None,
    "int8": "W8A16",
    "int4": "W4A16",
    "int4_awq": "W4A16_AWQ",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
    "fp8": "FP8",
}


_NO_TOOL: dict[str, Any] = {
    **dict.fromkeys(("workers", "calib_dataset", "calib_size", "trtllm_script")),
    "converter_flags": (),
}


def resolve_dtype(spec: ConvertSpec, hf: HfConfig) -> Literal["float32", "float16", "bfloat16"]:
    """Return the checkpoint's dtype; `auto` is the model's, or float16 for float32 and none, as in TensorRT-LLM."""
    if spec.dtype != "auto":
        return spec.dtype
    own = str(hf.get("dtype") or hf.get("torch_dtype"))
    return "bfloat16" if own.removeprefix("torch.") == "bfloat16" else "float16"


def resolve_release(spec: ConvertSpec) -> str | None:
    """Return the release that the checkpoint targets. Raises UsageError for an unknown one or one without engines."""
    if spec.trtllm_version is None:
        return None
    return require_engine_path(spec.trtllm_version)


def checkpoint_config(hf: HfConfig, spec: ConvertSpec) -> CheckpointConfig:
    """Return `config.json` of the checkpoint that `spec` makes from a model with this Hugging Face config."""
    hf = architectures.text_model(hf)
    own = convertible_family(hf).checkpoint_config(hf)
    stored = source_quantization(hf)
    has_experts = bool((own.get("moe") or {}).get("num_experts"))
    if not has_experts and (spec.moe_tp_size, spec.moe_ep_size) != (None, None):
        raise UsageError("--moe-tp-size and --moe-ep-size need a model with experts; this one has none.")
    ep_size, release = moe_parallel_sizes(spec.tp_size, spec.moe_tp_size, spec.moe_ep_size)[1], resolve_release(spec)
    if spec.embedding_sharding_dim and not (spec.use_parallel_embedding or own.get("use_parallel_embedding")):
        raise UsageError("--embedding-sharding-dim needs a split embedding; add --use-parallel-embedding.")
    quantization = _quantization(stored, spec, hf)
    if spec.keep_fp8:
        if (algorithm := fp8_to_keep(hf, spec)) is None:
            raise UsageError(
                "--keep-fp8 is for models without experts whose FP8 codes have a scale for each channel or block of "
                "128 × 128, in 16 bits and without --quantize.",
                hint="Omit --keep-fp8: the codes are widened, or kept where they have one scale for a matrix.",
            )
        quantization = {"quant_algo": algorithm}
        own = {**own, **superset(*own.get("superset", ()), "FP8 codes with a scale for each channel or block")}
    architecture = architectures.architecture_of(hf)
    content = _complete_config(
        own,
        architecture=architecture,
        dtype=resolve_dtype(spec, hf),
        tp_size=spec.tp_size,
        pp_size=spec.pp_size,
        quantization=quantization,
        ep_size=ep_size,
        parallel_embedding=spec.use_parallel_embedding,
        embedding_dim=spec.embedding_sharding_dim,
        release=release,
    )
    if stored is not None and stored.method != "fp8":
        # TensorRT-LLM ignores unknown keys; this is the only place to record the byte order of 4-bit weights.
        content["trtserve"] = {"gpu_sm": spec.gpu_sm}
    config = CheckpointConfig.of(content)
    check_parallel_sizes(config, spec.tp_size, spec.pp_size, ep_size)
    # Without a release nothing is refused: the embedded runtimes serve checkpoints that no release loads.
    if release is not None and (found := problems(config, release)):
        error = UsageError if found[0].option else UnsupportedModelError
        raise error(f"The checkpoint would not load in TensorRT-LLM {release}: {found[0].what}.", hint=found[0].fix)
    return config


def fp8_to_keep(hf: HfConfig, spec: ConvertSpec) -> str | None:
    """Return the algorithm of FP8 codes that --keep-fp8 keeps instead of widening them; None where it cannot."""
    hf = architectures.text_model(hf)
    moe = convertible_family(hf).checkpoint_config(hf).get("moe") or {}
    if spec.upstream or moe.get("num_experts") or spec.quantize != "none" or resolve_dtype(spec, hf) == "float32":
        return None
    return keepable_fp8(hf)


def _quantization(stored: SourceQuantization | None, spec: ConvertSpec, hf: HfConfig) -> dict[str, Any]:
    """Return the non-default keys of `quantization`: the source model's quantisation, or the requested one."""
    if stored is None:
        return {"quant_algo": _QUANT_ALGO[spec.quantize]}
    if spec.quantize != "none":
        raise _quantised_already(hf, spec)
    if resolve_dtype(spec, hf) == "float32":
        raise UsageError(
            "A quantised model has no float32 checkpoint: TensorRT-LLM computes with quantised weights in 16 bits.",
            hint="Omit --dtype, or use float16 or bfloat16.",
        )
    if stored.method != "fp8":
        require_gpu_sm(spec.gpu_sm)
    return stored.checkpoint_keys()


def _quantised_already(hf: HfConfig, spec: ConvertSpec) -> UsageError:
    described = hf["quantization_config"]
    method = described.get("quant_method") if isinstance(described, Mapping) else described
    return UsageError(
        f"The model is already quantised ({method}); --quantize {spec.quantize} needs the original model.",
        hint="Omit --quantize, or choose the original model.",
    )


def expected_config(hf: HfConfig, spec: ConvertSpec) -> CheckpointConfig:
    """Return our converter's config for a known model, otherwise the keys that every checkpoint has.

    A known model with unknown quantisation gets the config of float weights.
    """
    if spec.quantize != "none" and hf.get("quantization_config") and widened_by(hf) is None:
        raise _quantised_already(hf, spec)
    quantization = {"quant_algo": _QUANT_ALGO[spec.quantize]}
    own = replace(spec, quantize="none", converter="own", **_NO_TOOL)
    try:
        config = checkpoint_config(hf, own)
    except UnsupportedModelError:
        if hf.get("quantization_config"):
            return expected_config({**hf, "quantization_config": None}, spec)
        content = {
            "architecture": architectures.architecture_of(hf),
            "dtype": spec.dtype,
            "mapping": {"world_size": spec.tp_size * spec.pp_size, "tp_size": spec.tp_size, "pp_size": spec.pp_size},
            "quantization": quantization,
        }
        return CheckpointConfig.of(content)
    return config if config.quantization.quant_algo else config.changed(quantization=quantization)


_NOT_QUANTISED: Mapping[str, Any] = {
    "quant_algo": None,
    "kv_cache_quant_algo": None,
    "group_size": 128,
    "clamp_val": None,
    "use_meta_recipe": False,
    "has_zero_point": False,
    "pre_quant_scale": False,
    "exclude_modules": None,
    "mamba_ssm_cache_dtype": None,
}


def _complete_config(
    sizes: Mapping[str, Any],
    *,
    architecture: str,
    dtype: str,
    tp_size: int,
    pp_size: int,
    quantization: Mapping[str, Any],
    ep_size: int = 1,
    parallel_embedding: bool = False,
    embedding_dim: int = 0,
    release: str | None = None,
) -> dict[str, Any]:
    """Complete a family's part of `config.json` as `release` writes it.

    Without a release it has the keys of 1.2, minus those that some release from 0.12 on refuses. A family that sets
    `use_parallel_embedding` always splits its embedding over tensor-parallel ranks; for others `parallel_embedding`
    decides. `quantization` holds the non-default keys of that object. Raises UnsupportedModelError when the model needs
    a key that the release lacks.
    """
    config = {
        "architecture": architecture,
        "dtype": dtype,
        "logits_dtype": "float32",
        "runtime_defaults": None,
        "embedding_sharding_dim": embedding_dim,
        "qk_layernorm": False,
        **sizes,
        "use_parallel_embedding": tp_size > 1 if sizes.get("use_parallel_embedding") else parallel_embedding,
        "mapping": _mapping(tp_size, pp_size, ep_size),
        "quantization": {**_NOT_QUANTISED, "smoothquant_val": smoothquant_val(architecture), **quantization},
    }
    if shares_table(release):
        config["share_embedding_table"] = shares_head(architecture)
    for section in STRICT:
        if section in config:
            config[section] = keys_of_release(section, config[section], architecture=architecture, release=release)
    return keys_of_release("model", config, architecture=architecture, release=release)


def _mapping(tp_size: int, pp_size: int, ep_size: int) -> dict[str, Any]:
    """Return the keys common to all releases; later keys default to values derived from these."""
    return {
        "world_size": tp_size * pp_size,
        "gpus_per_node": 8,
        "cp_size": 1,
        "tp_size": tp_size,
        "pp_size": pp_size,
        "moe_tp_size": tp_size // ep_size,
        "moe_cluster_size": 1,
        "moe_ep_size": ep_size,
        "attn_tp_size": tp_size,
        "attn_cp_size": 1,
        "cp_config": {},
        "auto_parallel": False,
        "enable_attention_dp": False,
        "enable_lm_head_tp_in_adp": False,
    }
