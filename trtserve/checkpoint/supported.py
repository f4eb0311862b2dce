"""Whether a Hugging Face model can be converted, judged from its config.json alone."""

from __future__ import annotations

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import architecture_of, family, text_model
from trtserve.checkpoint.architectures.base import Architecture, HfConfig, require_numbers, require_sizes
from trtserve.checkpoint.quantized_source import source_quantization
from trtserve.errors import UnsupportedModelError

_PUBLISHED = "Use the config.json that was published with the weights."
# The families' own keys for `norm_epsilon`.
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
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
