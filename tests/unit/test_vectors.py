"""Answers of embeddings, from vectors that no engine has made."""

from __future__ import annotations

import asyncio
import base64
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trtserve.client.tensors import Reply
from trtserve.gateway.openai import vectors
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
