"""The answer to an option that does not exist: what it was, what replaces it, or what was meant.

A command line with options of NVIDIA's tools is translated into trtserve's options.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, cast

from trtserve.cli.parser import UnknownOptionError, commands_of
from trtserve.errors import TrtserveError, UsageError, listing
from trtserve.specs.options import OTHER_VALUES

if TYPE_CHECKING:
    from trtserve.nvidia.releases.options import BuildFlag, OldOption


_OTHER_WORDS = {
    "--tp-size": ("tensor-parallel-size", "tensor-parallel"),
    "--pp-size": ("pipeline-parallel-size", "pipeline-parallel"),
    "--max-seq-len": ("max-model-len", "context-length", "context-size", "ctx-size", "ctx", "num-ctx", "n-ctx"),
    "--max-batch-size": ("max-num-seqs", "max-running-requests", "parallel"),
    "--max-num-tokens": ("max-num-batched-tokens", "chunked-prefill-size"),
    "--quantize": ("quantization", "quantisation", "bits", "weights"),
    "--quantize int4": ("int4", "load-in-4bit"),
    "--quantize int8": ("int8", "load-in-8bit"),
    "--quantize fp8": ("fp8",),
    "--kv-precision": ("kv-cache-dtype", "kv-cache-type-k", "cache-type-k"),
    "--kv-cache-free-gpu-mem-fraction": ("gpu-memory-utilization", "mem-fraction-static", "kv-cache-fraction"),
    "--enable-kv-cache-reuse": ("enable-prefix-caching", "prefix-caching"),
    "--http-port": ("port",),
    "--host": ("listen", "listen-address", "bind", "bind-address", "address", "addr"),
    "--tls-key": ("ssl-keyfile",),
    "--tls-certificate": ("ssl-certfile",),
    "--name": ("served-model-name",),
    "--max-tokens": ("num-predict", "n-predict", "max-new-tokens", "max-completion-tokens"),
}
"""Our option → what vLLM, SGLang, llama.cpp and Ollama call it."""
_OURS = {f"--{other}": ours for ours, others in _OTHER_WORDS.items() for other in others}


def explain_unknown(error: UnknownOptionError, tree: Any) -> UsageError:
    """Return the error for an option that a command does not have; `tree` holds all commands."""
    owners: dict[str, list[str]] = {}  # option → the commands that have it
    for names, node in sorted(commands_of(tree), key=lambda each: "bench" in each[0]):  # it has options of many others
        for option in _options(node):
            owners.setdefault(option, []).append(" ".join(("trtserve", *names)))
    if error.names and hasattr(error.node, "commands"):
        return _explain_before_command(error, owners)
    return _explain_options(error.node, error.names, error.typed, owners)


def _options(node: Any) -> list[str]:
    return [option for each in node.params for option in (*each.opts, *each.secondary_opts) if option.startswith("--")]


def _explain_options(
    node: Any, names: tuple[str, ...], typed: Sequence[str], owners: Mapping[str, Sequence[str]]
) -> UsageError:
    """The error for every option in `typed` that the command does not have, with the corrected line if there is one."""
    command = " ".join(("trtserve", *names))
    explain = functools.cache(lambda option: _explain(names, option, _options(node), owners))
    line = _parse_words(typed, node.params, explain)
    unknown = {option.name: explain(option.name) for option in line.unknown}
    if len(unknown) == 1:
        [(name, found)] = unknown.items()
        words = [each.metavar for each in node.params if each.param_type_name == "argument" and each.required]
        missing = " ".join(words[len(line.arguments) :])
        takes = f"It takes {missing} as plain words. " if missing else ""
        advice = found.advice or f"{takes}`{command} -h` lists its options."
        message, hints = f"`{command}` has no option {name}.", [advice]
    else:
        message = f"`{command}` has none of the options {', '.join(unknown)}."
        hints = [_named(name, found.advice) for name, found in unknown.items()]
    ignored = _ignored_builder_options(names, line)
    corrected = _correct(line, unknown, node.params, leave_out=ignored)
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


def _explain_before_command(unknown: UnknownOptionError, owners: Mapping[str, Sequence[str]]) -> UsageError:
    """The error for an option between a group and its command, or without a command: it belongs after the command."""
    group, names, typed = unknown.node, unknown.names, unknown.typed
    # Undo Typer's spelling: --max-output-len → --max_output_len if the user typed that.
    words = (word.partition("=")[0] for word in typed)
    option = next((word for word in words if word.replace("_", "-") == unknown.option), unknown.option)
    path = " ".join(("trtserve", *names))
    place = next((at for at, word in enumerate(typed) if word.replace("_", "-") in group.commands), None)
    below = next(iter(group.commands)) if place is None else typed[place].replace("_", "-")
    node, after = group.commands[below], [word for at, word in enumerate(typed) if at != place]
    line = _parse_words(after, node.params, lambda _: UnknownOption())
    if line.unknown:
        error = _explain_options(node, (*names, below), after, owners)
    else:
        error = UsageError(
            f"{option} is an option of `{path} {below}`: write it after {below}.",
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
    from trtserve.nvidia.releases import NEWEST
    from trtserve.nvidia.releases.options import build_flags, old_option_of, old_option_of_any_tool
    from trtserve.repository.settings import settable

    command = names[0] if names else ""
    if option == "--port" and "--grpc-port" in known and "--url" in known:
        return UnknownOption(advice="Give the port in --url HOST:PORT, or as --grpc-port or --http-port.")
    old = old_option_of(command, option)
    if old is not None:
        return UnknownOption(advice=old.answer, old=old)
    key = settable(option.lstrip("-").replace("-", "_")) if command in ("repo", "import") else None
    if key is not None:
        advice = f"{option} is a key of fill_template.py: `trtserve {command} … --set {key}=VALUE`."
        return UnknownOption(advice=advice, setting=key)
    flag = build_flags(NEWEST).get("--" + option.lstrip("-").replace("-", "_"))
    if command in ("build", "import") and flag is not None:
        advice = f"{flag.name} is an option of trtllm-build: write it after `--`: `trtserve build … -- {flag.name} …`."
        return UnknownOption(advice=advice, flag=flag)
    spelled = option.replace("_", "-")
    ours = _OURS.get(spelled, "")
    name = ours.partition(" ")[0]
    if name in known:
        return UnknownOption(advice=f"{option} is {ours} here.")
    if name in owners:
        return UnknownOption(advice=f"{option} is {ours} of `{'` and `'.join(owners[name][:2])}`.")
    if spelled in owners:
        tail = next((name for name in known if spelled.endswith(name[1:])), None)
        here = f" Here it may be {tail}." if tail else f" {_meant(spelled, known)}".rstrip()
        if not names:
            return UnknownOption(advice=f"Write {option} after a command: `trtserve COMMAND … {option}`.")
        # One name for all kinds of `bench`.
        commands = listing(
            [f"`{owner}`" for owner in dict.fromkeys(" ".join(each.split()[:2]) for each in owners[spelled])]
        )
        return UnknownOption(advice=f"{option} is an option of {commands}.{here}")
    old = old_option_of_any_tool(option)
    if old is not None:
        return UnknownOption(advice=f"{old.answer} `trtserve {old.command}` does that tool's work.")
    begun = next((each for each in sorted(owners, key=len) if _begins(each, spelled)), None)
    elsewhere = f"Did you mean {begun} of `{owners[begun][0]}`?" if begun else ""
    close = get_close_matches(spelled[2:], [name[2:] for name in known], n=3, cutoff=0.65)
    near = f"Did you mean {' or '.join(f'--{name}' for name in close)}?" if close else ""
    return UnknownOption(advice=_meant(spelled, known) or elsewhere or near or None)


def _begins(known: str, typed: str) -> bool:
    """Return whether `typed` is the beginning of an option of another command: two letters must be a whole word."""
    return known.startswith(typed if len(typed) > len("--tp") else f"{typed}-")


def _meant(option: str, known: Sequence[str]) -> str:
    """Return a hint with up to three options that begin as `option` does, else that have its words or one like it."""
    words = set(option.strip("-").split("-"))
    begun = sorted((each for each in known if each.startswith(option)), key=len)
    found = begun or [each for each in known if words <= set(each.strip("-").split("-"))]
    if not found and len(option) > len("--tp-"):  # a misspelt word, such as prot for port
        found = [each for each in known if get_close_matches(option[2:], each[2:].split("-"), n=1, cutoff=0.75)]
    return f"Did you mean {' or '.join(found[:3])}?" if found else ""


@dataclass(kw_only=True)
class TypedOption:
    """One option as it was typed."""

    name: str
    value: str | None
    known: bool  # whether the command has this option

    @property
    def spelled(self) -> str:
        """Its name in trtserve's spelling."""
        return self.name.replace("_", "-")


