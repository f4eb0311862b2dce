"""The answer to a word that a command does not know: what it was, what replaces it, or what was meant."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from trtserve.cli.environment import commands_of
from trtserve.cli.usage import explain_usage, no_such_command, only_shows_help
from trtserve.errors import UsageError

if TYPE_CHECKING:
    from trtserve.releases.build_flags import BuildFlag


# Attention, MLPs and experts: how names of modules that adapters change begin.
_MODULE = re.compile(r"(cross_)?(attn|mlp|moe)_\w+")


def answer_unknown_options(tree: Any, whole: Callable[[], Any]) -> None:
    """Let every command of a tree answer what it does not know with a UsageError of ours; its help stays as it is.

    `whole` makes the tree of all commands, in which such options are looked for.
    """
    for names, node in commands_of(tree):
        _answer(node, names, whole)


def _owners(tree: Any) -> dict[str, list[str]]:
    """Options → the commands of a tree that have them."""
    owners: dict[str, list[str]] = {}
    for names, node in commands_of(tree):
        for option in _options(node):
            owners.setdefault(option, []).append(" ".join(("trtserve", *names)))
    return owners


def _options(node: Any) -> list[str]:
    return [option for each in node.params for option in (*each.opts, *each.secondary_opts) if option.startswith("--")]


def _answer(node: Any, names: tuple[str, ...], whole: Callable[[], Any]) -> None:
    parse = node.parse_args

    def parse_or_explain(context: Any, arguments: list[str]) -> Any:
        typed = list(arguments)
        _refuse_blanks(typed)
        try:
            return parse(context, arguments)
        except typer.TyperException as error:
            if only_shows_help(error):
                raise
            # Typer has no public name for this error; of all its errors only this one has possibilities.
            if not hasattr(error, "possibilities"):
                raise explain_usage(error, " ".join(("trtserve", *names))) from error
            option = str(getattr(error, "option_name", ""))
            raise explain(names, _as_typed(option, typed), _options(node), _owners(whole())) from None

    node.parse_args = parse_or_explain
    if hasattr(node, "commands"):
        _answer_commands(node, names)


def _answer_commands(group: Any, names: tuple[str, ...]) -> None:
    resolve = group.resolve_command

    def resolve_or_explain(context: Any, arguments: list[str]) -> Any:
        try:
            return resolve(context, arguments)
        except typer.TyperException:
            raise no_such_command(arguments[0], " ".join(("trtserve", *names)), list(group.commands)) from None

    group.resolve_command = resolve_or_explain


def _refuse_blanks(arguments: Sequence[str]) -> None:
    """UsageError for modules that blanks separate, which is how trtllm-build takes them."""
    for place, argument in enumerate(arguments):
        name, sign, first = argument.partition("=")
        if name.replace("_", "-") != "--lora-target-modules":
            continue
        words = [*([first] if sign else []), *arguments[place + 1 :]]
        modules = list(itertools.takewhile(_MODULE.fullmatch, words))
        if len(modules) > 1:
            raise UsageError(
                f"{name} has {len(modules)} words: {' '.join(modules)}.",
                hint=f"Separate them with commas: {name} {','.join(modules)}.",
            )


def _as_typed(option: str, arguments: Sequence[str]) -> str:
    """Typer reports --max-output-len for --max_output_len; the user should read what the user wrote."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.replace("_", "-") == option:
            return name
    return option


def explain(
    names: tuple[str, ...], option: str, known: Sequence[str], owners: Mapping[str, Sequence[str]]
) -> UsageError:
    """The error for `option` of the command `names`, which has the options `known`; `owners` are those of all."""
    command = " ".join(("trtserve", *names))
    message = f"`{command}` has no option {option}."
    return UsageError(message, hint=_hint(names, option, known, owners) or f"`{command} -h` lists its options.")


def _hint(names: tuple[str, ...], option: str, known: Sequence[str], owners: Mapping[str, Sequence[str]]) -> str | None:
    from trtserve.releases import NEWEST
    from trtserve.releases.build_flags import build_flags
    from trtserve.releases.retired import retired_in
    from trtserve.triton.settings import settable

    old = retired_in(names[0] if names else "", option)
    if old is not None:
        return old.answer
    key = settable(option.lstrip("-").replace("-", "_")) if names[:1] in (("repo",), ("import",)) else None
    if key is not None:
        return f"It is a key of fill_template.py: `trtserve {names[0]} … --set {key}=VALUE`."
    spelled = option.replace("_", "-")
    flag = build_flags(NEWEST).get("--" + option.lstrip("-").replace("-", "_"))
    if names[:1] in (("build",), ("import",)) and flag is not None:
        return _behind(flag)
    if spelled in owners:
        return f"It is an option of {', '.join(f'`{owner}`' for owner in owners[spelled])}."
    close = difflib.get_close_matches(spelled, known, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(close)}?" if close else None


def _behind(flag: BuildFlag) -> str:
    """What to do with a flag of trtllm-build that is no option of ours."""
    if flag.deprecated:
        return f"{flag.name} is an option of trtllm-build, and deprecated: {flag.deprecated}."
    return f"It is an option of trtllm-build; what stands behind `--` goes there: `trtserve build … -- {flag.name} …`."
