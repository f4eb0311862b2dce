"""Tables for a reader at a terminal: side by side where they fit, one line per cell where they do not."""

from __future__ import annotations

import sys

import pytest
from rich.text import Text

from trtserve.cli.output import count, print_table

COLUMNS = ("name", "http", "policy", "kv cache")
ROWS = [("demo", "127.0.0.1:19000", "no-streaming", "0 of 1024 blocks"), ("b", "0.0.0.0:8000", "streaming", "-")]


def printed(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_table(COLUMNS, ROWS)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [30, 52, 53, 60, 120])
def test_no_word_is_cut(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(width, monkeypatch, capsys)
    for cell in (cell for row in (COLUMNS, *ROWS) for cell in row):
        assert all(word in text for word in cell.split())


def test_narrow_terminal_gets_blocks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(40, monkeypatch, capsys).splitlines()
    assert lines[:2] == ["name      demo", "http      127.0.0.1:19000"]
    assert lines[4:6] == ["", "name      b"]


def test_long_paths_do_not_make_a_table_narrow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_table(("name", "path"), [("demo", "/a" * 60)])
    assert capsys.readouterr().out.startswith("┏━━━━━━┳━")


@pytest.mark.parametrize("width", [80, 98, 102, 103, 110, 120, 200])
def test_no_table_is_wider_than_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    row = ("tiny-int8", "/tmp/models/new-one/tiny", "977 KiB", "float16 int8 weights, compute bf16, KV u8")
    print_table(
        ("name", "source", "size", "engine", "repository", "server"), [(*row, "tiny-int8-d25137d0877d", "last-one")]
    )
    lines = [Text.from_ansi(line).plain for line in capsys.readouterr().out.splitlines()]
    assert all(len(line) <= width for line in lines)
    assert "last-one" in "".join(lines)
    # From there on no cell takes more than three lines; what is narrower gets blocks. With 120 no cell needs two lines.
    assert (lines[0] == "name        tiny-int8") == (width < 103)
    if width >= 103 and width != 120:
        assert len({len(line) for line in lines}) == 1
        assert (lines[0][-1], lines[-1][-1]) == ("┓", "┘")


def test_a_row_is_a_line_where_the_table_has_room_without_its_rules(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    row = ("granite-3.1-1b-a400m-instruct", "1.33 B", "apache-2.0", "no: memory")
    print_table(("alias", "size", "licence", "fits here"), [row, row])
    lines = [Text.from_ansi(line).plain.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[-2:] == [" ".join(row).split()] * 2
    monkeypatch.setenv("COLUMNS", "64")
    print_table(("alias", "size", "licence", "fits here"), [row, row])
    assert capsys.readouterr().out.splitlines()[-1] == "  ".join(row), "two blanks where there is room"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (3_300_000, "3.3 M"),
        (99_960_000, "100 M"),
        (999_600_000, "1.00 B"),
        (13_020_000_000, "13.0 B"),
        (10**12, "1000 B"),
    ],
)
def test_parameters_have_at_most_three_digits(number: int, text: str) -> None:
    assert count(number) == text
