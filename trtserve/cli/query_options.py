"""The flags of `trtserve query`: those of the request, made of its table, and how they come back as values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from trtserve.cli.query_prompts import as_utf8
from trtserve.query.options import REQUEST_OPTIONS, RequestOption

PROMPTS = "Prompts"
CHECKING = "Saving and checking"
ENDING = "Ending a request"

_TYPES: Mapping[str, Any] = {
    "int": int | None,
    "float": float | None,
    "switch": bool,
    "text": str | None,
    "file": str | None,
    "texts": list[str] | None,
    "floats": list[float] | None,
}


def with_request_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` a flag for every row of REQUEST_OPTIONS, in place of its `**options`.

    Typer reads the signature, so the table is the only place where such an option is written down.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    more = [_parameter(option) for option in REQUEST_OPTIONS.values()]
    first = [each for each in own if _panel(each) in (None, PROMPTS)]
    rest = [each for each in own if each not in first]
    together = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*first, *more, *rest)]
    command.__signature__ = signature.replace(parameters=together)  # type: ignore[attr-defined]
    return command


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was given of the table's options: flags that are off and lists that are empty were not."""
    given = {name: value for name, value in options.items() if value is not None and value is not False and value != []}
    return {name: _utf8(REQUEST_OPTIONS[name], value) for name, value in given.items()}


def _utf8(option: RequestOption, value: Any) -> Any:
    if option.kind == "texts":
        return [as_utf8(text, option.flag) for text in value]
    return as_utf8(value, option.flag) if option.kind == "text" else value


def _parameter(option: RequestOption) -> inspect.Parameter:
    declared = typer.Option(
        option.flag, *option.also, help=option.help, rich_help_panel=option.panel, metavar=option.metavar
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if option.kind == "switch" else None,
        annotation=Annotated[_TYPES[option.kind], declared],
    )


def _panel(parameter: inspect.Parameter) -> str | None:
    metadata = getattr(parameter.annotation, "__metadata__", ())
    panels = (getattr(each, "rich_help_panel", None) for each in metadata)
    return next((panel for panel in panels if panel is not None), None)
