"""Commands and options as trtserve parses and prints them: subclasses of Typer's public classes.

This is the only place that changes what Typer does, and it uses public names of Typer alone:

- values are read here, without pydantic, whose import takes longer than most commands
- an environment variable has the name of the option's flag, not of the Python parameter; variables that look like
  options but are none give a warning
- what Typer refuses becomes our own error; `corrections.py` has advice about options that do not exist
- help is plain text: usage, what the command does, examples, common options; `--help-all` adds the rest under headings,
  and `--help WORD` shows what WORD is about
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from trtserve.errors import UsageError, did_you_mean, exit_codes, listing
from trtserve.specs.options import metavar_of, read_value

PREFIX = "TRTSERVE"
# Variables that belong to no single option.
_GENERAL = ("HOME", "DEBUG", "TRTLLM_VERSION", "TRTLLM_EXAMPLES", "API_KEY", "VLLM_PYTHON")
# Similarity for a suggestion; in a short name one letter matters more.
_CLOSE, _CLOSE_SHORT = 0.85, 0.75
# What Kubernetes sets for a service called trtserve, or trtserve-…, in each pod of its namespace.
_OF_KUBERNETES = re.compile(r"PORT(_|$)|(.+_)?SERVICE_(HOST|PORT)|.+_PORT_\d+_(TCP|UDP|SCTP)")
# What trtserve sets for its own processes, and what its tests read.
_OF_CHILDREN = re.compile(r"VLLM_(LEADER|NODES?)$|RUN_FOLDER$|(TESTS?|STAND_IN|DOUBLE)_|CONTAINER_MOUNTS$")
_WIDEST_NAME = 28  # of an option in the help; longer ones have a line of their own
_LONGEST_NAME = 74  # with all choices; beyond it these go into the text
_MOST_OWNERS = 4  # commands that the help of a word names for an option
_MOST_FOUND = 10  # options that the help of a word shows, unless more have it in their names
_MOST_PARTLY = 3  # of these that have a part of the words only
# Words of a question that tell nothing about its subject.
_SAY_NOTHING = re.compile(
    "an?|and|any|are|at|be|by|can|change|choose|do|does|error|example|for|from|get|have|how|i|if|in|is|its?|make|me|my|"
    "need|of|on|or|own|see|set|should|so|that|the|there|this|to|use|using|want|what|when|where|which|why|with|you|your|"
    r"\d"
)
_SHORT_WORD = 3  # letters; log is not logits
# What people call things that the help calls otherwise.
_SYNONYMS = {
    "https": "tls",
    "ssl": "tls",
    "offline": "internet",
    "sent": "send",
    "remote": "another",
    "two": "several",
    "boot": "systemd",
    "reboot": "systemd",
    "config": "setup|settings",
    "environment": "variable",
    "stuck": "hung",
    "nothing": "hung",
    "no": "without",
    "accuracy": "quality|exact|equal",
    "mac": "macos",
    "cpp": "gguf",
    "thread": "processor",
    "threads": "processor",
    "password": "key",
    "auth": "key",
    "huggingface": "hub|hugging",
    "delete": "remove",
    "k8s": "kubernetes",
    "multiple": "several",
    "multi": "several",
    "benchmark": "bench|measure",
    "crash": "killed|restart",
    "crashes": "killed|restart",
    "webui": "page|browser",
    "ui": "page|browser",
    "openwebui": r"open[\W_]webui",
    "logprobs": r"log[\W_]prob",
}
# Words of questions that an option answers, and that its help does not have.
_ASKED_FOR = {
    "--http-port": "change the port",
    "--host": "expose on all interfaces, reach from another machine",
    "--api-key-file": "set an api key",
    "--max-batch-size": "how many requests at once",
}
_FLAG = re.compile("--[a-z][a-z-]+")
_MOST_LISTED = 5  # commands of a group that an error lists
_MOST_OPTIONS = 30  # of a command whose help shows all of them
_HELP = "trtserve.help"  # in the context: the word that is asked for, or "" for everything
_BRIEF = "trtserve.brief"  # in the context: nothing was typed, and a small terminal should show the answer whole
_SHORT = "trtserve.short"  # in the context: options have no second spellings
_HELP_FLAGS = ("-h", "--help")
_COMMON = ("Arguments", "Options")
_MOST_NAMED = 5  # options of a heading that a short help names; of more, one less
# Attention, MLPs and experts: how the names of modules that adapters change begin.
_MODULE = re.compile(r"(cross_)?(attn|mlp|moe)_\w+")
# What people, vLLM, Ollama, Docker and Triton CLI call our commands.
_OTHER_VERBS = {
    "serve": "start",
    "launch": "start",
    "deploy": "start",
    "generate": "query",
    "ask": "query",
    "download": "import --download-only",
    "quantize": "convert --quantize",
    "ps": "status",
    "running": "status",
    "log": "logs",
    "ls": "list",
    "rm": "remove",
    "delete": "remove",
    "clean": "prune",
    "show": "inspect",
    "kill": "stop",
    "profile": "bench",
    "benchmark": "bench",
    "measure": "bench",
    "compare": "bench compare",
    "report": "bench report",
    "infer": "query",
    "config": "inspect",
    "server": "start",
    "version": "--version",
}


class UnknownOptionError(Exception):
    """An option that does not exist; `corrections.explain_unknown` makes the error that a user sees."""

    def __init__(self, node: Any, names: tuple[str, ...], option: str, typed: Sequence[str]) -> None:
        super().__init__(option)
        self.node, self.names, self.option, self.typed = node, names, option, typed


def variables_of(parameter: Any, prefix: str) -> list[str]:
    """Environment variables of an option whose command has this prefix, such as TRTSERVE_START."""
    declared = [parameter.envvar] if isinstance(parameter.envvar, str) else list(parameter.envvar or ())
    flags = [flag[2:] for flag in parameter.opts if flag.startswith("--")]
    return [f"{prefix}_{flag.replace('-', '_').upper()}" for flag in flags] + declared


def _element(kind: Any) -> Any:
    """The type of a list's values; any other type unchanged."""
    return get_args(kind)[0] if get_origin(kind) is list else kind


