"""A conversation in the terminal: what is sent, what is remembered, and what the commands do."""

from __future__ import annotations

import io
import json
import os
import pty
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from trtserve.cli import run
from trtserve.cli.chat import MarkdownAnswer, complete_blocks, typed_ahead
from trtserve.client import query
from trtserve.client.answer import Generation
from trtserve.client.endpoint import Endpoint
from trtserve.client.query import Conversation
from trtserve.client.spec import QuerySpec
from trtserve.errors import RequestError, ServerNotFoundError


class ScriptedModel:
    """Answers like `generate` of `trtserve.client.query`; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[QuerySpec] = []
        self.answers: list[list[str | BaseException]] = []

    def __call__(self, spec: QuerySpec, _server: Endpoint, *, on_text: Callable[[str], None]) -> Generation:
        self.asked.append(spec)
        for piece in self.answers.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            on_text(piece)
        return Generation(
            sequences=(), model="m", request_id="r", streamed=True, responses=2, latency=1.0, output_tokens=7
        )


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ScriptedModel:
    model = ScriptedModel()
    monkeypatch.setattr(query, "generate", model)
    return model


@pytest.fixture
def talk(model: ScriptedModel) -> Conversation:
    return Conversation(spec=QuerySpec(), server=Endpoint())


def test_every_question_is_sent_with_what_was_said_before(model: ScriptedModel, talk: Conversation) -> None:
    model.answers = [["Hel", "lo"], ["Yes"]]
    pieces: list[str] = []
    times = talk.ask("Hi", pieces.append)
    assert (pieces, times.tokens) == (["Hel", "lo"], 7)
    assert times.first is not None
    talk.ask("Sure?", pieces.append)
    assert model.asked[1].prompts == ("Sure?",)
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert list(model.asked[1].history) == said
    talk.reset()
    model.answers = [["x"]]
    talk.ask("New", pieces.append)
    assert model.asked[2].history == ()


def test_a_stopped_answer_stays_part_of_the_conversation(model: ScriptedModel, talk: Conversation) -> None:
    model.answers = [["Once", KeyboardInterrupt()]]
    with pytest.raises(KeyboardInterrupt):
        talk.ask("A story", lambda _: None)
    assert talk.history[-1] == {"role": "assistant", "content": "Once"}
    assert talk.times == []


def test_a_failed_question_is_forgotten(model: ScriptedModel, talk: Conversation) -> None:
    model.answers = [["Once", RequestError("too long")]]
    with pytest.raises(RequestError):
        talk.ask("A story", lambda _: None)
    assert talk.history == []


def test_a_conversation_is_saved(model: ScriptedModel, talk: Conversation, tmp_path: Path) -> None:
    model.answers = [["Hello\n"]]
    talk.set_system("Be kind")
    talk.ask("Hi", lambda _: None)
    talk.save(tmp_path / "talk.json")
    roles = [turn["role"] for turn in json.loads((tmp_path / "talk.json").read_text())]
    assert roles == ["system", "user", "assistant"]
    talk.save(tmp_path / "talk.md")
    assert (tmp_path / "talk.md").read_text() == "**system**\n\nBe kind\n\n**user**\n\nHi\n\n**assistant**\n\nHello\n"


def test_lines_of_the_standard_input(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model.answers = [["one"], ["two"]]
    lines = f"first\n\n/system Be brief\nsecond\n/stats\n/nope\n/save\n/save {tmp_path}/a.md\n/exit\nthird\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert run(["chat", "--url", "gpu-box:8001", "--max-tokens", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[:2] == ["one", "two"]
    assert "answer 2: 7 tokens" in captured.out
    assert "There is no command /nope" in captured.err
    assert "/save needs the name of a file" in captured.err
    assert [spec.system for spec in model.asked] == [None, "Be brief"]
    assert model.asked[0].options["max_tokens"] == 5
    assert (tmp_path / "a.md").exists()


def test_an_unknown_server_is_explained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert run(["chat", "smollm2-135m"]) == ServerNotFoundError.code
    assert "trtserve import smollm2-135m, then trtserve start smollm2-135m --detach" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("one", "one"),
        ("one\n\ntwo", "two"),
        ("one\n\n```\ncode\n\nmore", "```\ncode\n\nmore"),
        ("```\na\n\nb\n```\n\nend", "end"),
        ("one\n", "one\n"),
        ("", ""),
    ],
)
def test_blocks_of_markdown_that_are_complete(text: str, rest: str) -> None:
    assert text[complete_blocks(text) :] == rest


def test_markdown_is_rendered_once() -> None:
    screen = io.StringIO()
    with MarkdownAnswer(Console(file=screen, force_terminal=False, width=40)) as answer:
        for piece in ("A **bo", "ld** word\n\n- o", "ne\n- two\n"):
            answer.add(piece)
    assert [line.rstrip() for line in screen.getvalue().splitlines() if line.strip()] == [
        "A bold word",
        " • one",
        " • two",
    ]


def test_lines_that_were_typed_too_early_are_questions_of_their_own() -> None:
    keyboard, terminal = pty.openpty()
    try:
        os.write(keyboard, "What is ML?\rund für später\rnot yet sent".encode())
        assert list(typed_ahead(terminal)) == ["What is ML?", "und für später"]
    finally:
        os.close(keyboard)
        os.close(terminal)
