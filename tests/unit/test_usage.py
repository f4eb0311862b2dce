"""What Typer refuses is told as every other error: what happened, what was expected, what to do next."""

from __future__ import annotations

import pytest

from trtserve.cli import run

_MODEL_OF_PLAN = "Folder, name of an import, alias, or org/name[@revision] of the hub"


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["queri"], "`trtserve` has no command queri.", "Did you mean `trtserve query`?"),
        (["xyzzy"], "`trtserve` has no command xyzzy.", "`trtserve -h` lists its commands."),
        (
            ["bench", "token-dist"],
            "`trtserve bench` has no command token-dist.",
            "Did you mean `trtserve bench token-norm-dist`?",
        ),
        (
            ["plan"],
            "`trtserve plan` needs MODEL.",
            f"MODEL: {_MODEL_OF_PLAN}. `trtserve plan -h` explains the rest.",
        ),
        (
            ["stop", "a", "b", "c"],
            "`trtserve stop` takes no such argument: b c.",
            "`trtserve stop -h` says what it takes.",
        ),
        (["start", "--http-port"], "--http-port needs a value.", "`trtserve start -h` explains it."),
        (["start", "--detach=yes"], "--detach takes no value.", "`trtserve start -h` explains it."),
        (
            ["query", "hi", "-o", "many"],
            "--max-tokens is 'many'; expected an integer.",
            "`trtserve query -h` explains it.",
        ),
        (["logs", "-n", "-1"], "--lines is '-1'; expected at least 0.", "`trtserve logs -h` explains it."),
        (
            ["metrics", "--interval", "soon"],
            "--interval is 'soon'; expected a number.",
            "`trtserve metrics -h` explains it.",
        ),
        (["list", "--jsno"], "`trtserve list` has no option --jsno.", "Did you mean --json?"),
    ],
)
def test_one_form_of_error(arguments: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"error: {message}", f"next:  {hint}"]
    assert captured.out == ""


def test_a_value_of_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTSERVE_LOGS_LINES", "few")
    assert run(["logs"]) == 2
    said = "error: TRTSERVE_LOGS_LINES (--lines of `trtserve logs`) is 'few'; expected an integer."
    assert capsys.readouterr().err.splitlines()[0] == said


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_a_group_alone_shows_its_help_and_nothing_else(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert "Usage: " in captured.out
    assert captured.err == ""
