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

from tests.support.certificates import certificates
from tests.support.echo_server import running_echo_server
from tests.support.waiting import wait_until
from trtserve.cli import run
from trtserve.client.endpoint import Endpoint
from trtserve.client.query import generate
from trtserve.client.spec import QuerySpec
from trtserve.errors import RequestError, ServerUnreachableError, UsageError

pytestmark = pytest.mark.triton

PROTOCOLS = ("grpc", "http")


def address(echo: Endpoint, protocol: str = "grpc") -> list[str]:
    """Flags that name the server for one protocol."""
    return ["--url", echo.http if protocol == "http" else echo.grpc, "--protocol", protocol]


def spec(prompt: str, protocol: str = "grpc", **settings: object) -> QuerySpec:
    return QuerySpec(prompts=(prompt,), protocol=protocol, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("model", ["echo", "text_plain", "text_accumulating"])
@pytest.mark.parametrize("stream", [False, True])
def test_answer_is_the_text_alone(echo: Endpoint, protocol: str, model: str, stream: bool) -> None:
    pieces: list[str] = []
    answer = generate(spec("What is ML?", protocol, model=model, stream=stream), echo, on_text=pieces.append)
    assert answer.text == "Echo: What is ML?"
    assert "".join(pieces) == answer.text
    assert answer.streamed == (stream and model != "text_plain")
    assert (answer.time_to_first_token is not None) == answer.streamed
    assert answer.responses == (4 if answer.streamed else 1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_inputs_arrive(echo: Endpoint, protocol: str) -> None:
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
    assert json.loads(generate(asked, echo).text) == {
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
def test_request_ids_are_unique(echo: Endpoint, protocol: str) -> None:
    ids = {generate(spec("x", protocol), echo).request_id for _ in range(3)}
    assert len(ids) == 3
    assert generate(spec("x", protocol, request_id="mine"), echo).request_id == "mine"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_errors_of_the_server_are_shown(echo: Endpoint, protocol: str) -> None:
    for stream in (False, True):
        with pytest.raises(RequestError) as caught:
            generate(spec("fail", protocol, stream=stream), echo)
        assert caught.value.message == "asked to fail"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_unknown_model_lists_those_there(echo: Endpoint, protocol: str) -> None:
    with pytest.raises(RequestError, match="no model 'nope'") as caught:
        generate(spec("x", protocol, model="nope"), echo)
    assert "text_plain" in str(caught.value.hint)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_core_model_needs_a_tokenizer_for_text(echo: Endpoint, protocol: str) -> None:
    with pytest.raises(UsageError, match="takes token ids"):
        generate(spec("x", protocol, model="tensorrt_llm"), echo)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_timeout_is_a_refused_request(echo: Endpoint, protocol: str) -> None:
    with pytest.raises(RequestError, match="No answer from"):
        generate(spec("forever", protocol, model="text_plain", timeout=0.5), echo)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_unreachable_server_is_reported(protocol: str) -> None:
    with pytest.raises(ServerUnreachableError, match="No Triton server answers"):
        generate(spec("x", protocol, model="m"), Endpoint(http_port=1, grpc_port=1))


def test_several_candidates_must_be_named(echo: Endpoint) -> None:
    with pytest.raises(UsageError, match="--model"):
        generate(spec("x"), Endpoint(grpc_port=echo.grpc_port))


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_command_prints_the_answer_alone(echo: Endpoint, capsys: pytest.CaptureFixture[str], stream: list[str]) -> None:
    assert run(["query", "hello there", "--model", "echo", *stream, *address(echo)]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("Echo: hello there\n", "")


def test_command_prints_times_on_stderr(echo: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "hello", "-v", "--model", "echo", *address(echo)]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Echo: hello\n"
    assert "echo: TTFT" in captured.err
    assert "latency" in captured.err


def test_command_prints_json(echo: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "hi", "--json", "--stream", "--model", "echo", "--request-id", "r", *address(echo)]) == 0
    envelope = json.loads(capsys.readouterr().out)
    assert envelope["command"] == "query"
    assert (envelope["result"]["text"], envelope["result"]["request_id"]) == ("Echo: hi", "r")


def test_command_reports_a_model_that_does_not_stream(echo: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "hi", "--stream", "--model", "text_plain", *address(echo, "http")]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Echo: hi\n"
    assert "does not stream" in captured.err


def test_dry_run_sends_no_request(echo: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "fail", "--dry-run", "--model", "echo", "--top-k", "2", *address(echo)]) == 0
    body = json.loads(capsys.readouterr().out)["result"]
    assert (body["text_input"], body["top_k"], body["max_tokens"]) == ("fail", 2, 256)


def test_recorded_server_is_the_default(
    echo: Endpoint, echo_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRTSERVE_HOME", str(echo_folder / "home"))
    assert run(["query", "hi"]) == run(["query", "hi", "--server", "echo", "--protocol", "http"]) == 0
    # Its address means the same server, whose alias is known.
    assert run(["query", "hi", *address(echo)]) == run(["query", "hi", *address(echo, "http")]) == 0
    assert capsys.readouterr().out == "Echo: hi\n" * 4


def test_no_server_running(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "x"]) == 33
    assert "trtserve start" in capsys.readouterr().err


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "trtserve", "query", *arguments]


def test_prompt_from_stdin(echo: Endpoint) -> None:
    command = _command("--model", "echo", *address(echo))
    result = subprocess.run(command, input="from a pipe\n", capture_output=True, text=True, check=True, timeout=30)
    assert result.stdout == "Echo: from a pipe\n"


def _wait_for(trace: Path, *lines: str) -> None:
    wait_until(lambda: trace.exists() and set(lines).issubset(trace.read_text().splitlines()))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_interrupt_stops_the_request(echo: Endpoint, echo_folder: Path, protocol: str) -> None:
    request_id = f"interrupted-{protocol}-{time.time_ns()}"  # another one if the test runs again
    command = _command("forever", "--stream", "--model", "echo", "--request-id", request_id, *address(echo, protocol))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.read(2) == "la"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    # The call itself was cancelled, and the core model got a stop request for the id.
    _wait_for(echo_folder / "trace", f"cancelled {request_id}", f"stop {request_id}")


def test_interrupt_of_a_unary_call(echo: Endpoint, echo_folder: Path) -> None:
    number = f"unary-{time.time_ns()}"  # another one if the test runs again
    command = _command("forever", "--model", "text_plain", "--request-id", number, *address(echo))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _wait_for(echo_folder / "trace", f"began {number}")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    _wait_for(echo_folder / "trace", f"cancelled {number}", f"stop {number}")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("model", ["echo", "text_plain"])
def test_time_limit_by_cancelling_the_call(
    echo: Endpoint, echo_folder: Path, protocol: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    number = f"cut-{protocol}-{model}"
    ending = ["--stop-after-ms", "1000", "--stop-via-request-cancel", "--request-id", number]
    assert run(["query", "forever", "--stream", "--model", model, *ending, *address(echo, protocol)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("la la") or model == "text_plain"
    assert "Stopped by --stop-after-ms." in captured.err
    if (protocol, model) != ("http", "text_plain"):  # Triton does not look at the connection of a plain call
        _wait_for(echo_folder / "trace", f"cancelled {number}")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_time_limit_by_a_stop_request(
    echo: Endpoint, echo_folder: Path, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--input-tokens-csv", "1,2,3", "--model", "core_slow", "--max-tokens", "1000", "--stream", "--json"]
    ending = ["--stop-after-ms", "300", "--request-id", f"stopped-{protocol}"]
    assert run(["query", *asked, *ending, *address(echo, protocol)]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["stopped"]
    assert 0 < len(result["sequences"][0]["token_ids"]) < 1000
    _wait_for(echo_folder / "trace", f"stop stopped-{protocol}", f"ended stopped-{protocol}")


def test_answer_before_the_time_limit_is_whole(echo: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "hi", "--model", "echo", "--stop-after-ms", "60000", "--json", *address(echo)]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["text"], result["stopped"]) == ("Echo: hi", False)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_prompts_of_a_file_are_requests_of_their_own(
    echo: Endpoint, protocol: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text("one\ntwo\n")
    asked = ["--input-file", str(tmp_path / "prompts"), "--model", "echo", "--request-id", "r"]
    assert run(["query", *asked, *address(echo, protocol)]) == 0
    assert capsys.readouterr().out == "prompt 0: Echo: one\nprompt 1: Echo: two\n"
    assert run(["query", *asked, "--json", *address(echo, protocol)]) == 0
    answers = json.loads(capsys.readouterr().out)["result"]["answers"]
    assert [(each["request_id"], each["sequences"][0]["prompt"]) for each in answers] == [("r", 0), ("r-1", 1)]


def test_answers_are_lines_of_a_file_and_are_not_asked_for_again(
    echo: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text("one\ntwo\nthree\n")
    out = tmp_path / "answers.jsonl"
    asked = ["--input-file", str(tmp_path / "prompts"), "--output-file", str(out), "--model", "echo"]
    assert run(["query", *asked, *address(echo)]) == 0
    whole = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(whole[1] + whole[2][:9])  # an interruption cuts the last line
    assert run(["query", *asked, *address(echo)]) == 0
    assert "2 answers, 1 was there." in capsys.readouterr().err
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(each["prompt"], each["input"], each["text"]) for each in found] == [
        (1, "two", "Echo: two"),
        (0, "one", "Echo: one"),
        (2, "three", "Echo: three"),
    ]
    assert [each["sequences"][0]["prompt"] for each in found] == [1, 0, 2]
    (tmp_path / "prompts").write_text("one\n2\n")
    assert run(["query", *asked, *address(echo)]) == 2
    assert "has answers to other prompts" in capsys.readouterr().err


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_any_input_by_its_name(echo: Endpoint, protocol: str, capsys: pytest.CaptureFixture[str]) -> None:
    further = ["--input", "top_k=3", "--input", 'stop_words=["a", "b, c"]', "--input", "seed=18446744073709551615"]
    assert run(["query", "inputs", "--model", "echo", *further, *address(echo, protocol)]) == 0
    sent = json.loads(capsys.readouterr().out)
    assert (sent["top_k"], sent["stop_words"], sent["seed"]) == ([3], ["a", "b, c"], [2**64 - 1])


def test_ids_in_and_ids_out(echo: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["query", "--input-tokens-csv", "7,8", "--model", "tensorrt_llm", "--max-tokens", "5", *address(echo)]
    assert run([*asked, "--stream"]) == 0
    assert capsys.readouterr().out == "7, 8, 7, 8, 7\n"


def test_only_requested_outputs_come(echo: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["query", "hi", "--model", "echo", "--requested-outputs", "text_output"]
    assert run([*asked, *address(echo)]) == 0
    assert run([*asked, *address(echo, "http")]) == 2
    assert "--protocol grpc" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["none", "deflate", "gzip"])
def test_calls_may_be_compressed(echo: Endpoint, algorithm: str) -> None:
    assert generate(spec("hi", model="echo", compression=algorithm), echo).text == "Echo: hi"


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A server whose gRPC port requires certificates of both sides."""
    flags = ["--grpc-use-ssl=true", "--grpc-use-ssl-mutual=true"]
    made = certificates()
    files = {"server-cert": made.server, "server-key": made.server_key, "root-cert": made.root}
    flags += [f"--grpc-{name}={file}" for name, file in files.items()]
    with running_echo_server(tmp_path_factory.mktemp("tls"), *flags) as endpoint:
        yield endpoint


def test_grpc_over_tls(encrypted: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["query", "hi", "--model", "echo", "-u", encrypted.grpc.replace("127.0.0.1", "localhost")]
    made = certificates()
    trust, own = ["-r", str(made.root)], ["-p", str(made.client_key), "-x", str(made.client)]
    assert run([*asked, "-s", *trust, *own]) == 0
    assert capsys.readouterr().out == "Echo: hi\n"
    for wrong, words in (
        ([], "--ssl"),
        (["-s", *trust], "--private-key"),
        (["-s", "-r", str(made.client), *own], "not trusted"),
    ):
        assert run([*asked, *wrong, "--timeout", "20"]) == 40
        assert words in capsys.readouterr().err