def _process_value(parameter: Any, context: Any, value: Any) -> Any:
    """The value of a parameter, of the type of its annotation.

    Raises UsageError when it is missing or cannot be read.
    """
    several = parameter.multiple or parameter.nargs == -1
    kind = _element(parameter.type_descriptor.annotation)
    if value is None or (several and not value):
        if parameter.required:
            name = parameter.display_name()
            about = f"{name}: {parameter.help.rstrip('.')}. " if parameter.help else ""
            raise UsageError(
                f"`{context.command_path}` needs {name}.", hint=f"{about}`{context.command_path} -h` explains the rest."
            )
        value = () if several else None
    elif several:
        value = [_read(parameter, kind, each) for each in value]
    else:
        value = _read(parameter, kind, value)
    return value if parameter.callback is None else parameter.callback(context, parameter, value)


def _read(parameter: Any, kind: Any, value: Any) -> Any:
    if isinstance(value, str):
        value = read_value(kind, value, parameter.display_name())
    if parameter.min is not None and value < parameter.min:
        raise UsageError(f"{parameter.display_name()} is {value}; it must be at least {parameter.min}.")
    return value


class ParsedOption(TyperOption):
    def process_value(self, ctx: Any, value: Any) -> Any:
        """Return the value that the command gets."""
        return _process_value(self, ctx, value)

    def display_name(self) -> str:
        """Return the first long spelling."""
        return next((flag for flag in self.opts if flag.startswith("--")), (*self.opts, *self.secondary_opts)[0])

    def resolve_envvar_value(self, ctx: Any) -> str | None:
        """Return the value of the first of the option's environment variables that is set."""
        values = (os.environ.get(name) for name in variables_of(self, str(ctx.auto_envvar_prefix)))
        return next(filter(None, values), None)

    def get_help_record(self, ctx: Any) -> tuple[str, str] | None:
        """Return the option's spellings with the value, and its help with the default."""
        if self.hidden:
            return None
        if self.name == "help":
            return "-h, --help [WORDS]", "Show this message, or what WORDS are about; --help-all shows every option."
        on, off = ([*self.opts], [*self.secondary_opts])
        if ctx.meta.get(_SHORT):  # one long spelling each
            on = [*(flag for flag in on if not flag.startswith("--")), *([self.display_name()] if self.opts else [])]
            off = off[:1]
        names = ", ".join(sorted(on, key=lambda flag: flag.startswith("--")))
        if off:
            names = " / ".join(filter(None, (names, ", ".join(off))))
        notes = ["required"] if self.required else [f"default: {text}"] if (text := self.default_text()) else []
        if not self.is_flag:
            metavar = self.metavar or metavar_of(_element(self.type_descriptor.annotation))
            if len(names + metavar) > _LONGEST_NAME and "|" in metavar:
                notes.insert(0, f"one of {metavar.replace('|', ', ')}")
                metavar = "CHOICE"
            names += f" {metavar}"
        return names, f"{self.help or ''} [{'; '.join(notes)}]".lstrip() if notes else self.help or ""

    def default_text(self) -> str:
        """Return what applies when the option is not given; nothing when that is obvious."""
        if isinstance(self.show_default, str):
            return self.show_default
        if not self.show_default or self.default in (None, False, "", (), []):
            return ""
        if self.default is True:
            return self.opts[0].lstrip("-") if self.opts else ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


