"""The answer to an option or command that does not exist: what it was, what replaces it, or what was meant."""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from trtserve.cli.environment import commands_of
from trtserve.errors import TrtserveError, UsageError

if TYPE_CHECKING:
    from trtserve.cli.corrections import CommandLine, UnknownOption


# Attention, MLPs and experts: how the names of modules that adapters change begin.
_MODULE = re.compile(r"(cross_)?(attn|mlp|moe)_\w+")


def explain_unknown(node: Any, names: tuple[str, ...], option: str, typed: Sequence[str]) -> UsageError:
    """The error for `option`, which the command `names` does not have; `typed` are the words behind the command."""
    if names and hasattr(node, "commands"):
        return _explain_before_command(node, names, _as_typed(option, typed), typed, _owners())
    return explain_unknown_options(node, names, typed, _owners())


def refuse_blanks(arguments: Sequence[str]) -> None:
    """Raise UsageError for modules separated by blanks, as trtllm-build takes them."""
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
    """Undo Typer's spelling: --max-output-len → --max_output_len if the user typed that."""
    names = (argument.partition("=")[0] for argument in arguments)
    return next((name for name in names if name.replace("_", "-") == option), option)


@functools.cache
def _owners() -> dict[str, list[str]]:
    """Option → the commands that have it."""
    from trtserve.cli.commands import command_tree

    owners: dict[str, list[str]] = {}
    for names, node in commands_of(command_tree()):
        for option in _options(node):
            owners.setdefault(option, []).append(" ".join(("trtserve", *names)))
    return owners


def _options(node: Any) -> list[str]:
    return [option for each in node.params for option in (*each.opts, *each.secondary_opts) if option.startswith("--")]


def explain_unknown_options(
    node: Any, names: tuple[str, ...], typed: Sequence[str], owners: Mapping[str, Sequence[str]]
) -> UsageError:
    """The error for every option in `typed` that the command does not have, with the corrected line if there is one."""
    from trtserve.cli.corrections import correct, parse_words

    command = " ".join(("trtserve", *names))
    explain = functools.cache(lambda option: _explain(names, option, _options(node), owners))
    line = parse_words(typed, node.params, explain)
    unknown = {option.name: explain(option.name) for option in line.unknown}
    if len(unknown) == 1:
        [(name, found)] = unknown.items()
        message, hints = f"`{command}` has no option {name}.", [found.advice or f"`{command} -h` lists its options."]
    else:
        message = f"`{command}` has none of the options {', '.join(unknown)}."
        hints = [_named(name, found.advice) for name, found in unknown.items()]
    ignored = _ignored_builder_options(names, line)
    corrected = correct(line, unknown, node.params, leave_out=ignored)
    if ignored and corrected is not None:
        corrected.passed_on = []
    required = sum(each.param_type_name == "argument" and each.required for each in node.params)
    if corrected is not None and len(corrected.arguments) >= required:
        written = [option.name for option in line.options if option.spelled in ignored]
        if written:
            verb = "is an option" if len(written) == 1 else "are options"
            hints.append(f"{', '.join(written)} {verb} of trtllm-build; on this machine the engine is for CPUs.")
        hints.append(f"Corrected: {corrected.printed(command)}")
    return UsageError(message, hint="\n".join(hints))


def _named(option: str, advice: str | None) -> str:
    if advice is None:
        return f"{option} is unknown."
    return advice if advice.lstrip("-").startswith(option.lstrip("-")) else f"{option}: {advice}"


def _explain_before_command(
    group: Any, names: tuple[str, ...], option: str, typed: Sequence[str], owners: Mapping[str, Sequence[str]]
) -> UsageError:
    """The error for an option between a group and its command, or without a command: it belongs behind the command."""
    from trtserve.cli.corrections import UnknownOption, parse_words

    path = " ".join(("trtserve", *names))
    place = next((at for at, word in enumerate(typed) if word.replace("_", "-") in group.commands), None)
    below = next(iter(group.commands)) if place is None else typed[place].replace("_", "-")
    node, words = group.commands[below], [word for at, word in enumerate(typed) if at != place]
    line = parse_words(words, node.params, lambda _: UnknownOption())
    if line.unknown:
        error = explain_unknown_options(node, (*names, below), words, owners)
    else:
        error = UsageError(
            f"{option} is an option of `{path} {below}`: write it behind {below}.",
            hint=f"Corrected: {line.printed(f'{path} {below}')}",
        )
    if place is None:
        *others, last = group.commands
        named = f"{', '.join(others)} or {last}" if others else last
        return UsageError(f"`{path}` needs a command before {option}: {named}.", hint=error.hint)
    return error


def _ignored_builder_options(names: tuple[str, ...], line: CommandLine) -> Sequence[str]:
    """The options for trtllm-build where this command line builds an engine for CPUs, which takes none of them."""
    from trtserve.executor.runtimes import choose_runtime
    from trtserve.specs import BuildSpec
    from trtserve.specs.options import options_of

    if names[:1] not in (("build",), ("import",)):
        return ()
    with suppress(TrtserveError, ValueError):
        values = line.values()
        runtime = cast(Any, values.get("--runtime") or "auto")
        chosen, options = choose_runtime(runtime, container=values.get("--container")), options_of(BuildSpec)
        return [flag for name in chosen.unused_build_options for flag in options[name].flags]
    return ()


def _explain(
    names: tuple[str, ...], option: str, known: Sequence[str], owners: Mapping[str, Sequence[str]]
) -> UnknownOption:
    """Find out what `option`, which the command `names` does not have, stands for."""
    from trtserve.cli.corrections import UnknownOption
    from trtserve.nvidia.releases import NEWEST
    from trtserve.nvidia.releases.build_flags import build_flags
    from trtserve.nvidia.releases.old_options import old_option_of, old_option_of_any_tool
    from trtserve.repository.settings import settable

    command = names[0] if names else ""
    old = old_option_of(command, option)
    if old is not None:
        return UnknownOption(advice=old.answer, old=old)
    key = settable(option.lstrip("-").replace("-", "_")) if command in ("repo", "import") else None
    if key is not None:
        advice = f"{option} is a key of fill_template.py: `trtserve {command} … --set {key}=VALUE`."
        return UnknownOption(advice=advice, setting=key)
    flag = build_flags(NEWEST).get("--" + option.lstrip("-").replace("-", "_"))
    if command in ("build", "import") and flag is not None:
        advice = f"{flag.name} is an option of trtllm-build: write it behind `--`: `trtserve build … -- {flag.name} …`."
        return UnknownOption(advice=advice, flag=flag)
    spelled = option.replace("_", "-")
    if spelled in owners:
        tail = next((name for name in known if spelled.endswith(name[1:])), None)
        here = f" Here it may be {tail}." if tail else ""
        if not names:
            return UnknownOption(advice=f"Write {option} behind a command: `trtserve COMMAND … {option}`.")
        commands = ", ".join(f"`{owner}`" for owner in owners[spelled])
        return UnknownOption(advice=f"{option} is an option of {commands}.{here}")
    old = old_option_of_any_tool(option)
    if old is not None:
        return UnknownOption(advice=f"{old.answer} `trtserve {old.command}` does that tool's work.")
    close = difflib.get_close_matches(spelled, known, n=3, cutoff=0.65)
    return UnknownOption(advice=f"Did you mean {' or '.join(close)}?" if close else None)
