"""Answers of embeddings, from vectors that no engine has made."""

from __future__ import annotations

import asyncio
import base64
import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from trtserve.client.tensors import Reply
from trtserve.errors import RequestError
from trtserve.gateway.openai import vectors
from trtserve.gateway.openai.answering import ClientGoneError
from trtserve.gateway.openai.router import Paths
from trtserve.gateway.openai.vectors import EmbeddingBody


@pytest.mark.parametrize("form", ["float", "base64"])
def test_an_answer_has_the_vector_of_each_input_in_its_order(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    async def ask(_backend: object, _served: object, asked: dict[str, Any]) -> Reply:
        count = len(asked["input"])
        await asyncio.sleep(0.01 / count)  # the last one is answered first
        outputs = {"text_output": np.array([f"[{count}, 0.5]"], object), "num_input_tokens": np.array([count])}
        return Reply(outputs=outputs)

    monkeypatch.setattr(vectors, "_ask", ask)
    served: Any = SimpleNamespace(model=SimpleNamespace(inputs={"embedding_request"}), require_room=lambda _: None)
    backend: Any = None
    body = EmbeddingBody.model_validate({"model": "m", "input": [[7], [7, 8], [7, 8, 9]], "encoding_format": form})
    answer = json.loads(bytes(asyncio.run(vectors.embeddings(backend, served, body)).body))
    found = [each.pop("embedding") for each in answer["data"]]
    if form == "base64":
        found = [np.frombuffer(base64.b64decode(each), "<f4").tolist() for each in found]
    assert found == [[1.0, 0.5], [2.0, 0.5], [3.0, 0.5]]
    assert answer == {
        "object": "list",
        "model": "m",
        "usage": {"prompt_tokens": 6, "total_tokens": 6},
        "data": [{"object": "embedding", "index": index} for index in range(3)],
    }


@pytest.mark.parametrize("error", [RequestError("the model has ended"), asyncio.CancelledError(), None], ids=str)
def test_what_was_not_sent_yet_stays_here_when_one_has_failed_or_the_client_has_gone(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    sent, ended = [], []

    async def ask(_backend: object, _served: object, asked: dict[str, Any]) -> Reply:
        sent.append(asked["input"])
        await asyncio.sleep(0.01)
        ended.append(asked["input"])
        if error is not None:
            raise error
        return Reply(outputs={"text_output": np.array(["[1]"], object), "num_input_tokens": np.array([1])})

    async def receive() -> dict[str, Any]:
        while error is not None or not sent:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def find(*_: object) -> tuple[Any, None]:
        return SimpleNamespace(model=SimpleNamespace(inputs={"embedding_request"}), require_room=lambda _: None), None

    monkeypatch.setattr(vectors, "_ask", ask)
    monkeypatch.setattr(vectors, "_AT_ONCE", 4)
    monkeypatch.setattr(Paths, "_find", find)
    body = EmbeddingBody.model_validate({"model": "m", "input": ["a"] * 100})
    paths = Paths(cast(Any, SimpleNamespace(repository=None)), cast(Any, None), None)
    with pytest.raises(ClientGoneError if error is None else type(error)):
        asyncio.run(paths.embeddings(body, cast(Any, SimpleNamespace(receive=receive))))
    assert len(sent) == len(ended) == 4
