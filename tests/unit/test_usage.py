"""Errors about the command line: what happened, what was expected, what to do next."""

from __future__ import annotations

import pytest

from trtserve.cli import run
from trtserve.cli.app import command_tree
from trtserve.cli.corrections import _OTHER_WORDS
from trtserve.cli.parser import commands_of

_MODEL_OF_PLAN = "Folder, name of an import, alias, or org/name[@revision] of the hub"


HOSTED = ("start", "chat", "query", "gateway", "bench")


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["hlep", "start"], "`trtserve` has no command hlep.", "Did you mean `trtserve help`?"),
        (["queri"], "`trtserve` has no command queri.", "Did you mean `trtserve query`?"),
        (["xyzzy"], "`trtserve` has no command xyzzy.", "`trtserve -h` lists its commands."),
        (["serve"], "`trtserve` has no command serve.", "Use `trtserve start`."),
        (["compare", "a", "b"], "`trtserve` has no command compare.", "Use `trtserve bench compare`."),
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
        (
            ["start", "--prot", "9000"],
            "`trtserve start` has no option --prot.",
            "Did you mean --http-port or --grpc-port or --metrics-port?",
        ),
        (["list", "--jsno"], "`trtserve list` has no option --jsno.", "Did you mean --json?"),
        (
            ["push", "llama", "--to", "x"],
            "`trtserve push` has no option --to.",
            "It takes TARGET as plain words. `trtserve push -h` lists its options.",
        ),
        (
            ["import", "demo", "--gpu-memory-utilization=0.5"],
            "`trtserve import` has no option --gpu-memory-utilization.",
            "--gpu-memory-utilization is --kv-cache-free-gpu-mem-fraction here.",
        ),
        (
            ["import", "demo", "--int4"],
            "`trtserve import` has no option --int4.",
            "--int4 is --quantize int4 here.",
        ),
        (
            ["import", "demo", "--quantize", "int4_wo"],
            "--quantize is 'int4_wo'; expected one of none, int8, int4, int4_awq, int8_sq, fp8.",
            "int4_wo is int4 here.",
        ),
        (
            ["import", "demo", "--dtype", "bf16"],
            "--dtype is 'bf16'; expected one of auto, float32, float16, bfloat16.",
            "bf16 is bfloat16 here.",
        ),
        (
            ["replicas", "add", "gpu-3:8001"],
            "`trtserve replicas` takes no such argument: gpu-3:8001.",
            "Did you mean --add? `trtserve replicas -h` says what it takes.",
        ),
        (
            ["import", "demo", "--host", "0.0.0.0"],
            "`trtserve import` has no option --host.",
            f"--host is an option of {', '.join(f'`trtserve {name}`' for name in HOSTED)}.",
        ),
        (
            ["run", "demo", "--port", "9000"],
            "`trtserve run` has no option --port.",
            "--port is --http-port of `trtserve start` and `trtserve chat`.",
        ),
        (["start", "--listen", "0.0.0.0"], "`trtserve start` has no option --listen.", "--listen is --host here."),
        (
            ["start", "--max-model-len", "4096"],
            "`trtserve start` has no option --max-model-len.",
            "--max-model-len is --max-seq-len of `trtserve import` and `trtserve build`.",
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


def test_the_words_of_other_engines_stand_for_options_that_exist() -> None:
    known = {option for _, node in commands_of(command_tree()) for each in node.params for option in each.opts}
    assert {ours.partition(" ")[0] for ours in _OTHER_WORDS} <= known


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
    assert captured.out.startswith("  Serve language models with Triton Inference Server")
    assert "`trtserve -h` says more." in captured.out
    assert captured.err == ""
