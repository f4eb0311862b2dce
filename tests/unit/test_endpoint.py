"""Which server the options of a command name, and a port that answers something else."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.http_pages import answering
from tests.support.server_records import proxy_record, server_record
from trtserve.cli import run
from trtserve.cli.bench_runs import _require_repository
from trtserve.cli.endpoint import Connection, find_endpoint, find_openai_endpoint
from trtserve.cli.start import _print_summary, _which
from trtserve.client.endpoint import unknown_model
from trtserve.client.tensors import STANDARD_MODELS
from trtserve.errors import UsageError
from trtserve.host.ports import free_ports
from trtserve.server.state import State, log_file, write_state
from trtserve.store import Store


def _record(name: str, port: int, state: State = "ready") -> None:
    """A server of this process, with its ports from `port` on."""
    proxy = proxy_record(port + 5)
    server = server_record(
        name,
        http_port=port,
        grpc_port=port + 1,
        metrics_port=port + 2,
        repository=Path("nowhere"),
        state=state,
        proxy=proxy,
    )
    write_state(server, Store())


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (
            ["query", "hi", "--url", "localhost:9000"],
            "9000 is the HTTP port of the server demo, whose gRPC port is 9001.",
            "Give --url localhost:9001; or ask over HTTP: --protocol http (query).",
        ),
        (
            ["query", "hi", "--protocol", "http", "--http-port", "9001"],
            "9001 is the gRPC port of the server demo, whose HTTP port is 9000.",
            "Give --url 127.0.0.1:9000; or ask over gRPC: --protocol grpc (query).",
        ),
        (
            ["query", "hi", "--grpc-port", "9002"],
            "9002 is the metrics port of the server demo, whose gRPC port is 9001.",
            "Give --url 127.0.0.1:9001.",
        ),
        (
            ["query", "hi", "--url", "127.0.0.1:9005"],
            "9005 is the HTTP port of the server demo, whose gRPC port is 9006.",
            "Give --url 127.0.0.1:9006; or ask over HTTP: --protocol http (query).",
        ),
        (
            ["metrics", "--url", "127.0.0.1:9000"],
            "9000 is the HTTP port of the server demo, whose metrics port is 9002.",
            "Give --url 127.0.0.1:9002.",
        ),
    ],
)
def test_another_port_of_a_known_server(
    arguments: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _record("demo", 9000)
    assert run(arguments) == 2
    assert capsys.readouterr().err.splitlines() == [f"error: {message}", f"next:  {hint}"]


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        *(
            (
                [*command, "--http-port", "9999"],
                "--http-port is given without --grpc-port, but the server is asked over gRPC.",
                "Give --grpc-port PORT, or ask over HTTP: --protocol http (query).",
            )
            for command in (["query", "hi"], ["chat"], ["bench"], ["bench", "--protocol", "http"])
        ),
        (
            ["query", "hi", "--protocol", "http", "--grpc-port", "9999"],
            "--grpc-port is given without --http-port, but these requests go over HTTP.",
            "Give --http-port PORT.",
        ),
    ],
)
def test_a_port_of_the_other_protocol_alone_is_refused(
    arguments: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert capsys.readouterr().err.splitlines()[-2:] == [f"error: {message}", f"next:  {hint}"]


def test_what_to_do_fits_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    home = os.environ["TRTSERVE_HOME"]

    def hint(*words: str) -> str:
        run(list(words))
        return capsys.readouterr().err.splitlines()[-1].removeprefix("next:  ")

    assert hint("stop") == f"There is nothing to stop (only the store of $TRTSERVE_HOME was searched: {home})."
    assert "--url HOST:PORT, or as --grpc-port or --http-port." in hint("query", "hi", "--port", "1")
    (port,) = free_ports("127.0.0.1", 1)
    assert "--url takes the gRPC port, with --protocol http" in hint("query", "hi", "--url", f"127.0.0.1:{port}")
    _record("demo", 9000)
    assert hint("query", "hi", "--server", "nosuch") == "Name a running server (demo)."
    log_file("demo", Store()).touch()
    assert hint("logs", "nosuch") == "There are logs of demo."


def test_the_hint_of_several_servers_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    _record("demo", 9000)
    _record("other", 9010)
    assert run(["metrics"]) == 34
    said = ["error: 2 servers are running: demo, other.", "next:  Name one of them: trtserve metrics NAME"]
    assert capsys.readouterr().err.splitlines() == said


def test_a_gateway_warns_if_nothing_answers_behind_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trtserve.gateway.processes.serve", lambda *_: 0)
    with answering(str) as there:
        for port, silent in ((1, True), (there, False)):
            (front,) = free_ports("127.0.0.1", 1)
            assert run(["gateway", "--url", f"127.0.0.1:{port}", "--port", str(front)]) == 0
            assert (f"Nothing answers at 127.0.0.1:{port} yet" in capsys.readouterr().err) is silent


def test_a_wrong_value_is_named_before_the_choice_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    _record("demo", 9000)
    _record("other", 9010)
    for words, said in (
        (["--slo", "ttft=fast"], "--slo ttft=fast cannot be read"),
        (["--html", "/proc/nowhere/r.html"], "r.html"),
    ):
        assert run(["bench", *words]) != 34
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "seconds"), [(None, 600), (30.0, 30), (900.0, 900)])
def test_a_port_for_many_models_is_waited_for_as_long_as_loading_takes_or_as_was_asked(
    asked: float | None, seconds: float
) -> None:
    write_state(server_record("many", kept={"one": "unloaded"}), Store())
    assert find_endpoint(Connection(connect_timeout=asked)).connect_timeout == seconds


def test_a_port_for_many_models_is_found_by_its_address_and_has_no_metrics_of_triton(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = {"one": "loaded", "two": "unloaded"}
    write_state(server_record("many", http_port=9000, grpc_port=0, metrics_port=0, model="", kept=kept), Store())
    asked = Connection(url="localhost:9000")
    for found in (
        find_endpoint(asked),
        find_endpoint(asked, "http"),
        find_openai_endpoint("http://localhost:9000/v1", "one"),
    ):
        assert found is not None
        assert (found.http_port, found.grpc_port) == (9000, 0)
    assert found is not None
    assert found.model == "one"
    with pytest.raises(UsageError, match="--diagnose asks the core model itself"):
        _require_repository(replace(found, repository=Path()))
    assert run(["metrics"]) == 2
    said = capsys.readouterr().err
    assert "many is a port for many models" in said
    assert "Name a loaded model (one), or read http://127.0.0.1:9000/metrics." in said


def test_query_warns_about_a_starting_server(capsys: pytest.CaptureFixture[str]) -> None:
    _record("demo", 1, "starting")  # nobody answers there
    assert run(["query", "hi", "--timeout", "5"]) == 40
    said = "warning: demo is still starting; `trtserve status` says when it runs."
    assert capsys.readouterr().err.splitlines()[0] == said


def test_logs_and_metrics_take_a_server_by_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    _record("demo", 9000)
    _record("other", 9100)
    log_file("other", Store()).write_text("hello\n")
    for words in (["other"], ["--server", "other"], ["other", "--server", "other"]):
        assert run(["logs", *words]) == 0
        assert capsys.readouterr().out == "hello\n"
    assert run(["logs", "demo", "--server", "other"]) == 2
    assert run(["metrics", "--server", "third"]) == 33
    assert "No server third is running" in capsys.readouterr().err


def test_logs_of_the_last_server_that_ended(capsys: pytest.CaptureFixture[str]) -> None:
    Store().servers.mkdir(parents=True)
    log_file("demo", Store()).write_text("the end\n")
    assert run(["logs"]) == 0
    assert capsys.readouterr().out == "the end\n"


def test_a_log_that_was_removed_under_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    _record("demo", 9000)
    assert run(["logs", "demo"]) == 33
    assert "/demo.log was removed while its server runs." in capsys.readouterr().err


@pytest.mark.parametrize("key", [True, False])
def test_a_server_with_a_key_says_that_clients_need_it(key: bool, capsys: pytest.CaptureFixture[str]) -> None:
    _print_summary(server_record(), page=False, key=key, detached=True)
    assert ("clients need it: export OPENAI_API_KEY" in capsys.readouterr().err) is key


def test_what_to_try_names_the_server_when_another_one_runs() -> None:
    _record("one", 8000)
    assert _which(server_record("one")) == ""
    _record("two", 8100)
    assert _which(server_record("one")) == " --server one"


@pytest.mark.parametrize(
    ("name", "models", "hint"),
    [
        ("gpt", ["demo", *STANDARD_MODELS], "Models there: demo."),
        ("ensembel", ["demo", *STANDARD_MODELS], "Did you mean ensemble? Models there: demo."),
        ("gpt", ["ensemble", "tensorrt_llm"], "Models there: ensemble, tensorrt_llm."),
        ("gpt", [], "Models there: none."),
    ],
)
def test_an_unknown_model_is_answered_with_those_that_people_ask(name: str, models: list[str], hint: str) -> None:
    assert unknown_model(name, "localhost:8001", models).hint == hint
