"""Whether an engine fits the TensorRT-LLM, TensorRT and GPU that are to serve it, and how to build it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trtserve.errors import RepositoryError
from trtserve.progress import SILENT, Progress
from trtserve.releases import RELEASES, release_of
from trtserve.releases.build_flags import build_flags
from trtserve.triton.core_models import CoreModel
from trtserve.triton.preflight import Served

# Limits and features of build_config that `trtserve build` has as flags, in its order.
_LIMITS = (
    "max_batch_size",
    "max_input_len",
    "max_seq_len",
    "max_num_tokens",
    "max_beam_width",
    "max_draft_len",
    "max_prompt_embedding_table_size",
)
_UNSET = {"max_beam_width": 1, "max_draft_len": 0, "max_prompt_embedding_table_size": 0}
_SWITCHES = ("gather_context_logits", "gather_generation_logits")
# Keys of its plugin_config that `trtserve build` has as flags.
_PLUGINS = (
    "gemm_plugin",
    "gpt_attention_plugin",
    "context_fmha",
    "use_paged_context_fmha",
    "use_fp8_context_fmha",
    "remove_input_padding",
    "reduce_fusion",
    "multiple_profiles",
    "tokens_per_block",
)


@dataclass(frozen=True, kw_only=True)
class Installation:
    """What is to serve: versions, and compute capability (`9.0` or `90`) and name of the GPUs; None: not known."""

    tensorrt_llm: str | None = None
    tensorrt: str | None = None
    sm: str | None = None
    gpu: str | None = None


def require_matching(
    served: Served, here: Installation, progress: Progress = SILENT, *, again: str | None = None
) -> None:
    """RepositoryError, with the command that builds the engine again, when one cannot be loaded `here`.

    `again` is the command that makes the whole repository again, where one command does.

    TensorRT loads engines of its own version and of one compute capability only; TensorRT-LLM changes plugins and
    configuration with every release. Other differences are told to `progress`.
    """
    for core in served.core_models:
        if core.backend == "llmapi" or served.runtime == "openvino":
            continue
        if reasons := list(mismatches(core, here)):
            built_as = (served.facts.get("core_models") or {}).get(core.name, {}).get("built_as")
            build = f"Build it again here, then make the repository again: {rebuild_command(core, built_as)}"
            raise RepositoryError(
                f"The engine of the model {core.name} does not fit: {'; '.join(reasons)}.",
                hint=build if again is None else f"Build it again here, which takes one command: {again}",
            )
        for difference in _differences(core, here):
            progress.warn(f"{core.name}: {difference}")


def mismatches(core: CoreModel, here: Installation) -> Iterator[str]:
    """What keeps the engine of `core` from being loaded, each as a part of a sentence."""
    if core.version and here.tensorrt_llm and release_of(core.version) != release_of(here.tensorrt_llm):
        yield f"it was built by TensorRT-LLM {core.version}, and {here.tensorrt_llm} is installed"
    built = core.origin.get("tensorrt")
    if built and here.tensorrt and _significant(built) != _significant(here.tensorrt):
        yield f"it was built by TensorRT {built}, and {here.tensorrt} is installed"
    sm = core.origin.get("sm")
    if sm and here.sm and _digits(sm) != _digits(here.sm):
        gpu = f" ({core.origin['gpu']})" if "gpu" in core.origin else ""
        this = f" ({here.gpu})" if here.gpu else ""
        yield f"it was built for compute capability {sm}{gpu}, and this GPU has {here.sm}{this}"


def rebuild_command(core: CoreModel, built_as: str | None = None) -> str:
    """`trtserve build` with the limits and features of the engine; `built_as` names its checkpoint, if it is known."""
    build: Mapping[str, Any] = core.config.get("build_config", {})
    words = ["trtserve build", shlex.quote(built_as or "CHECKPOINT"), "--runtime tensorrt_llm"]
    for name in _LIMITS:
        value = build.get(name)
        if value is not None and value != _UNSET.get(name):
            words.append(f"--{name.replace('_', '-')} {value}")
    words += [f"--{name.replace('_', '-')}" for name in _SWITCHES if build.get(name)]
    plugins: Mapping[str, Any] = build.get("plugin_config") or {}
    words += _plugin_words(core.version, plugins)
    lora = plugins.get("lora_plugin")
    if lora:
        settings = build.get("lora_config") or {}
        words.append(f"--lora-plugin {lora}")
        if modules := settings.get("lora_target_modules"):
            words.append(f"--lora-target-modules {','.join(modules)}")
        if rank := settings.get("max_lora_rank"):
            words.append(f"--max-lora-rank {rank}")
    return " ".join(words)


def _plugin_words(version: str | None, plugins: Mapping[str, Any]) -> Iterator[str]:
    """Flags for what is not as `trtllm-build` of that version makes it unasked; `auto` became a type, and is again."""
    release = release_of(version) if version else None
    known = build_flags(release) if release in RELEASES else {}
    for name in _PLUGINS:
        flag = known.get(f"--{name}")
        if flag is None or name not in plugins:
            continue
        value = plugins[name]
        text = "disable" if value in (None, False) else "enable" if value is True else str(value)
        if text != flag.default and (flag.default != "auto" or text == "disable"):
            yield f"--{name.replace('_', '-')} {text}"


def _differences(core: CoreModel, here: Installation) -> Iterator[str]:
    if core.version and here.tensorrt_llm and core.version != here.tensorrt_llm:
        yield f"built by TensorRT-LLM {core.version}, served by {here.tensorrt_llm} of the same release"
    gpu = core.origin.get("gpu")
    if gpu and here.gpu and gpu != here.gpu:
        yield f"built on {gpu}, served on {here.gpu}: it may not fit its memory or run at its best"


def _significant(version: str) -> list[str]:
    """`10.8.0.43` → major, minor and patch: TensorRT loads engines of no other version."""
    return version.split(".")[:3]


def _digits(sm: str) -> str:
    """`9.0`, `90` and `sm_90` are the same."""
    return "".join(letter for letter in sm if letter.isdigit())
