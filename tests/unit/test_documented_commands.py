"""Every `trtserve …` line of the documents and of the help names a command and options that exist."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtserve.cli.app import command_tree, with_default
from trtserve.cli.documentation import about, page_text
from trtserve.cli.parser import split_help

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = command_tree()


def _lines() -> Iterator[tuple[str, str]]:
    for document in DOCUMENTS:
        if document.name == "cli.md" or document.parent.name == "cli":
            continue
        text = document.read_text(encoding="utf-8").replace("\\\n", "")
        shown = re.findall(r"^\$ (?:.*\| )?(trtserve .*)$", text, re.MULTILINE)
        inline = re.findall(r"`(trtserve [a-z-]+ [^`…]*)`", text)
        yield from ((document.name, line) for line in [*shown, *inline])


def _examples(node: Any) -> Iterator[tuple[str, str]]:
    yield from ((str(node.name), line.rpartition("| ")[2]) for line in split_help(node.help)[1])
    for child in getattr(node, "commands", {}).values():
        yield from _examples(child)


def _resolve(words: list[str]) -> tuple[Any, list[str]]:
    node: Any = COMMANDS
    while words and words[0] in getattr(node, "commands", {}):
        node, words = node.commands[words[0]], words[1:]
    return node, words


def _unknown(line: str) -> set[str]:
    """The options of a line that its command lacks, or its words when it names no command."""
    if asked := re.fullmatch(r"trtserve help (.+)", line):  # words to search for, a page, or a command
        known = asked[1] in {"WORDS", "COMMAND", *COMMANDS.commands} or page_text(asked[1])
        return set() if known or about(asked[1].split()).pages else {asked[1]}
    node, rest = _resolve([*with_default(shlex.split(line, comments=True)[1:])])
    if hasattr(node, "commands"):
        return set(rest or [line])
    options = {name for parameter in node.params for name in [*parameter.opts, *parameter.secondary_opts]}
    own = itertools.takewhile(lambda word: word != "--", rest)  # after it are flags of the wrapped tool
    used = {word.split("=")[0] for word in own if word.startswith("-") and word != "-"}
    return used - options - {"--help", "-h"}


def test_commands_and_options_exist() -> None:
    lines = {*_lines(), *_examples(COMMANDS)}
    assert len(lines) > 200
    assert {place: found for place in sorted(lines) if (found := _unknown(place[1]))} == {}
