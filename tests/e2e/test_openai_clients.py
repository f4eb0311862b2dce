"""The OpenAI endpoint in front of several repositories, asked by the clients that people use, and its page."""

from __future__ import annotations

import asyncio
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI

from tests.support.model_server import ModelServer, serving
from tests.support.needs import find_program
from tests.support.openai_endpoint import PROMPTS, SCHEMA, expected, openai_endpoint
from tests.support.stages import make_repository
from tests.support.text_requests import ENDLESS, is_idle
from tests.support.waiting import wait_until
from trtserve.artifacts import Engine
from trtserve.client.endpoint import Endpoint
from trtserve.client.query import generate
from trtserve.client.spec import QuerySpec
from trtserve.host.ports import free_ports
from trtserve.specs import RepositorySpec

pytestmark = pytest.mark.triton

EXAMPLES = Path(__file__).parents[2] / "examples"
# The oldest release can neither leave the prompt out of an answer that is not streamed nor say why an answer ended.
REPOSITORIES: dict[str, RepositorySpec | None] = {
    "default": None,
    "release": RepositorySpec(name="tiny", release="0.12"),
    "no-streaming": RepositorySpec(name="tiny", streaming=False),
}


@pytest.fixture(scope="module", params=REPOSITORIES)
def any_url(
    request: pytest.FixtureRequest,
    url: str,
    features_root: Path,
    features_model: Path,
    features_engine: Engine,
    logits_engine: Engine,
) -> Iterator[str]:
    """The endpoint on each of the repositories; the one that does not stream has an engine with logits of prompts."""
    spec = REPOSITORIES[request.param]
    if spec is None:
        yield url
        return
    out = features_root / f"openai-{request.param}"
    engine = features_engine if spec.release else logits_engine
    repository = make_repository(engine, features_model, spec, out=out)
    with (
        serving(repository.path, features_root / f"openai-{request.param}-server") as server,
        openai_endpoint(server, repository=repository.path) as url,
    ):
        yield url


@pytest.fixture
def any_client(any_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=any_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("prompt", PROMPTS)
def test_completions_of_any_repository(any_client: OpenAI, endpoint: Endpoint, prompt: str) -> None:
    text, tokens, _ = expected(endpoint, prompt)
    answer = any_client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0)
    assert answer.choices[0].text.lstrip(" ") == text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == tokens
    streamed = any_client.completions.create(
        model="tiny", prompt=prompt, max_tokens=24, temperature=0, stream=True, n=2
    )
    texts = {0: "", 1: ""}
    for chunk in streamed:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [each.lstrip(" ") for each in texts.values()] == [text] * 2


def test_chats_of_any_repository(any_client: OpenAI, endpoint: Endpoint) -> None:
    text, tokens, _ = expected(endpoint, PROMPTS[0])
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": PROMPTS[0]}]}
    asked |= {"max_completion_tokens": 24, "temperature": 0}
    answer = any_client.chat.completions.create(**asked)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "length")
    chunks = list(any_client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert answer.usage == chunks[-1].usage
    assert answer.usage.completion_tokens == tokens


def test_stop_strings_of_any_repository(any_client: OpenAI, endpoint: Endpoint) -> None:
    text, _, _ = expected(endpoint, PROMPTS[0])
    for stream in (False, True):
        answer: Any = any_client.completions.create(
            model="tiny", prompt=PROMPTS[0], max_tokens=24, temperature=0, stop=text[6:8], stream=stream
        )
        chunks = list(answer) if stream else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks).lstrip(" ") == text[: text.index(text[6:8])]
        assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("any_url", ["release"], indirect=True)
