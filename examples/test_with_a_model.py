"""Test your own code against a real model: `pytest examples/test_with_a_model.py`.

The first run imports the demo model; later ones reuse it. The server is stopped when the tests are over.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import trtserve


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Where a model answers, as OpenAI's clients and yours want to know it."""
    with trtserve.serve(trtserve.import_model("demo")) as running:
        yield running.name


def test_the_model_knows_what_it_is_asked(server: str) -> None:
    """Replace this by a call of your own code."""
    answer = trtserve.Client(server).ask("What is ML?", max_tokens=40)
    assert "learning" in answer.text
    assert answer.sequences[0].finish_reason in ("length", "end_id")
