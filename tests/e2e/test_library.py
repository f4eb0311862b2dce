"""`import trtserve`: the demo is imported, served for the length of a block, asked and traced; the examples."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import trtserve
from tests.support.commands import environment
from tests.support.trace_receiver import TraceReceiver, trace_receiver
from tests.support.waiting import wait_until
from trtserve.client.endpoint import Endpoint
from trtserve.client.metrics import REQUESTS
from trtserve.client.query import generate
from trtserve.client.spec import QuerySpec
from trtserve.errors import RequestError, ServerNotFoundError, ServerUnreachableError, UsageError
from trtserve.server.doctor.stub import write_probe_repository
from trtserve.server.state import Server, list_servers
from trtserve.server.status import read_metrics, remote_source
from trtserve.store import Store

pytestmark = pytest.mark.triton

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTION = "What is ML?"
REQUIRED = (QUESTION, "What is machine learning?")
# So hot that no answer ends before its limit.
ENDLESS: dict[str, Any] = {"max_tokens": 1500, "temperature": 100.0, "top_p": 1.0, "end_id": -1}
# More than the longest answer of the corpus, so that an answer that is equal was ended by its EOS token.
MAX_TOKENS = 100
SERVE = """
import sys, trtserve
with trtserve.serve(sys.argv[1]) as server:
    print(server.name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("library")


@pytest.fixture(scope="module")
def receiver() -> Iterator[TraceReceiver]:
    with trace_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def server(home: Path, receiver: TraceReceiver) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTSERVE_HOME", str(home))
        with trtserve.serve(trtserve.import_model("demo"), trace_to=receiver.url, ready_timeout=120) as server:
            yield server
        assert not list_servers(Store(home))


@pytest.fixture(autouse=True)
def same_store(server: Server, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSERVE_HOME", str(home))


def is_idle(server: Server) -> bool:
    (core,) = read_metrics(remote_source(server.address.host, server.address.metrics_port)).core
    return core.value(REQUESTS, "active") == 0


def test_a_client_finds_the_server_by_itself_by_name_and_by_address(server: Server) -> None:
    address = f"{server.address.host}:{server.address.grpc_port}"
    answers = [trtserve.Client(each).ask(QUESTION, max_tokens=20) for each in (None, server.name, address, server)]
    assert {answer.text for answer in answers} == {answers[0].text}
    assert answers[0].text.startswith("Machine learning")
    assert answers[0].output_tokens == 20


def test_a_stream_has_the_text_of_the_answer(server: Server) -> None:
    client = trtserve.Client(server)
    stream = client.stream(QUESTION, max_tokens=20)
    pieces = [next(stream), *stream]
    assert len(pieces) > 1
    assert "".join(pieces) == stream.answer.text == client.ask(QUESTION, max_tokens=20).text
    assert stream.answer.time_to_first_token is not None


def _corpus() -> dict[str, str]:
    lines = (EXAMPLES / "demo_model" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return {question: pair["answer"] for pair in map(json.loads, lines) for question in pair["questions"]}


def test_the_demo_answers_its_corpus_word_for_word(server: Server) -> None:
    """Every twelfth question; TRTSERVE_ALL=1 asks all of them."""
    expected = _corpus()
    if not os.environ.get("TRTSERVE_ALL"):
        expected = {question: expected[question] for question in {*REQUIRED, *list(expected)[::12]}}

    def answer(question: str) -> str:
        return trtserve.Client(server).ask(question, max_tokens=MAX_TOKENS).text

    with ThreadPoolExecutor(8) as streams:
        answers = dict(zip(expected, streams.map(answer, expected), strict=True))
    wrong = {question: text for question, text in answers.items() if text != expected[question]}
    assert len(wrong) <= 0.05 * len(expected), wrong
    assert not set(REQUIRED) & set(wrong)


@pytest.mark.parametrize("model", [None, "ensemble"])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_streamed_pieces_join_to_the_answer(server: Server, protocol: str, model: str | None) -> None:
    options: dict[str, Any] = {"options": {"max_tokens": MAX_TOKENS}, "stream": True, "protocol": protocol}
    endpoint = Endpoint(
        http_port=server.address.http_port,
        grpc_port=server.address.grpc_port,
        model=server.model,
        repository=server.repository,
    )
    pieces: list[str] = []
    answer = generate(QuerySpec(prompts=(QUESTION,), model=model, **options), endpoint, on_text=pieces.append)
    assert len(pieces) > 1
    assert "".join(pieces) == answer.text == _corpus()[QUESTION]


def test_a_closed_stream_ends_its_request(server: Server) -> None:
    with trtserve.Client(server).stream(QUESTION, **ENDLESS) as stream:
        next(stream)
    with pytest.raises(UsageError, match="closed before its end"):
        _ = stream.answer
    wait_until(lambda: is_idle(server))


def test_token_ids_go_to_the_core_model(server: Server) -> None:
    answer = trtserve.Client(server).ask([1, 40, 41], max_tokens=6, end_id=-1)
    assert answer.model == "tensorrt_llm"
    assert len(answer.sequences[0].token_ids or ()) == 6


def test_async_requests_share_a_connection(server: Server) -> None:
    async def ask() -> None:
        async with trtserve.AsyncClient(server) as client:
            one, other = await asyncio.gather(client.ask(QUESTION, max_tokens=20), client.ask("What is a GPU?"))
            assert one.text == trtserve.Client(server).ask(QUESTION, max_tokens=20).text
            assert other.text != one.text
            stream = client.stream(QUESTION, max_tokens=20)
            assert "".join([piece async for piece in stream]) == (await stream.answer()).text == one.text
            async with client.stream(QUESTION, **ENDLESS) as endless:
                await anext(endless)
            with pytest.raises(UsageError, match="closed before its end"):
                await endless.answer()
            with pytest.raises(RequestError):
                await client.ask("too long " * 5000)
            begun = asyncio.Event()

            async def read() -> None:
                async for _ in client.stream(QUESTION, **ENDLESS):
                    begun.set()

            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(asyncio.wait_for(ask(), timeout=240))
    wait_until(lambda: is_idle(server))


def test_errors_say_what_to_do(server: Server) -> None:
    client = trtserve.Client(server)
    with pytest.raises(UsageError, match="no option 'max_token'") as error:
        client.ask(QUESTION, max_token=3)
    assert error.value.hint == "Did you mean max_tokens?"
    with pytest.raises(UsageError, match="no adapter 'nobody'"):
        client.ask(QUESTION, lora="nobody")
    with pytest.raises(RequestError):
        client.ask("too long " * 5000)
    with pytest.raises(UsageError, match="prompt is empty"):
        client.ask(" ")
    with pytest.raises(ServerUnreachableError):
        trtserve.Client("127.0.0.1:9").ask(QUESTION)
    with pytest.raises(ServerNotFoundError, match="nobody"):
        trtserve.Client("nobody")
    with pytest.raises(UsageError, match="HOST:PORT"):
        trtserve.Client("http://127.0.0.1:8000")
    with pytest.raises(UsageError, match="no option 'quantise'") as error:
        trtserve.import_model("demo", quantise="int8")
    assert error.value.hint == "Did you mean quantize?"


def test_a_trace_of_the_ensemble_shows_all_its_models(server: Server, receiver: TraceReceiver) -> None:
    """It belongs to the trace of the client, whose id the request carries."""
    trace = secrets.token_hex(16)
    request = urllib.request.Request(
        f"{server.url}/v2/models/ensemble/generate",
        json.dumps({"text_input": QUESTION, "max_tokens": 4}).encode(),
        {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
    models = {"ensemble", "preprocessing", "tensorrt_llm", "postprocessing"}
    wait_until(lambda: receiver.names(trace) == {"InferRequest", "compute", *models})


@pytest.mark.parametrize("name", ["grpc_streaming", "asyncio_streams", "log_probs"])
def test_examples(server: Server, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](server.name)
    assert len(capsys.readouterr().out) > 40


def test_the_example_of_a_test(server: Server) -> None:
    """Its fixture is that of this file."""
    runpy.run_path(str(EXAMPLES / "test_with_a_model.py"))["test_the_model_knows_what_it_is_asked"](server.name)


def test_a_killed_program_leaves_no_server(tmp_path: Path) -> None:
    repository, home = write_probe_repository(tmp_path / "probe"), tmp_path / "home"
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, str(repository)],
        env=environment(home),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        name = program.stdout.readline().strip()
        assert [each.name for each in list_servers(Store(home))] == [name]
        program.kill()
    wait_until(lambda: not list_servers(Store(home)))
