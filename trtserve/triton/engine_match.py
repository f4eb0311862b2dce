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
from trtserve.releases.engine_config import speculative_mode
from trtserve.triton.core_models import CoreModel
from trtserve.triton.preflight import Served
from trtserve.wording import PLACE, option_words

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
# Of its other plugins: what options of other names ask for, and what follows from the number of ranks.
_NOT_AGAIN = ("lora_plugin", "paged_kv_cache", "nccl_plugin")
# Keys of build_config whose flag stands behind `--`.
_RAW_SWITCHES = {
    "weight_sparsity": "--weight_sparsity",
    "weight_streaming": "--weight_streaming",
    "use_strip_plan": "--strip_plan",
    "enable_debug_output": "--enable_debug_output",
    "monitor_memory": "--monitor_memory",
}


@dataclass(frozen=True, kw_only=True)
class Installation:
    """What is to serve: versions, and compute capability (`9.0` or `90`) and name of the GPUs; None: not known."""

    tensorrt_llm: str | None = None
    tensorrt: str | None = None
    sm: str | None = None
    gpu: str | None = None


def require_matching(
    served: Served,
    here: Installation,
    progress: Progress = SILENT,
    *,
    again: str | None = None,
    container: str | None = None,
) -> None:
    """RepositoryError, with the command that builds the engine again, when one cannot be loaded `here`.

    `again` is the command that makes the whole repository again, where one command does; `container` is where the
    engine would be built.

    TensorRT loads engines of its own version and of one compute capability only; TensorRT-LLM changes plugins and
    configuration with every release. Other differences are told to `progress`.
    """
    for core in served.core_models:
        if core.backend == "llmapi" or served.runtime == "openvino":
            continue
        if reasons := list(mismatches(core, here, in_container=container is not None)):
            built_as = (served.facts.get("core_models") or {}).get(core.name, {}).get("built_as")
            command = rebuild_command(core, built_as, container=container)
            build = f"Build it again here, then make the repository again: {command}"
            raise RepositoryError(
                f"The engine of the model {core.name} does not fit: {'; '.join(reasons)}.",
                hint=build if again is None else f"Build it again here, which takes one command: {again}",
            )
        for difference in _differences(core, here):
            progress.warn(f"{core.name}: {difference}")


def mismatches(core: CoreModel, here: Installation, *, in_container: bool = False) -> Iterator[str]:
    """What keeps the engine of `core` from being loaded `here`, each as a part of a sentence."""
    found = "the container has {}" if in_container else "{} is installed"
    if core.version and here.tensorrt_llm and release_of(core.version) != release_of(here.tensorrt_llm):
        yield f"it was built by TensorRT-LLM {core.version}, and {found.format(here.tensorrt_llm)}"
    built = core.origin.get("tensorrt")
    if built and here.tensorrt and _significant(built) != _significant(here.tensorrt):
        yield f"it was built by TensorRT {built}, and {found.format(here.tensorrt)}"
    sm = core.origin.get("sm")
    if sm and here.sm and _digits(sm) != _digits(here.sm):
        gpu = f" ({core.origin['gpu']})" if "gpu" in core.origin else ""
        this = f" ({here.gpu})" if here.gpu else ""
        yield f"it was built for compute capability {sm}{gpu}, and this GPU has {here.sm}{this}"


def rebuild_command(core: CoreModel, built_as: str | None = None, *, container: str | None = None) -> str:
    """`trtserve build` of the same engine; `built_as` names its checkpoint, if it is known.

    Its limits are those of the engine, whatever another release would choose; the rest is what its builder was asked
    for, or for an engine of somebody else's what its config.json tells. `container` is where to build it.
    """
    build: Mapping[str, Any] = core.config.get("build_config") or {}
    limits = {name: build[name] for name in _LIMITS if build.get(name) not in (None, _UNSET.get(name))}
    wished, flags = _asked(core.built_with) if core.built_with is not None else _told(core)
    place = {} if container is None else {"container": container}
    words = option_words({"runtime": "tensorrt_llm", **limits, **wished, **place})
    behind = ["--", *map(shlex.quote, flags)] if flags else []
    return " ".join(["trtserve build", shlex.quote(built_as or "CHECKPOINT"), *words, *behind])


def _asked(built_with: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Options beside the limits, and flags behind `--`, of a build that trtserve made."""
    known = {name: value for name, value in built_with.items() if name not in (*_LIMITS, *PLACE)}
    return known, list(known.pop("builder_flags", ()))


def _told(core: CoreModel) -> tuple[dict[str, Any], list[str]]:
    """The same of any engine, from its config.json: what `trtllm-build` of its version would not make unasked."""
    build: Mapping[str, Any] = core.config.get("build_config") or {}
    plugins: Mapping[str, Any] = build.get("plugin_config") or {}
    options: dict[str, Any] = {name: True for name in _SWITCHES if build.get(name)}
    options |= {name: value for name, value in _build_options(core.config).items() if value is not None}
    changed = dict(_changed_plugins(core.version, plugins))
    options |= {name: changed.pop(name) for name in _PLUGINS if name in changed}
    if plugins.get("lora_plugin"):
        lora = build.get("lora_config") or {}
        modules = list(lora.get("lora_target_modules") or ())
        given = {"lora_plugin": plugins["lora_plugin"], "lora_target_modules": modules}
        given["max_lora_rank"] = lora.get("max_lora_rank")
        options |= {name: value for name, value in given.items() if value}
    switches = [flag for key, flag in _RAW_SWITCHES.items() if build.get(key)]
    return options, [*switches, *(word for name, value in changed.items() for word in (f"--{name}", value))]


def _build_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are keys of build_config or of the model; None for those that are as they are by themselves."""
    build: Mapping[str, Any] = config.get("build_config") or {}
    mode, kind = speculative_mode(build.get("speculative_decoding_mode")), str(build.get("kv_cache_type")).lower()
    if (build.get("plugin_config") or {}).get("paged_kv_cache") is False:  # 0.12
        kind = "continuous"
    step = (build.get("max_batch_size") or 0) * (build.get("max_beam_width") or 1)
    profiles = (build.get("plugin_config") or {}).get("multiple_profiles")
    tokens, verbosity = build.get("opt_num_tokens"), build.get("profiling_verbosity")
    logits = (config.get("pretrained_config") or {}).get("logits_dtype")
    return {
        "speculative_decoding_mode": None if mode in (None, "none", "draft_tokens_external") else mode,
        "kv_cache_type": kind if kind in ("continuous", "disabled") else None,
        "opt_num_tokens": None if profiles or tokens == step else tokens,
        "logits_dtype": "float16" if logits == "float16" else None,
        "profiling_verbosity": None if verbosity == "layer_names_only" else verbosity,
    }


def _changed_plugins(version: str | None, plugins: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is not as `trtllm-build` of that version makes it unasked; `auto` became a type, and is again."""
    release = release_of(version) if version else None
    known = build_flags(release) if release in RELEASES else {}
    for name, flag in ((flag.name.removeprefix("--"), flag) for flag in known.values() if flag.plugin):
        if name not in plugins or name in _NOT_AGAIN:
            continue
        value = plugins[name]
        text = "disable" if value in (None, False) else "enable" if value is True else str(value)
        if text != flag.default and (flag.default != "auto" or text == "disable"):
            yield name, text


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
