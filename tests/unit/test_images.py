"""Images in conversations: where they may come from, and what the engine gets, whatever the API."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.scripted_endpoint import chat, endpoint_of, error, respond, send_message, write_chat_model
from tests.support.scripted_triton import NAME, ScriptedTriton
from trtserve.gateway.openai.errors import ApiError
from trtserve.gateway.openai.images import ImageSources

PNG = b"\x89PNG\r\n\x1a\n and so on"
GIF = b"GIF89a and so on"
TEXT = {"type": "text", "text": "Hi"}
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}>"
)


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(where: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": where}}


def load(*urls: str, **allowed: Any) -> tuple[bytes, ...]:
    return asyncio.run(ImageSources(**allowed).load(urls))


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
    assert "no PNG" in refused(url(b"<svg/>"))
    assert "not base64" in refused("data:image/png;base64,!!!!")
    assert "must have its data in base64" in refused("data:image/png,abc")
    assert "is no URL of an image" in refused("ftp://host/x.png")
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


def test_nothing_is_fetched_from_a_host_that_is_not_allowed() -> None:
    for where in ("http://example.org/a.png", "http://good.example@example.org/a.png", "http://good.example:81/a.png"):
        assert "--image-host" in refused(where, hosts=("good.example",)), where


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
