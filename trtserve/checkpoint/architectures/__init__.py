"""The supported model families: one module per lineage.

`base` has the protocol that a family follows; `parts` has what several families are built from.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Architecture, Decoder, HfConfig, Target, WrongConfigError
from trtserve.checkpoint.architectures.parts.named_tensors import named_targets
from trtserve.checkpoint.architectures.parts.text_halves import VISION, WITH_IMAGES, text_config
from trtserve.errors import UnsupportedModelError

__all__ = [
    "FAMILIES",
    "Architecture",
    "Decoder",
    "Target",
    "UnknownArchitectureError",
    "checkpoint_targets",
    "described",
    "family",
    "parameter_count",
    "shares_embedding",
    "text_model",
    "tied",
    "unused_tensors",
]

# Module of this package, imported on demand → architecture in config.json → its family.
_LINEAGES: dict[str, dict[str, str]] = {
    "deepseek": {
        "DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3",
        "Glm4MoeLiteForCausalLM": "deepseek_v3",
    },
    "ernie4_5": {"Ernie4_5_MoeForCausalLM": "ernie4_5_moe", "Ernie4_5ForCausalLM": "ernie4_5"},
    "exaone": {"ExaoneMoeForCausalLM": "exaone_moe", "Exaone4ForCausalLM": "exaone4", "ExaoneForCausalLM": "exaone"},
    "falcon": {"FalconForCausalLM": "falcon", "RWForCausalLM": "falcon", "FalconH1ForCausalLM": "falcon_h1"},
    "gemma": {
        "GemmaForCausalLM": "gemma", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3",
        "VaultGemmaForCausalLM": "vaultgemma",
    },
    "gemma4": {"Gemma3nForCausalLM": "gemma3n", "Gemma4ForCausalLM": "gemma4"},
    "glm": {
        "Glm4MoeForCausalLM": "glm4_moe", "SolarOpenForCausalLM": "glm4_moe", "GlmForCausalLM": "glm",
        "Glm4ForCausalLM": "glm",
    },
    "gpt": {
        "GPT2LMHeadModel": "gpt2", "GPTJForCausalLM": "gptj", "GPTNeoXForCausalLM": "gpt_neox",
        "OPTForCausalLM": "opt", "Starcoder2ForCausalLM": "starcoder2", "BloomForCausalLM": "bloom",
    },
    "gpt_oss": {"GptOssForCausalLM": "gpt_oss"},
    "granite": {
        "GraniteForCausalLM": "granite", "HyperCLOVAXForCausalLM": "granite", "GraniteMoeForCausalLM": "granite_moe",
        "GraniteMoeSharedForCausalLM": "granite_moe", "GraniteMoeHybridForCausalLM": "granite_hybrid",
        "BambaForCausalLM": "bamba",
    },
    "hunyuan": {
        "HYV3ForCausalLM": "hy_v3", "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
        "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    },
    "lfm2": {"Lfm2ForCausalLM": "lfm2", "Lfm2MoeForCausalLM": "lfm2_moe"},
    "llama": {"LlamaForCausalLM": "llama"},
    "llama4": {"Llama4ForCausalLM": "llama4"},
    "mistral": {
        "MistralForCausalLM": "mistral", "MixtralForCausalLM": "mixtral", "MinistralForCausalLM": "ministral",
        "Ministral3ForCausalLM": "ministral", "CwmForCausalLM": "ministral",
    },
    "near_llama": {
        "ApertusForCausalLM": "apertus", "SmolLM3ForCausalLM": "smollm3", "CohereForCausalLM": "cohere",
        "Cohere2ForCausalLM": "cohere", "SeedOssForCausalLM": "seed_oss", "HeliumForCausalLM": "helium",
        "StableLmForCausalLM": "stablelm", "InternLM3ForCausalLM": "internlm3",
        "IQuestCoderForCausalLM": "internlm3",
    },
    "nemotron": {
        "NemotronForCausalLM": "nemotron", "ArceeForCausalLM": "nemotron", "Jais2ForCausalLM": "nemotron",
        "NemotronHForCausalLM": "nemotron_h",
    },
    "olmo": {
        "OlmoeForCausalLM": "olmoe", "FlexOlmoForCausalLM": "olmoe", "Olmo2ForCausalLM": "olmo2",
        "Olmo3ForCausalLM": "olmo2",
    },
    "phi": {"PhiForCausalLM": "phi", "Phi3ForCausalLM": "phi3"},
    "qwen": {
        "Qwen2ForCausalLM": "qwen2", "Qwen2MoeForCausalLM": "qwen2_moe", "Qwen3ForCausalLM": "qwen3",
        "Qwen3MoeForCausalLM": "qwen3_moe", "Qwen3NextForCausalLM": "qwen3_next", "Qwen3_5ForCausalLM": "qwen3_next",
        "Qwen3_5MoeForCausalLM": "qwen3_next",
    },
    "sigmoid_experts": {"Dots1ForCausalLM": "dots1", "MiniMaxM2ForCausalLM": "minimax_m2", "AfmoeForCausalLM": "afmoe"},
}  # fmt: skip
FAMILIES = {name: ours for families in _LINEAGES.values() for name, ours in families.items()}  # architecture → family
LINEAGE = {ours: module for module, families in _LINEAGES.items() for ours in families.values()}  # family → module

# Other names in TensorRT-LLM's checkpoints.
_CHECKPOINT_NAMES = {"GPTForCausalLM": "gpt2", "Gemma3ForConditionalGeneration": "gemma3"}

# How the names of all source tensors but the head begin, where not with "model.".
_PREFIXES = {**dict.fromkeys(("bloom", "exaone", "falcon", "gpt2", "gptj"), "transformer."), "gpt_neox": "gpt_neox."}

# Families whose output head is the embedding table unless config.json says otherwise.
_TIED = {
    *("bloom", "cohere", "ernie4_5", "ernie4_5_moe", "falcon", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4"),
    *("gpt2", "lfm2", "lfm2_moe", "opt", "smollm3", "starcoder2", "vaultgemma"),
}

# The first Llama exports use this spelling; transformers goes by their model_type.
_RENAMED = {"LLaMAForCausalLM": "LlamaForCausalLM"}


# transformers computes these as Llamas, and names them so when it saves them.
_SAVED_AS_LLAMA = {
    "exaone": "ExaoneForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "iquestcoder": "IQuestCoderForCausalLM",
}


# transformers' name of a family as far as it follows from the architecture's → ours.
_KINDS = {re.sub("ForCausalLM|LMHeadModel|_", "", name).lower(): ours for name, ours in FAMILIES.items()}


_KIND_OF_MODEL = re.compile("For(CausalLM|ConditionalGeneration)|LMHeadModel")


class UnknownArchitectureError(UnsupportedModelError):
    """No family has this architecture."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        stems = {re.sub(_KIND_OF_MODEL, "", name): name for name in (*WITH_IMAGES, *FAMILIES)}
        near = get_close_matches(re.sub(_KIND_OF_MODEL, "", architecture[:99]), stems, n=3, cutoff=0.7)
        similar = f" Similar ones that are: {', '.join(stems[name] for name in near)}." if near else ""
        super().__init__(
            f"Architecture {architecture:.99} is not supported.{similar}",
            hint="`trtserve help families.md` lists what is.",
        )