def test_a_release_without_guides_says_so(any_client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no guided decoding"):
        any_client.completions.create(model="tiny", prompt="Hi", extra_body={"guided_regex": "a"})


@pytest.mark.parametrize("any_url", ["no-streaming"], indirect=True)
def test_an_echoed_prompt_has_the_log_probs_of_an_answer(any_client: OpenAI, endpoint: Endpoint) -> None:
    prompt = list(range(40, 60))
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0, "logprobs": 2}
    first = any_client.completions.create(prompt=prompt, **asked).choices[0].logprobs
    assert first is not None
    spec = QuerySpec(token_ids=(tuple(prompt),), model="tensorrt_llm", options={"max_tokens": 8})
    tokens = generate(spec, endpoint).sequences[0].token_ids or []
    echoed = any_client.completions.create(prompt=[*prompt, *tokens], echo=True, **asked).choices[0].logprobs
    assert echoed is not None
    assert len(echoed.tokens or []) == len(prompt) + 8 + 8
    assert (echoed.token_logprobs or [])[0] is None
    part = slice(len(prompt), len(prompt) + 8)
    assert (echoed.tokens or [])[part] == first.tokens
    np.testing.assert_allclose((echoed.token_logprobs or [])[part], first.token_logprobs or [], rtol=1e-3, atol=1e-4)
    for one, other in zip((echoed.top_logprobs or [])[part], first.top_logprobs or [], strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


def test_without_a_tokenizer_the_text_model_is_asked(features: ModelServer, endpoint: Endpoint) -> None:
    with openai_endpoint(features) as url, OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for stream in (False, True):
            answer: Any = client.completions.create(
                model="tiny", prompt=PROMPTS[0], max_tokens=24, temperature=0, stream=stream
            )
            texts = [chunk.choices[0].text for chunk in answer] if stream else [answer.choices[0].text]
            assert "".join(texts).lstrip(" ") == expected(endpoint, PROMPTS[0])[0]
        with pytest.raises(openai.BadRequestError, match="--tokenizer"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])


def test_the_command(features: ModelServer, features_model: Path, endpoint: Endpoint) -> None:
    """`trtserve gateway` prints its address, serves until Ctrl-C, and needs no repository."""
    address, (port,) = features.address, free_ports("127.0.0.1", 1)
    ports = ["--http-port", str(address.http_port), "--metrics-port", str(address.metrics_port), "--port", str(port)]
    command = [sys.executable, "-m", "trtserve", "gateway", "--url", f"{address.host}:{address.grpc_port}", *ports]
    with subprocess.Popen(
        [*command, "--tokenizer", str(features_model)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with OpenAI(base_url=url, api_key="none") as client:
            wait_until(lambda: answers(client))
            answer = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": PROMPTS[0]}], max_tokens=24, temperature=0
            )
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert answer.choices[0].message.content == expected(endpoint, PROMPTS[0])[0]
    assert process.returncode == 130
    assert "Traceback" not in errors


def answers(client: OpenAI) -> bool:
    try:
        return bool(list(client.models.list()))
    except openai.APIConnectionError:
        return False


@pytest.mark.parametrize("name", ["openai_chat", "openai_asyncio", "openai_structured"])
def test_examples(url: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](url, "tiny")
    assert len(capsys.readouterr().out) > 20


def test_responses_of_any_repository(any_client: OpenAI, endpoint: Endpoint) -> None:
    text, tokens, _ = expected(endpoint, PROMPTS[0])
    asked: dict[str, Any] = {"model": "tiny", "input": PROMPTS[0], "max_output_tokens": 24, "temperature": 0}
    answer = any_client.responses.create(**asked)
    assert (answer.output_text, answer.status) == (text, "incomplete")
    assert answer.usage is not None
    assert answer.usage.output_tokens == tokens
    events = list(any_client.responses.create(**asked, previous_response_id=answer.id, stream=True))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert "".join(pieces) == last.response.output_text == text  # a model without a template sees the last message


@pytest.mark.needs("anthropic")
def test_anthropics_client(any_url: str, endpoint: Endpoint) -> None:
    import anthropic

    text, tokens, _ = expected(endpoint, PROMPTS[0])
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "extra_body": {"temperature": 0}}
    asked["messages"] = [{"role": "user", "content": PROMPTS[0]}]
    with anthropic.Anthropic(base_url=any_url.removesuffix("/v1"), api_key="none", max_retries=0) as client:
        answer = client.messages.create(**asked)
        assert [block.text for block in answer.content if block.type == "text"] == [text]
        assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", tokens)
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == text
            assert stream.get_final_message().usage == answer.usage
        counted = client.messages.count_tokens(model="tiny", messages=asked["messages"])
        assert counted.input_tokens == answer.usage.input_tokens
        assert next(iter(client.models.list())).id == "tiny"
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            client.messages.create(**{**asked, "model": "other"})


