"""Images in conversations: where they may come from, and what the engine gets, whatever the API."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.support.scripted_endpoint import chat, endpoint_of, error, respond, send_message, write_chat_model
from tests.support.scripted_triton import NAME, ScriptedTriton
from trtserve.gateway.admission import Exchange, Gate
from trtserve.gateway.openai.answering import Measures
from trtserve.gateway.openai.errors import ApiError
from trtserve.gateway.openai.images import ImageSources
from trtserve.gateway.openai.router import openai_router
from trtserve.gateway.settings import RequestLimits

PNG = b"\x89PNG\r\n\x1a\n and so on"
GIF = b"GIF89a and so on"
TEXT = {"type": "text", "text": "Hi"}
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}>"
)


reserved: list[int] = []


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(where: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": where}}


def load(*urls: str, **allowed: Any) -> tuple[bytes, ...]:
    return asyncio.run(ImageSources(**allowed).load(urls, reserved.append))


def refused(*urls: str, **allowed: Any) -> str:
    with pytest.raises(ApiError) as caught:
        load(*urls, **allowed)
    return str(caught.value.message)


def seeing(folder: Path, template: str) -> ScriptedTriton:
    """A model that reads images."""
    config = json.loads((write_chat_model(folder) / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    triton = ScriptedTriton(folder)
    triton._served = (replace(triton._served[0], reads_images=True),)
    return triton


@pytest.fixture
def triton(tmp_path: Path) -> ScriptedTriton:
    return seeing(tmp_path / "model", PARTS)


@pytest.fixture
def client(triton: ScriptedTriton) -> Iterator[TestClient]:
    with endpoint_of(triton) as client:
        yield client


def asked(triton: ScriptedTriton) -> tuple[str, list[bytes]]:
    """The prompt of the last request, and its images."""
    sent = triton.requests[-1]
    return triton.files.decode(sent["input_ids"]), list(sent.get("images", ()))


def test_data_urls_of_the_four_formats() -> None:
    webp = b"RIFF0000WEBP and so on"
    assert load(url(PNG), url(GIF, "image/gif"), url(webp), url(b"\xff\xd8\xff")) == (PNG, GIF, webp, b"\xff\xd8\xff")


def test_what_is_no_image_is_refused() -> None:
    assert "is not a PNG" in refused(url(b"<svg/>"))
    assert "not base64" in refused("data:image/png;base64,!!!!")
    assert "must have its data in base64" in refused("data:image/png,abc")
    assert "is not a URL of an image" in refused("ftp://host/x.png")
    assert "at most 64" in refused(*[url(PNG)] * 65)


def test_images_are_bounded_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("trtserve.gateway.openai.images._MOST_BYTES", 20)
    (tmp_path / "a.png").write_bytes(PNG * 2)
    assert "more than 0 MiB" in refused(url(PNG * 2))
    assert "more than 0 MiB" in refused(f"file://{tmp_path}/a.png", folder=tmp_path)
    monkeypatch.setattr("trtserve.gateway.openai.images._MOST_BYTES_TOGETHER", 30)
    assert "together" in refused(url(PNG), url(PNG))


def test_files_are_read_below_the_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a b.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    assert load(f"file://{folder}/a%20b.png", folder=folder) == (PNG,)
    for name in ("../secret.png", "link.png", "", "none.png", "%2e%2e/secret.png"):
        assert "not a file below the folder" in refused(f"file://{folder}/{name}", folder=folder), name
    assert "--image-folder" in refused(f"file://{folder}/a%20b.png")
    (folder / "loop.png").symlink_to("loop.png")
    assert refused(f"file://{folder}/loop.png", folder=folder).startswith("The image")


def test_nothing_is_fetched_from_a_host_that_is_not_allowed() -> None:
    for where in ("http://example.org/a.png", "http://good.example@example.org/a.png", "http://good.example:81/a.png"):
        assert "--image-host" in refused(where, hosts=("good.example",)), where


@contextlib.contextmanager
def host_that_sends(*pieces: bytes, pause: float = 0.0) -> Iterator[str]:
    """HOST:PORT of a host that answers each connection with these pieces."""
    stopped = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with contextlib.suppress(ConnectionError), server.accept()[0] as connection:
                        connection.recv(1 << 16)
                        for piece in pieces:
                            connection.sendall(piece)
                            stopped.wait(pause)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        stopped.set()
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_fetched_images_are_reserved_and_redirects_are_not_followed() -> None:
    with host_that_sends(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(PNG), PNG) as host:
        reserved.clear()
        assert load(f"http://{host}/a.png", f"http://{host}/b.png?c", hosts=(host,)) == (PNG, PNG)
        assert reserved == [len(PNG)] * 2
    with host_that_sends(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n") as host:
        assert "HTTP 302" in refused(f"http://{host}/a.png", hosts=(host,))
    assert "cannot be fetched" in refused(f"http://{host}/a.png", hosts=(host,))  # nobody listens there any more


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_a_host_that_drips_is_cut_off(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtserve.gateway.openai.images._SECONDS", 0.5)
    with host_that_sends(head, PNG, *[b"x"] * 2000, pause=0.02) as host:
        began = time.monotonic()
        assert "did not arrive within 0.5 s" in refused(f"http://{host}/a.png", hosts=(host,))
        assert time.monotonic() - began < 15  # of 40


def test_images_that_find_no_memory_are_refused(triton: ScriptedTriton) -> None:
    gate = Gate(RequestLimits(buffered_bytes=2 * len(PNG)))
    app = FastAPI()
    app.include_router(openai_router(triton, Measures()))

    async def reserving(scope: Any, receive: Any, send: Any) -> None:
        with gate.memory() as reserve:
            if scope["type"] == "http":
                task = asyncio.current_task()
                assert task is not None
                scope["state"] = {**scope.get("state", {}), "exchange": Exchange(task=task, reserve=reserve)}
            await app(scope, receive, send)

    with TestClient(reserving) as client:
        for _ in range(2):  # what the first one reserved is free again
            assert chat(client, [image(url(PNG)), TEXT, image(url(PNG))]).status_code == 200
        status, message, _ = error(chat(client, [image(url(PNG)), image(url(PNG)), image(url(GIF))]))
        assert (status, message) == (503, "too many large requests at the same time")


def test_every_api_hands_over_the_images(client: TestClient, triton: ScriptedTriton) -> None:
    assert chat(client, [image(url(PNG)), TEXT, image(url(GIF))]).status_code == 200
    assert asked(triton) == ("[user]<image>Hi<image>>", [PNG, GIF])
    parts = [{"type": "input_image", "image_url": url(PNG), "detail": "auto"}, {"type": "input_text", "text": "Hi"}]
    assert respond(client, [{"role": "user", "content": parts}]).status_code == 200
    assert asked(triton) == ("[user]<image>Hi>", [PNG])
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    assert send_message(client, [{"type": "image", "source": source}, TEXT]).status_code == 200
    assert asked(triton) == ("[user]<image>Hi>", [PNG])


def test_an_image_that_a_tool_returns(client: TestClient, triton: ScriptedTriton) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, {"type": "image", "source": source}]}
    messages = [
        {"role": "user", "content": "See"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    assert send_message(client, messages=messages).status_code == 200
    assert asked(triton) == ("[user]See[assistant][tool]Hi<image>>", [PNG])


def test_a_conversation_without_images_has_parts_too(client: TestClient, triton: ScriptedTriton) -> None:
    assert chat(client).status_code == 200
    assert asked(triton) == ("[user]Hi>", [])
    (listed,) = client.get("/v1/models").json()["data"]
    assert listed["input_modalities"] == ["text", "image"]


def test_a_template_that_knows_no_parts(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
    triton = seeing(tmp_path / "model", template)
    with endpoint_of(triton) as client:
        assert chat(client).status_code == 200
        assert asked(triton)[0] == "[user]Hi>"
        status, message, _ = error(chat(client, [image(url(PNG))]))
        assert (status, "no places for images" in message) == (400, True)


def test_a_model_without_eyes_refuses_by_name(tmp_path: Path) -> None:
    triton = ScriptedTriton(write_chat_model(tmp_path / "model"))
    with endpoint_of(triton) as client:
        status, message, _ = error(chat(client, [image(url(PNG)), TEXT]))
        assert (status, f"`{NAME}` reads text only" in message) == (400, True)
        assert client.get("/v1/models").json()["data"][0]["input_modalities"] == ["text"]
    assert not triton.requests
