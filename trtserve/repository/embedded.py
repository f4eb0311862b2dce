"""Check that the embedded executor starts with a core model's parameters, with the code that will start it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import UsageError
from trtserve.repository.profiles import CORE, find_parameter, parameter_classes, refused_parameter

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
    from trtserve.programs.core.executor_module import load_embedded_executor
    from trtserve.programs.core.settings import executor_config
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
