"""Whatever a client sends to OpenAI's API, the answer is an answer or an error that blames the request."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
from collections import Counter
from pathlib import Path

import psutil
from fastapi import FastAPI

from tests.support.generated_bodies import BODIES
from tests.support.scripted_endpoint import post_to, write_chat_model
from tests.support.scripted_triton import NAME, ScriptedTriton
from trtserve.gateway.openai.answering import Measures
from trtserve.gateway.openai.router import openai_router

COUNT = int(os.environ.get("TRTSERVE_FUZZ", "400"))  # make fuzz asks for more, and for other ones
SEED = int(os.environ.get("TRTSERVE_FUZZ_SEED", "1"))
SETTLED = 20_000
"""Requests after which the caches are full."""


def _require_honest(path: str, status: int, answer: bytes) -> None:
    if answer.startswith(b"event: "):
        assert status == 200
        contents = [json.loads(each.partition(b"\ndata: ")[2]) for each in answer.strip().split(b"\n\n")]
        assert contents[-1]["type"] in ("message_stop", "response.completed", "response.incomplete", "response.failed")
    elif answer.startswith(b"data: "):
        assert status == 200
        assert answer.endswith(b"data: [DONE]\n\n")
        contents = [json.loads(line[6:]) for line in answer.split(b"\n\n")[:-2]]
    else:  # a stream of Ollama has a document in each line
        contents = [json.loads(line) for line in answer.splitlines()]
    assert contents
    for content in contents:
        if (error := content.get("error")) is not None:
            error = {"message": error} if path.startswith("/api/") else error
            assert error["message"]
            assert (content.get("type") == "error") == path.startswith("/v1/messages")
            assert "log says why" not in error["message"], error
            assert "is a bug" not in error["message"], error
        else:
            assert status == 200
    assert status in (200, 400, 404)


def test_any_openai_body_has_an_honest_answer(tmp_path: Path) -> None:
    triton, app = ScriptedTriton(write_chat_model(tmp_path)), FastAPI()
    app.include_router(openai_router(triton, Measures()))
    chance, statuses = random.Random(SEED), Counter[int]()
    memory: list[int] = []

    async def run() -> None:
        for number in range(COUNT):
            path = chance.choice(sorted(BODIES))
            body = BODIES[path](NAME, chance)
            triton.requests.clear()
            triton.stops.clear()
            try:
                status, answer = await post_to(app, path, body)
                _require_honest(path, status, answer)
            except BaseException as error:
                raise AssertionError(f"seed {SEED}, request {number}: {path} {body[:3000]!r}") from error
            statuses[status] += 1
            if number % SETTLED == SETTLED - 1:
                gc.collect()
                memory.append(psutil.Process().memory_info().rss)

    asyncio.run(run())
    assert statuses[200] > COUNT / 10
    assert statuses[400] > COUNT / 10
    if len(memory) > 1:
        print(f"{dict(statuses)}, memory in MiB: {[each >> 20 for each in memory]}")  # noqa: T201
        assert memory[-1] < 1.05 * memory[0] + 16 * 2**20
