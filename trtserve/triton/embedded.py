"""Whether the embedded executor starts with the parameters of a core model, asked of the code that will start it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtserve.errors import UsageError
from trtserve.triton.core_program import core_modules
from trtserve.triton.parameters import find_parameter, parameter_classes
from trtserve.triton.profiles import CORE

_ENGINE_FOLDER = f"{CORE}/1"
_NEEDED = {"gpt_model_type": "inflight_fused_batching", "gpt_model_path": _ENGINE_FOLDER}


def require_startable(
    parameters: Mapping[str, str],
    engine: Mapping[str, Any],
    *,
    release: str,
    settings: Mapping[str, str],
    max_queue_size: int = 0,
) -> None:
    """UsageError when the embedded executor refuses `parameters` on an engine whose `config.json` is `engine`.

    `settings` are those of `parameters` that the user set; the error names the one that is refused. `max_queue_size`
    is that of the model's `dynamic_batching`.
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
                f"--set {name}={value} cannot start on the openvino runtime: {own}",
                hint=f"Leave {name} out{f', or set it to {starting}' if starting else ''}.",
            )
    raise UsageError(f"The openvino runtime cannot start with these settings: {reason}")


def startup_refusal(
    parameters: Mapping[str, str], engine: Mapping[str, Any], *, release: str, max_queue_size: int = 0
) -> str | None:
    """What the embedded executor says against `parameters` of a repository that exists; None when it starts.

    Where its engine lies is no question here.
    """
    return _refusal({**parameters, "gpt_model_path": _ENGINE_FOLDER}, engine, release, max_queue_size)


def require_carried_out(given: Mapping[str, Mapping[str, str]], release: str) -> None:
    """UsageError for a parameter of `given` (model → parameter → text) that a model refuses when it is loaded."""
    for model, parameters in given.items():
        if (reason := refused_parameter(parameters, parameter_classes(model, release))) is not None:
            raise UsageError(
                f"--set cannot start on the openvino runtime: {model}: {reason}", hint="Leave the parameter out."
            )


def refused_parameter(parameters: Mapping[str, str], classes: Mapping[str, Any]) -> str | None:
    """What a model says at load against one of `parameters` that it cannot carry out; None when there is none.

    `classes` is the content of its CLASSES_FILE.
    """
    refusal = core_modules()["parameter_classes"].refusal
    entries = classes.get("refused", {}).items()
    reasons = (refusal(name, parameters.get(name, "").strip() or None, entry) for name, entry in entries)
    return next((str(reason) for reason in reasons if reason is not None), None)


def _refusal(parameters: Mapping[str, str], engine: Mapping[str, Any], release: str, max_queue_size: int) -> str | None:
    """What the core model or its executor says against `parameters`; None when they start."""
    from trtserve.executor.limits import resolve_limits
    from trtserve.executor.unbuilt import refuse_unbuilt_config

    classes = parameter_classes(CORE, release)
    if (reason := refused_parameter(parameters, classes)) is not None:
        return reason
    modules = core_modules()
    module = modules["executor_module"].load_executor_module("openvino", release)
    model = {
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
        "dynamic_batching": {"default_queue_policy": {"max_queue_size": max_queue_size}},
    }
    ignored: list[str] = []
    reader = modules["model_parameters"].ModelParameters(model, Path(), ignored.append)
    reader = reader.without(classes["without_meaning"])
    try:
        config = modules["core_settings"].executor_config(module, reader, model)
        _refuse_beam_search(config)
        _refuse_missing_engine(parameters.get("gpt_model_path", ""))
        refuse_unbuilt_config(config)
        resolve_limits(engine, config)
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return ignored[0] if ignored else None


def _refuse_beam_search(config: Any) -> None:
    """The executor replaces this mode with a warning in its log, as TensorRT-LLM does; nobody wants that served."""
    mode = config.decoding_config and config.decoding_config.decoding_mode
    if mode and mode.isBeamSearch() and config.max_beam_width == 1:
        raise ValueError(
            "decoding_mode beam_search needs a max_beam_width above 1, and an engine that was built for it"
        )


def _refuse_missing_engine(folder: str) -> None:
    """A relative folder is one of the repository, which holds its engine in one place."""
    if folder != _ENGINE_FOLDER and not (Path(folder).is_absolute() and Path(folder).is_dir()):
        raise ValueError(f"gpt_model_path {folder!r} is neither {_ENGINE_FOLDER} nor the absolute path of a folder")
