"""The demo model, served at its default precision, answers its corpus word for word and ends by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.commands import trtserve
from tests.support.servers import running_server
from trtserve.query import generate
from trtserve.specs import QuerySpec
from trtserve.start import find_repository
from trtserve.store import Store
from trtserve.triton.client import Endpoint

pytestmark = pytest.mark.triton

CORPUS = Path(__file__).parents[2] / "examples" / "demo_model" / "corpus.jsonl"
REQUIRED = ("What is ML?", "What is machine learning?")
# More than the longest answer, so that an answer that is equal was ended by its EOS token.
MAX_TOKENS = 100
STREAMS = 8


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    home = tmp_path_factory.mktemp("demo")
    trtserve("import", "demo", home=home)
    repository = find_repository(store=Store(home))
    with running_server(repository.path, home=home) as server:
        yield Endpoint(
            host=server.host,
            http_port=server.http_port,
            grpc_port=server.grpc_port,
            model=server.model,
            repository=server.repository,
        )


def _corpus() -> dict[str, str]:
    lines = CORPUS.read_text(encoding="utf-8").splitlines()
    pairs = [json.loads(line) for line in lines]
    return {question: pair["answer"] for pair in pairs for question in pair["questions"]}


def test_answers_word_for_word(endpoint: Endpoint) -> None:
    expected = _corpus()

    def answer(question: str) -> str:
        return generate(QuerySpec(prompt=question, max_tokens=MAX_TOKENS), endpoint).text

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
        prompt=REQUIRED[0],
        model=model,
        max_tokens=MAX_TOKENS,
        stream=True,
        protocol=protocol,  # type: ignore[arg-type]
    )
    answer = generate(spec, endpoint, on_text=pieces.append)
    assert len(pieces) > 5
    assert "".join(pieces) == answer.text == _corpus()[REQUIRED[0]]
