"""Whether a Hugging Face model can be converted, judged from its config.json alone, and how its matrices are quantised.

| `quant_method`                              | tensors of a matrix `X`                      | checkpoint   |
|---------------------------------------------|----------------------------------------------|--------------|
| awq (AutoAWQ, version gemm, 4 bit)          | `X.qweight`, `X.qzeros`, `X.scales`          | W4A16_GPTQ   |
| gptq (4 bit, groups, no desc_act)           | the same and `X.g_idx`                       | W4A16_GPTQ   |
| fp8, modelopt, compressed-tensors (static)  | `X.weight`, `X.weight_scale`, `X.input_scale`| FP8          |

Sources: AutoAWQ `WQLinear_GEMM`, AutoGPTQ `QuantLinear`, compressed-tensors' `float-quantized`, and TensorRT-LLM's
`update_quant_config_from_hf`, which loads Hugging Face AWQ in GPTQ layout too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import architecture_of, family, text_model
from trtserve.checkpoint.architectures.base import Architecture, HfConfig, require_numbers, require_sizes
from trtserve.checkpoint.quantized import FP8, GPTQ
from trtserve.errors import UnsupportedModelError

Method = Literal["awq", "gptq", "fp8"]


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
    """Return how a model is quantised, or None; UnsupportedModelError names what cannot be converted."""
    config = hf.get("quantization_config")
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise _refused(f"quantization_config of config.json is {config!r}")
    method = str(config.get("quant_method", "unknown method"))
    if method == "awq":
        return _awq(config)
    if method == "gptq":
        return _gptq(config)
    if method == "mxfp4":  # read as floats, which have the same values (`source.read_source`)
        return None
    if method in ("fp8", "modelopt", "compressed-tensors"):
        _require_static_fp8(method, config)
        # 8-bit KV cache: `kv_cache_quant_algo` (ModelOpt) or `kv_cache_scheme`.
        inner = config.get("quantization")
        deeper = inner.get("kv_cache_quant_algo") if isinstance(inner, Mapping) else None
        return SourceQuantization(
            method="fp8",
            narrow_cache=bool(deeper or config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")),
        )
    if method == "fbgemm_fp8":
        raise _refused("FP8 with one scale per row (fbgemm_fp8)")
    raise _refused(f"quantised ({method})")


def _awq(config: Mapping[str, Any]) -> SourceQuantization:
    version, backend = str(config.get("version", "gemm")).lower(), str(config.get("backend", "autoawq"))
    if version != "gemm" or backend != "autoawq":
        raise _refused(f"AWQ version {version} ({backend}); only AutoAWQ's gemm is supported")
    if not config.get("zero_point", True):
        raise _refused("AWQ without zero points")
    _require_bits("AWQ", config.get("bits", config.get("w_bit", 4)))
    return SourceQuantization(
        method="awq", group_size=_group_size("AWQ", config.get("group_size", config.get("q_group_size", 128)))
    )


def _gptq(config: Mapping[str, Any]) -> SourceQuantization:
    if config.get("desc_act"):
        raise _refused("GPTQ with desc_act", "TensorRT-LLM does not support it either; choose another model.")
    _require_bits("GPTQ", config.get("bits"))
    layout = str(config.get("checkpoint_format", "gptq"))
    if layout not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise _refused(f"GPTQ in the format {layout if layout != 'gptq' else 'marlin'}")
    group_size = _group_size("GPTQ", config.get("group_size", 128))
    return SourceQuantization(method="gptq", group_size=group_size, stored_zero=1 if layout == "gptq" else 0)


def _require_bits(method: str, bits: object) -> None:
    if bits != 4:
        raise _refused(f"{method} with {bits!r} bits; only 4 is supported")


def _group_size(method: str, size: object) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise _refused(f"{method} with group size {size!r}; only groups along the inputs are supported")
    return size


def _require_static_fp8(method: str, config: Mapping[str, Any]) -> None:
    """Require TensorRT-LLM's FP8: one scale per matrix, and one calibrated scale for its inputs."""
    if method == "fp8":
        if config.get("weight_block_size"):
            raise _refused("FP8 with one scale per block")
        if config.get("activation_scheme") != "static":
            raise _refused("FP8 without activation scales (activation_scheme is not static)")
    elif method == "modelopt":
        inner = config.get("quantization")
        algorithm = config.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, Mapping) else None)
        if algorithm != "FP8":
            raise _refused(f"quantised by ModelOpt with {algorithm}; only FP8 is supported")
    else:
        _require_float_quantized(config)


def _require_float_quantized(config: Mapping[str, Any]) -> None:
    layout = config.get("format")
    if layout != "float-quantized":
        raise _refused(f"compressed-tensors in format {layout}; only float-quantized is supported")
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise _refused("compressed-tensors whose config_groups is not an object")
    for name, group in groups.items():
        for part in ("weights", "input_activations"):
            if not isinstance(scheme := group.get(part), Mapping):
                raise _refused(f"compressed-tensors whose {part} ({name}) are not quantised")
            if scheme.get("strategy") != "tensor" or scheme.get("dynamic") or scheme.get("num_bits") != 8:
                raise _refused(
                    f"compressed-tensors whose {part} ({name}) are {scheme.get('num_bits')} bits by "
                    f"{scheme.get('strategy')}{', dynamic' if scheme.get('dynamic') else ''}; only 8 bits with one "
                    "static scale per tensor are supported"
                )


def _refused(what: str, hint: str | None = None) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The model has an unsupported quantisation: {what}.",
        hint=hint or "Choose the original model and quantise with --quantize, or convert with --converter upstream.",
    )


_PUBLISHED = "Use the config.json that was published with the weights."
# The families' own keys for `norm_epsilon`.
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_NUMBERS = (
    *("rotary_pct", "query_pre_attn_scalar"),
    *("final_logit_softcapping", "attn_logit_softcapping"),
)


def supported_family(hf: HfConfig) -> Architecture:
    """Return the family of a Hugging Face config after checking everything that the config tells.

    Raises UnsupportedModelError for an unknown architecture, or for a quantisation or feature that cannot be converted.
    """
    hf = text_model(hf)
    module = family(architecture_of(hf))
    source_quantization(hf)
    if hf.get("is_causal") is False:
        raise UnsupportedModelError(
            "config.json has is_causal = false: every token attends to later ones too, so the model cannot generate.",
            hint="Choose a model that was trained to generate text.",
        )
    content = module.checkpoint_config(hf)
    require_sizes(content, "head_size", "num_key_value_heads", "intermediate_size")
    require_numbers(content, *_NUMBERS)
    _require_epsilon(hf, content["norm_epsilon"])
    if content["position_embedding_type"] != "alibi":
        require_sizes(content, "max_position_embeddings")
    module.decoder(CheckpointConfig.of(content, error=UnsupportedModelError, hint=_PUBLISHED))
    return module


def _require_epsilon(hf: HfConfig, epsilon: object) -> None:
    """Require a numeric epsilon; the error uses the key of the model's own config."""
    read = [key for key in _EPSILONS if key in hf and hf[key] is epsilon]
    if read and epsilon is None:
        raise UnsupportedModelError(
            f"config.json has {read[0]} = null; expected a positive number.",
            hint=_PUBLISHED,
        )
    require_numbers(hf, *read)
