"""Translate a command line with options of NVIDIA's tools into trtserve's options."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtserve.nvidia.releases.build_flags import BuildFlag
    from trtserve.nvidia.releases.old_options import OldOption


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
    """The words behind a command: arguments, options, and what follows `--`."""

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
    flag: BuildFlag | None = None  # a flag that trtllm-build takes behind `--`

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return bool(self.old and self.old.switch) or bool(self.flag and self.flag.kind == "switch")


def parse_words(
    words: Sequence[str], parameters: Sequence[Any], explain: Callable[[str], UnknownOption]
) -> CommandLine:
    """Sort the words behind a command that has these `parameters`.

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


def correct(  # noqa: C901 - one branch per kind of option
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
            if not line.arguments and option.value is not None:
                made.arguments.append(option.value)
        elif (new := found.old.replacement(option.value, line.values())) is not None and new[0] in known:
            name, value = new
            own = value is not None and value == option.value
            if name not in typed and (name not in options or (own and not options[name][1])):
                options[name] = TypedOption(name=name, value=value, known=True), own
                if found.old.needs is not None and found.old.needs not in typed:
                    options[found.old.needs] = TypedOption(name=found.old.needs, value=None, known=True), True
    made.options = [option for option, _ in options.values() if option.spelled not in leave_out]
    return made
