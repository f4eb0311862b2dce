"""Engines of a repository: their files, whether they fit the machine that serves them, and how to make them again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve.artifacts import MANIFEST, ModelRepository, load_artifact
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import RepositoryError, TrtserveError, UsageError
from trtserve.executor.embedded import write_config
from trtserve.executor.loaders import embedded_runtime, engine_files
from trtserve.executor.vllm.arguments import MODEL_FOLDER
from trtserve.files import SUBFOLDERS, read_json_object, require_own
from trtserve.nvidia.releases import RELEASES, release_of
from trtserve.nvidia.releases.options import build_flags, speculative_mode
from trtserve.progress import SILENT, Progress
from trtserve.repository.profiles import CORE, PREPROCESSING, find_parameter, parameter_classes, refused_parameter
from trtserve.repository.programs import VERSION, model_names
from trtserve.repository.served import CoreModel, ServedRepository
from trtserve.specs import RepositorySpec
from trtserve.specs.command_line import PLACE, given_values, option_words, spec_of
from trtserve.store import link_or_copy

_LIMITS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width")


def read_engine(folder: Path) -> EngineConfig:
    """Return the content of an engine's config.json. Raises RepositoryError for a folder without an engine."""
    path = folder / "config.json"
    try:
        content = read_json_object(path, RepositoryError, hint="Build the engine again.")
    except FileNotFoundError:
        raise RepositoryError(
            f"{folder} is not an engine: it has no config.json.", hint="Give the folder that `trtserve build` printed."
        ) from None
    if not isinstance(content.get("build_config"), dict):
        raise RepositoryError(
            f"{path} has no build_config: this is a checkpoint or a model, not an engine.",
            hint="Run `trtserve build` on the checkpoint first.",
        )
    return EngineConfig.of(content, path, RepositoryError)


def require_engine_files(folder: Path, config: EngineConfig) -> None:
    """Raise RepositoryError when a rank's file is missing or empty; the server would fail only minutes later."""
    if lacking := lacking_files(folder, config, executor=embedded_runtime(config)):
        raise RepositoryError(
            f"{folder} is not a complete engine: {', '.join(lacking)} missing or empty.",
            hint="Remove the folder and build the engine again: trtserve build CHECKPOINT",
        )


def lacking_files(folder: Path, config: EngineConfig, *, executor: str | None) -> list[str]:
    """Return the names of an engine's files that are missing or empty; `executor` is the runtime if it is embedded."""
    own = [] if executor is None else engine_files(config, executor)
    names = own or [f"rank{rank}.engine" for rank in range(config.mapping.ranks)]
    return [name for name in names if not (folder / name).is_file() or (folder / name).stat().st_size == 0]


def rank_sizes(folder: Path) -> dict[str, int]:
    """Return file name → bytes of all ranks."""
    found = sorted(path for path in folder.glob("rank*.*") if path.is_file())
    return {path.name: path.stat().st_size for path in found}


def limits_of(config: EngineConfig) -> dict[str, Any]:
    """Return the limits that a repository and its clients must know."""
    return {name: config.build_keys.get(name) for name in _LIMITS}


def own_files(folder: Path) -> list[Path]:
    """Return the files of an engine or a model, without the manifest. Raises UsageError for a link to elsewhere."""
    entries = (*folder.iterdir(), *(path for pattern in SUBFOLDERS for path in folder.glob(pattern)))
    found = sorted(path for path in entries if path.is_file() and path.name != MANIFEST)
    for path in found:
        require_own(path, folder)
    return found


def link_engine(engine: Path, target: Path, *, copy: bool) -> None:
    """Hard-link the engine's files into the folder `target`; copy them if `copy`."""
    for source in own_files(engine):
        link_or_copy(source, target / source.name, copy=copy)


def write_hugging_face(model: Path, config: EngineConfig, target: Path, *, copy: bool) -> None:
    """Write the config of an engine that is a Hugging Face model into `target`, and hard-link or copy the model."""
    write_config(target, config.content)
    for source in own_files(model):
        link_or_copy(source, target / MODEL_FOLDER / source.relative_to(model), copy=copy)


