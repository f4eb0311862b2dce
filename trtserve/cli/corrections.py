"""A command line of an old guide as it is typed here: what every option became, in one line that works."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtserve.specs import BUILDER_FIELDS

# How the answers of releases/retired_tables.py begin that a machine can follow.
_BECAME = re.compile(r"(?:Here it is|It is|It became) (--[\w-]+(?: \w+)?)(?:[.,:;]| of | or )")
_WITH = re.compile(r", with (--[\w-]+)\.")
# Answers that leave open what the line would be; what another command does is not left out in silence.
_OPEN = ("Did you mean", " is an option of `trtserve ", "--from-template")
_ARGUMENT = re.compile(r"(?:Here t|T)he \w+ is the argument")
# Options of other tools that are arguments here.
_ARGUMENTS = ("--checkpoint-dir", "--model-dir", "--engine-dir", "--gpt-model-path", "--input-text", "--in-file")
# What a plugin of old scripts is without a value.
_UNSAID = {"--gemm-plugin": "auto", "--lora-plugin": "auto"}
_FALSE = ("false", "0", "no", "disable")
_OLD_INPUT_LEN = 1024  # of trtllm-build with --max_output_len, where nobody said it


@dataclass(kw_only=True)
class Typed:
    """One option as it was typed: its name, its value, and whether the command has it."""

    name: str
    value: str | None
    known: bool

    @property
    def spelled(self) -> str:
        """Its name as options of ours are spelled."""
        return self.name.replace("_", "-")

    def words(self) -> list[str]:
        """The option as it is typed here."""
        return [self.spelled] if self.value is None else [self.spelled, self.value]


@dataclass(kw_only=True)
class CommandLine:
    """A command line taken apart: arguments without a name, options, and what stands behind `--`."""

    positional: list[str] = field(default_factory=list)
    options: list[Typed] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)

    @property
    def unknown(self) -> list[Typed]:
        """Its options that the command does not have."""
        return [option for option in self.options if not option.known]

    def value_of(self, name: str) -> str | None:
        """The value of an option, in our spelling of its name."""
        return next((option.value for option in self.options if option.spelled == name), None)


def take_apart(words: Sequence[str], parameters: Sequence[Any], *, required: int) -> CommandLine:
    """Sort the words behind a command, which has these `parameters` and needs `required` arguments.

    The word behind an option that the command does not have is its value, unless an argument would be missing then.
    """
    switches = {name: bool(getattr(each, "is_flag", False)) for each in parameters for name in _names(each)}
    line, left = CommandLine(), list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            line.behind = left
            break
        if not word.startswith("-") or word == "-":
            line.positional.append(word)
            continue
        name, sign, value = word.partition("=")
        spelled = name.replace("_", "-")
        takes = not switches.get(spelled, False) and bool(left) and not left[0].startswith("-")
        given = value if sign else left.pop(0) if takes else None
        line.options.append(Typed(name=name, value=given, known=spelled in switches))
    _give_back(line, required)
    return line


def _names(parameter: Any) -> tuple[str, ...]:
    return (*parameter.opts, *parameter.secondary_opts)


def _give_back(line: CommandLine, required: int) -> None:
    """A switch of another tool took the command's argument for its value."""
    named = sum(option.spelled in _ARGUMENTS for option in line.unknown)
    lacking = required - len(line.positional) - named
    for option in reversed(line.unknown):
        if lacking > 0 and option.value is not None and option.spelled not in _ARGUMENTS:
            line.positional.insert(0, option.value)
            option.value, lacking = None, lacking - 1


@dataclass(kw_only=True)
class Correction:
    """What one option becomes: words of the command, an argument of it, or words behind `--`; nothing: it goes."""

    words: Sequence[str] = ()
    positional: str | None = None
    behind: Sequence[str] = ()