@dataclass(kw_only=True)
class CommandLine:
    """The words after a command: arguments, options, and what follows `--`."""

    arguments: list[str] = field(default_factory=list)
    options: list[TypedOption] = field(default_factory=list)
    passed_on: list[str] = field(default_factory=list)

    @property
    def unknown(self) -> list[TypedOption]:
        """The options that the command does not have."""
        return [option for option in self.options if not option.known]

    def values(self) -> dict[str, str | None]:
        """Options in our spelling → their values."""
        return {option.spelled: option.value for option in self.options}

    def printed(self, command: str) -> str:
        """The command line as a shell takes it."""
        options = (word for each in self.options for word in (each.spelled, each.value) if word is not None)
        passed_on = ["--", *self.passed_on] if self.passed_on else []
        return shlex.join([*command.split(), *self.arguments, *options, *passed_on])


@dataclass(frozen=True, kw_only=True)
class UnknownOption:
    """Facts about an option that a command does not have. If all are None, there is no correction."""

    advice: str | None = None
    old: OldOption | None = None  # an option of another tool
    setting: str | None = None  # a key for --set
    flag: BuildFlag | None = None  # a flag that trtllm-build takes after `--`

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return bool(self.old and self.old.switch) or bool(self.flag and self.flag.kind == "switch")


