"""The command line: exit codes, error envelopes, and help that fits the terminal."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import trtserve
from trtserve.__main__ import main
from trtserve.cli.app import COMMANDS, SHOWN, USUAL, command_tree, run
from trtserve.cli.documentation import page_text, plain
from trtserve.cli.output import print_json
from trtserve.cli.parser import _ASKED_FOR
from trtserve.errors import (
    CheckError,
    MemoryLimitError,
    ModelNotFoundError,
    ServerNotFoundError,
    UsageError,
    exit_codes,
)


def _commands() -> dict[str, Any]:
    tree: Any = command_tree()
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
    assert captured.err.splitlines()[-2].startswith("error: 'nope-nope' is not the name of a model.")
    assert captured.out == ""


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/closed/x"), 23, "error: /closed/x cannot be read or"),
        (OSError(errno.ENOSPC, "No space left on device", "/full/x"), 13, "the disk is full"),
        (MemoryError(), 14, "error: Out of memory"),
        (ImportError("libx.so.1: failed to map segment from shared object"), 14, "error: Out of memory: libx.so"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 14, "error: Out of memory"),
        (RuntimeError("can't start new thread"), 14, "error: Out of memory"),
        (ImportError("libx.so.1: failed to map segment: Operation not permitted"), 1, "Unexpected ImportError"),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), 2, "or a file has bytes that are not"),
        (ValueError("odd"), 1, "Unexpected ValueError: odd"),
    ],
)
def test_errors_of_the_system_are_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: Exception, code: int, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("trtserve.pipeline.inventory.list_imported", fail)
    assert run(["list"]) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--model", "--api-key"])
def test_an_argument_that_is_not_utf8_is_named_and_not_shown(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "x", "--url", "127.0.0.1:1", option, "secret\udcff"]) == 2
    said = capsys.readouterr().err
    assert "Argument 6 of this command has bytes that are not UTF-8" in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HF_ENDPOINT", "http://[", "the address of a hub"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "soon", "seconds"),
        ("HF_HUB_ETAG_TIMEOUT", "", "seconds"),
    ],
)
def test_variables_at_which_the_client_of_the_hub_fails_are_named(
    name: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert run(["plan", "org/name"]) == 2
    assert f"{name} is {value!r}; expected {expected}." in capsys.readouterr().err


@pytest.mark.parametrize("command", ["--version", "help stop", "status", "list"])
def test_what_needs_no_hub_takes_any_variable_of_its_client(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "soon")
    run(command.split())
    assert "soon" not in capsys.readouterr().err


class _Full(io.StringIO):
    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def fileno(self) -> int:
        return self._number

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("full", [["stdout"], ["stderr"], ["stdout", "stderr"]])
def test_an_error_that_cannot_be_written_keeps_its_code(full: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(os.devnull).open("w") as anywhere:
        for name in full:
            monkeypatch.setattr(f"sys.{name}", _Full(anywhere.fileno()))
        assert run(["nosuch", "--json"]) == 2


@pytest.mark.parametrize(("argument", "code", "words"), [(None, 0, ""), (3, 3, ""), ("no licence", 1, "no licence")])
def test_a_library_that_ends_the_process(
    argument: object, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(*_: object, **__: object) -> None:
        raise SystemExit(argument)

    monkeypatch.setattr("trtserve.pipeline.inventory.list_imported", end)
    assert run(["list"]) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(_commands()))
def test_help_names_every_option_in_full(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*name.split(), "--help-all"]) == 0
    text = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    for parameter in _commands()[name].params:
        if getattr(parameter, "hidden", False):
            continue
        for option in (*parameter.opts, *parameter.secondary_opts):
            assert option in text or not option.startswith("-")


def test_help_is_short_where_there_are_many_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "import"]) == 0
    short = capsys.readouterr().out
    assert run(["import", "-h"]) == 0
    assert capsys.readouterr().out == short
    assert "--max-batch-size REQUESTS" in short
    assert "--gemm-plugin, " in short  # only named
    assert len(short.splitlines()) < 110


def test_without_a_command_a_small_terminal_shows_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([]) == UsageError.code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    assert all(name in " ".join(lines) for name in SHOWN)


def test_help_about_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "--help", "temp"]) == 0
    shown = capsys.readouterr().out
    assert "--temperature NUMBER" in shown
    assert "--top-k" not in shown.replace("also give --top-k", "")
    assert run(["help", "gemm"]) == 0
    shown = capsys.readouterr().out
    found = [line for line in shown.splitlines() if line.startswith("trtserve")]
    assert found == ["trtserve import, convert, plan:", "trtserve import, build:"]  # each option once
    assert run(["help", "json"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("  --json ") == 1
    assert run(["help", "exit-codes"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {code} " in shown and meaning in shown for code, _, meaning in exit_codes())
    assert run(["help", "31"]) == 0
    assert "31  a port is taken" in capsys.readouterr().out
    assert run(["build", "--help", "xyzzy"]) == UsageError.code
    assert run(["help", "xyzzy"]) == UsageError.code
    assert "no word 'xyzzy'" in capsys.readouterr().err
    assert run(["--help", "bench", "report"]) == 0
    assert "Usage: trtserve bench report" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "page", "heading"),
    [
        ("adapters", "openai", "Load LoRA adapters while the server runs"),
        ("embeddings", "vllm-repositories", "Embeddings and reranking"),
        ("rerank", "vllm-repositories", "Embeddings and reranking"),
        ("tools", "openai-features", "Thoughts, tools and images: Tools"),
        ("rerankers", "vllm-repositories", "Embeddings and reranking"),
        ("gguf", "quantised-models", "GGUF"),
        ("quantise", "quantise", "Quantise"),
        ("quantize", "quantise", "Quantise"),
        ("docker", "containers", "Run NVIDIA's containers"),  # no heading has these words
        ("temperature", "chat", "Chat: In the terminal"),
        ("kv cache", "vllm", "Serve with vLLM"),
        ("load lora", "openai", "Load LoRA adapters while the server runs"),
        ("lora load", "openai", "Load LoRA adapters while the server runs"),  # the first word is a command
        ("how do I load a LoRA at run time?", "query", "Send requests: LoRA adapters"),
        ("multiple GPUs", "gpus", "Several GPUs"),
        ("quantising", "quantise", "Quantise"),
        ("https", "serve", "Serve: Proxies"),
    ],
)
def test_help_leads_to_the_documentation(
    word: str, page: str, heading: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["help", *word.split()]) == 0
    documented = capsys.readouterr().out.partition("prints one):")[2].split()
    assert f"how-to/{page}.md" in documented
    assert heading in " ".join(documented)


def test_several_words_find_the_options_that_have_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "where", "are", "logs"]) == 0
    shown = capsys.readouterr().out
    assert "--log-format" in shown
    assert "logits" not in shown.partition("\n\n")[2]  # a short word is a whole one
    assert run(["help", "key", "file"]) == 0
    options, _, pages = capsys.readouterr().out.partition("documentation")
    assert "--api-key-file FILE" in options
    assert "--api-key KEY" not in options
    assert "setup-file.md" in pages
    assert run(["--help", "key", "file"]) == 0
    assert capsys.readouterr().out == f"{options}documentation{pages}"


@pytest.mark.parametrize(
    ("question", "heading"),
    [
        ("where are the models stored", "Where are models, engines, logs and other files stored?"),
        ("serve several models on one port", "How do I serve several models at once, on one port?"),
        ("two models at once", "How do I serve several models at once, on one port?"),
        ("stop a hung server", "How do I stop or restart a hung server (no answer, connection refused)?"),
        ("how many requests at once", "How many requests or users does it answer at once (concurrency)?"),
        ("CUDA out of memory", "How do I limit its memory (CUDA out of memory)?"),
        ("openwebui", "Does Open WebUI work with it?"),
        ("gpu is not found", "Does it work without a GPU, and what if my GPU is not found?"),
        ("use it from python", "How do I call it from Python (library)?"),
        ("is my data sent anywhere", "Does it send any data home (telemetry)?"),
        ("offline", "How do I work without internet access?"),
        ("backup", "How do I back up a model, or move it to another machine (backup, copy)?"),
        (
            "start after reboot",
            "How do I start it at boot, keep it running, and start it again after a crash or reboot (systemd)?",
        ),
        ("port 8000 already in use", "How do I change the port (address already in use)?"),
        ("how do I stop", "How do I stop a server?"),
        ("stop a server that hung", "How do I stop or restart a hung server (no answer, connection refused)?"),
        ("where are my files", "Where are models, engines, logs and other files stored?"),
        ("update", "How do I upgrade trtserve (update, new version)?"),
        ("update a model", "How do I update (reload) a model without downtime?"),
        ("change port", "How do I change the port (address already in use)?"),
        ("no gpu", "Does it work without a GPU, and what if my GPU is not found?"),
        ("use gpu 1", "How do I choose a GPU?"),
        ("several gpus", "How do I use several GPUs, or share one?"),
        ("proxy", "Does it work behind a proxy, or with one for downloads?"),
        (
            "tokens per second",
            "How fast is it (tokens per second), why is it slow, and how do I speed it up?",
        ),
        ("quantize to int4", "How do I quantise to int8 or int4 (8 or 4 bits, quantize)?"),
        ("disk full", "How do I delete a model, free a full disk or uninstall it?"),
        ("ask a remote server", "How do I ask a server on a remote machine?"),
        ("stop server", "How do I stop a server?"),  # the first word is a command
        ("stop a server", "How do I stop a server?"),
        ("https", "How do I reach the server from another machine (host, API keys, TLS, nginx)?"),
        ("longer answers", "How do I get longer answers, or why was one cut off (max tokens)?"),
        ("which models can I run", "Which models are supported, and which can I run?"),
        ("install gpu", "How do I install it for GPUs (CUDA)?"),
        ("vllm", "How do I serve with vLLM?"),
        ("chat history", "How do I save or reset a conversation (chat history)?"),
        ("save conversation", "How do I save or reset a conversation (chat history)?"),
        ("streaming", "How do I stream answers (streaming)?"),
        ("python library", "How do I call it from Python (library)?"),
        ("load balancing", "How do I balance load over several copies or servers (load balancing, replicas)?"),
    ],
)
def test_a_question_is_answered_at_once(question: str, heading: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", *question.split()]) == 0
    shown = capsys.readouterr().out
    assert " ".join(shown.split()).startswith(heading)
    answer = shown.partition("?\n  ")[2].partition("\n\n")[0]
    assert len(answer) > 40
    assert not re.search(r"\S-\n", answer)  # the name of a page stays whole
    assert "](" not in answer  # a link is words and a page


def test_the_options_of_an_answer_are_those_that_it_tells_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "change", "port"]) == 0
    options = capsys.readouterr().out.partition("\n\n")[2].partition("documentation")[0].split("\n")
    assert [line for line in options if line.startswith("trtserve")] == ["trtserve start:"]
    assert [line.split()[0] for line in options if line.startswith("  --")] == [
        "--http-port",
        "--grpc-port",
        "--metrics-port",
        "--auto-ports",
    ]


@pytest.mark.parametrize("words", ["", "bench", "help grpc port"])
def test_no_line_of_help_is_wider_than_a_terminal(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*words.split(), *([] if words.startswith("help") else ["--help"])]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_headings_and_names_of_help_have_a_style_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")
    assert run(["stop", "-h"]) == 0
    piped = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run(["stop", "-h"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b[1mOptions:\x1b[0m\n  \x1b[36m--all\x1b[0m      " in shown
    assert re.sub(r"\x1b\[\d+m", "", shown) == piped
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(["stop", "-h"]) == 0
    assert capsys.readouterr().out == piped


def test_a_page_fits_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["help", "how-to/chat.md"]) == 0
    piped = capsys.readouterr().out
    assert piped.startswith("# Chat\n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run(["help", "how-to/chat.md"]) == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80 < max(map(len, piped.splitlines()))
    assert "# Chat" not in lines


def test_a_short_word_with_a_synonym_is_a_whole_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "mac"]) == 0
    assert "doctor.md" not in capsys.readouterr().out.partition("prints one):")[2]  # Check the machine


def test_links_of_an_answer_are_words_with_their_page() -> None:
    assert plain("**No**, read\n[the guide](how-to/a.md#part).") == "No, read the guide (how-to/a.md)."


def test_a_question_that_has_no_answer_finds_pages(capsys: pytest.CaptureFixture[str]) -> None:
    for question, first in (("private registry", "how-to/travel.md"), ("run on two nodes", "tutorials/nodes.md")):
        assert run(["help", *question.split()]) == 0
        assert capsys.readouterr().out.partition("prints one):")[2].split()[0] == first


@pytest.mark.parametrize(
    ("words", "command"),
    [("delete a model", "remove"), ("see running servers", "status"), ("measure my server", "bench"), ("kill", "stop")],
)
def test_commands_are_found_by_what_people_call_them(
    words: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["help", *words.split()]) == 0
    listed = capsys.readouterr().out.partition("commands:\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in listed.splitlines() if line[:4].strip()].count(command) == 1


def test_options_with_most_of_the_words_are_found_where_none_has_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "firewall", "http", "port"]) == 0
    assert "  --http-port PORT " in capsys.readouterr().out


def test_a_command_among_words_that_its_help_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "check", "prometheus"]) == 0
    assert "how-to/watch.md" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("question", "option"),
    [
        ("change the port", "--http-port"),
        ("expose on all interfaces", "--host"),
        ("how do I set an api key", "--api-key-file"),
        ("logprobs", "--return-log-probs"),
        ("how many requests at once", "--max-batch-size"),
    ],
)
def test_a_question_finds_its_option_too(question: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", *question.split()]) == 0
    assert f"  {option} " in capsys.readouterr().out


def test_every_option_that_a_question_finds_exists() -> None:
    every = {name for command in _commands().values() for parameter in command.params for name in parameter.opts}
    assert set(_ASKED_FOR) <= every


def test_every_guide_of_a_command_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert [name for name, entry in COMMANDS.items() if page_text(entry.guide) is None] == []
    assert run(["stop", "--help"]) == 0
    assert capsys.readouterr().out.endswith("Guide: `trtserve help how-to/supervise`\n")


def test_a_conversation_has_defaults_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for command, seed in (("chat", "a new one for each answer"), ("run", "a new one for each answer"), ("query", "0")):
        assert run([command, "--help", "seed"]) == 0
        assert f"[default: {seed}]" in " ".join(capsys.readouterr().out.split())


def test_second_spellings_are_in_the_whole_help_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "--help"]) == 0
    assert "--request-output-len" not in capsys.readouterr().out
    assert run(["chat", "--help", "output-len"]) == 0
    assert "--request-output-len" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["tool", "tools"])
def test_a_section_of_just_the_name_comes_first(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", word]) == 0
    documented = capsys.readouterr().out.partition("prints one):")[2].split()
    assert documented[0] == "how-to/openai-features.md"


@pytest.mark.parametrize("name", ["how-to/serve", "how-to/serve.md", "docs/how-to/serve.md", "serve.md"])
def test_help_prints_a_page(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", name]) == 0
    assert capsys.readouterr().out.startswith("# Serve\n")


def test_the_bare_name_of_two_pages_means_the_one_above(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "gpu.md"]) == 0
    assert capsys.readouterr().out.startswith("# GPU figures\n")


def test_every_page_that_a_message_names_exists() -> None:
    """Hints name pages as `trtserve help PAGE`, which a reader of an installed package can open too."""
    named = [
        (path.name, name)
        for path in Path(trtserve.__file__).parent.rglob("*.py")
        for name in re.findall(r"`trtserve help ([a-z-]+/[a-z-]+)`", path.read_text(encoding="utf-8"))
    ]
    assert named
    assert [each for each in named if page_text(each[1]) is None] == []


def test_a_word_that_help_does_not_have_leads_to_the_whole_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "nonsense"]) == UsageError.code
    assert "next:  `trtserve --help-all` shows all of it." in capsys.readouterr().err
    assert run(["help", "("]) == UsageError.code
    assert "has no word '('" in capsys.readouterr().err
    assert run(["help", "qantise"]) == UsageError.code
    assert "next:  Did you mean quantise? " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("import demo --tp 2", "--tp-size"),
        ("convert x --quant int8", "--quantize"),
        ("build x --batch 3", "--max-batch-size"),
        ("query hi --temp 1", "--temperature"),
        ("plan x --seq-len 9", "--max-seq-len"),
        ("build x --tp 2", "--tp-size of `trtserve import`"),
    ],
)
def test_a_shortened_option_is_understood(line: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == UsageError.code
    assert f"Did you mean {meant}?" in capsys.readouterr().err


def test_bench_alone_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--concurrency", "0"]) == UsageError.code
    assert "--concurrency is 0" in capsys.readouterr().err
    assert run(["bench"]) == ServerNotFoundError.code


def test_a_group_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "token-norm-dist" in shown
    assert USUAL not in shown
    usual, _, others = shown.partition("More options")
    assert "Options of token-norm-dist:\n" in usual  # `bench` alone takes them
    assert "  --concurrency N " in usual
    assert "  --html FILE " in usual
    assert "--strict" in others


def test_with_json_an_error_is_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", "nope-nope", "--json"]) == 10
    captured = capsys.readouterr()
    envelope = json.loads(captured.out)
    assert (envelope["version"], envelope["command"]) == (1, "import")
    error = envelope["error"]
    assert (error["code"], error["exit_code"]) == ("ModelNotFoundError", 10)
    assert "'nope-nope'" in error["message"]
    assert error["next"]
    assert captured.err.startswith("error: ")


def test_a_result_is_the_only_document_of_a_command_that_fails_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def print_and_fail(command: str, result: object) -> None:
        print_json(command, result)
        raise CheckError("too large")

    monkeypatch.setattr("trtserve.cli.models.print_json", print_and_fail)
    assert run(["list", "--json"]) == CheckError.code
    assert "result" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("words", [["convert", "x", "--tp-size", "0"], ["bench", "dataset"], ["query", "--tok-k", "1"]])
def test_a_wrong_option_with_json_is_a_document(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "UsageError"


@pytest.mark.parametrize(
    "failure",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libx.so.1: failed to map segment from shared object"),
    ],
)
def test_memory_that_ends_before_the_error_can_be_explained(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_arguments: object) -> int:
        raise failure

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("trtserve.cli.run", fail)
    monkeypatch.setattr("os._exit", leave)
    threshold, handler = gc.get_threshold(), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ending:
            main()
    finally:
        gc.set_threshold(*threshold)
        signal.signal(signal.SIGINT, handler)
    assert ending.value.code == MemoryLimitError.code
    assert "ulimit -v" in capfd.readouterr().err


def test_the_door_is_the_gateway_by_its_former_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["door", "--help"]) == 0
    as_door = capsys.readouterr().out
    assert run(["gateway", "--help"]) == 0
    assert as_door.replace("trtserve door", "trtserve gateway") == capsys.readouterr().out
    run(["--help"])
    assert "door" not in capsys.readouterr().out


def test_words_narrow_the_list_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "QWEN", "0.5b", "--json"]) == 0
    assert [each["alias"] for each in json.loads(capsys.readouterr().out)["result"]] == ["qwen2.5-0.5b-instruct"]
    assert run(["models", "qwen", "nonsense"]) == ModelNotFoundError.code
    assert "trtserve plan org/name" in capsys.readouterr().err
