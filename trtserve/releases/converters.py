"""Where the scripts lie that convert, quantise and try models, in each release of TensorRT-LLM.

Paths are relative to a checkout (or the source tree in a container). Source: the trees of the tagged releases.
"""

from __future__ import annotations

from trtserve.errors import UnsupportedModelError
from trtserve.releases import normalize_release, order

QUANTIZE_SCRIPT = "examples/quantization/quantize.py"
LORA_SCRIPT = "examples/hf_lora_convert.py"
RUN_SCRIPT = "examples/run.py"

_MOVED = "0.20"
"""The release from which each family lies below examples/models/core or examples/models/contrib."""

# Folder → the architectures (of a Hugging Face config.json) that its script converts.
_CORE = {
    "gemma": ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    "gpt": ("GPT2LMHeadModel", "Starcoder2ForCausalLM", "GPTBigCodeForCausalLM", "NemotronForCausalLM"),
    "llama": ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
    "phi": ("PhiForCausalLM", "Phi3ForCausalLM"),
    "qwen": ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
}
_CONTRIB = {
    "bloom": ("BloomForCausalLM",),
    "falcon": ("FalconForCausalLM",),
    "gptj": ("GPTJForCausalLM",),
    "gptneox": ("GPTNeoXForCausalLM",),
    "opt": ("OPTForCausalLM",),
}


def converter_script(architecture: str, release: str) -> str:
    """The convert_checkpoint.py for an architecture; UnsupportedModelError when no family has it."""
    moved = order(normalize_release(release)) >= order(_MOVED)
    for place, families in (("core", _CORE), ("contrib", _CONTRIB)):
        for folder, architectures in families.items():
            if architecture in architectures:
                return (
                    f"examples/models/{place}/{folder}/convert_checkpoint.py"
                    if moved
                    else (f"examples/{folder}/convert_checkpoint.py")
                )
    known = sorted(name for families in (_CORE, _CONTRIB) for names in families.values() for name in names)
    raise UnsupportedModelError(
        f"No convert_checkpoint.py of TensorRT-LLM {release} is known for {architecture}.",
        hint=f"Known: {', '.join(known)}.",
    )
