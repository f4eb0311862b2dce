"""How the command line speaks: messages keep their words whole, and a log shows that work goes on."""

from __future__ import annotations

import io
import re

import pytest
from rich.cells import cell_len

from trtserve.__main__ import prepare_streams
from trtserve.cli import output
from trtserve.cli.query_output import Sink
from trtserve.errors import UsageError


def _error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **environment: str) -> list[str]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    output.print_error(UsageError("kv_cache_free_gpu_mem_fraction " * 6 + "[x]", hint="Choose another."))
    return capsys.readouterr().err.splitlines()


def test_words_stay_whole_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _error(monkeypatch, capsys, FORCE_COLOR="1", TERM="dumb", COLUMNS="80")
    assert len(lines) == 4
    assert all(len(line) <= 80 for line in lines)
    assert lines[1] == "       " + " ".join(["kv_cache_free_gpu_mem_fraction"] * 2)


def test_one_line_elsewhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _error(monkeypatch, capsys, COLUMNS="80")
    assert lines[0].startswith("error: kv_cache_free")
    assert lines[0].endswith(" [x]")
    assert lines[1:] == ["next:  Choose another."]


def test_a_log_gets_rate_and_remaining_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 20.0])
    monkeypatch.setattr("trtserve.cli.output.time.monotonic", lambda: next(clock))
    with output.TerminalProgress().task("Pulling", total=400 * 2**20, unit="bytes") as task:
        task.advance(10 * 2**20)
        task.advance(190 * 2**20)
    assert capsys.readouterr().err.splitlines() == ["Pulling", "Pulling: 200 MiB of 400 MiB, 10 MiB/s, 20 s left"]


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with output.TerminalProgress(quiet=True).task("Pulling", total=1) as task:
        task.advance(1)
    assert capsys.readouterr().err == ""


def test_findings_are_broken_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "error: model [rule]\n  " + "seven " * 20 + "/a/path\n"
    output.print_block(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    output.print_block(text)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "error: model [rule]"
    assert len(lines) == 3
    assert all(line.startswith("  seven") and len(line) <= 80 for line in lines[1:])


def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what is written go to a terminal of 80 columns."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for name, value in {"COLUMNS": "80", "FORCE_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)


def test_talk_goes_on_under_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _narrow(monkeypatch)
    output.say("Loading " + "seven " * 15 + "/a/path")
    assert capsys.readouterr().err.splitlines() == ["Loading" + " seven" * 12, "  seven seven seven /a/path"]


def test_what_stands_behind_a_label_goes_on_under_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _narrow(monkeypatch)
    path, command = f"/{'x' * 90}", f"command   trtllm-build {'--flag ' * 20}"
    output.print_block(f"per GPU     {'seven ' * 10}123456 MiB {'seven ' * 5}\nto        {path}\n{command}")
    assert capsys.readouterr().out.splitlines() == [
        "per GPU    " + " seven" * 10,
        " " * 12 + "123456 MiB" + " seven" * 5,
        f"to        {path}",
        command,
    ]


def test_what_stands_behind_two_labels_goes_on_under_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    output.print_block(f"embedding_bias_words    not set   {'apple ' * 7}")
    assert [line.index("apple") for line in capsys.readouterr().out.splitlines()] == [34, 34]


def test_a_table_without_room_for_its_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _narrow(monkeypatch)
    columns = ("model", *["some header"] * 7)
    output.print_table(columns, [("tensorrt_llm_bls", *["12345"] * 7)])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    assert any(line.split() == ["tensorrt_llm_bls", *["12345"] * 7] for line in lines)
    output.print_table(columns, [("tensorrt_llm_bls", *["1234567890"] * 7)])  # nor for its words
    assert capsys.readouterr().out.splitlines()[:2] == ["model        tensorrt_llm_bls", "some header  1234567890"]
    output.print_table(columns, [(name, *["1234567890"] * 7) for name in ("first", "second")])  # rows become columns
    lines = capsys.readouterr().out.splitlines()
    assert [word.strip() for word in lines[1].strip("┃").split("┃")] == ["model", "first", "second"]
    assert len(lines) == 11


def test_room_goes_where_cells_would_be_folded_most(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _narrow(monkeypatch)
    row = ("name", "21 MiB", "seven " * 10, "eight " * 5)
    output.print_table(("a", "b", "c", "d"), [row])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert len(lines) == 6  # two lines of cells, and four of the table
    assert "21 MiB" in lines[3]
    output.print_table(("a", "b", "c", "d"), [(*row[:2], "seven " * 30, row[3])])
    assert capsys.readouterr().out.startswith("a  name\nb  21 MiB\nc  seven")


def test_columns_have_names_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("a", "b", "c"), [(1, 2, 3)])
    output.print_table(("name", "value"), [("speed", 2)])
    assert capsys.readouterr().out == "a\tb\tc\n1\t2\t3\nname\tvalue\nspeed\t2\n"


