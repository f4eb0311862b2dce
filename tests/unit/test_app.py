"""The command line as a whole: help that shows every name in full, however narrow the terminal."""

from __future__ import annotations

import errno
import re
from typing import Any

import pytest
import typer

from trtserve.cli.app import run
from trtserve.cli.commands import STAGES
from trtserve.cli.whole import app


def _commands() -> dict[str, Any]:
    tree: Any = typer.main.get_command(app)
    found = {name: child for name, child in tree.commands.items() if not hasattr(child, "commands")}
    found |= {f"bench {name}": child for name, child in tree.commands["bench"].commands.items()}
    return found


def test_debug_adds_the_traceback_and_keeps_the_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTSERVE_DEBUG", "1")
    assert run(["import", "nope-nope"]) == 10
    captured = capsys.readouterr()
    assert "Traceback" in captured.err
    assert captured.err.splitlines()[-2].startswith("error: 'nope-nope' names no model.")
    assert captured.out == ""


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/closed/x"), 23, "error: /closed/x cannot be read or"),
        (OSError(errno.ENOSPC, "No space left on device", "/full/x"), 13, "the disk is full"),
        (MemoryError(), 14, "error: The memory ran out"),
        (ImportError("libx.so.1: failed to map segment from shared object"), 14, "error: The memory ran out: libx.so"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 14, "error: The memory ran out"),
        (RuntimeError("can't start new thread"), 14, "error: The memory ran out"),
        (ImportError("libx.so.1: failed to map segment: Operation not permitted"), 1, "Unexpected ImportError"),
        (ValueError("odd"), 1, "Unexpected ValueError: odd"),
    ],
)
def test_what_the_file_system_refuses_is_no_defect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: Exception, code: int, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("trtserve.inventory.list_imported", fail)
    assert run(["list"]) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("argument", "code", "words"), [(None, 0, ""), (3, 3, ""), ("no licence", 1, "no licence")])
def test_a_library_that_ends_the_process(
    argument: object, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(*_: object, **__: object) -> None:
        raise SystemExit(argument)

    monkeypatch.setattr("trtserve.inventory.list_imported", end)
    assert run(["list"]) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(_commands()))
def test_help_names_every_option_in_full(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    for parameter in _commands()[name].params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            assert option in text or not option.startswith("-")


def test_commands_below_a_command_are_in_no_panel_of_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "token-norm-dist" in shown
    assert STAGES not in shown


def test_options_of_an_import_stand_below_their_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", "--help"]) == 0
    sections = dict(re.findall(r"^(\S.*):\n((?: .*\n|\n)+)", capsys.readouterr().out, re.MULTILINE))
    for title, option in (
        ("Options", "--name"),
        ("Options", "--trtllm-version"),
        ("Checkpoint (as for convert)", "--tp-size"),
        ("Engine (as for build)", "--max-batch-size"),
        ("Repository (as for repo)", "--tokenizer"),
        ("trtllm-build (runtime tensorrt_llm)", "--gemm-plugin"),
    ):
        assert f"  {option} " in sections[title]
