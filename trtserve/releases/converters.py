"""Where the scripts lie that convert, quantise and try models, in each release of TensorRT-LLM.

Paths are relative to a checkout of its repository. Source: MODEL_MAP of tensorrt_llm/models/__init__.py (02267d3d, and
one between 0.13 and 0.14), the folders that have a convert_checkpoint.py, and the release notes for what came when.
Models of which an engine needs more than one part (vision, encoders) are listed where a script takes their decoder.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtserve.errors import UnsupportedModelError
from trtserve.releases import Row, normalize_release, order

QUANTIZE_SCRIPT = "examples/quantization/quantize.py"

_MOVED = "0.20"
"""The release from which families lie below examples/models, those of others than NVIDIA in contrib."""

# Folders that were called otherwise when they moved.
_RENAMED = {"chatglm": "glm-4-9b"}


@dataclass(frozen=True, kw_only=True)
class Converter(Row):
    """Who converts an `architecture`, as a Hugging Face config.json names it: the script in `folder`."""

    architecture: str
    folder: str
    place: str

    def script(self, release: str) -> str:
        """The script's path in a release."""
        return _script(self.folder, self.place, release)


def _script(folder: str, place: str, release: str) -> str:
    if order(release) < order(_MOVED):
        return f"examples/{folder}/convert_checkpoint.py"
    return f"examples/models/{place}/{_RENAMED.get(folder, folder)}/convert_checkpoint.py"


_TABLE = """
LlamaForCausalLM                llama          core    0.12
MistralForCausalLM              llama          core    0.12
MixtralForCausalLM              llama          core    0.12
ArcticForCausalLM               llama          core    0.12
ExaoneForCausalLM               llama          core    0.12
InternLMForCausalLM             llama          core    0.12
SkyworkForCausalLM              llama          core    0.12
GraniteForCausalLM              llama          core    0.17
GraniteMoeForCausalLM           llama          core    0.17
InternLM2ForCausalLM            internlm2      core    0.12
GPT2LMHeadModel                 gpt            core    0.12
GPT2LMHeadCustomModel           gpt            core    0.12
GPTForCausalLM                  gpt            core    0.12
GPTBigCodeForCausalLM           gpt            core    0.12
Starcoder2ForCausalLM           gpt            core    0.12
JAISLMHeadModel                 gpt            core    0.12
FuyuForCausalLM                 gpt            core    0.12
Kosmos2ForConditionalGeneration gpt            core    0.12
NemotronForCausalLM             gpt            core    0.15
GemmaForCausalLM                gemma          core    0.12
Gemma2ForCausalLM               gemma          core    0.13
Gemma3ForCausalLM               gemma          core    0.19
PhiForCausalLM                  phi            core    0.12
Phi3ForCausalLM                 phi            core    0.12
Phi3SmallForCausalLM            phi            core    0.12
Phi3VForCausalLM                phi            core    0.12
PhiMoEForCausalLM               phi            core    0.14
Phi4MMForCausalLM               phi            core    0.19
QWenLMHeadModel                 qwen           core    0.12
QWenForCausalLM                 qwen           core    0.12
Qwen2ForCausalLM                qwen           core    0.12
Qwen2MoeForCausalLM             qwen           core    0.12
Qwen2ForSequenceClassification  qwen           core    0.15
Qwen2VLForConditionalGeneration qwen           core    0.16
Qwen3ForCausalLM                qwen           core    1.0
Qwen3MoeForCausalLM             qwen           core    1.0
GLMModel                        chatglm        core    0.12
ChatGLMModel                    chatglm        core    0.12
ChatGLMForCausalLM              chatglm        core    0.12
CohereForCausalLM               commandr       core    0.15
DeciLMForCausalLM               nemotron_nas   core    0.14
MambaForCausalLM                mamba          core    0.12
MllamaForConditionalGeneration  mllama         core    0.15
RecurrentGemmaForCausalLM       recurrentgemma core    0.12
BloomForCausalLM                bloom          contrib 0.12
CogVLMForCausalLM               cogvlm         contrib 0.12
DeepseekForCausalLM             deepseek_v1    contrib 0.14
DeepseekV2ForCausalLM           deepseek_v2    contrib 0.15
FalconForCausalLM               falcon         contrib 0.12
RWForCausalLM                   falcon         contrib 0.12
GPTJForCausalLM                 gptj           contrib 0.12
GPTNeoXForCausalLM              gptneox        contrib 0.12
OPTForCausalLM                  opt            contrib 0.12
BaichuanForCausalLM             baichuan       contrib 0.12
BaiChuanForCausalLM             baichuan       contrib 0.12
MPTForCausalLM                  mpt            contrib 0.12
DbrxForCausalLM                 dbrx           contrib 0.12
Grok1ModelForCausalLM           grok           contrib 0.12
"""


def _converter(line: str) -> Converter:
    architecture, folder, place, since = line.split()
    return Converter(architecture=architecture, folder=folder, place=place, since=since)


CONVERTERS = {each.architecture: each for each in map(_converter, _TABLE.strip().splitlines())}


def require_converter(architecture: str) -> Converter:
    """Who converts an architecture in some release; UnsupportedModelError when the table does not know."""
    converter = CONVERTERS.get(architecture)
    if converter is None:
        raise UnsupportedModelError(
            f"Which convert_checkpoint.py of TensorRT-LLM takes {architecture} is not known here.",
            hint="If your release has one, name its folder: --trtllm-script llama (or core/llama, or the script's "
            "path). Without an engine: --runtime llmapi.",
        )
    return converter


def named_script(folder: str, release: str) -> str:
    """The convert_checkpoint.py in a folder that the user names: `llama`, or `contrib/mpt` of releases from 0.20 on."""
    place, _, name = folder.strip("/").rpartition("/")
    known = {converter.folder: converter.place for converter in CONVERTERS.values()}
    return _script(name, place or known.get(name, "core"), normalize_release(release))


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
