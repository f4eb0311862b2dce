"""The OpenAI endpoint on a real Triton server, asked by the clients that people use."""

from __future__ import annotations

import asyncio
import json
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tests.support.model_server import ModelServer, serving
from tests.support.openai_endpoint import openai_endpoint
from tests.support.text_requests import ENDLESS, MAX_SEQ_LEN, is_idle
from tests.support.waiting import wait_until
from trtserve.artifacts import Engine
from trtserve.host.ports import free_ports
from trtserve.process import find_sbin_program
from trtserve.query import QuerySpec, generate
from trtserve.repo import assemble_repository, plan_repository
from trtserve.specs import RepositorySpec
from trtserve.triton.client import Endpoint

pytestmark = pytest.mark.triton

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = ("What is machine learning?", "é–字", "x")
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def endpoint(features: ModelServer, features_root: Path) -> Endpoint:
    """The server for `trtserve query`."""
    address, repository = features.address, features_root / "repository"
    return Endpoint(http_port=address.http_port, grpc_port=address.grpc_port, model="tiny", repository=repository)


@pytest.fixture(scope="module")
def url(features: ModelServer, features_root: Path) -> Iterator[str]:
    with openai_endpoint(features, repository=features_root / "repository", ui=True) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def expected(endpoint: Endpoint, prompt: str, count: int = 24, **options: Any) -> tuple[str, int | None, str | None]:
    """Text without leading spaces, number of tokens and reason of `trtserve query` on the core model."""
    spec = QuerySpec(prompts=(prompt,), model="tensorrt_llm", options={"max_tokens": count, **options})
    answer = generate(spec, endpoint)
    return answer.text, answer.output_tokens, answer.sequences[0].finish_reason


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_answer_is_that_of_query(client: OpenAI, endpoint: Endpoint, prompt: str) -> None:
    text, tokens, reason = expected(endpoint, prompt)
    assert reason == "length"
    whole = client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0)
    assert whole.choices[0].text.lstrip(" ") == text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == tokens
    assert whole.choices[0].finish_reason == "length"
    stream = client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces).lstrip(" ") == text
    assert len(pieces) > 1
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": prompt}], max_tokens=24, temperature=0
    )
    assert chat.choices[0].message.content == text


def test_answers_have_the_types_of_the_client(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="tiny", prompt="Hi", logprobs=2)
    Completion.model_validate_json(raw.text, strict=True)
    raw_chat = client.chat.completions.with_raw_response.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=4, logprobs=True, top_logprobs=2
    )
    ChatCompletion.model_validate_json(raw_chat.text, strict=True)
    assert raw_chat.headers["x-request-id"]


def test_usage_is_what_the_engine_counts(client: OpenAI, features: ModelServer) -> None:
    def counted() -> list[float]:
        return [features.metric(f"nv_llm_{kind}_token_len_sum") for kind in ("input", "output")]

    def settled() -> list[float]:
        """The counts, once those of earlier tests have arrived."""
        counts, before = counted(), [-1.0]
        while counts != before:
            time.sleep(2.0)
            counts, before = counted(), counts
        return counts

    prompt, completion = settled()
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Count"}],
            max_tokens=9,
            n=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    usage = chunks[-1].usage
    assert usage is not None
    # The engine counts an answer just after its last token was sent.
    wait_until(lambda: counted() == [prompt + 3 * usage.prompt_tokens, completion + usage.completion_tokens])
    assert {chunk.choices[0].index for chunk in chunks[:-1]} == {0, 1, 2}


def test_asynchronous_streams(url: str, endpoint: Endpoint) -> None:
    async def ask(client: AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS * 3))

    texts = [text.lstrip(" ") for text in asyncio.run(ask_all())]
    assert texts == [expected(endpoint, prompt)[0] for prompt in PROMPTS] * 3


