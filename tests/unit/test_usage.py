"""Errors about the command line: what happened, what was expected, what to do next."""

from __future__ import annotations

import pytest

from trtserve.cli import run

_MODEL_OF_PLAN = "Folder, name of an import, alias, or org/name[@revision] of the hub"


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["queri"], "`trtserve` has no command queri.", "Did you mean `trtserve query`?"),
        (["xyzzy"], "`trtserve` has no command xyzzy.", "`trtserve -h` lists its commands."),
        (["serve"], "`trtserve` has no command serve.", "Use `trtserve start`."),
        (["ps"], "`trtserve` has no command ps.", "Use `trtserve status`."),
        (["--seed"], "`trtserve` has no option --seed.", "Write --seed after a command: `trtserve COMMAND … --seed`."),
        (
            ["bench", "datset"],
            "`trtserve bench` has no command datset.",
            "Did you mean `trtserve bench dataset`?",
        ),
        (
            ["plan"],
            "`trtserve plan` needs MODEL, or --fleet FILE.",
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
        (["logs", "-n", "-1"], "--lines is -1; it must be at least 0.", "`trtserve logs -h` explains it."),
        (
            ["metrics", "--interval", "soon"],
            "--interval is 'soon'; expected a number.",
            "`trtserve metrics -h` explains it.",
        ),
        (["list", "--jsno"], "`trtserve list` has no option --jsno.", "Did you mean --json?"),
        (
            ["push", "llama", "--to", "x"],
            "`trtserve push` has no option --to.",
            "It takes TARGET as plain words. `trtserve push -h` lists its options.",
        ),
        (
            ["start", "--nonsense"],
            "`trtserve start` has no option --nonsense.",
            "`trtserve start -h` lists its options.",
        ),
    ],
)
def test_one_form_of_error(arguments: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"error: {message}", f"next:  {hint}"]
    assert captured.out == ""


def test_a_wrong_value_names_its_environment_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTSERVE_LOGS_LINES", "few")
    assert run(["logs"]) == 2
    message, hint = capsys.readouterr().err.splitlines()
    assert message == "error: --lines is 'few'; expected an integer."
    assert "TRTSERVE_LOGS_LINES sets --lines." in hint


def test_trtserve_alone_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("  From a Hugging Face checkpoint")
    assert "`trtserve -h` says more." in captured.out
    assert captured.err == ""