# Limits in build_config that `trtserve build` has as options, in its order.
_BUILD_LIMITS = (*_LIMITS, "max_draft_len", "max_prompt_embedding_table_size")
_UNSET = {"max_beam_width": 1, "max_draft_len": 0, "max_prompt_embedding_table_size": 0}
_SWITCHES = ("gather_context_logits", "gather_generation_logits")
# Keys of plugin_config that `trtserve build` has as options.
_PLUGINS = (
    "gemm_plugin", "gpt_attention_plugin", "context_fmha", "use_paged_context_fmha", "use_fp8_context_fmha",
    "remove_input_padding", "reduce_fusion", "multiple_profiles", "tokens_per_block",
)  # fmt: skip
# Other plugins, which follow from options of other names or from the number of ranks.
_IMPLIED_PLUGINS = ("lora_plugin", "paged_kv_cache", "nccl_plugin")
# Keys of build_config → flag of trtllm-build, given after `--`.
_RAW_SWITCHES = {
    "weight_sparsity": "--weight_sparsity",
    "weight_streaming": "--weight_streaming",
    "use_strip_plan": "--strip_plan",
    "enable_debug_output": "--enable_debug_output",
    "monitor_memory": "--monitor_memory",
}


@dataclass(frozen=True, kw_only=True)
class Installation:
    """The software and GPU that will serve an engine; None means unknown."""

    tensorrt_llm: str | None = None
    tensorrt: str | None = None
    sm: str | None = None  # compute capability of the GPUs: `9.0` or `90`
    gpu: str | None = None  # name of the GPUs


def require_matching(
    served: ServedRepository,
    here: Installation,
    progress: Progress = SILENT,
    *,
    remake_command: str | None = None,
    container: str | None = None,
) -> None:
    """Raise RepositoryError, with the command that rebuilds the engine, when an engine cannot be loaded `here`.

    TensorRT loads only engines of its own version and compute capability; TensorRT-LLM changes plugins and
    configuration with every release. Other differences are warnings. `remake_command` makes the
    repository again, if a single command can; `container` is where the engine would be built.
    """
    for core in served.core_models:
        if core.uses_llmapi or served.embedded:
            continue
        if reasons := list(mismatches(core, here, in_container=container is not None)):
            built_as = (served.facts.get("core_models") or {}).get(core.name, {}).get("built_as")
            command = rebuild_command(core, built_as, container=container)
            rebuild = f"Build it again here, then make the repository again: {command}"
            raise RepositoryError(
                f"The engine of the model {core.name} does not fit: {'; '.join(reasons)}.",
                hint=rebuild if remake_command is None else f"Build it again here with one command: {remake_command}",
            )
        if core.version and here.tensorrt_llm and core.version != here.tensorrt_llm:
            progress.warn(
                f"{core.name}: built by TensorRT-LLM {core.version}, served by {here.tensorrt_llm} of the same release"
            )
        gpu = core.origin.get("gpu")
        if gpu and here.gpu and gpu != here.gpu:
            progress.warn(f"{core.name}: built on {gpu}, served on {here.gpu}: it may need more memory or run slower")


def mismatches(core: CoreModel, here: Installation, *, in_container: bool = False) -> Iterator[str]:
    """Yield why the engine of `core` cannot be loaded `here`, each as a clause."""
    found = "the container has {}" if in_container else "{} is installed"
    if core.version and here.tensorrt_llm and release_of(core.version) != release_of(here.tensorrt_llm):
        yield f"it was built by TensorRT-LLM {core.version}, but {found.format(here.tensorrt_llm)}"
    built = core.origin.get("tensorrt")
    if built and here.tensorrt and _significant(built) != _significant(here.tensorrt):
        yield f"it was built by TensorRT {built}, but {found.format(here.tensorrt)}"
    sm = core.origin.get("sm")
    if sm and here.sm and _digits(sm) != _digits(here.sm):
        gpu = f" ({core.origin['gpu']})" if "gpu" in core.origin else ""
        this = f" ({here.gpu})" if here.gpu else ""
        yield f"it was built for compute capability {sm}{gpu}, but this GPU has {here.sm}{this}"


def rebuild_command(core: CoreModel, built_as: str | None = None, *, container: str | None = None) -> str:
    """Return the `trtserve build` command for the same engine; `built_as` names its checkpoint, if it is known.

    Limits are those of the engine. Other options are those of its build or, for an engine that another tool built,
    what its config.json shows. `container` is where to build it.
    """
    build = core.config.build_keys
    limits = {name: build[name] for name in _BUILD_LIMITS if build.get(name) not in (None, _UNSET.get(name))}
    options, flags = _build_options(core.built_with) if core.built_with is not None else _engine_options(core)
    place = {} if container is None else {"container": container}
    words = option_words({"runtime": "tensorrt_llm", **limits, **options, **place})
    raw = ["--", *map(shlex.quote, flags)] if flags else []
    return " ".join(["trtserve build", shlex.quote(built_as or "CHECKPOINT"), *words, *raw])


