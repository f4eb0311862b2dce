"""The page of `start --ui`, without a browser: what it says, and what it may load."""

from __future__ import annotations

import re

from fastapi import FastAPI
from fastapi.testclient import TestClient

from trtserve.gateway.page import page_router


def page() -> tuple[str, str]:
    """The page, and its policy."""
    app = FastAPI()
    app.include_router(page_router())
    with TestClient(app) as client:
        answer = client.get("/")
    assert answer.status_code == 200
    return answer.text, answer.headers["content-security-policy"]


def test_fields_have_the_words_of_the_api() -> None:
    html, _ = page()
    labels = re.findall(r"<label[^>]*>([^<]+?)\s*<", html)
    assert {"Max tokens", "System message"} <= set(labels)


def test_a_system_message_goes_only_to_a_model_that_takes_one() -> None:
    html, _ = page()
    assert "?.system_messages === false" in html  # what /v1/models says of a model
    assert '$("system").disabled = refused;' in html
    assert "The model's chat template has no place for a system message." in html
    sent = next(line for line in html.splitlines() if 'role: "system"' in line)
    assert '!$("system").disabled' in sent


def test_nothing_that_a_model_says_becomes_markup_or_loads() -> None:
    html, policy = page()
    assert "innerHTML" not in html
    assert "document.write" not in html
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy
