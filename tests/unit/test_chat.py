"""A conversation in the terminal: what is sent, what is remembered, and what the commands do."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import termios
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from trtserve.cli import output, run
from trtserve.cli.chat import MarkdownAnswer, PlainAnswer, _typed, complete_blocks, silent_keyboard, typed_ahead
from trtserve.client import query
from trtserve.client.answer import GeneratedSequence, Generation
from trtserve.client.endpoint import Endpoint
from trtserve.client.query import Conversation
from trtserve.client.spec import QuerySpec
from trtserve.client.tensors import ModelDescription
from trtserve.client.tokenizer import PreparedPrompts
from trtserve.errors import RequestError, ServerNotFoundError, ServerUnreachableError, UsageError
from trtserve.host.ports import free_ports
from trtserve.store import NameRecord, Store


class ScriptedModel:
    """Answers like `generate` of `trtserve.client.query`; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[QuerySpec] = []
        self.answers: list[list[str | BaseException]] = []
        self.takes_system = True
        self.reason = "stop_words"
        self.context = SimpleNamespace(spec=QuerySpec(), tokenizer=None, prompts=PreparedPrompts(texts=("Hi",)))

    def __call__(
        self, spec: QuerySpec, _server: Endpoint, *, on_text: Callable[[str], None], on_start: query.OnStart
    ) -> Generation:
        self.asked.append(spec)
        on_start(self.context)  # type: ignore[arg-type]
        for piece in self.answers.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            on_text(piece)
        return Generation(
            sequences=(GeneratedSequence(prompt=0, sequence=0, beam=0, finish_reason=self.reason),),
            model="m",
            request_id="r",
            streamed=True,
            responses=2,
            latency=1.0,
            output_tokens=7,
        )

    def prepare(self, spec: QuerySpec, *_: object) -> None:
        """Refuse a system message, as the template of some models does."""
        if spec.system is not None and not self.takes_system:
            raise UsageError("no place for a system message")


class Served:
    """A server with these models, as far as `/model` asks it."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def model_names(self) -> list[str]:
        return self.names

    def describe(self, name: str) -> ModelDescription:
        text = {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}
        return ModelDescription.from_config({"name": name, "input": [text]})

    def close(self) -> None:
        pass


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ScriptedModel:
    model = ScriptedModel()
    monkeypatch.setattr(query, "generate", model)
    monkeypatch.setattr(query, "connect", lambda *_: io.BytesIO())
    monkeypatch.setattr(query, "request_contexts", model.prepare)
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


@pytest.mark.parametrize(("opened", "first"), [("<think>\n", ""), ("", "<think>")])
def test_thoughts_are_neither_printed_nor_remembered_but_counted(
    opened: str, first: str, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template = SimpleNamespace(chat_templates={"default": "{{ x }}<think></think>"})
    prompts = PreparedPrompts(texts=(f"Hi{opened}",))
    model.context = SimpleNamespace(spec=QuerySpec(), tokenizer=template, prompts=prompts)
    model.answers = [[first, "Hm. ", "So?</th", "ink>", "Hel", "lo"], ["<think>", "cut"]]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n/thoughts\n/stats\nMore\n/thoughts\n"))
    monkeypatch.setattr("trtserve.cli.chat.find_endpoint", lambda *_, **_options: Endpoint())
    assert run(["chat"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[:2] == ["Hello", "Hm. So?"]
    assert re.match(r"answer 1: 7 tokens, \d\d% of it thoughts", lines[2])
    assert model.asked[1].history[-1] == {"role": "assistant", "content": "Hello"}
    assert "cut" in lines[4]


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


def test_a_system_message_that_the_model_has_no_place_for_is_refused_at_once(
    model: ScriptedModel, talk: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model.takes_system = False
    with pytest.raises(UsageError, match="no place"):
        talk.set_system("Be kind")
    model.answers = [["one"]]
    talk.ask("Hi", lambda _: None)
    talk.set_system("")
    assert model.asked[0].system is None
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert run(["chat", "--url", "gpu-box:8001", "--system", "Be kind"]) == UsageError.code
    assert "no place for a system message" in capsys.readouterr().err
    assert len(model.asked) == 1


@pytest.mark.parametrize("command", ["/reset", "/clear"])
def test_a_conversation_begins_anew(
    command: str, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model.answers = [["one"], ["two"]]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"First\n{command}\nSecond\n"))
    assert run(["chat", "--url", "gpu-box:8001"]) == 0
    assert "begins anew" in capsys.readouterr().err
    assert [(asked.prompts, len(asked.history)) for asked in model.asked] == [(("First",), 0), (("Second",), 0)]


@pytest.mark.parametrize("typed", ["", "/bye\n"])
def test_a_dead_server_is_an_error_without_a_question_too(
    typed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    (port,) = free_ports("127.0.0.1", 1)
    assert run(["chat", "--url", f"127.0.0.1:{port}"]) == 40
    assert f"No Triton server answers at 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["demo", "org/other"])
def test_the_greeting_says_what_the_demo_model_knows(
    source: str, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths: dict[str, Any] = dict.fromkeys(("model", "checkpoint", "engine", "imported"), "x")
    Store().record(NameRecord(name="mine", source=source, repository="/repository", **paths))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("trtserve.cli.chat._typed", lambda: iter(()))
    monkeypatch.setattr(query, "connect", lambda *_: Served(["mine"]))
    monkeypatch.setattr(
        "trtserve.cli.chat.find_endpoint", lambda *_, **_options: Endpoint(model="mine", repository=Path("/repository"))
    )
    assert run(["chat"]) == 0
    said = capsys.readouterr().err
    assert "mine: /help lists the commands" in said
    assert ("only a few hundred answers" in said) == (source == "demo")


def test_exit_without_a_slash_ends_a_conversation_in_a_terminal(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("trtserve.cli.chat._typed", lambda: iter(("exit", "Hi")))
    monkeypatch.setattr(query, "connect", lambda *_: Served(["mine"]))
    monkeypatch.setattr("trtserve.cli.chat.find_endpoint", lambda *_, **_options: Endpoint(model="mine"))
    assert run(["chat"]) == 0
    assert not model.asked


@pytest.mark.parametrize(("typed", "meant"), [("clear", "/reset"), ("set", "/set")])
def test_a_command_without_its_slash_is_not_sent(
    typed: str,
    meant: str,
    model: ScriptedModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("trtserve.cli.chat._typed", lambda: iter((typed,)))
    monkeypatch.setattr(query, "connect", lambda *_: Served(["mine"]))
    monkeypatch.setattr("trtserve.cli.chat.find_endpoint", lambda *_, **_options: Endpoint(model="mine"))
    assert run(["chat"]) == 0
    assert not model.asked
    assert f"the command is {meant}." in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["help", "?", "/?", "/help"])
def test_help_typed_alone_lists_the_commands(
    typed: str, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("trtserve.cli.chat._typed", lambda: iter((typed,)))
    monkeypatch.setattr(query, "connect", lambda *_: Served(["mine"]))
    monkeypatch.setattr("trtserve.cli.chat.find_endpoint", lambda *_, **_options: Endpoint(model="mine"))
    assert run(["chat"]) == 0
    assert not model.asked
    assert "/retry" in capsys.readouterr().out


def typed(lines: tuple[str, ...], model: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> list[QuerySpec]:
    """Hold a conversation in a terminal and return what the model was asked."""
    monkeypatch.setattr("trtserve.cli.chat.silent_keyboard", contextlib.nullcontext)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("trtserve.cli.chat._typed", lambda: iter(lines))
    monkeypatch.setattr("trtserve.cli.chat.find_endpoint", lambda *_, **_options: Endpoint(model="mine"))
    assert run(["chat", "--plain"]) == 0
    return model.asked


@pytest.mark.parametrize(
    ("reason", "limit", "said"),
    [
        ("length", 7, "cut at 7 tokens. Say “Go on.”, or /set max_tokens 14, then /retry"),
        ("length", 9, "the model has no room for more words. /reset"),
        ("stop_words", 7, ""),  # an answer may end by itself with its last token
    ],
)
def test_an_answer_that_was_cut_says_how_to_go_on(
    reason: str,
    limit: int,
    said: str,
    model: ScriptedModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model.answers, model.reason = [["so far"]], reason
    monkeypatch.setattr(query, "connect", lambda *_: Served(["mine"]))
    asked = typed((f"/set max_tokens {limit}", "/set system Be brief.", "Hi"), model, monkeypatch)
    shown = capsys.readouterr().err
    assert said in shown
    assert ("The answer was cut" in shown) == bool(said)
    assert asked[0].system == "Be brief."


@pytest.mark.parametrize("again", ["Hello", "/retry"])
def test_the_next_question_waits_until_a_lost_server_is_back(
    again: str, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model.answers = [[ServerUnreachableError("gone")], ["one"], ["two"]]
    connections = iter((Served(["mine"]), None, None))

    def connect(*_: object) -> Served:
        found = next(connections, Served(["mine"]))
        if found is None:
            raise ServerUnreachableError("not yet")
        return found

    monkeypatch.setattr("trtserve.cli.chat._LOST_PAUSE", 0)
    monkeypatch.setattr(query, "connect", connect)
    asked = typed(("Hi", again, "More"), model, monkeypatch)
    said = capsys.readouterr()
    assert [each.prompts[0] for each in asked] == ["Hi", "Hi" if again == "/retry" else "Hello", "More"]
    assert said.err.count("gone") == said.err.count("The server is back.") == 1
    assert "not yet" not in said.err
    assert "two" in said.out


def test_lines_of_the_standard_input(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model.answers = [["one"], ["two"]]
    lines = f"first\n\n/system Be brief\nsecond\n/stats\n/nope\n/save {tmp_path}/a.md\n/exit\nthird\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert run(["chat", "--url", "gpu-box:8001", "--max-tokens", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[:2] == ["one", "two"]
    assert "answer 2: 7 tokens" in captured.out
    assert "There is no command /nope" in captured.err
    assert [spec.system for spec in model.asked] == [None, "Be brief"]
    assert model.asked[0].options["max_tokens"] == 5
    assert (tmp_path / "a.md").exists()


def test_options_are_set_and_removed_and_a_question_is_asked_again(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model.answers = [["one"], ["two"], ["three"]]
    lines = (
        "Hi\n/set temperature 0.5\n/set top_k=3\n/set stop_words END\n"
        '/set\n/set all\n/retry\n/set temperature\n/sett\n"""\nfirst\n\n  second """\n'
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert run(["chat", "--url", "gpu-box:8001"]) == 0
    captured = capsys.readouterr()
    printed = captured.out.splitlines()
    assert (printed[0], printed[-2:]) == ("one", ["two", "three"])
    listed = {line.split()[0]: line.split()[1:] for line in printed[1:-2]}
    assert {name: listed[name][0] for name in ("max_tokens", "temperature", "top_k", "stop_words")} == {
        "max_tokens": "1024",
        "temperature": "0.5",
        "top_k": "3",
        "stop_words": "END",
    }
    assert listed["temperature"] == ["0.5", "Sampling", "temperature."]  # `query` alone needs more for it
    assert listed["seed"][:3] == ["not", "set", "Seed"]
    assert "guide_type," in listed["Also:"]
    usual = printed[1 : printed.index("/set all names all options.")]
    assert len(usual) < 16
    assert not any("guide_type" in line for line in usual)
    assert "did you mean /set?" in captured.err
    assert "temperature is 0.5 from now on." in captured.err
    assert "temperature is not set any more." in captured.err
    assert "no effect" not in captured.err
    assert [spec.prompts for spec in model.asked] == [("Hi",), ("Hi",), ("first\n\n  second ",)]
    assert (model.asked[1].history, len(model.asked[2].history)) == ((), 2)
    assert [spec.options.get("temperature") for spec in model.asked] == [None, 0.5, None]
    assert model.asked[2].options["stop_words"] == ("END",)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/retry", "no question to ask again"),
        ("/set temprature 1", "Did you mean temperature? /set all lists the options."),
        ("/set max_tokens x", "max_tokens is 'x'"),
        ("/save", "/save needs the name of a file"),
        ("/model other", "other"),
    ],
)
def test_a_command_that_fails_ends_a_conversation_without_a_terminal(
    command: str, said: str, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the model that was there before would get what follows, and nobody would see why."""
    monkeypatch.setattr(query, "connect", lambda *_: Served(["ensemble", "small", "large"]))
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{command}\nHi\n"))
    assert run(["chat", "small", "--url", "gpu-box:8001"]) != 0
    assert said in capsys.readouterr().err
    assert not model.asked