def _parse_words(
    words: Sequence[str], parameters: Sequence[Any], explain: Callable[[str], UnknownOption]
) -> CommandLine:
    """Sort the words after a command that has these `parameters`.

    `explain` says whether an unknown option is a switch. Any other unknown option takes the next word as its value,
    unless that begins with a dash.
    """
    switches = {name: bool(getattr(p, "is_flag", False)) for p in parameters for name in (*p.opts, *p.secondary_opts)}
    line, left = CommandLine(), list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            line.passed_on = left
            break
        if not word.startswith("-") or word == "-":
            line.arguments.append(word)
            continue
        name, sign, value = word.partition("=")
        known = name.replace("_", "-") in switches
        is_switch = switches[name.replace("_", "-")] if known else explain(name).is_switch
        takes_next = not is_switch and left and not left[0].startswith("-")
        line.options.append(
            TypedOption(name=name, value=value if sign else left.pop(0) if takes_next else None, known=known)
        )
    return line


def _correct(  # noqa: C901 - one branch per kind of option
    line: CommandLine, unknown: Mapping[str, UnknownOption], parameters: Sequence[Any], *, leave_out: Sequence[str] = ()
) -> CommandLine | None:
    """Return the command line in trtserve's options, with None where an option has no certain replacement.

    Options that belong to another command are dropped, and so are those in `leave_out`.
    """
    known = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
    typed = {option.spelled for option in line.options if option.known}
    made = CommandLine(arguments=list(line.arguments), passed_on=list(line.passed_on))
    options: dict[str, tuple[TypedOption, bool]] = {}  # and whether the user typed the value
    for place, option in enumerate(line.options):
        if option.known:
            options[f"{option.spelled} {place}"] = option, True
            continue
        found = unknown[option.name]
        if found.flag is not None:
            made.passed_on += [option.name, *([] if option.value is None else [option.value])]
        elif found.setting is not None:
            setting = f"{found.setting}={option.value or ''}"
            options[f"--set {place}"] = TypedOption(name="--set", value=setting, known=True), True
        elif found.old is None or found.old.manual:
            return None
        elif found.old.is_argument:
            others = (each.old for name, each in unknown.items() if name != option.name and each.old is not None)
            if found.old.otherwise is not None and any(each.is_argument for each in others):
                new_option = TypedOption(name=found.old.otherwise, value=option.value, known=True)
                options[found.old.otherwise] = new_option, True
            elif not line.arguments and option.value is not None:
                made.arguments.append(option.value)
        elif (new := found.old.replacement(option.value, line.values())) is not None and new[0] in known:
            name, value = new
            own = value is not None and value == option.value
            if name == "--quantize" and value is not None:
                value = OTHER_VALUES.get(value, value)
            if name not in typed and (name not in options or (own and not options[name][1])):
                options[name] = TypedOption(name=name, value=value, known=True), own
                if found.old.needs is not None and found.old.needs not in typed:
                    options[found.old.needs] = TypedOption(name=found.old.needs, value=None, known=True), True
    made.options = [option for option, _ in options.values() if option.spelled not in leave_out]
    return made
