"""The answer to a word that a command does not know: what it was, what replaces it, or what was meant."""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import typer

from trtserve.cli.environment import commands_of
from trtserve.cli.usage import explain_usage, no_such_command, only_shows_help
from trtserve.errors import TrtserveError, UsageError

if TYPE_CHECKING:
    from trtserve.cli.corrections import CommandLine
    from trtserve.releases.build_flags import BuildFlag


# Attention, MLPs and experts: how names of modules that adapters change begin.
_MODULE = re.compile(r"(cross_)?(attn|mlp|moe)_\w+")


def answer_unknown_options(tree: Any, whole: Callable[[], Any]) -> None:
    """Let every command of a tree answer what it does not know with a UsageError of ours; its help stays as it is.

    `whole` makes the tree of all commands, in which such options are looked for.
    """
    owners = functools.cache(lambda: _owners(whole()))
    for names, node in commands_of(tree):
        _answer(node, names, owners)


def _owners(tree: Any) -> dict[str, list[str]]:
    """Options → the commands of a tree that have them."""
    owners: dict[str, list[str]] = {}
    for names, node in commands_of(tree):
        for option in _options(node):
            owners.setdefault(option, []).append(" ".join(("trtserve", *names)))
    return owners


def _options(node: Any) -> list[str]:
    return [option for each in node.params for option in (*each.opts, *each.secondary_opts) if option.startswith("--")]


def _answer(node: Any, names: tuple[str, ...], owners: Callable[[], Mapping[str, Sequence[str]]]) -> None:
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
            option = _as_typed(str(getattr(error, "option_name", "")), typed)
            if names and hasattr(node, "commands"):
                raise _explain_group(node, names, option, typed, owners()) from None
            raise _explain_all(node, names, option, typed, owners()) from None

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


def _explain_all(
    node: Any, names: tuple[str, ...], option: str, typed: Sequence[str], owners: Mapping[str, Sequence[str]]
) -> UsageError:
    """The error for `option` and every other one that the command does not have, with the command line that does it."""
    from trtserve.cli.corrections import corrected, in_one_line, take_apart

    known = _options(node)
    required = sum(each.param_type_name == "argument" and each.required for each in node.params)
    line = take_apart(typed, node.params, required=required)
    unknown = list(dict.fromkeys((option, *(each.name for each in line.unknown))))
    command = " ".join(("trtserve", *names))
    answers = {name: _hint(names, name, known, owners) for name in unknown}
    told = [_about(name, answer) for name, answer in answers.items()]
    embedded, cpu = _builds_for_cpus(names, line)
    instead = corrected(line, answers, known, embedded=embedded)
    if len(unknown) == 1 and (instead is None or not _is_complete(node, instead)):
        return explain(names, option, known, owners)
    if instead is not None and _is_complete(node, instead):
        told = [*told, *cpu, f"As a whole: {in_one_line(command, instead)}"]
    lacking = f"no option {unknown[0]}" if len(unknown) == 1 else f"none of the options {', '.join(unknown)}"
    return UsageError(f"`{command}` has {lacking}.", hint="\n".join(told))


def _explain_group(
    group: Any, names: tuple[str, ...], option: str, typed: Sequence[str], owners: Mapping[str, Sequence[str]]
) -> UsageError:
    """The error for `option` before the command of a group, or without one: it belongs behind the command."""
    from trtserve.cli.corrections import corrected, in_one_line, take_apart

    path = " ".join(("trtserve", *names))
    place = next((at for at, word in enumerate(typed) if word.replace("_", "-") in group.commands), None)
    below = next(iter(group.commands)) if place is None else typed[place].replace("_", "-")
    node, words = group.commands[below], [word for at, word in enumerate(typed) if at != place]
    line = take_apart(words, node.params, required=0)
    instead = corrected(line, {}, _options(node), embedded=False)
    if line.unknown or instead is None:
        error = _explain_all(node, (*names, below), line.unknown[0].name, words, owners)
    else:
        whole = f"As a whole: {in_one_line(f'{path} {below}', instead)}"
        error = UsageError(f"{option} stands before {below}, and is an option of `{path} {below}`.", hint=whole)
    if place is None:
        return UsageError(f"`{path}` needs a command before {option}: {' or '.join(group.commands)}.", hint=error.hint)
    return error


def _about(name: str, answer: str | None) -> str:
    """An answer that stands among others."""
    if answer is None:
        return f"{name} is not known."
    return answer if answer.lstrip("-").startswith(name.lstrip("-")) else f"{name}: {answer}"


def _builds_for_cpus(names: tuple[str, ...], line: CommandLine) -> tuple[bool, list[str]]:
    """Whether the engine is for CPUs, where options of trtllm-build mean nothing; and what to say of those."""
    from trtserve.cli.corrections import builder_options
    from trtserve.runtimes import choose_runtime, openvino

    if names[:1] not in (("build",), ("import",)):
        return False, []
    with suppress(TrtserveError, ValueError):
        runtime = cast(Any, line.value_of("--runtime") or "auto")
        if choose_runtime(runtime, container=line.value_of("--container")).NAME == openvino.NAME:
            typed = list(builder_options(line))
            verb = "is" if len(typed) == 1 else "are"
            return True, [f"{', '.join(typed)} {verb} for trtllm-build, and the engine for CPUs here."] if typed else []
    return False, []


def _is_complete(node: Any, words: Sequence[str]) -> bool:
    """Whether the command takes these words, as far as it can tell from them alone."""
    from trtserve.cli.corrections import take_apart

    required = sum(each.param_type_name == "argument" and each.required for each in node.params)
    line = take_apart(words, node.params, required=required)
    return not line.unknown and len(line.positional) >= required


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
    from trtserve.releases.retired import retired_elsewhere, retired_in
    from trtserve.triton.settings import settable

    old = retired_in(names[0] if names else "", option)
    if old is not None:
        return old.answer
    key = settable(option.lstrip("-").replace("-", "_")) if names[:1] in (("repo",), ("import",)) else None
    if key is not None:
        return f"{option} is a key of fill_template.py: `trtserve {names[0]} … --set {key}=VALUE`."
    spelled = option.replace("_", "-")
    flag = build_flags(NEWEST).get("--" + option.lstrip("-").replace("-", "_"))
    if names[:1] in (("build",), ("import",)) and flag is not None:
        return _behind(flag)
    if flag is not None and flag.deprecated:
        return _behind(flag)
    if (gone := retired_elsewhere(option)) is not None and spelled not in owners:
        return gone
    if spelled in owners:
        tail = next((name for name in known if spelled.endswith(name[1:])), None)
        here = f" Here it may be {tail}." if tail else ""
        return f"{option} is an option of {', '.join(f'`{owner}`' for owner in owners[spelled])}.{here}"
    close = difflib.get_close_matches(spelled, known, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(close)}?" if close else None


def _behind(flag: BuildFlag) -> str:
    """What to do with a flag of trtllm-build that is no option of ours."""
    if flag.deprecated:
        return f"{flag.name} is an option of trtllm-build, and deprecated: {flag.deprecated}."
    there = f"`trtserve build … -- {flag.name} …`"
    return f"{flag.name} is an option of trtllm-build; what stands behind `--` goes there: {there}."
