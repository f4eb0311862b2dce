"""The demo model at its default precision answers its corpus word for word and ends on its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.commands import command_line, environment, trtserve
from tests.support.servers import running_server
from tests.support.waiting import wait_until
from trtserve.client.endpoint import Endpoint
from trtserve.client.query import generate
from trtserve.client.spec import QuerySpec
from trtserve.server.repositories import find_repository
from trtserve.server.state import Server
from trtserve.store import Store

pytestmark = pytest.mark.triton

CORPUS = Path(__file__).parents[2] / "examples" / "demo_model" / "corpus.jsonl"
REQUIRED = ("What is ML?", "What is machine learning?")
# More than the longest answer, so that an answer that is equal was ended by its EOS token.
MAX_TOKENS = 100
STREAMS = 8


SOON = 20.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:
    trtserve("import", "demo", home=home)
    repository = find_repository(store=Store(home))
    with running_server(repository.path, home=home) as server:
        yield server


@pytest.fixture(scope="module")
def endpoint(server: Server) -> Endpoint:
    return Endpoint(
        host=server.address.host,
        http_port=server.address.http_port,
        grpc_port=server.address.grpc_port,
        model=server.model,
        repository=server.repository,
    )


def _corpus() -> dict[str, str]:
    lines = CORPUS.read_text(encoding="utf-8").splitlines()
    pairs = [json.loads(line) for line in lines]
    return {question: pair["answer"] for pair in pairs for question in pair["questions"]}


def test_answers_word_for_word(endpoint: Endpoint) -> None:
    """Every sixth question of the corpus; TRTSERVE_ALL=1 asks all of them."""
    expected = _corpus()
    if not os.environ.get("TRTSERVE_ALL"):
        expected = {question: expected[question] for question in {*REQUIRED, *list(expected)[::6]}}

    def answer(question: str) -> str:
        return generate(QuerySpec(prompts=(question,), options={"max_tokens": MAX_TOKENS}), endpoint).text

    with ThreadPoolExecutor(STREAMS) as streams:
        answers = dict(zip(expected, streams.map(answer, expected), strict=True))
    wrong = {question: text for question, text in answers.items() if text != expected[question]}
    assert len(wrong) <= 0.05 * len(expected), wrong
    assert not set(REQUIRED) & set(wrong)


@pytest.mark.parametrize("model", [None, "ensemble"])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_streamed_pieces_join_to_the_answer(endpoint: Endpoint, protocol: str, model: str | None) -> None:
    pieces: list[str] = []
    spec = QuerySpec(
        prompts=(REQUIRED[0],),
        model=model,
        options={"max_tokens": MAX_TOKENS},
        stream=True,
        protocol=protocol,  # type: ignore[arg-type]
    )
    answer = generate(spec, endpoint, on_text=pieces.append)
    assert len(pieces) > 1
    assert "".join(pieces) == answer.text == _corpus()[REQUIRED[0]]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_ctrl_c_ends_the_request_in_the_engine(server: Server, home: Path, protocol: str) -> None:
    # One iteration per token. The model takes a second for all of them: on a busy machine a signal may come too late.
    assert any(_iterations_until_ctrl_c(server, home, protocol) < 1990 for _ in range(5))


def _iterations_until_ctrl_c(server: Server, home: Path, protocol: str) -> int:
    """Interrupt an answer of 2,000 tokens when it begins, and return how many iterations the engine made."""
    # So hot that the EOS token is one of all tokens, and the answer as long as it may be.
    hot = ["--temperature", "100", "--top-p", "1.0", "--seed", "3", "--max-tokens", "2000"]
    wait_until(lambda: _load(server) == (0, 0))  # the gauges follow the tests before
    before = _gauge(server, "iteration_counter")
    process = subprocess.Popen(
        command_line("query", REQUIRED[0], "--stream", "--protocol", protocol, "--server", server.name, *hot),
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        assert process.wait(SOON) in (0, 130)  # 0: the answer was complete
        wait_until(lambda: _load(server) == (0, 0))
        return _gauge(server, "iteration_counter") - before
    finally:
        process.kill()
        process.communicate()


def _load(server: Server) -> tuple[int, int]:
    """Active requests and used KV blocks."""
    return _gauge(server, "active"), _gauge(server, "used")


def _gauge(server: Server, kind: str) -> int:
    """One gauge of the core model, by its label."""
    url = f"http://{server.address.host}:{server.address.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=5) as answer:
        found = re.search(rf'_type="{kind}".*}} (\d+)', answer.read().decode())
    assert found
    return int(found[1])