class ParsedArgument(TyperArgument):
    """A positional argument of a command."""

    def process_value(self, ctx: Any, value: Any) -> Any:
        """Return the value that the command gets."""
        return _process_value(self, ctx, value)

    def display_name(self) -> str:
        """Return what stands for the argument in the help."""
        return self.metavar or self.name.upper()

    def get_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the argument as the usage line shows it."""
        dots = "..." if self.nargs == -1 and "…" not in self.display_name() else ""
        return [f"{self.display_name()}{dots}" if self.required else f"[{self.display_name()}{dots}]"]

    def get_help_record(self, ctx: Any) -> tuple[str, str] | None:
        """Return the argument's name and help."""
        return None if self.hidden else (self.display_name(), self.help or "")


def _own(parameters: list[Any]) -> list[Any]:
    """Give Typer's parameters our classes; Typer itself offers no way to choose them."""
    for parameter in parameters:
        if type(parameter) is TyperOption:
            parameter.__class__ = ParsedOption
        elif type(parameter) is TyperArgument:
            parameter.__class__ = ParsedArgument
    return parameters


class ParsedCommand(TyperCommand):
    allow_extra_args = True  # refused below, with our own message

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters, --help included."""
        return _own(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command. Raises UsageError for what it does not take."""
        args = _with_commas(_asked_help(ctx, args))
        typed = list(args)
        with _explained(self, ctx, typed):
            extra = super().parse_args(ctx, args)
        if extra and not ctx.resilient_parsing:
            options = {flag for each in self.params for flag in each.opts}
            meant = next((f"--{word}" for word in typed if f"--{word}" in options), None)
            raise _extra_arguments(ctx.command_path, extra, meant)
        return extra

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, description, examples and options."""
        _write_help(self, ctx, formatter)


class ParsedGroup(TyperGroup):
    """A command with commands below it."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all parameters, --help included."""
        return _own(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before a command; print the help where nothing is given."""
        if not args and not ctx.resilient_parsing:
            ctx.meta[_BRIEF] = True
            sys.stdout.write(ctx.get_help() + "\n")
            raise typer.Exit(2)
        before = list(itertools.takewhile(lambda word: word.startswith("-"), args))
        if before and before[-1] in _HELP_FLAGS and args[len(before) :][:1] and args[len(before)] in self.commands:
            args = [args[len(before)], *before, *args[len(before) + 1 :]]  # `--help COMMAND`
        elif before:
            args = _asked_help(ctx, args)
        with _explained(self, ctx, list(args)):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the first word names. Raises UsageError with the closest names when there is none."""
        try:
            return super().resolve_command(ctx, args)
        except typer.TyperException:
            raise _no_such_command(args[0], ctx.command_path, list(self.commands)) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, description, commands by heading and options."""
        _write_help(self, ctx, formatter)


def _write_help(node: Any, context: Any, formatter: Any) -> None:
    if word := context.meta.get(_HELP):
        _write_matches(node, context, formatter, word)
        return
    if _BRIEF not in context.meta:
        node.format_usage(context, formatter)
    description, examples = split_help(node.help)
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(description)
    if examples:
        with _section(formatter, "Examples"):
            formatter.write("".join(f"  {line}\n" for line in examples))
    context.meta[_SHORT] = _HELP not in context.meta
    sections, more = help_sections(node, context), []
    default = getattr(node, "commands", {}).get(context.obj)  # its options are taken without its name too
    if default is not None:
        sections[-1:] = help_sections(default, context)
    if _BRIEF in context.meta:
        _write_brief(sections, context, formatter)
        return
    options = sum(len(records) for _, records in sections)
    if _HELP not in context.meta and (default or not hasattr(node, "commands")) and options > _MOST_OPTIONS:
        more = [(title, records) for title, records in sections if title not in (*_COMMON, "Commands")]
    for title, records in sections:
        if (title, records) not in more:
            with _section(formatter, f"{title} of {default.name}" if default and title == "Options" else title):
                _write_columns(formatter, records)
    if more:
        with _section(formatter, f"More options (`{context.command_path} --help-all`, or `--help WORDS`)"):
            _write_columns(formatter, [(title, _named_options(records)) for title, records in more])
    node.format_epilog(context, formatter)


def _write_brief(sections: Sequence[tuple[str, Sequence[tuple[str, str]]]], context: Any, formatter: Any) -> None:
    """Write the first heading with a line for each command, and only the names of the others."""
    (title, records), *others = sections
    room = formatter.width - max(len(name) for name, _ in records) - 4
    with _section(formatter, title):
        texts = [textwrap.shorten(re.split("[;:]", text)[0].rstrip("."), room, placeholder=" …") for _, text in records]
        _write_columns(formatter, [(name, text) for (name, _), text in zip(records, texts, strict=True)])
    names = [name for other, rows in others if other not in _COMMON for name, _ in rows]
    more = f"Others: {', '.join(names)}. " if names else ""
    formatter.write_paragraph()
    formatter.write_text(f"{more}`{context.command_path} -h` says more.")


def _named_options(records: Sequence[tuple[str, str]]) -> str:
    """Return the first spellings of some options, and how many more there are."""
    names = [next((part for part in names.split() if part.startswith("--")), names).rstrip(",") for names, _ in records]
    shown = len(names) if len(names) <= _MOST_NAMED else _MOST_NAMED - 1
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if shown < len(names) else "")


def _asked_help(context: Any, args: list[str]) -> list[str]:
    """Note the words after --help, and --help-all, in the context; return the words without them."""
    for place, word in enumerate(args):
        if word == "--":
            break
        if word == "--help-all":
            context.meta[_HELP] = ""
            return [*args[:place], "--help"]
        after = list(itertools.takewhile(lambda each: not each.startswith("-"), args[place + 1 :]))
        if word in _HELP_FLAGS and after:
            context.meta[_HELP] = " ".join(after)
            return [*args[:place], "--help"]
    return args


def _write_matches(node: Any, context: Any, formatter: Any, asked: str) -> None:
    """Write what some words are about: an answer, commands and options, and pages of the documentation.

    Of a command only its own options. For the whole command line, also the exit codes, found by that name or by a
    code; a page that is asked for by its name is printed. A question without an answer has its pages first. Raises
    UsageError when there is nothing.
    """
    from trtserve.cli.documentation import about, beginning, page_text, plain, rendered, sections

    whole = context.parent is None
    if whole and (page := page_text(asked)) is not None:
        formatter.write(rendered(page, formatter.width) if sys.stdout.isatty() else page)
        return
    parts = _stems(asked)
    found, named = _records_about(node, context, parts) if parts else {}, dict[tuple[str, str], None]()
    if whole and parts:
        begins = beginning(r"[\W_]+".join(parts))
        codes = [(code, text) for code, _, text in exit_codes() if begins.search("exit codes") or asked == code]
        named = dict.fromkeys((*_commands_named(node, asked), *found.pop(context.command_path, [])))
        found = {"exit codes": codes, **found}
    command = "" if whole else context.command_path.split()[1]
    documented = about(parts, command)
    pages = {"documentation (`trtserve help PAGE` prints one)": documented.pages}
    question = len(parts) < len(asked.split())
    if documented.answer and (whole or len(parts) > 1 or documented.about_all):
        found = {"exit codes": found.pop("exit codes", []), **_told_of(documented.answer.text, found, parts)}
        named = dict.fromkeys(_commands_named(node, asked)) if whole else {}
        heading, text = documented.answer.heading, plain(documented.answer.text)
        for line in _lines(heading, formatter.width):
            formatter.write(f"{_styled(line, '1')}\n")
        for line in _lines(text, formatter.width - 2, indent="  "):
            formatter.write(f"{line}\n")
        question = False
    found = {"commands": list(named), **(pages | found if question else found | pages)}
    for title, rows in found.items():
        if rows:
            with _section(formatter, title):
                _write_columns(formatter, rows)
    if not any(found.values()) and not whole and about(parts).pages:  # the first word was not meant as a command
        root = context.find_root()
        _write_matches(root.command, root, formatter, f"{command} {asked}")
        return
    if not any(found.values()):
        path, known = context.command_path, {word for section in sections() for word in section.words}
        hint = f"{did_you_mean(asked.lower(), known, cutoff=_CLOSE_SHORT)} `{path} --help-all` shows all of it."
        raise UsageError(f"The help of `{path}` has no word {asked!r}.", hint=hint.lstrip())


def _told_of(
    answer: str, found: Mapping[str, list[tuple[str, str]]], parts: Sequence[str]
) -> dict[str, list[tuple[str, str]]]:
    """Return the options that an answer tells of, best of its commands, or those with the words in their names."""
    from trtserve.cli.documentation import beginning

    flags, commands = set(_FLAG.findall(answer)), set(re.findall("`(?:trtserve )?([a-z]+)", answer))
    phrase = beginning(r"[\W_]+".join(parts))
    told = {title: [row for row in rows if flags & set(_FLAG.findall(row[0]))] for title, rows in found.items()}
    own = {title: rows for title, rows in told.items() if commands & set(re.findall("[a-z]+", title))}
    named = {title: [row for row in rows if phrase.search(row[0])] for title, rows in found.items()}
    return next((each for each in (own, told, named) if any(each.values())), {})


def _stems(asked: str) -> list[str]:
    """Return expressions for the words that were asked for, without those that say nothing.

    They match the beginning of a word, and a short one the whole word. Quantising is quantized, drafts is draft, and
    a hyphen is a blank.
    """
    words = [word.lower() for word in re.findall(r"[^\W_]+", asked)]
    telling = [word for word in words if not _SAY_NOTHING.fullmatch(word)] or words
    return [_stem(word) for word in telling]


def _stem(word: str) -> str:
    if word in _SYNONYMS:
        whole = r"(?![^\W_])" if len(word) <= _SHORT_WORD else ""
        return f"({word}{whole}|{_SYNONYMS[word]})"
    bare = re.sub(r"(?<=[^\W\d_]{3})(?<!s)s$|(?<=[^\W\d_]{4})(ed|ing|ise|ize)$", "", word)
    if len(bare) <= _SHORT_WORD:
        return rf"{bare}s?(?![^\W_])"
    return re.sub(r"i[sz](?=[aei]|$)", "i[sz]", re.sub(r"([bdgmnprt])\1$", r"\1", bare))


def _records_about(node: Any, context: Any, parts: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """Return what matches of the help of a command and those below it, each once, by the commands that have it.

    A record has all words, and where any have them one after the other, only those count. Where many do, those that
    have them in their names count. Where none has all, a few whose names have the most do.
    """
    from trtserve.cli.documentation import beginning

    owners: dict[tuple[str, str], list[str]] = {}  # option → its commands
    others: dict[tuple[str, str], list[str]] = {}
    each_word = [*map(beginning, parts)]
    for names, each in commands_of(node):
        if each.hidden:
            continue
        own = each.make_context(names[-1] if names else context.info_name, [], parent=context, resilient_parsing=True)
        for title, listed in help_sections(each, own):
            records = [record for record in listed if "--help [" not in record[0]]
            about = [record for record in records if all(word.search(_words_of(record)) for word in each_word)]
            # A heading stands for all below it where none of them has the word itself.
            about = about or (records if all(word.search(title) for word in each_word) else [])
            for record in records:
                (owners if record in about else others).setdefault(record, []).append(" ".join(names))
    if not owners and len(parts) > 1 and others:  # what has most of the words in its name, the shortest name first
        ranks = {record: sum(bool(word.search(record[0])) for word in each_word) for record in others}
        most = max(ranks.values())
        best = sorted((each for each, rank in ranks.items() if rank == most), key=lambda each: len(each[0]))
        owners = {record: others[record] for record in best[:_MOST_PARTLY] if 2 * most > len(parts)}
    phrase = beginning(r"[\W_]+".join(parts))
    kept = [record for record in owners if phrase.search(_words_of(record))] or list(owners)
    named = [record for record in kept if phrase.search(record[0])]
    found: dict[str, list[tuple[str, str]]] = {}
    for record in named if named and len(kept) > _MOST_FOUND else kept[: 2 * _MOST_FOUND]:
        heading = f"{context.command_path} {listing(_owners(owners[record]), most=_MOST_OWNERS)}".rstrip()
        found.setdefault(heading, []).append(record)
    return found


def _owners(names: Sequence[str]) -> list[str]:
    """Return the names of commands, where several of a group have the name of the group."""
    groups = [name.split(" ")[0] for name in names]
    return list(
        dict.fromkeys(group if groups.count(group) > 1 else name for group, name in zip(groups, names, strict=True))
    )


def _commands_named(node: Any, asked: str) -> list[tuple[str, str]]:
    """Return the commands that some words name, by what other tools call them too."""
    words = {name for word in asked.lower().split() for name in (word, _OTHER_VERBS.get(word, "").split(" ")[0])}
    return [(name, each.get_short_help_str(200)) for name, each in node.commands.items() if name in words]


def _words_of(record: tuple[str, str]) -> str:
    return " ".join((*record, _ASKED_FOR.get(record[0].split()[0], "")))


def split_help(text: str | None) -> tuple[str, list[str]]:
    """Return a command's description, and the lines below `Examples:` in its docstring."""
    description, _, examples = inspect.cleandoc(text or "").partition("Examples:\n")
    return description.rstrip(), inspect.cleandoc(examples).splitlines()


def help_sections(node: Any, context: Any, *, commands: bool = True) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the commands by heading, arguments, options without a heading, then the options of each heading."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for name, command in (getattr(node, "commands", {}) if commands else {}).items():
        sections.setdefault(command.rich_help_panel or "Commands", []).append((name, command.get_short_help_str(200)))
    return [*sections.items(), *_parameters(node, context)]


@contextmanager
def _section(formatter: Any, title: str) -> Iterator[None]:
    """Write a heading, which is bold on a terminal, and indent what follows."""
    formatter.write_paragraph()
    formatter.write(f"{_styled(f'{title}:', '1')}\n")
    with formatter.indentation():
        yield


def _styled(text: str, style: str) -> str:
    """Return a text in a style of terminals (bold is 1, cyan 36), where stdout is one that shows it."""
    plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[{style}m{text}\x1b[0m"


def _write_columns(formatter: Any, rows: Sequence[tuple[str, str]]) -> None:
    """Names on the left, texts on the right; unlike Typer's own columns no word is cut at a hyphen."""
    column = min(max(len(name) for name, _ in rows), _WIDEST_NAME) + 4
    for name, text in rows:
        lines = _lines(text, max(20, formatter.width - column))
        below = lines if len(name) + 4 > column else lines[1:]
        beside = "" if below is lines else "".join(lines[:1])
        gap = " " * (column - len(name) - 2)
        formatter.write(f"  {_styled(name, '36')}{gap + beside if beside else ''}\n")
        formatter.write("".join(f"{' ' * column}{line}\n" for line in below))


def _lines(text: str, width: int, indent: str = "") -> list[str]:
    """Return text in lines that break at blanks only."""
    lines = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
    return [indent + line for line in lines]


def _parameters(node: Any, context: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in node.get_params(context):
        title = "Arguments" if isinstance(parameter, ParsedArgument) else parameter.rich_help_panel or "Options"
        record = parameter.get_help_record(context)
        if record is not None:
            sections.setdefault(title, []).append(record)
    yield from ((title, records) for title, records in sections.items() if records)


@contextmanager
def _explained(node: Any, context: Any, typed: Sequence[str]) -> Iterator[None]:
    """Turn Typer's errors about `typed`, the words after a command, into UsageErrors."""
    path = context.command_path
    try:
        yield
    except UsageError as error:
        error.hint = error.hint or f"`{path} -h` explains it."
        raise
    except typer.TyperException as error:
        # Typer has no public names for its errors: an unknown option has possibilities, a misused one its name.
        option = getattr(error, "option_name", None)
        if hasattr(error, "possibilities"):
            raise UnknownOptionError(node, tuple(path.split()[1:]), str(option), typed) from None
        if option:
            takes = "takes no value" if "does not take" in error.message else "needs a value"
            raise UsageError(f"{option} {takes}.", hint=f"`{path} -h` explains it.") from None
        raise


def _with_commas(arguments: Sequence[str]) -> list[str]:
    """Return the words with commas between modules that blanks separate, as build.py and trtllm-build take them."""
    words = list(arguments)
    for place, argument in enumerate(arguments):
        name, _, first = argument.partition("=")
        if name.replace("_", "-") == "--lora-target-modules":
            after = list(itertools.takewhile(_MODULE.fullmatch, arguments[place + 1 :]))
            modules = [*([first] if first else []), *after]
            words[place : place + 1 + len(after)] = [f"{name}={','.join(modules)}"] if modules else [name]
            break
    return words


def _extra_arguments(path: str, words: Sequence[str], meant: str | None) -> UsageError:
    message = f"`{path}` takes no such argument: {' '.join(words)}."
    if path == "trtserve repo" and words[0].partition(":")[2]:
        return UsageError(
            message,
            hint="KEY:VALUE,… is for fill_template.py: `trtserve repo --from-template DIR 'KEY:VALUE,…'`; without "
            "templates it is --set KEY=VALUE.",
        )
    hint = f"Did you mean {meant}? " if meant else ""
    return UsageError(message, hint=f"{hint}`{path} -h` says what it takes.")


def _no_such_command(word: str, path: str, commands: Sequence[str]) -> UsageError:
    close = difflib.get_close_matches(word, [*commands, *(["help"] if path == "trtserve" else [])], n=3)
    if path == "trtserve" and word in _OTHER_VERBS:
        hint = f"Use `{path} {_OTHER_VERBS[word]}`."
    elif close:
        hint = f"Did you mean {' or '.join(f'`{path} {name}`' for name in close)}?"
    elif len(commands) <= _MOST_LISTED:
        hint = f"Its commands: {', '.join(commands)}."
    else:
        hint = f"`{path} -h` lists its commands."
    return UsageError(f"`{path}` has no command {word}.", hint=hint)


def commands_of(node: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command of a tree with the words that lead to it; `names` lead to `node`."""
    yield names, node
    for name, child in getattr(node, "commands", {}).items():
        yield from commands_of(child, (*names, name))


def unread_variables(
    names: Iterable[str], commands: Collection[str], tree_of: Callable[[tuple[str, ...]], Any]
) -> Iterator[str]:
    """Yield a warning for each of the variables `names` that has our prefix but is not read.

    `tree_of` makes the tree of some commands.
    """
    for name in sorted(names):
        rest = name.removeprefix(f"{PREFIX}_")
        if rest == name or rest in _GENERAL or _OF_KUBERNETES.match(rest) or _OF_CHILDREN.match(rest):
            continue
        first, _, option = rest.partition("_")
        word = first.lower()
        near = (
            (word,) if word in commands else tuple(difflib.get_close_matches(word, commands, n=1, cutoff=_CLOSE_SHORT))
        )
        read = _variables(tree_of(near)) if near else set()
        if rest in read:
            continue
        close = difflib.get_close_matches(rest, sorted(read), n=1, cutoff=_CLOSE)
        close = close or difflib.get_close_matches(rest, _GENERAL, n=1, cutoff=_CLOSE_SHORT)
        close = close or [each for each in sorted(read) if option and each.endswith(f"_{option}")]
        if close:
            yield f"{name} is set but not read. Did you mean {' or '.join(f'{PREFIX}_{each}' for each in close)}?"
        elif near:
            yield f"{name} is set but not read: `trtserve {near[0]}` has no such option."
        else:
            yield f"{name} is set but not read: it begins with no command, as {PREFIX}_START_HTTP_PORT does."


def setting_variables(message: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable that set an option which an error's `message` mentions."""
    words = [word for word in arguments if not word.startswith("-")]
    commands = ["_".join((PREFIX, *words[:count], "")).upper().replace("-", "_") for count in (2, 1)]
    typed = {word.partition("=")[0].replace("_", "-") for word in arguments}
    said = re.split(r"[\s'\",;:]+", message)
    for name, value in sorted(environment.items()):
        command = next((command for command in commands if name.startswith(command)), None)
        if command is None or not value or name in message:
            continue
        option = "--" + name.removeprefix(command).lower().replace("_", "-")
        if option not in typed and (option in said or value in said):
            yield f"{name} sets {option}."


def _variables(tree: Any) -> set[str]:
    """The variables that the commands of a tree read, without TRTSERVE_."""
    found = {
        name
        for names, node in commands_of(tree)
        for parameter in node.params
        for name in variables_of(parameter, "_".join((PREFIX, *names)).upper().replace("-", "_"))
    }
    return {name.removeprefix(f"{PREFIX}_") for name in found}
