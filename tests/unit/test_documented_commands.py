"""Every `$ trtserve …` line of the documents names a command and options that exist."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from trtserve.cli.whole import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _lines() -> Iterator[tuple[str, str]]:
    for document in DOCUMENTS:
        if document.name == "cli.md":
            continue
        text = document.read_text(encoding="utf-8")
        shown = re.findall(r"^\$ (?:.*\| )?(trtserve .*)$", text, re.MULTILINE)
        inline = re.findall(r"`(trtserve [a-z-]+ [^`…]*)`", text)
        yield from ((document.name, line) for line in [*shown, *inline])


def _resolve(words: list[str]) -> tuple[Any, list[str]]:
    node: Any = typer.main.get_command(app)
    while words and words[0] in getattr(node, "commands", {}):
        node, words = node.commands[words[0]], words[1:]
    return node, words


@pytest.mark.parametrize(("document", "line"), sorted(set(_lines())))
def test_command_and_options_exist(document: str, line: str) -> None:
    node, rest = _resolve(shlex.split(line)[1:])
    assert not hasattr(node, "commands"), f"{document}: {line} names no command"
    options = {name for parameter in node.params for name in [*parameter.opts, *parameter.secondary_opts]}
    own = itertools.takewhile(lambda word: word != "--", rest)  # behind it are flags of the wrapped tool
    used = {word.split("=")[0] for word in own if word.startswith("-")}
    assert used <= options | {"--help", "-h"}, f"{document}: {line}"


def test_there_are_commands_to_check() -> None:
    assert len(set(_lines())) > 20