def corrected(
    line: CommandLine, answers: Mapping[str, str | None], known: Collection[str], *, embedded: bool
) -> list[str] | None:
    """The words of the command line that does it here; None where an option has no certain answer.

    `answers` are those to its unknown options; an `embedded` engine takes none of the options of trtllm-build.
    """
    left_out = {f"--{name.replace('_', '-')}" for name in BUILDER_FIELDS} if embedded else set()
    positional, behind = list(line.positional), list(line.behind)
    words: list[str] = []
    for option in line.options:
        made = Correction(words=option.words()) if option.known else _correction(option, answers, known, line)
        if made is None:
            return None
        if made.words and made.words[0] not in left_out and not _repeats(made.words, words, line):
            words += made.words
        if made.positional is not None and not line.positional:
            positional.append(made.positional)
        behind += made.behind
    return [*positional, *words, *(["--", *behind] if behind and not embedded else [])]


def _repeats(made: Sequence[str], words: Sequence[str], line: CommandLine) -> bool:
    """Whether an option that may stand only once is there already, by itself or from another correction."""
    typed = any(option.known and option.spelled == made[0] for option in line.options)
    return made[0] in words and made[0] != "--set" and not typed


def _correction(
    option: Typed, answers: Mapping[str, str | None], known: Collection[str], line: CommandLine
) -> Correction | None:
    special = _SPECIAL.get(option.spelled.removeprefix("--"))
    if special is not None:
        made = special(option, line)
        if not made or made[0] in known:
            return Correction(words=made)
    answer = answers.get(option.name)
    if answer is None or any(words in answer for words in _OPEN):
        return None
    if " --set " in answer and "--set" in known:
        key = answer.partition(" --set ")[2].partition("=")[0]
        return Correction(words=["--set", f"{key}={option.value or ''}"])
    if "what stands behind `--` goes there" in answer:
        return Correction(behind=[option.name, *([] if option.value is None else [option.value])])
    instead = answer.partition(". ")[2]
    if _ARGUMENT.match(instead):
        return Correction(positional=option.value)
    became = _BECAME.match(instead)
    return Correction(words=[*_renamed(became[1], option.value, known), *_besides(instead, line)] if became else ())


def _renamed(became: str, value: str | None, known: Collection[str]) -> list[str]:
    """The option under its new name, which may have its value with it; nothing where it means what is so anyhow."""
    name, _, fixed = became.partition(" ")
    name = name.replace("_", "-")
    value = fixed or value or _UNSAID.get(name)
    return [name, value] if name in known and value else []


def _besides(instead: str, line: CommandLine) -> list[str]:
    """The switch that an option needs under its new name, unless it is there."""
    switch = _WITH.search(instead)
    return [switch[1]] if switch and all(option.spelled != switch[1] for option in line.options) else []


def _max_output_len(option: Typed, line: CommandLine) -> list[str]:
    """Tokens of the answer, and those of the prompt."""
    if line.value_of("--max-seq-len") is not None or not (option.value or "").isdigit():
        return []
    prompt = line.value_of("--max-input-len") or str(_OLD_INPUT_LEN)
    return ["--max-seq-len", str(int(prompt) + int(option.value or 0))] if prompt.isdigit() else []


def _paged_kv_cache(option: Typed, line: CommandLine) -> list[str]:
    off = (option.value or "").lower() in _FALSE and line.value_of("--kv-cache-type") is None
    return ["--kv-cache-type", "continuous"] if off else []


def _decoupled(option: Typed, line: CommandLine) -> list[str]:
    return ["--no-streaming" if (option.value or "").lower() in _FALSE else "--streaming"]


def _weight_only(option: Typed, line: CommandLine) -> list[str]:
    return ["--quantize", line.value_of("--weight-only-precision") or option.value or "int8"]


_SPECIAL: Mapping[str, Callable[[Typed, CommandLine], list[str]]] = {
    "max-output-len": _max_output_len,
    "paged-kv-cache": _paged_kv_cache,
    "decoupled-mode": _decoupled,
    "decoupled": _decoupled,
    "use-weight-only": _weight_only,
    "weight-only-precision": _weight_only,
    "use-weight-only-with-precision": _weight_only,
}


def in_one_line(command: str, words: Sequence[str]) -> str:
    """The command as a shell takes it."""
    return shlex.join([*command.split(), *words])


def builder_options(line: CommandLine) -> Iterator[str]:
    """The options of a command line that only trtllm-build has, as they were typed."""
    names = {f"--{name.replace('_', '-')}" for name in BUILDER_FIELDS}
    yield from (option.name for option in line.options if option.known and option.spelled in names)