def family(architecture: str) -> Architecture:
    """Return the family of an architecture; UnknownArchitectureError for an unknown one."""
    name = FAMILIES.get(architecture) or _CHECKPOINT_NAMES.get(architecture)
    if name is None:
        raise UnknownArchitectureError(architecture)
    module = importlib.import_module(f"{__name__}.{LINEAGE[name]}")
    own = "" if name == LINEAGE[name] else f"{name}_"  # how the names of a family's functions begin in another's module
    return Architecture(
        checkpoint_config=getattr(module, f"{own}checkpoint_config"),
        source_names=getattr(module, f"{own}names", llama.names),
        decoder=getattr(module, f"{own}decoder", llama.decoder),
        prefix=_PREFIXES.get(name, "model."),
        tied=name in _TIED,
    )


def text_model(hf: HfConfig) -> HfConfig:
    """Return the config to convert: the text model's config of a multimodal model, otherwise `hf`.

    Its architecture has the name that transformers and TensorRT-LLM use.
    """
    architecture = architecture_of(hf)
    if architecture in WITH_IMAGES:
        return text_config(hf)
    if architecture == "LlamaForCausalLM" and (saved := _SAVED_AS_LLAMA.get(str(hf.get("model_type")))):
        return {**hf, "architectures": [saved]}
    family_name = _RENAMED.get(architecture, architecture)
    kind = str(hf.get("model_type")).removesuffix("_text").replace("_", "")
    ours = FAMILIES.get(family_name)
    if ours is not None and _KINDS.get(kind, ours) != ours:
        raise WrongConfigError(
            f"config.json names two families: model_type = {hf['model_type']} and the architecture {architecture}."
        )
    return hf if family_name == architecture else {**hf, "architectures": [family_name]}


def checkpoint_targets(config: CheckpointConfig) -> list[Target]:
    """Return every tensor of an unsharded checkpoint, in file order.

    To resolve sources, `config` must have the keys that `described` adds.
    """
    return named_targets(config, family(config.architecture).names(config), tied=shares_embedding(config))


def unused_tensors(config: CheckpointConfig) -> Sequence[str]:
    """Return patterns (fnmatch) of source tensors that a checkpoint does not need; `config` is `described`."""
    names = family(config.architecture).names(config)
    # Some exports store a copy of a tied embedding under the head's name.
    return (*names.unused, *VISION, *([f"{names.head}.weight"] if shares_embedding(config) else []))


def shares_embedding(config: CheckpointConfig) -> bool:
    """Return whether the output head of a checkpoint is the embedding table, as far as its config says."""
    return config.own("tie_word_embeddings", family(config.architecture).tied)


def described(hf: HfConfig, config: CheckpointConfig) -> CheckpointConfig:
    """Return a checkpoint's config with the source keys that `checkpoint_targets` needs."""
    quantization = hf.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    return config.changed(
        tie_word_embeddings=tied(hf), word_embed_proj_dim=hf.get("word_embed_proj_dim"), quant_method=method
    )


def tied(hf: HfConfig) -> bool:
    """Return whether the output head shares the embedding table."""
    hf = text_model(hf)
    return bool(hf.get("tie_word_embeddings", family(architecture_of(hf)).tied))


def architecture_of(hf: HfConfig) -> str:
    """Return the first architecture in a Hugging Face config."""
    names = hf.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedModelError(
            f"config.json gives architectures = {names!r:.80}; expected a list of names.",
            hint="Take config.json from the model's own repository.",
        )
    if not names:
        raise UnsupportedModelError(
            "config.json names no architecture.", hint="Take config.json from the model's own repository."
        )
    if len({FAMILIES[name] for name in names if name in FAMILIES}) > 1:
        raise UnsupportedModelError(
            f"config.json names several architectures: {', '.join(names)[:200]}; expected one.",
            hint="Leave the one that the weights are for.",
        )
    first: str = names[0]
    return first


def parameter_count(config: CheckpointConfig) -> int:
    """Count the weights in an unsharded checkpoint; a tied output head counts as a separate copy.

    `config` is a checkpoint's config.json, or the result of `checkpoint_config` plus `architecture`.
    """
    return sum(math.prod(target.shape) for target in checkpoint_targets(config))
