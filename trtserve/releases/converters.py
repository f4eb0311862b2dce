"""Where the scripts lie that convert, quantise and try models, in each release of TensorRT-LLM.

Paths are relative to a checkout of its repository. Source: the trees of the tagged releases, and for later ones the
release notes and guides.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtserve.errors import UnsupportedModelError
from trtserve.releases import Row, normalize_release, order

QUANTIZE_SCRIPT = "examples/quantization/quantize.py"

_MOVED = "0.20"
"""The release from which families lie below examples/models, those of others than NVIDIA in contrib."""


@dataclass(frozen=True, kw_only=True)
class Converter(Row):
    """Who converts an `architecture`, as a Hugging Face config.json names it: the script in `folder`."""

    architecture: str
    folder: str
    place: str

    def script(self, release: str) -> str:
        """The script's path in a release."""
        place = f"models/{self.place}/" if order(release) >= order(_MOVED) else ""
        return f"examples/{place}{self.folder}/convert_checkpoint.py"


_TABLE = """
LlamaForCausalLM      llama    core     0.12
MistralForCausalLM    llama    core     0.12
MixtralForCausalLM    llama    core     0.12
GPT2LMHeadModel       gpt      core     0.12
GPTBigCodeForCausalLM gpt      core     0.12
Starcoder2ForCausalLM gpt      core     0.12
NemotronForCausalLM   gpt      core     0.15
GemmaForCausalLM      gemma    core     0.12
Gemma2ForCausalLM     gemma    core     0.13
Gemma3ForCausalLM     gemma    core     0.19
PhiForCausalLM        phi      core     0.12
Phi3ForCausalLM       phi      core     0.12
Qwen2ForCausalLM      qwen     core     0.12
Qwen2MoeForCausalLM   qwen     core     0.12
Qwen3ForCausalLM      qwen     core     1.0
Qwen3MoeForCausalLM   qwen     core     1.0
BloomForCausalLM      bloom    contrib  0.12
FalconForCausalLM     falcon   contrib  0.12
GPTJForCausalLM       gptj     contrib  0.12
GPTNeoXForCausalLM    gptneox  contrib  0.12
OPTForCausalLM        opt      contrib  0.12
BaichuanForCausalLM   baichuan contrib  0.12
BaiChuanForCausalLM   baichuan contrib  0.12
MPTForCausalLM        mpt      contrib  0.12
DbrxForCausalLM       dbrx     contrib  0.12
Grok1ModelForCausalLM grok     contrib  0.12
"""


def _converter(line: str) -> Converter:
    architecture, folder, place, since = line.split()
    return Converter(architecture=architecture, folder=folder, place=place, since=since)


CONVERTERS = {each.architecture: each for each in map(_converter, _TABLE.strip().splitlines())}


def require_converter(architecture: str) -> Converter:
    """Who converts an architecture in some release; UnsupportedModelError when nobody does."""
    converter = CONVERTERS.get(architecture)
    if converter is None:
        raise UnsupportedModelError(
            f"No convert_checkpoint.py of TensorRT-LLM is known for {architecture}.",
            hint=f"Known: {', '.join(CONVERTERS)}. Without an engine: --runtime llmapi.",
        )
    return converter


def converter_script(architecture: str, release: str) -> str:
    """The convert_checkpoint.py for an architecture; UnsupportedModelError when the release has none."""
    wanted = normalize_release(release)
    converter = require_converter(architecture)
    if not converter.within(wanted):
        raise UnsupportedModelError(
            f"TensorRT-LLM {wanted} does not convert {architecture}; {converter.since} is the first release that does.",
            hint=f"Use TensorRT-LLM {converter.since} or newer.",
        )
    return converter.script(wanted)
