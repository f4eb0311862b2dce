"""The OpenAI endpoint on a real Triton server, asked by the clients that people use."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tests.support.model_server import ModelServer
from tests.support.openai_endpoint import PROMPTS, SCHEMA, expected
from tests.support.text_requests import ENDLESS, MAX_SEQ_LEN, is_idle
from tests.support.waiting import wait_until
from trtserve.client.endpoint import Endpoint
from trtserve.client.query import generate
from trtserve.client.spec import QuerySpec

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


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
            time.sleep(0.5)
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
    """Tokens that wait for a busy client come as one piece, but not in all nine streams."""

    async def ask(client: AsyncOpenAI, prompt: str) -> list[str]:
        stream = await client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0, stream=True)
        return [chunk.choices[0].text async for chunk in stream]

    async def ask_all() -> list[list[str]]:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS * 3))

    streams = asyncio.run(ask_all())
    assert max(map(len, streams)) > 1
    assert ["".join(pieces).lstrip(" ") for pieces in streams] == [
        expected(endpoint, prompt)[0] for prompt in PROMPTS
    ] * 3


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