def test_stop_strings(client: OpenAI, endpoint: Endpoint) -> None:
    text, _, _ = expected(endpoint, PROMPTS[0])
    stop = text[6:8]
    for stream in (False, True):
        answer: Any = client.completions.create(
            model="tiny", prompt=PROMPTS[0], max_tokens=24, temperature=0, stop=stop, stream=stream
        )
        chunks = list(answer) if stream else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks).lstrip(" ") == text[: text.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_sampling_is_repeatable_with_a_seed(client: OpenAI) -> None:
    def ask(**options: Any) -> list[str]:
        answer = client.completions.create(model="tiny", prompt="Hi", max_tokens=12, n=2, **options)
        return [choice.text for choice in answer.choices]

    first = ask(seed=7)
    assert first[0] != first[1]
    assert ask(seed=7) == first
    assert ask() != ask()


def test_adapters_are_models(client: OpenAI, endpoint: Endpoint) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "left", "right"]
    text, _, _ = expected(endpoint, PROMPTS[0], lora="left")
    for _ in range(2):
        answer = client.completions.create(model="left", prompt=PROMPTS[0], max_tokens=24, temperature=0)
        assert answer.choices[0].text.lstrip(" ") == text
    assert text != expected(endpoint, PROMPTS[0])[0]


def test_an_answer_follows_a_schema(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Say:"}],
        max_tokens=200,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}},
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert value["kind"] in ("cat", "dog")
    assert 0 <= value["legs"] <= 9


def test_a_required_tool_is_called(client: OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "animal", "parameters": SCHEMA}}
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Say:"}],
        max_tokens=200,
        seed=1,
        tools=[tool],
        tool_choice="required",
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments)["kind"] in ("cat", "dog")


def test_log_probs_are_those_of_the_logits(client: OpenAI, endpoint: Endpoint) -> None:
    options = {"max_tokens": 4, "return_generation_logits": True}
    logits = generate(QuerySpec(prompts=(PROMPTS[0],), model="tensorrt_llm", options=options), endpoint).outputs[
        "generation_logits", 0, 0
    ][0, 0]
    expected = np.sort(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)), axis=-1)[:, ::-1][:, :3]
    for stream in (False, True):
        answer: Any = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": PROMPTS[0]}],
            max_tokens=4,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
            stream=stream,
        )
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        content = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
        got = [[top.logprob for top in token.top_logprobs] for token in content]
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
        assert [token.logprob for token in content] == [row[0] for row in got]
    alone = client.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=4, temperature=0, logprobs=0)
    assert alone.choices[0].logprobs is not None
    np.testing.assert_allclose(alone.choices[0].logprobs.token_logprobs or [], expected[:, 0], rtol=1e-3, atol=1e-3)


def test_errors_are_those_of_the_client(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="`other` does not exist"):
        client.completions.create(model="other", prompt="Hi")
    with pytest.raises(openai.BadRequestError, match="exceeds maximum input length") as error:
        client.completions.create(model="tiny", prompt="x" * MAX_SEQ_LEN)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="Unrecognized request argument"):
        client.completions.create(model="tiny", prompt="Hi", extra_body={"temperatur": 1})


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_client_that_goes_away_frees_the_engine(url: str, features: ModelServer, stream: bool, begun: bool) -> None:
    """Answers so many and so long that they take seconds."""
    before = features.metric("nv_llm_output_token_len_sum")
    body = {"model": "tiny", "prompt": ["go"] * 8, "max_tokens": ENDLESS, "stream": stream, "ignore_eos": True}

    async def leave() -> None:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asking = asyncio.create_task(client.post("/completions", body=body, cast_to=object, stream=stream))
            while begun and is_idle(features):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(leave())
    wait_until(lambda: is_idle(features))
    assert features.metric("nv_llm_output_token_len_sum") - before < 8 * ENDLESS


