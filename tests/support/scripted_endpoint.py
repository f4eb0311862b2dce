"""The OpenAI endpoint in front of a scripted engine: its requests, and what comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.support.scripted_triton import NAME, ScriptedTriton
from tests.support.tiny_models import write_tiny_model
from trtserve.gateway.openai.answering import Measures
from trtserve.gateway.openai.router import openai_router

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def write_chat_model(folder: Path) -> Path:
    """Fill `folder` with a tiny model that has a chat template."""
    write_tiny_model(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder


@contextmanager
def endpoint_of(triton: ScriptedTriton, **options: Any) -> Iterator[TestClient]:
    """Yield a client of the endpoint; `options` are those of its router."""
    app = FastAPI()
    app.include_router(openai_router(triton, options.pop("measures", Measures()), **options))
    with TestClient(app) as client:
        yield client


def complete(client: TestClient, **body: Any) -> Any:
    return client.post("/v1/completions", json={"model": NAME, "prompt": "Hi", **body})


def chat(client: TestClient, content: Any = "Hi", **body: Any) -> Any:
    messages = body.pop("messages", [{"role": "user", "content": content}])
    return client.post("/v1/chat/completions", json={"model": NAME, "messages": messages, **body})


def respond(client: TestClient, content: Any = "Hi", **body: Any) -> Any:
    return client.post("/v1/responses", json={"model": NAME, "input": content, **body})


def send_message(client: TestClient, content: Any = "Hi", **body: Any) -> Any:
    messages = body.pop("messages", [{"role": "user", "content": content}])
    asked = {"model": NAME, "messages": messages, "max_tokens": 100, **body}
    return client.post("/v1/messages", json=asked)


def named_events(response: Any) -> list[dict[str, Any]]:
    """Events whose names are the types in their data."""
    found = []
    for each in response.text.strip().split("\n\n"):
        name, data = each.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name.removeprefix("event: ") == content["type"]
        found.append(content)
    return found


def events(response: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def error(response: Any) -> tuple[int, str, str | None]:
    """Status, message and parameter of an error in OpenAI's shape."""
    content = response.json()["error"]
    assert content.keys() == {"message", "type", "param", "code"}
    return response.status_code, content["message"], content["param"]


async def post_to(app: FastAPI, path: str, body: bytes) -> tuple[int, bytes]:
    """Send one request straight to the application; return the status and the body of its answer."""
    sent: list[dict[str, Any]] = []
    waiting = asyncio.Event()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await waiting.wait()  # the client stays
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
    }
    await asyncio.wait_for(app(scope, receive, send), 30)  # type: ignore[arg-type]
    return int(sent[0]["status"]), b"".join(each.get("body", b"") for each in sent[1:])