@pytest.mark.parametrize("text", ["Converting", "Converting " + "seven " * 12 + "ranks"])
def test_a_bar_leaves_its_text_whole(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _narrow(monkeypatch)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with output.TerminalProgress().task(text, total=2, unit="bytes") as task:
        task.advance(1)
    lines = capsys.readouterr().err.splitlines()
    assert " ".join(line.strip() for line in lines if line.strip()).endswith(text)
    assert all(len(line) <= 80 for line in lines)


def test_a_bar_shows_how_much_is_left_beside_a_long_description(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _narrow(monkeypatch)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    described = "8.79/s, 12 in flight, TTFT p50 11.9 p99 23.1 ms"
    with output.TerminalProgress().task("Sending 10 + 150 requests", total=150) as task:
        task.advance(73)
        task.describe(described)
    shown = capsys.readouterr().err
    assert described in shown
    assert "73 of 150" in shown.rpartition(described)[2]


def test_one_line_changes_on_a_terminal_and_goes_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _narrow(monkeypatch)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with output.ChangingLine() as progress:
        progress.step("Serving " + "demo " * 40)
        with progress.task("Loading the models", total=3, unit="parts") as task:
            task.describe("core\r")
            task.advance(2)
        with progress.task("Converting", total=9, unit="bytes") as task:
            task.advance(9)
        progress.warn("the machine is busy")
        progress.end()
        progress.step("Stopping")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err)
    kept = [line.rpartition("\x1b[2K")[2].strip() for line in shown.split("\n")]
    kept = [line for line in kept if line and "Loading" not in line and "━" not in line]  # bars are erased afterwards
    assert kept == ["warning: the machine is busy", "Stopping"]
    assert "Loading the models, 2 of 3: core\\r" in shown
    assert all(
        len(re.sub(r"\x1b\S*?[A-Za-z]", "", part)) <= 80 for line in shown.split("\n") for part in line.split("\r")
    )


def test_an_interrupt_of_the_one_line_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _narrow(monkeypatch)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)

    def interrupted() -> None:
        with output.ChangingLine() as progress:
            progress.step("Loading the models")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert capsys.readouterr().err.rstrip().endswith("Interrupted.")


def test_elsewhere_each_step_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with output.ChangingLine() as progress:
        progress.step("Serving demo")
        with progress.task("Loading the models", total=3, unit="parts") as task:
            task.advance(3)
    assert capsys.readouterr().err.splitlines() == ["Serving demo", "Loading the models"]


@pytest.mark.parametrize(
    ("verbose", "shown"),
    [(False, ["Starting demo"]), (True, ["Starting demo", "Comparing the files", "Loading the models"])],
)
def test_a_brief_line_is_brief_elsewhere_too(
    verbose: bool, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with output.BriefLine(verbose=verbose) as progress:
        progress.stage("Starting demo")
        progress.step("Comparing the files")
        with progress.task("Loading the models", total=3, unit="parts") as task:
            task.advance(3)
        progress.warn("the machine is busy")
    assert capsys.readouterr().err.splitlines() == [*shown, "warning: the machine is busy"]


def test_control_characters_in_a_message_are_spelled_out(capsys: pytest.CaptureFixture[str]) -> None:
    output.say("tensor \x1b[2K\rerror: forged")
    assert capsys.readouterr().err == "tensor \\x1b[2K\\rerror: forged\n"


def test_nothing_printed_can_command_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "a\x1b]52;c;aGk=\x07\x9b2J\rb\tc"
    for terminal in (True, False):
        screen = io.StringIO()
        monkeypatch.setattr(screen, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr("sys.stdout", screen)
        output.print_data(hostile)
        output.print_piece(hostile)
        output.print_block(hostile)
        output.print_table(("Name", hostile), [(hostile, "x")], title=hostile)
        Sink(stream=False, json=False, verbose=False)._write(hostile)
        commands = re.findall(r"\x1b\]|\x07|\x9b|\r", screen.getvalue())
        assert not commands if terminal else commands
        assert screen.getvalue().count("52;c;aGk=") >= 5


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_stream_that_cannot_take_a_letter_is_no_error(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    content = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(content, encoding=encoding))
    prepare_streams()
    output.print_data("“é”… \ud800")
    assert content.getvalue().endswith(b" ?\n")


def test_a_stream_is_wrapped_between_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = "one two three four five\nsix seven 日本語日本語日本語 eight " + "x" * 25 + "\n\n  nine"
    for pieces in ([text], list(text)):
        stream = output.StreamedText()
        for piece in pieces:
            stream.write(piece)
        stream.end()
        assert capsys.readouterr().out == text + "\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "18")
    shown = []
    for pieces in ([text], list(text)):
        stream = output.StreamedText()
        for piece in pieces:
            stream.write(piece)
        stream.end()
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    lines = shown[0].splitlines()
    assert lines[:3] == ["one two three four", "five", "six seven 日本語日"]
    assert [line.strip() for line in lines if "x" not in line or "six" in line][-3:] == ["本語日本語 eight", "", "nine"]
    assert max(map(cell_len, lines)) == 25, "a word stays whole"


def test_a_stopped_server_is_a_sentence_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output.print_stopped(["a", "b"])
    assert capsys.readouterr().out == "a\nb\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    output.print_stopped(["a", "b"])
    assert capsys.readouterr().out == "a is stopped.\nb is stopped.\n"
