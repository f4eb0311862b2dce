"""The demo model at its default precision answers its corpus word for word and ends on its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.commands import trtserve
from tests.support.servers import running_server
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