@pytest.mark.needs("anthropic")
def test_a_tool_of_anthropics_client(url: str) -> None:
    import anthropic

    tool: Any = {"name": "animal", "description": "Name an animal.", "input_schema": SCHEMA}
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "tools": [tool], "tool_choice": {"type": "any"}}
    asked["messages"] = [{"role": "user", "content": "Say:"}]
    with (
        anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0) as client,
        client.messages.stream(**asked) as stream,
    ):
        answer = stream.get_final_message()
    (call,) = answer.content
    assert call.type == "tool_use"
    assert answer.stop_reason == "tool_use"
    found: Any = call.input
    assert found["kind"] in ("cat", "dog")


@pytest.mark.needs("clients")
def test_langchain(any_url: str, endpoint: Endpoint) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="tiny", base_url=any_url, api_key="none", temperature=0, max_tokens=24)
    text = expected(endpoint, PROMPTS[0])[0]
    assert model.invoke(PROMPTS[0]).content == text
    assert "".join(str(chunk.content) for chunk in model.stream(PROMPTS[0])) == text
    answers = model.batch(list(PROMPTS))
    assert [answer.content for answer in answers] == [expected(endpoint, prompt)[0] for prompt in PROMPTS]


@pytest.mark.needs("clients")
def test_structured_answers_of_langchain(url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="tiny", base_url=url, api_key="none", temperature=1, max_tokens=200, seed=1)
    structured = model.with_structured_output({"title": "animal", **SCHEMA}, method="json_schema")
    found: Any = structured.invoke("Say:")
    assert found["kind"] in ("cat", "dog")


@pytest.fixture
def event_loop_of_the_thread() -> Iterator[None]:
    """The loop that litellm asks for, and would leave open if it made one."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.mark.needs("clients")
@pytest.mark.usefixtures("event_loop_of_the_thread")
def test_litellm(any_url: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise its import asks the internet for prices
    import litellm

    asked: dict[str, Any] = {"model": "openai/tiny", "api_base": any_url, "api_key": "none", "temperature": 0}
    asked |= {"messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 24}
    text = expected(endpoint, PROMPTS[0])[0]
    answer: Any = litellm.completion(**asked)
    assert answer.choices[0].message.content == text
    stream: Any = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


@pytest.mark.needs("chromium")
def test_the_page(url: str, features: ModelServer) -> None:
    """It sends, streams, stops, shows the figures, and fits a narrow screen; only the keyboard is used."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_program("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 380, "height": 720})
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("requestfailed", lambda request: wrong.append(request.url))
        page.goto(url.removesuffix("v1"))
        wait_until(lambda: page.evaluate("document.querySelector('#model').value === 'tiny'"))
        assert page.evaluate("document.documentElement.scrollWidth") == 380
        assert page.evaluate("document.activeElement.id") == "question"
        page.evaluate("document.querySelector('#temperature').value = '0'")
        page.evaluate("document.querySelector('#max_tokens').value = '5'")
        page.keyboard.type("Hi")
        page.keyboard.press("Enter")
        page.get_by_text("tokens/s, time to first token").wait_for()
        page.evaluate(f"document.querySelector('#max_tokens').value = '{ENDLESS}'")
        for _ in range(10):  # an answer takes a second, in which a busy machine may not press Escape
            page.keyboard.type("Tell me a story")
            page.keyboard.press("Enter")
            wait_until(
                lambda: page.evaluate("[...document.querySelectorAll('.assistant .words')].at(-1).textContent !== ''")
            )
            page.keyboard.press("Escape")
            wait_until(lambda: page.evaluate("!document.querySelector('#send').hidden"))
            if page.get_by_text("stopped").filter(visible=True).count():
                break
        assert page.get_by_text("stopped").filter(visible=True).count() == 1
        wait_until(lambda: page.evaluate("/ms/.test(document.querySelector('#first').textContent)"))
        wait_until(lambda: page.evaluate("/ of /.test(document.querySelector('#kv').textContent)"))
        unlabelled = (
            "[...document.querySelectorAll('input:not([aria-hidden]), select, textarea')]"
            ".filter(each => !each.labels.length).length"
        )
        assert page.evaluate(unlabelled) == 0
        assert page.get_by_role("log", name="Conversation").count() == 1
        browser.close()
    wait_until(lambda: is_idle(features))
    assert not [each for each in wrong if "chat/completions" not in each]