def _build_options(built_with: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return options other than limits, and flags after `--`, of a build by trtserve."""
    known = {name: value for name, value in built_with.items() if name not in (*_BUILD_LIMITS, *PLACE)}
    return known, list(known.pop("builder_flags", ()))


def _engine_options(core: CoreModel) -> tuple[dict[str, Any], list[str]]:
    """Return the same for any engine, from what its config.json has other than the defaults of `trtllm-build`."""
    build, plugins = core.config.build_keys, core.config.plugin_keys
    options: dict[str, Any] = {name: True for name in _SWITCHES if build.get(name)}
    options |= {name: value for name, value in _config_options(core.config).items() if value is not None}
    changed = dict(_changed_plugins(core.version, plugins))
    options |= {name: changed.pop(name) for name in _PLUGINS if name in changed}
    if plugin := core.config.build.plugin_config.lora_plugin:
        lora = core.config.build.lora_config
        given = {"lora_target_modules": list(lora.lora_target_modules), "max_lora_rank": lora.max_lora_rank}
        options |= {"lora_plugin": plugin} | {name: value for name, value in given.items() if value}
    switches = [flag for key, flag in _RAW_SWITCHES.items() if build.get(key)]
    return options, [*switches, *(word for name, value in changed.items() for word in (f"--{name}", value))]


def _config_options(config: EngineConfig) -> dict[str, Any]:
    """Return options from build_config and the model, or None for default values."""
    build, plugins = config.build, config.build.plugin_config
    mode, kind = speculative_mode(build.speculative_decoding_mode), str(build.kv_cache_type).lower()
    if plugins.paged_kv_cache is False:  # 0.12
        kind = "continuous"
    step, tokens = build.max_batch_size * build.max_beam_width, build.opt_num_tokens
    return {
        "speculative_decoding_mode": None if mode in (None, "none", "draft_tokens_external") else mode,
        "kv_cache_type": kind if kind in ("continuous", "disabled") else None,
        "opt_num_tokens": None if plugins.multiple_profiles or tokens == step else tokens,
        "logits_dtype": "float16" if config.model.logits_dtype == "float16" else None,
        "profiling_verbosity": None if build.profiling_verbosity == "layer_names_only" else build.profiling_verbosity,
    }


def _changed_plugins(version: str | None, plugins: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield plugins that differ from the defaults of that `trtllm-build`; `auto` stands for any type."""
    release = release_of(version) if version else None
    known = build_flags(release) if release in RELEASES else {}
    for name, flag in ((flag.name.removeprefix("--"), flag) for flag in known.values() if flag.plugin):
        if name not in plugins or name in _IMPLIED_PLUGINS:
            continue
        value = plugins[name]
        text = "disable" if value in (None, False) else "enable" if value is True else str(value)
        if text != flag.default and (flag.default != "auto" or text == "disable"):
            yield name, text


def _significant(version: str) -> list[str]:
    """Return major, minor and patch of `10.8.0.43`, which must be equal for TensorRT to load an engine."""
    return version.split(".")[:3]


def _digits(sm: str) -> str:
    """Return `90` for `9.0`, `90` and `sm_90`."""
    return "".join(letter for letter in sm if letter.isdigit())


_WITHOUT = ("release", "trtllm_version")  # the new repository is for another TensorRT-LLM


def remake_command(repository: Path, core: CoreModel, *, container: str | None = None) -> str | None:
    """Return the command `trtserve repo "$(trtserve build …)"` that makes a repository of one engine again.

    It uses the repository's own tokenizer. Returns None for a repository with several engines, one whose checkpoint is
    unknown or gone, and one that trtserve did not make.
    """
    try:
        manifest = load_artifact(ModelRepository, repository).manifest
    except TrtserveError:
        return None
    if manifest is None or manifest.facts.get("members") or manifest.facts.get("draft"):
        return None
    names = model_names(str(manifest.facts.get("suffix") or ""))
    entry: Mapping[str, Any] = (manifest.facts.get("core_models") or {}).get(core.name) or {}
    checkpoint, tokenizer = entry.get("built_as"), repository / names[PREPROCESSING] / VERSION / "tokenizer"
    if core.name != names[CORE] or not checkpoint or not Path(checkpoint).is_dir() or not tokenizer.is_dir():
        return None
    build = rebuild_command(core, str(checkpoint), container=container)
    spec = spec_of(RepositorySpec, manifest.spec)
    words = ["--name", shlex.quote(spec.name), "--tokenizer", shlex.quote(str(tokenizer))]
    return " ".join([f'trtserve repo "$({build})"', *words, *option_words(given_values(spec, without=_WITHOUT))])


_ENGINE_FOLDER = f"{CORE}/1"
_NEEDED = {"gpt_model_type": "inflight_fused_batching", "gpt_model_path": _ENGINE_FOLDER}


def require_startable(
    parameters: Mapping[str, str],
    engine: EngineConfig,
    *,
    release: str,
    settings: Mapping[str, str],
    max_queue_size: int = 0,
) -> None:
    """Raise UsageError when the embedded executor refuses `parameters` for an engine with this config.json.

    `settings` are the parameters that the user set; the error names the refused one. `max_queue_size` is that of the
    model's `dynamic_batching`.
    """

    def refused(chosen: Mapping[str, str]) -> str | None:
        return _refusal(chosen, engine, release, max_queue_size)

    reason = refused(parameters)
    if reason is None:
        return
    others = _NEEDED | {name: value for name, value in parameters.items() if name not in settings}
    for name, value in settings.items():
        if (own := refused({**others, name: value})) is not None:
            declared = find_parameter(CORE, name, release)
            choices = () if declared is None else declared.values.choices
            starting = " or ".join(word for word in choices if refused({**others, name: word}) is None)
            raise UsageError(
                f"--set {name}={value} cannot start in the embedded executor: {own}",
                hint=f"Leave {name} out{f', or set it to {starting}' if starting else ''}.",
            )
    raise UsageError(f"The embedded executor cannot start with these settings: {reason}")


def startup_refusal(
    parameters: Mapping[str, str], engine: EngineConfig, *, release: str, max_queue_size: int = 0
) -> str | None:
    """Return why the embedded executor refuses the `parameters` of an existing repository, or None when it starts.

    The path of the engine is not checked.
    """
    return _refusal({**parameters, "gpt_model_path": _ENGINE_FOLDER}, engine, release, max_queue_size)


def require_accepted(given: Mapping[str, Mapping[str, str]], release: str) -> None:
    """Raise UsageError for a parameter in `given` (model → parameter → text) that a model refuses at load."""
    for model, parameters in given.items():
        if (reason := refused_parameter(parameters, parameter_classes(model, release))) is not None:
            raise UsageError(
                f"--set cannot start in the embedded executor: {model}: {reason}", hint="Leave the parameter out."
            )


def _refusal(parameters: Mapping[str, str], engine: EngineConfig, release: str, max_queue_size: int) -> str | None:
    """Return why the core model or its executor refuses `parameters`, or None when they start."""
    from trtserve.executor.engine.limits import resolve_limits
    from trtserve.executor.interface.convert import engine_options, refuse_unsupported_config
    from trtserve.programs.core.settings import executor_config, load_embedded_executor
    from trtserve.programs.shared.parameters import ModelParameters

    classes = parameter_classes(CORE, release)
    if (reason := refused_parameter(parameters, classes)) is not None:
        return reason
    module = load_embedded_executor(release)
    model = {
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
        "dynamic_batching": {"default_queue_policy": {"max_queue_size": max_queue_size}},
    }
    ignored: list[str] = []
    reader = ModelParameters(model, Path(), ignored.append)
    reader = reader.without(classes["ignored"])
    try:
        config = executor_config(module, reader, model)
        _refuse_beam_search(config)
        _refuse_missing_engine(parameters.get("gpt_model_path", ""))
        refuse_unsupported_config(config)
        resolve_limits(engine, engine_options(config))
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return ignored[0] if ignored else None


def _refuse_beam_search(config: Any) -> None:
    """Refuse a mode that the executor, like TensorRT-LLM, would replace with only a warning in its log."""
    mode = config.decoding_config and config.decoding_config.decoding_mode
    if mode and mode.isBeamSearch() and config.max_beam_width == 1:
        raise ValueError(
            "decoding_mode beam_search needs a max_beam_width above 1, and an engine that was built for it"
        )


def _refuse_missing_engine(folder: str) -> None:
    """Accept the engine folder of the repository, or an existing absolute path."""
    if folder != _ENGINE_FOLDER and not (Path(folder).is_absolute() and Path(folder).is_dir()):
        raise ValueError(f"gpt_model_path {folder!r} is neither {_ENGINE_FOLDER} nor the absolute path of a folder")
