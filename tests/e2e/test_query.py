"""`trtserve query` against a real Triton whose text models echo their prompt."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.echo_server import running_echo_server
from trtserve.cli import run
from trtserve.errors import RequestError, ServerUnreachableError, UsageError
from trtserve.query import QuerySpec, generate
from trtserve.triton.client import Endpoint

pytestmark = pytest.mark.triton

PROTOCOLS = ("grpc", "http")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("echo")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Endpoint]:
    with running_echo_server(folder) as endpoint:
        yield endpoint


def address(server: Endpoint, protocol: str = "grpc") -> list[str]:
    """Flags that name the server for one protocol."""
    return ["--url", server.http if protocol == "http" else server.grpc, "--protocol", protocol]


def spec(prompt: str, protocol: str = "grpc", **settings: object) -> QuerySpec:
    return QuerySpec(prompts=(prompt,), protocol=protocol, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("model", ["echo", "text_plain", "text_accumulating"])
@pytest.mark.parametrize("stream", [False, True])
def test_answer_is_the_text_alone(server: Endpoint, protocol: str, model: str, stream: bool) -> None:
    pieces: list[str] = []
    answer = generate(spec("What is ML?", protocol, model=model, stream=stream), server, on_text=pieces.append)
    assert answer.text == "Echo: What is ML?"
    assert "".join(pieces) == answer.text
    assert answer.streamed == (stream and model != "text_plain")
    assert (answer.time_to_first_token is not None) == answer.streamed
    assert answer.responses == (4 if answer.streamed else 1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_inputs_arrive(server: Endpoint, protocol: str) -> None:
    asked = spec(
        "inputs",
        protocol,
        options={
            "max_tokens": 9,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.25,
            "seed": 11,
            "stop_words": ["a", "b c"],
            "bad_words": ["é"],
        },
    )
    assert json.loads(generate(asked, server).text) == {
        "text_input": ["inputs"],
        "max_tokens": [9],
        "temperature": [0.5],
        "top_k": [3],
        "top_p": [0.25],
        "seed": [11],
        "stop_words": ["a", " a", "b c", " b c"],
        "bad_words": ["é"],
        "stream": [False],
        "exclude_input_in_output": [True],
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_older_release_gets_its_own_names(server: Endpoint, protocol: str) -> None:
    asked = spec("inputs", protocol, model="text_plain", options={"seed": 11})
    assert json.loads(generate(asked, server).text)["random_seed"] == [11]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_request_ids_are_unique(server: Endpoint, protocol: str) -> None:
    ids = {generate(spec("x", protocol), server).request_id for _ in range(3)}
    assert len(ids) == 3
    assert generate(spec("x", protocol, request_id="mine"), server).request_id == "mine"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_errors_of_the_server_are_shown(server: Endpoint, protocol: str) -> None:
    for stream in (False, True):
        with pytest.raises(RequestError) as caught:
            generate(spec("fail", protocol, stream=stream), server)
        assert caught.value.message == "asked to fail"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_unknown_model_lists_those_there(server: Endpoint, protocol: str) -> None:
    with pytest.raises(RequestError, match="no model 'nope'") as caught:
        generate(spec("x", protocol, model="nope"), server)
    assert "text_plain" in str(caught.value.hint)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_core_model_needs_a_tokenizer_for_text(server: Endpoint, protocol: str) -> None:
    with pytest.raises(UsageError, match="takes token ids"):
        generate(spec("x", protocol, model="tensorrt_llm"), server)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_timeout_is_a_refused_request(server: Endpoint, protocol: str) -> None:
    with pytest.raises(RequestError, match="No answer from"):
        generate(spec("forever", protocol, model="text_plain", timeout=0.5), server)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nobody_answers(protocol: str) -> None:
    with pytest.raises(ServerUnreachableError, match="No Triton server answers"):
        generate(spec("x", protocol, model="m"), Endpoint(http_port=1, grpc_port=1))


def test_several_candidates_must_be_named(server: Endpoint) -> None:
    with pytest.raises(UsageError, match="--model"):
        generate(spec("x"), Endpoint(grpc_port=server.grpc_port))


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_command_prints_the_answer_alone(
    server: Endpoint, capsys: pytest.CaptureFixture[str], stream: list[str]
) -> None:
    assert run(["query", "hello there", "--model", "echo", *stream, *address(server)]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("Echo: hello there\n", "")


def test_command_prints_times_on_stderr(server: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "hello", "-v", "--model", "echo", *address(server)]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Echo: hello\n"
    assert "echo: TTFT" in captured.err
    assert "latency" in captured.err


def test_command_prints_json(server: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "hi", "--json", "--stream", "--model", "echo", "--request-id", "r", *address(server)]) == 0
    envelope = json.loads(capsys.readouterr().out)
    assert envelope["command"] == "query"
    assert (envelope["result"]["text"], envelope["result"]["request_id"]) == ("Echo: hi", "r")


def test_command_says_that_a_model_does_not_stream(server: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "hi", "--stream", "--model", "text_plain", *address(server, "http")]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Echo: hi\n"
    assert "does not stream" in captured.err


def test_dry_run_sends_no_request(server: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "fail", "--dry-run", "--model", "echo", "--top-k", "2", *address(server)]) == 0
    body = json.loads(capsys.readouterr().out)["result"]
    assert (body["text_input"], body["top_k"], body["max_tokens"]) == ("fail", 2, 256)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["fail", "--model", "echo"], 41),
        (["x", "--model", "nope"], 41),
        (["", "--model", "echo"], 2),
        (["x", "--model", "echo", "--max-tokens", "0"], 2),
        (["x", "--server", "a"], 2),
        (["x", "--host", "localhost"], 2),
    ],
)
def test_exit_codes(server: Endpoint, arguments: list[str], code: int) -> None:
    assert run(["query", *arguments, *address(server)]) == code


def test_recorded_server_is_the_default(
    server: Endpoint, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTSERVE_HOME", str(folder / "home"))
    assert run(["query", "hi"]) == run(["query", "hi", "--server", "echo", "--protocol", "http"]) == 0
    assert capsys.readouterr().out == "Echo: hi\n" * 2


def test_no_server_running(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "x"]) == 33
    assert "trtserve start" in capsys.readouterr().err


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "trtserve", "query", *arguments]


def test_prompt_from_stdin(server: Endpoint) -> None:
    command = _command("--model", "echo", *address(server))
    result = subprocess.run(command, input="from a pipe\n", capture_output=True, text=True, check=True, timeout=30)
    assert result.stdout == "Echo: from a pipe\n"


def _wait_for(trace: Path, *lines: str) -> None:
    deadline = time.monotonic() + 10
    seen: set[str] = set()
    while time.monotonic() < deadline and not seen.issuperset(lines):
        seen = set(trace.read_text().splitlines()) if trace.exists() else set()
        time.sleep(0.05)
    assert seen.issuperset(lines)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_interrupt_stops_the_request(server: Endpoint, folder: Path, protocol: str) -> None:
    request_id = f"interrupted-{protocol}"
    command = _command("forever", "--stream", "--model", "echo", "--request-id", request_id, *address(server, protocol))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.read(2) == "la"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "Traceback" not in errors
    # The call itself was cancelled, and the core model was told to stop the id.
    _wait_for(folder / "trace", f"cancelled {request_id}", f"stop {request_id}")


def test_interrupt_of_a_unary_call(server: Endpoint, folder: Path) -> None:
    command = _command("forever", "--model", "text_plain", "--request-id", "unary", *address(server))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _wait_for(folder / "trace", "began unary")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    _wait_for(folder / "trace", "cancelled unary", "stop unary")
