"""`config.json` of the checkpoint that a conversion makes; needs no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from trtserve import architectures
from trtserve.architectures.checkpoint import complete_config
from trtserve.architectures.kernel_layout import require_gpu_sm
from trtserve.architectures.quantized import GPTQ
from trtserve.architectures.quantized_source import SourceQuantization, source_quantization
from trtserve.architectures.sharding import check_parallel_sizes, moe_parallel_sizes
from trtserve.errors import UnsupportedModelError, UsageError
from trtserve.specs import ConvertSpec

# Weight-only quantisation is recorded, the weights stay floats: TensorRT-LLM's loader (preprocess_weights →
# weight_only_quantize_dict) quantises the qkv, dense, fc, gate and proj weights that are not int8 yet, and so does the
# builder of the openvino runtime.
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


def resolve_dtype(spec: ConvertSpec, hf: Mapping[str, Any]) -> Literal["float32", "float16", "bfloat16"]:
    """The checkpoint's dtype: `auto` takes the model's own, float16 for float32 or none (as TensorRT-LLM does)."""
    if spec.dtype != "auto":
        return spec.dtype
    return "bfloat16" if own_dtype(hf) == "bfloat16" else "float16"


def own_dtype(hf: Mapping[str, Any]) -> str:
    return str(hf.get("dtype") or hf.get("torch_dtype") or "float16").removeprefix("torch.")


def resolve_release(spec: ConvertSpec) -> str | None:
    """The release that the checkpoint is for; UsageError for one that has no engines or that the tables lack."""
    if spec.trtllm_version is None:
        return None
    from trtserve.releases.installed import require_engine_path

    return require_engine_path(spec.trtllm_version)


def checkpoint_config(hf: Mapping[str, Any], spec: ConvertSpec) -> dict[str, Any]:
    """`config.json` of the checkpoint that `spec` makes of a model with this Hugging Face config; needs no weights."""
    hf = architectures.text_model(hf)
    own = architectures.supported(hf).checkpoint_config(hf)
    stored = source_quantization(hf)
    ep_size, release = _expert_parallel_size(own, spec), resolve_release(spec)
    if spec.embedding_sharding_dim and not (spec.use_parallel_embedding or own.get("use_parallel_embedding")):
        raise UsageError("--embedding-sharding-dim is for an embedding that is split: add --use-parallel-embedding.")
    quantization = _quantization(stored, spec, hf)
    architecture = architectures.architecture_of(hf)
    if release is not None:
        _require_loadable(release, {"architecture": architecture, **own}, quantization["quant_algo"], spec)
    config = complete_config(
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
        # TensorRT-LLM takes keys that it does not know; here is no other place for what the order of the bytes means.
        config["trtserve"] = {"gpu_sm": spec.gpu_sm}
    check_parallel_sizes(config, spec.tp_size, spec.pp_size, ep_size)
    return config


def _require_loadable(release: str, config: Mapping[str, Any], quant_algo: str | None, spec: ConvertSpec) -> None:
    """UnsupportedModelError or UsageError when the loader of a release does not know the model, or splits it other."""
    from trtserve.releases.checkpoint_config import require_stages
    from trtserve.releases.converters import CONVERTERS, converter_script
    from trtserve.releases.weight_only import require_loader_quantises, require_quantised_experts

    architecture = config["architecture"]
    if architecture in CONVERTERS:
        converter_script(architecture, release)
    require_stages(release, architecture, config["num_hidden_layers"], spec.pp_size)
    require_loader_quantises(release, quant_algo)
    if (config.get("moe") or {}).get("num_experts") and quant_algo == GPTQ:
        require_quantised_experts(release)


def _quantization(stored: SourceQuantization | None, spec: ConvertSpec, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `quantization` in config.json: of a model that is quantised already, else what is asked for."""
    if stored is None:
        return {"quant_algo": _QUANT_ALGO[spec.quantize]}
    if spec.quantize != "none":
        raise _quantised_already(hf, spec)
    if resolve_dtype(spec, hf) == "float32":
        raise UsageError(
            "A model that is quantised already has no float32 checkpoint: TensorRT-LLM computes with such weights in "
            "16 bits.",
            hint="Leave --dtype out, or give float16 or bfloat16.",
        )
    if stored.method != "fp8":
        require_gpu_sm(spec.gpu_sm)
    return stored.checkpoint_keys()


def _quantised_already(hf: Mapping[str, Any], spec: ConvertSpec) -> UsageError:
    described = hf["quantization_config"]
    method = described.get("quant_method") if isinstance(described, Mapping) else described
    return UsageError(
        f"The model is quantised already ({method}): --quantize {spec.quantize} cannot be applied to it.",
        hint="Leave --quantize out, or choose the original model.",
    )


def _expert_parallel_size(config: Mapping[str, Any], spec: ConvertSpec) -> int:
    has_experts = bool((config.get("moe") or {}).get("num_experts"))
    if not has_experts and (spec.moe_tp_size, spec.moe_ep_size) != (None, None):
        raise UsageError("--moe-tp-size and --moe-ep-size are for models with experts, which this one has not.")
    return moe_parallel_sizes(spec.tp_size, spec.moe_tp_size, spec.moe_ep_size)[1]


def expected_config(hf: Mapping[str, Any], spec: ConvertSpec) -> dict[str, Any]:
    """Our own converter's config where it knows the model, else what every checkpoint says.

    Where it knows the model but not how that is quantised, the config is that of floats.
    """
    if spec.quantize != "none" and hf.get("quantization_config"):
        raise _quantised_already(hf, spec)
    quantization = {"quant_algo": _QUANT_ALGO[spec.quantize]}
    own = replace(spec, quantize="none", converter="own", **_NO_TOOL)
    try:
        config = checkpoint_config(hf, own)
    except UnsupportedModelError:
        if hf.get("quantization_config"):
            return expected_config({**hf, "quantization_config": None}, spec)
        return {
            "architecture": architectures.architecture_of(hf),
            "dtype": spec.dtype,
            "mapping": {"world_size": spec.tp_size * spec.pp_size, "tp_size": spec.tp_size, "pp_size": spec.pp_size},
            "quantization": quantization,
        }
    return config if config["quantization"]["quant_algo"] else {**config, "quantization": quantization}