def test_a_retry_that_fails_keeps_the_answer_before(model: ScriptedModel, talk: Conversation) -> None:
    model.answers = [["one"], [RequestError("gone")], ["two"]]
    talk.ask("Hi", lambda _: None)
    with pytest.raises(RequestError):
        talk.retry(lambda _: None)
    assert talk.history[-1]["content"] == "one"
    talk.retry(lambda _: None)
    assert [turn["content"] for turn in talk.history] == ["Hi", "two"]


def test_another_model_of_the_server_answers(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = Served(["ensemble", "small", "large"])
    monkeypatch.setattr(query, "connect", lambda *_: served)
    model.answers = [["one"]]
    monkeypatch.setattr("sys.stdin", io.StringIO("/model\n/model large\nHi\n"))
    assert run(["chat", "small", "--url", "gpu-box:8001"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ["* small", "  large", "one"]
    assert "large answers from now on" in captured.err
    assert model.asked[0].model == "large"


@pytest.mark.parametrize(
    ("typed", "imported", "started"),
    [
        ("smollm2-135m", "smollm2-135m", "smollm2-135m"),
        ("org/x", "org/x", "x"),
        ("mine", "MODEL --name mine", "mine"),
        ("what?", "MODEL --name NAME", "NAME"),
        ("ensemble", "MODEL --name NAME", "NAME"),
    ],
)
def test_an_unknown_server_is_explained(
    typed: str, imported: str, started: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert run(["chat", typed]) == ServerNotFoundError.code
    assert f"trtserve import {imported}, then trtserve start {started} --detach" in capsys.readouterr().err


def test_a_temperature_alone_samples_and_each_answer_has_a_new_seed(model: ScriptedModel, talk: Conversation) -> None:
    model.answers = [["a"], ["b"], ["c"], ["d"], ["e"]]
    talk.spec = QuerySpec(options={"temperature": 0.8})
    talk.ask("Hi", lambda _: None)
    talk.retry(lambda _: None)
    first, again = (spec.options for spec in model.asked)
    assert (first["temperature"], first["top_k"], first["top_p"]) == (0.8, 0, 1.0)
    assert first["seed"] != again["seed"]
    for options in ({"temperature": 0.8, "top_p": 0.9, "seed": 7}, {"max_tokens": 3}, {"temperature": 0.0}):
        talk.spec = QuerySpec(options=options)
        talk.ask("Hi", lambda _: None)
        assert model.asked[-1].options == options


def test_an_answer_without_text_is_explained(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model.answers = [[]]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert run(["chat", "--url", "gpu-box:8001"]) == 0
    assert "The model ended its answer at once, without any text." in capsys.readouterr().err


def test_a_plain_answer_is_wrapped_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "20")
    text = "A model that answers\nhas    " + "long " * 12 + "x" * 40 + " e"
    with PlainAnswer() as answer:
        for at in range(0, len(text), 3):
            answer.add(text[at : at + 3])
    lines = screen.getvalue().splitlines()
    assert lines[0] == "A model that answers"
    assert screen.getvalue().split() == text.split()
    assert all(len(line.rstrip()) <= 20 for line in lines if "x" not in line)


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


def test_code_begins_in_the_first_column() -> None:
    screen = io.StringIO()
    with MarkdownAnswer(Console(file=screen, force_terminal=False, width=40)) as answer:
        answer.add("Text:\n\n```python\nif a:\n    b()\n```\n")
    assert [line.rstrip() for line in screen.getvalue().splitlines() if line.strip()] == ["Text:", "if a:", "    b()"]


def test_ctrl_c_at_an_empty_prompt_says_how_to_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    with (
        os.fdopen(reader) as stdin,
        os.fdopen(writer, "w"),
        create_pipe_input() as keys,
        create_app_session(input=keys, output=DummyOutput()),
    ):
        monkeypatch.setattr("sys.stdin", stdin)
        keys.send_text("typed\x03")
        typed = _typed()
        keys.send_text("\x03Hi\r\x04")
        assert list(typed) == ["Hi"]
    assert capsys.readouterr().err.count("Ctrl-D or /exit ends the conversation.") == 1


def test_lines_that_were_typed_too_early_are_questions_of_their_own() -> None:
    keyboard, terminal = pty.openpty()
    try:
        os.write(keyboard, "What is ML?\rund für später\rnot yet sent".encode())
        assert list(typed_ahead(terminal)) == ["What is ML?", "und für später"]
    finally:
        os.close(keyboard)
        os.close(terminal)


class Screen(io.StringIO):
    """A terminal of some lines that knows what `rich` writes: what has left it at the top stays in `scrolled`."""

    def __init__(self, height: int) -> None:
        super().__init__()
        self.height, self.scrolled, self.row = height, list[str](), 0
        self.lines = [""]

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if part == "\n":
                self.row += 1
                if self.row == len(self.lines):
                    self.lines.append("")
                if len(self.lines) > self.height:
                    self.scrolled.append(self.lines.pop(0))
                    self.row -= 1
            elif part.startswith("\x1b") and part.endswith("A"):
                self.row = max(0, self.row - int(part[2:-1] or 1))
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif part != "\r" and not part.startswith("\x1b"):
                self.lines[self.row] += part
        return len(text)

    def seen(self) -> list[str]:
        return [line.rstrip() for line in [*self.scrolled, *self.lines] if line.strip()]


@pytest.mark.parametrize("width", [30, 80])
def test_a_block_taller_than_the_screen_is_printed_once(width: int) -> None:
    screen = Screen(10)
    code = "\n".join(f"line {number}" for number in range(40))
    text = f"Before.\n\n```\n{code}\n```\n\n{' '.join(f'word{number}' for number in range(200))}\n\n- last"
    with MarkdownAnswer(Console(file=screen, force_terminal=True, width=width, height=10)) as answer:
        for at in range(0, len(text), 7):
            answer.add(text[at : at + 7])
    seen = screen.seen()
    assert [line.strip() for line in seen if "line" in line] == code.splitlines()
    assert [word for line in seen for word in line.split() if word.startswith("word")] == [
        f"word{number}" for number in range(200)
    ]
    assert (seen[0], seen[-1].split()) == ("Before.", ["•", "last"])


def test_a_stopped_answer_stays_on_the_screen_once() -> None:
    screen = Screen(10)

    def interrupted() -> None:
        with MarkdownAnswer(Console(file=screen, force_terminal=True, width=40)) as answer:
            answer.add("One line ")
            answer.add("and more")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert screen.seen() == ["One line and more"]


def test_nothing_typed_is_shown_while_an_answer_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = pty.openpty()
    with os.fdopen(terminal) as stdin, os.fdopen(controller, "wb", buffering=0):
        monkeypatch.setattr("sys.stdin", stdin)
        with silent_keyboard():
            assert not termios.tcgetattr(stdin)[3] & termios.ECHO
        assert termios.tcgetattr(stdin)[3] & termios.ECHO


@pytest.mark.parametrize("plain", [True, False])
def test_answers_cannot_command_the_terminal(monkeypatch: pytest.MonkeyPatch, plain: bool) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", screen)
    printing = PlainAnswer() if plain else MarkdownAnswer(output.terminal())
    with printing as answer:
        answer.add("a \x1b]52;c;aGk=\x07 [b](<javascript:\x1b]52;>) \x9b31m \x1b[2J `\x1b[2J`\n\n")
    assert "52;c;aGk=" in screen.getvalue()
    assert not re.findall(r"\x1b\]|\x07|\x9b|\x1b\[2J", screen.getvalue())
