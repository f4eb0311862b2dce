"""Where `trtserve query` takes its prompt from, and which bytes it accepts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.commands import command_line, environment
from trtserve.cli import run
from trtserve.query import QuerySpec

LATIN1 = "café".encode("latin1")


@pytest.mark.parametrize("way", ["argument", "stdin"])
def test_prompt_that_is_not_utf8_is_a_usage_error(way: str, tmp_path: Path) -> None:
    command = [part.encode() for part in command_line("query")] + ([LATIN1] if way == "argument" else [])
    ended = subprocess.run(
        command,
        input=b"" if way == "argument" else LATIN1,
        env=environment(tmp_path),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert b"not UTF-8 text: unexpected end of data at byte 3" in ended.stderr
    assert ended.stdout == b""


@pytest.mark.parametrize("text", ["What is ML?\n", "😀\r\n"])
def test_good_prompt_gets_as_far_as_looking_for_a_server(text: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        command_line("query", "-"),
        input=text.encode(),
        env=environment(tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 33


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "5"], True),
        (["--temperature", "5", "--top-k", "0"], True),
        (["--temperature", "5", "--top-p", "0.9"], False),
        (["--temperature", "0"], False),
        ([], False),
    ],
)
def test_temperature_without_effect_is_said(options: list[str], said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    # Port 1 answers nobody; the note comes first.
    assert run(["query", "hi", "--url", "127.0.0.1:1", "--timeout", "5", *options]) == 40
    assert ("--temperature has no effect" in capsys.readouterr().err) == said


@pytest.mark.parametrize("words", [["what", "is", "ml"], ["what is ml"]])
def test_words_without_quotes_are_one_prompt(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def ask(spec: QuerySpec, *rest: object, **settings: object) -> None:
        asked.append(spec.prompts)

    monkeypatch.setattr("trtserve.cli.query._ask", ask)
    assert run(["query", *words, "--url", "127.0.0.1:1"]) == 0
    assert asked == [("what is ml",)]


def test_sampling_out_of_range_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "hi", "--top-p", "5"]) == 2
    assert "--top-p is 5.0" in capsys.readouterr().err