@pytest.fixture(scope="module")
def whole(features_root: Path, features_model: Path, features_engine: Engine) -> Iterator[str]:
    """The endpoint on the repository of an old release, which neither streams nor can leave the prompt out."""
    spec = RepositorySpec(name="tiny", release="0.12", streaming=False)
    repository = assemble_repository(
        plan_repository(features_engine, features_model, spec, out=features_root / "whole")
    )
    with (
        serving(repository.path, features_root / "whole-server") as server,
        openai_endpoint(server, repository=repository.path) as url,
    ):
        yield url


def test_a_release_repository_that_does_not_stream(whole: str, endpoint: Endpoint) -> None:
    with OpenAI(base_url=whole, api_key="none", max_retries=0) as client:
        for prompt in PROMPTS:
            text, tokens, _ = expected(endpoint, prompt)
            answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0)
            assert answer.choices[0].text.lstrip(" ") == text
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage is not None
            assert answer.usage.completion_tokens == tokens
        streamed = client.completions.create(
            model="tiny", prompt=PROMPTS[0], max_tokens=24, temperature=0, stream=True, n=2
        )
        texts = {0: "", 1: ""}
        for chunk in streamed:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert [text.lstrip(" ") for text in texts.values()] == [expected(endpoint, PROMPTS[0])[0]] * 2
        with pytest.raises(openai.BadRequestError, match="no guided decoding"):
            client.completions.create(model="tiny", prompt="Hi", extra_body={"guided_regex": "a"})


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
    """`trtserve door` prints its address, serves until Ctrl-C, and needs no repository."""
    address, (port,) = features.address, free_ports("127.0.0.1", 1)
    ports = ["--http-port", str(address.http_port), "--metrics-port", str(address.metrics_port), "--port", str(port)]
    command = [sys.executable, "-m", "trtserve", "door", "--url", f"{address.host}:{address.grpc_port}", *ports]
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


@pytest.mark.needs("clients")
def test_langchain(url: str, endpoint: Endpoint) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="tiny", base_url=url, api_key="none", temperature=0, max_tokens=24)
    text = expected(endpoint, PROMPTS[0])[0]
    assert model.invoke(PROMPTS[0]).content == text
    assert "".join(str(chunk.content) for chunk in model.stream(PROMPTS[0])) == text
    longer = model.model_copy(update={"max_tokens": 200, "temperature": 1, "seed": 1})
    structured = longer.with_structured_output({"title": "animal", **SCHEMA}, method="json_schema")
    found: Any = structured.invoke("Say:")
    assert found["kind"] in ("cat", "dog")


@pytest.mark.needs("clients")
def test_litellm(url: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise its import asks the internet for prices
    import litellm

    asked: dict[str, Any] = {"model": "openai/tiny", "api_base": url, "api_key": "none", "temperature": 0}
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
            executable_path=find_sbin_program("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"]
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
        page.get_by_text("tokens/s, first after").wait_for()
        page.evaluate(f"document.querySelector('#max_tokens').value = '{ENDLESS}'")
        for _ in range(10):  # an answer takes a second, in which a busy machine may not press Escape
            page.keyboard.type("Tell me a story")
            page.keyboard.press("Enter")
            wait_until(
                lambda: page.evaluate("[...document.querySelectorAll('.assistant p')].at(-1).textContent !== ''")
            )
            page.keyboard.press("Escape")
            wait_until(lambda: page.evaluate("!document.querySelector('#send').disabled"))
            if page.get_by_text("stopped").count():
                break
        assert page.get_by_text("stopped").count() == 1
        wait_until(lambda: page.evaluate("/ms/.test(document.querySelector('#first').textContent)"))
        wait_until(lambda: page.evaluate("/blocks/.test(document.querySelector('#kv').textContent)"))
        unlabelled = (
            "[...document.querySelectorAll('input, select, textarea')].filter(each => !each.labels.length).length"
        )
        assert page.evaluate(unlabelled) == 0
        assert page.get_by_role("log", name="Conversation").count() == 1
        browser.close()
    wait_until(lambda: is_idle(features))
    assert not [each for each in wrong if "chat/completions" not in each]
