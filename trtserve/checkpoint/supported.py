"""Whether a Hugging Face model can be converted, judged from its config.json alone, and how its matrices are quantised.

| `quant_method`                              | tensors of a matrix `X`                      | checkpoint   |
|---------------------------------------------|----------------------------------------------|--------------|
| awq (AutoAWQ, version gemm, 4 bit)          | `X.qweight`, `X.qzeros`, `X.scales`          | W4A16_GPTQ   |
| gptq (4 bit, groups, no desc_act)           | the same and `X.g_idx`                       | W4A16_GPTQ   |
| fp8, modelopt, compressed-tensors (static)  | `X.weight`, `X.weight_scale`, `X.input_scale`| FP8          |
| others that `encodings` reads               | see there                                    | floats       |

Sources: AutoAWQ `WQLinear_GEMM`, AutoGPTQ `QuantLinear`, compressed-tensors' `float-quantized`, and TensorRT-LLM's
`update_quant_config_from_hf`, which loads Hugging Face AWQ in GPTQ layout too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import architecture_of, family, text_model
from trtserve.checkpoint.architectures.base import (
    PUBLISHED,
    Architecture,
    HfConfig,
    WrongConfigError,
    require_numbers,
    require_sizes,
)
from trtserve.checkpoint.architectures.parts.model_keys import require_types
from trtserve.checkpoint.encoded_tensors import Widening, refused, widening
from trtserve.checkpoint.quantized import FP8, FP8_BLOCK, FP8_BLOCKS, FP8_ROWS, GPTQ
from trtserve.errors import UnsupportedModelError

Method = Literal["awq", "gptq", "fp8"]
_PARTS = ("weights", "input_activations")


@dataclass(frozen=True, kw_only=True)
class SourceQuantization:
    """How the matrices of a quantised model are stored.

    `group_size` is the number of inputs per scale; `stored_zero` is added to stored zero points (GPTQ stores them minus
    one). Both are unused for fp8. `narrow_cache`: the model was also calibrated for an 8-bit KV cache.
    """

    method: Method
    group_size: int = 0
    stored_zero: int = 0
    narrow_cache: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Suffixes of a matrix's tensors."""
        if self.method == "fp8":
            return ("weight", "weight_scale", "input_scale")
        return ("qweight", "qzeros", "scales")

    def checkpoint_keys(self) -> dict[str, Any]:
        """Non-default keys of `quantization` in the checkpoint's config.json."""
        if self.method == "fp8":
            return {"quant_algo": FP8}
        # Upstream writes has_zero_point = sym for GPTQ, so its loader drops the zero points of asymmetric models.
        return {"quant_algo": GPTQ, "group_size": self.group_size, "has_zero_point": True}


def source_quantization(hf: HfConfig) -> SourceQuantization | None:
    """Return how the codes of a model are kept; None for floats and for a model that `widened_by` describes.

    UnsupportedModelError names what cannot be converted.
    """
    config = hf.get("quantization_config")
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise refused(f"quantization_config of config.json is {config!r}")
    read = widening(config)
    if read.method == "awq" or read.method == "gptq":
        kept = read.bits == 4 and read.group > 0 and not config.get("desc_act")
        zero = read.stored_zero
        return SourceQuantization(method=read.method, group_size=read.group, stored_zero=zero) if kept else None
    if not _is_static_fp8(config):
        return None
    # 8-bit KV cache: `kv_cache_quant_algo` (ModelOpt) or `kv_cache_scheme`.
    inner = config.get("quantization")
    deeper = inner.get("kv_cache_quant_algo") if isinstance(inner, Mapping) else None
    return SourceQuantization(
        method="fp8", narrow_cache=bool(deeper or config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme"))
    )


def widened_by(hf: HfConfig) -> Widening | None:
    """Return how the matrices of a model are read as floats; None where their codes are kept, and for floats.

    Raises as `source_quantization` does.
    """
    text = hf.get("text_config")
    config = hf.get("quantization_config") or (text.get("quantization_config") if isinstance(text, Mapping) else None)
    if not config or source_quantization({"quantization_config": config}) is not None:
        return None
    return widening(config)


def keepable_fp8(hf: HfConfig) -> str | None:
    """Return the algorithm of the FP8 codes of a model that is widened; None for other models."""
    read = widened_by(hf)
    if read is None or read.method not in ("fp8", "modelopt", "compressed-tensors"):
        return None
    config = hf.get("quantization_config") or hf["text_config"]["quantization_config"]
    if read.method == "modelopt":
        fp8 = str(config.get("quant_algo") or config["quantization"]["quant_algo"]).startswith("FP8")
    elif read.method == "compressed-tensors":
        weights = [group["weights"] for group in config["config_groups"].values()]
        fp8 = all((each.get("type"), each["num_bits"]) == ("float", 8) for each in weights)
    else:
        fp8 = True
    if not fp8 or read.block not in (None, (FP8_BLOCK, FP8_BLOCK)):
        return None
    return FP8_ROWS if read.block is None else FP8_BLOCKS


def _is_static_fp8(config: Mapping[str, Any]) -> bool:
    """Return whether this is TensorRT-LLM's FP8: one scale per matrix, and one calibrated scale for its inputs."""
    method = config.get("quant_method")
    if method == "fp8":
        return not config.get("weight_block_size") and config.get("activation_scheme") == "static"
    if method == "modelopt":
        inner = config.get("quantization")
        return "FP8" in (config.get("quant_algo"), inner.get("quant_algo") if isinstance(inner, Mapping) else None)
    if method != "compressed-tensors" or config.get("format") != "float-quantized":
        return False
    schemes = [group.get(part) for group in config["config_groups"].values() for part in _PARTS]
    return all(
        isinstance(scheme, Mapping) and scheme.get("strategy") == "tensor" and not scheme.get("dynamic")
        for scheme in schemes
    )


# The families' own keys for `norm_epsilon`.
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_NUMBERS = (*("rotary_pct", "query_pre_attn_scalar"), *("final_logit_softcapping", "attn_logit_softcapping"))


def supported_family(hf: HfConfig) -> Architecture:
    """Return the family of a Hugging Face config after checking everything that the config tells.

    Raises UnsupportedModelError for an unknown architecture, or for a quantisation or feature that cannot be converted.
    """
    hf = text_model(hf)
    module = family(architecture_of(hf))
    require_types(hf)
    source_quantization(hf)
    if not hf.get("is_causal", True):
        raise UnsupportedModelError(
            f"config.json has is_causal = {str(hf['is_causal']).lower()}: every token attends to later ones too, so "
            "the model cannot generate.",
            hint="Choose a model that was trained to generate text.",
        )
    content = module.checkpoint_config(hf)
    require_sizes(content, "head_size", "num_key_value_heads", "intermediate_size")
    require_numbers(content, *_NUMBERS)
    _require_epsilon(hf, content["norm_epsilon"])
    if content["position_embedding_type"] != "alibi":
        require_sizes(content, "max_position_embeddings")
    module.decoder(CheckpointConfig.of(content, error=UnsupportedModelError, hint=PUBLISHED))
    return module


def _require_epsilon(hf: HfConfig, epsilon: object) -> None:
    """Require a numeric epsilon; the error uses the key of the model's own config."""
    read = [key for key in _EPSILONS if key in hf and hf[key] is epsilon]
    if read and epsilon is None:
        raise WrongConfigError(f"config.json has {read[0]} = null; expected a positive number.")
    require_numbers(hf, *read)
