"""The model families that can be converted: one file each, one line each in `FAMILIES`."""

from __future__ import annotations

import importlib
import math
import re
from typing import Any

from trtserve.architectures.base import (
    Architecture,
    CheckpointConfig,
    Decoder,
    HfConfig,
    Target,
    require_numbers,
    require_sizes,
)
from trtserve.architectures.quantized_source import source_quantization
from trtserve.errors import UnsupportedModelError

__all__ = [
    "FAMILIES",
    "Architecture",
    "Decoder",
    "Target",
    "described",
    "family",
    "parameter_count",
    "supported",
    "text_model",
    "tied",
]

# Architecture in config.json → module of this package, which is loaded when it is asked for.
FAMILIES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3ForCausalLM": "gemma3",
    "PhiForCausalLM": "phi",
    "Phi3ForCausalLM": "phi3",
    "GPT2LMHeadModel": "gpt2",
    "GPTJForCausalLM": "gptj",
    "GPTNeoXForCausalLM": "gpt_neox",
    "OPTForCausalLM": "opt",
    "Starcoder2ForCausalLM": "starcoder2",
    "BloomForCausalLM": "bloom",
    "FalconForCausalLM": "falcon",
    "RWForCausalLM": "falcon",
}

# Names in checkpoints of TensorRT-LLM ≤ 0.11, which did not copy the Hugging Face architecture.
_CHECKPOINT_NAMES = {"GPTForCausalLM": "gpt2"}

# What the first exports of Llama call it; transformers goes by their model_type.
_RENAMED = {"LLaMAForCausalLM": "LlamaForCausalLM"}

# What the families' own files call `norm_epsilon`.
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_NUMBERS = (
    *("rotary_pct", "query_pre_attn_scalar"),
    *("final_logit_softcapping", "attn_logit_softcapping"),
)


def family(architecture: str) -> Architecture:
    """The family of an architecture name; UnsupportedModelError naming it and those that work."""
    name = FAMILIES.get(architecture) or _CHECKPOINT_NAMES.get(architecture)
    if name is None:
        raise UnsupportedModelError(
            f"Architecture {architecture} cannot be converted; these can: {', '.join(FAMILIES)}.",
            hint=_advice(architecture),
        )
    module: Architecture = importlib.import_module(f"{__name__}.{name}")
    return module


def _advice(architecture: str) -> str:
    """The supported architecture that the name begins like, and what else takes one that is not supported."""
    stems = {_stem(name): name for name in FAMILIES}
    near = max((stem for stem in stems if _stem(architecture).startswith(stem)), key=len, default=None)
    choice = f"The nearest is {stems[near]}" if near else "Choose a model of one of these (see its config.json)"
    from trtserve.releases.converters import CONVERTERS

    converter = CONVERTERS.get(architecture)
    if converter is not None:
        return f"{choice}; NVIDIA's converter takes it from TensorRT-LLM {converter.since} on: --converter upstream."
    return (
        f"{choice}; if TensorRT-LLM has a convert_checkpoint.py for {architecture}, name its folder: --converter "
        "upstream --trtllm-script FOLDER; without an engine its PyTorch backend may run it: --runtime llmapi."
    )


def _stem(architecture: str) -> str:
    """Qwen3 of Qwen3ForCausalLM."""
    return re.split("For|LMHead", architecture, maxsplit=1)[0]


def supported(hf: HfConfig) -> Architecture:
    """The family of a Hugging Face config, checked as far as the config alone allows.

    UnsupportedModelError for an unknown architecture, or a quantisation or feature that cannot be converted.
    """
    hf = text_model(hf)
    module = family(architecture_of(hf))
    source_quantization(hf)
    config = module.checkpoint_config(hf)
    require_sizes(config, "head_size", "num_key_value_heads", "intermediate_size")
    require_numbers(config, *_NUMBERS)
    _require_epsilon(hf, config)
    if config["position_embedding_type"] != "alibi":
        require_sizes(config, "max_position_embeddings")
    module.decoder(config)
    return module


def text_model(hf: HfConfig) -> HfConfig:
    """The config of the model that is converted: of one that sees images too, its text model's; else `hf` itself.

    Its architecture has the name that transformers and TensorRT-LLM know.
    """
    architecture = architecture_of(hf)
    if FAMILIES.get(architecture) == "gemma3":
        from trtserve.architectures import gemma3

        return gemma3.text_config(hf) if architecture == gemma3.WITH_VISION else hf
    return {**hf, "architectures": [_RENAMED[architecture]]} if architecture in _RENAMED else hf


def _require_epsilon(hf: HfConfig, config: CheckpointConfig) -> None:
    """The norms' epsilon is a number; what is none is told under the name that the model's own file has for it."""
    epsilon = config["norm_epsilon"]
    read = [key for key in _EPSILONS if key in hf and hf[key] is epsilon]
    if read and epsilon is None:
        raise UnsupportedModelError(
            f"config.json gives {read[0]} = null; expected a positive number.",
            hint="Take config.json from where the weights are from.",
        )
    require_numbers(hf, *read)


def described(hf: HfConfig, config: CheckpointConfig) -> dict[str, Any]:
    """A checkpoint's config with what decides where its tensors come from: see `Architecture.targets`."""
    return {**config, "tie_word_embeddings": tied(hf), "word_embed_proj_dim": hf.get("word_embed_proj_dim")}


def tied(hf: HfConfig) -> bool:
    """True when the model's output head is its embedding table."""
    hf = text_model(hf)
    return bool(hf.get("tie_word_embeddings", family(architecture_of(hf)).TIED))


def architecture_of(hf: HfConfig) -> str:
    """The architecture that a Hugging Face config names first."""
    names = hf.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedModelError(
            f"config.json gives architectures = {names!r}; expected a list of names.",
            hint="Take config.json from the model's own repository.",
        )
    if not names:
        raise UnsupportedModelError(
            "config.json names no architecture.", hint="Take config.json from the model's own repository."
        )
    first: str = names[0]
    return first


def parameter_count(config: CheckpointConfig) -> int:
    """Number of weights in a checkpoint of the whole model, a tied output head counted as the copy that it is.

    `config` is a checkpoint's config.json or what `checkpoint_config` gives plus `architecture`.
    """
    return sum(math.prod(target.shape) for target in family(config["architecture"]).targets(config))
