"""The OpenAI endpoint in front of a scripted engine: what reaches the engine, and what the client gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support.scripted_triton import NAME, ScriptedTriton, refused
from tests.support.tiny_models import write_tiny_model
from tests.support.waiting import wait_until
from trtserve.door.openai.measures import Measures
from trtserve.door.openai.router import openai_router
from trtserve.door.refusals import RefusedError

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("openai") / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def triton(folder: Path) -> ScriptedTriton:
    return ScriptedTriton(folder)


@pytest.fixture
def client(triton: ScriptedTriton) -> Iterator[TestClient]:
    app = FastAPI()
    app.include_router(openai_router(triton, Measures()))
    with TestClient(app) as client:
        yield client


def complete(client: TestClient, **body: Any) -> Any:
    return client.post("/v1/completions", json={"model": NAME, "prompt": "Hi", **body})


def chat(client: TestClient, content: Any = "Hi", **body: Any) -> Any:
    messages = body.pop("messages", [{"role": "user", "content": content}])
    return client.post("/v1/chat/completions", json={"model": NAME, "messages": messages, **body})


def events(response: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def error(response: Any) -> tuple[int, str, str | None]:
    """Status, message and parameter of an error in OpenAI's shape."""
    content = response.json()["error"]
    assert content.keys() == {"message", "type", "param", "code"}
    return response.status_code, content["message"], content["param"]


def test_a_completion(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script = (" there, you",)
    answer = Completion.model_validate(complete(client).json(), strict=True)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (" there, you", "stop", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 11, 14)
    assert triton.requests[0]["request_output_len"] == [16]
    assert triton.requests[0]["streaming"] == [False]


def test_a_chat(client: TestClient, triton: ScriptedTriton) -> None:
    answer = ChatCompletion.model_validate(chat(client).json(), strict=True)
    assert (answer.choices[0].message.content, answer.choices[0].message.role) == ("Hello", "assistant")
    assert triton.files.decode(triton.requests[0]["input_ids"]) == "[user]Hi>"
    assert triton.requests[0]["request_output_len"] == [512 - len("[user]Hi>")]


def test_a_streamed_chat(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script = ("é–字 done",)
    response = chat(client, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = [ChatCompletionChunk.model_validate(each, strict=True) for each in events(response)]
    assert "".join(each.choices[0].delta.content or "" for each in chunks[:-1]) == "é–字 done"
    assert "\N{REPLACEMENT CHARACTER}" not in response.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [each.choices[0].finish_reason for each in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == len("é–字 done".encode())
    assert len({each.id for each in chunks}) == 1


def test_a_stream_without_usage_has_none(client: TestClient) -> None:
    assert all("usage" not in each for each in events(complete(client, stream=True)))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("stop", "text"), [("lo", "Hel"), (["x", "l"], "He"), ("zz", "Hello"), ("o!", "Hello")])
def test_a_stop_string_is_not_part_of_the_text(
    client: TestClient, triton: ScriptedTriton, stop: Any, text: str, stream: bool
) -> None:
    response = complete(client, stop=stop, stream=stream)
    if stream:
        assert "".join(each["choices"][0]["text"] for each in events(response)) == text
    else:
        assert response.json()["choices"][0]["text"] == text
    assert triton.requests[0]["stop_words_list"]


def test_a_stop_string_ends_the_request_in_the_engine(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script, triton.pause = ("Hello" * 40,), 0.002
    assert complete(client, stop="lo", stream=True).status_code == 200
    wait_until(lambda: len(triton.stops) >= 1)


def test_stop_ids_and_bias_reach_the_engine(client: TestClient, triton: ScriptedTriton) -> None:
    assert complete(client, stop_token_ids=[7, 9], logit_bias={"5": -100, "6": 2.5}).status_code == 200
    (sent,) = triton.requests
    assert sent["stop_words_list"] == [7, 9, 1, 2]
    assert (sent["embedding_bias"][5], sent["embedding_bias"][6], sum(sent["embedding_bias"])) == (-100, 2.5, -97.5)


def test_sampling_has_the_defaults_of_openai(client: TestClient, triton: ScriptedTriton) -> None:
    complete(client)
    complete(client)
    complete(client, temperature=0, seed=-1)
    first, second, greedy = triton.requests
    assert (first["temperature"], first["runtime_top_p"], first["runtime_top_k"]) == ([1.0], [1.0], [0])
    assert first["seed"] != second["seed"]
    assert greedy["runtime_top_k"] == [1]
    assert "temperature" not in greedy
    assert greedy["seed"] == [2**64 - 1]


def test_several_prompts_with_several_answers(client: TestClient, triton: ScriptedTriton) -> None:
    answer = complete(client, prompt=["a", "b"], n=2, seed=4, echo=True).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["choices"][0]["text"] == "aHello"
    assert [sent["seed"] for sent in triton.requests] == [[4], [5], [4], [5]]
    assert answer["usage"] == {"prompt_tokens": 2 + 2, "completion_tokens": 4 * 5, "total_tokens": 24}
    streamed = events(complete(client, prompt=["a", "b"], n=2, stream=True))
    texts = dict.fromkeys(range(4), "")
    for each in streamed:
        texts[each["choices"][0]["index"]] += each["choices"][0]["text"]
    assert list(texts.values()) == ["Hello"] * 4


def test_prompts_of_token_ids(client: TestClient, triton: ScriptedTriton) -> None:
    assert complete(client, prompt=[5, 6, 7]).json()["usage"]["prompt_tokens"] == 3
    assert complete(client, prompt=[[5, 6], [7]]).json()["usage"]["prompt_tokens"] == 3
    assert [sent["input_ids"] for sent in triton.requests] == [[5, 6, 7], [5, 6], [7]]


def test_the_best_of_several(client: TestClient, triton: ScriptedTriton) -> None:
    answer = complete(client, best_of=3, n=2).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 3 * 5
    assert all(sent["return_log_probs"] == [True] for sent in triton.requests)


@pytest.mark.parametrize("stream", [True, False])
def test_log_probs_of_a_completion(client: TestClient, stream: bool) -> None:
    response = complete(client, logprobs=2, stream=stream)
    choices = [each["choices"][0] for each in events(response)] if stream else response.json()["choices"]
    found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [token for each in found for token in each["tokens"]] == list("Hello")
    assert [offset for each in found for offset in each["text_offset"]] == [0, 1, 2, 3, 4]
    assert all(
        top.keys() >= {token} for each in found for token, top in zip(each["tokens"], each["top_logprobs"], strict=True)
    )
    assert all(len(top) == 2 for each in found for top in each["top_logprobs"])


def test_log_probs_of_a_chat(client: TestClient) -> None:
    answer = ChatCompletion.model_validate(chat(client, logprobs=True).json(), strict=True)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert [(each.token, each.logprob, each.bytes) for each in content[:1]] == [("H", -0.5, [72])]
    assert len(content) == 5


def test_guides(client: TestClient, triton: ScriptedTriton) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat(client, response_format={"type": "json_object"})
    chat(client, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    chat(client, guided_choice=["a.b", "c"])
    chat(client, guided_regex="@/etc/passwd")
    chat(client, response_format={"type": "text"}, guided_grammar="start: 'a'")
    kinds = [sent["guided_decoding_guide_type"] for sent in triton.requests]
    guides = [sent["guided_decoding_guide"][0] for sent in triton.requests]
    assert kinds == [["json_schema"], ["json_schema"], ["regex"], ["regex"], ["ebnf_grammar"]]
    assert json.loads(guides[0]) == {"type": "object"}
    assert json.loads(guides[1]) == schema
    assert guides[2:] == [r"a\.b|c", "@/etc/passwd", "start: 'a'"]


def test_tools_are_in_the_prompt_and_their_calls_in_the_answer(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script = ('Well. <tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>',)
    answer = ChatCompletion.model_validate(chat(client, tools=[WEATHER]).json(), strict=True)
    assert '"name": "weather"' in triton.files.decode(triton.requests[0]["input_ids"])
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Well. ")
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Ulm"})
    streamed = [ChatCompletionChunk.model_validate(each) for each in events(chat(client, tools=[WEATHER], stream=True))]
    deltas = [each.choices[0].delta for each in streamed]
    assert "".join(delta.content or "" for delta in deltas) == "Well. "
    assert [delta.tool_calls[0].index for delta in deltas if delta.tool_calls] == [0]
    assert streamed[-1].choices[0].finish_reason == "tool_calls"


def test_text_that_only_looks_like_a_call_stays_text(client: TestClient, triton: ScriptedTriton) -> None:
    for text in ("<tool_call>no json</tool_call>", '{"name": "other", "arguments": {}}', "a <tool"):
        triton.script = (text,)
        assert chat(client, tools=[WEATHER]).json()["choices"][0]["message"]["content"] == text
        streamed = events(chat(client, tools=[WEATHER], stream=True))
        assert "".join(each["choices"][0]["delta"].get("content") or "" for each in streamed) == text


def test_a_prescribed_tool_is_a_guide(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script = ('{"name": "weather", "arguments": {}}',)
    named = {"type": "function", "function": {"name": "weather"}}
    choice = chat(client, tools=[WEATHER], tool_choice=named).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["tool_calls"][0]["function"]["arguments"]) == ("stop", "{}")
    schema = json.loads(triton.requests[0]["guided_decoding_guide"][0])
    assert schema["properties"]["name"] == {"const": "weather"}
    choice = chat(client, tools=[WEATHER], tool_choice="required").json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)


def test_a_conversation_with_parts_and_earlier_calls(client: TestClient, triton: ScriptedTriton) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    assert chat(client, messages=messages).status_code == 200
    assert triton.files.decode(triton.requests[0]["input_ids"]) == "[system]S[user]ab[assistant][tool]rain>"


@pytest.mark.parametrize(
    ("body", "status", "words", "param"),
    [
        ({"model": "other"}, 404, "`other` does not exist", "model"),
        ({"temperatur": 1}, 400, "Unrecognized request argument supplied: temperatur", "temperatur"),
        ({"temperature": 3}, 400, "less than or equal to 2", "temperature"),
        ({"temperature": "hot"}, 400, "number", "temperature"),
        ({"n": 0}, 400, "greater than or equal to 1", "n"),
        ({"suffix": "x"}, 400, "does not fill gaps", "suffix"),
        ({"min_p": 0.1}, 400, "no such input", "min_p"),
        ({"prompt": ""}, 400, "must not be empty", None),
        ({"prompt": []}, 400, "must not be empty", None),
        ({"prompt": [1, "a"]}, 400, "", "prompt"),
        ({"best_of": 1, "n": 2}, 400, "best_of must be at least n", None),
        ({"prompt": ["a"] * 21, "n": 100}, 400, "must be at most 2048", None),
        ({"stop": ["a"] * 65}, 400, "at most 64 stop strings", "stop"),
        ({"best_of": 2, "stream": True}, 400, "best_of must equal n", None),
        ({"stop": ""}, 400, "must not be empty", "stop"),
        ({"logit_bias": {"cat": 1}}, 400, "not a token id", "logit_bias"),
        ({"logit_bias": {"99999": 1}}, 400, "the vocabulary has", "logit_bias"),
        ({"logit_bias": {"5": 101}}, 400, "from -100 to 100", "logit_bias"),
        ({"stream_options": {"include_usage": True}}, 400, "only allowed when stream is true", None),
        ({"guided_json": {}, "guided_regex": "a"}, 400, "only one of", None),
        ({"guided_choice": []}, 400, "at least 1 item", "guided_choice"),
        ({"echo": True, "logprobs": 1}, 400, "not available", None),
    ],
)
def test_a_wrong_completion(
    client: TestClient, body: dict[str, Any], status: int, words: str, param: str | None
) -> None:
    got = error(complete(client, **body))
    assert (got[0], got[2]) == (status, param)
    assert words in got[1]
    assert "None" not in got[1]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "at least 1 item"),
        ({"messages": [{"content": "x"}]}, "message 0 has no role"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "reads text only"),
        ({"content": 5}, "must be a text"),
        ({"top_logprobs": 3}, "needs logprobs"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "not among the tools"),
        ({"tools": [{"type": "web_search"}]}, "'function'"),
        ({"response_format": {"type": "json_schema"}}, "needs it"),
        ({"response_format": {"type": "xml"}}, "json_object"),
        ({"functions": []}, "replaced by tools"),
        ({"audio": {"voice": "x"}}, "text only"),
        ({"modalities": ["audio"]}, "'text'"),
    ],
)
def test_a_wrong_chat(client: TestClient, body: dict[str, Any], words: str) -> None:
    status, message, _ = error(chat(client, **body))
    assert status == 400
    assert words in message


def test_keys_of_openais_own_service_have_no_effect(client: TestClient) -> None:
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "reasoning_effort": "low"}
    nulls = {"stop": None, "tools": None, "functions": None, "seed": None, "n": None}
    assert chat(client, **ignored, **nulls, parallel_tool_calls=True).status_code == 200


def test_other_paths(client: TestClient) -> None:
    assert error(client.post("/v1/embeddings", json={"input": "x"}))[:2] == (
        400,
        "This server has no embeddings: its models generate text.",
    )
    assert error(client.get("/v1/files"))[:2] == (404, "Unknown request URL: GET /v1/files.")
    json_type = {"Content-Type": "application/json"}
    assert error(client.post("/v1/completions", content=b"{", headers=json_type))[1] == "The body is not valid JSON."
    assert "Content-Type" in error(client.post("/v1/completions", content=b"{}"))[1]
    assert "JSON object" in error(client.post("/v1/completions", json=[]))[1]
    assert error(client.post("/v1/completions", json={"model": NAME}))[1] == "Missing required parameter: 'prompt'."
    assert error(client.get("/v1/models/other"))[0] == 404


def test_models(client: TestClient) -> None:
    (only,) = client.get("/v1/models").json()["data"]
    assert Model.model_validate(only, strict=True).id == NAME
    assert client.get(f"/v1/models/{NAME}").json() == only


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("Prompt length (600) exceeds maximum input length (511)", 400),
        ("Maximum queue size is reached", 429),
        ("Stub process 'tensorrt_llm_0_0' is not healthy.", 503),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_errors_of_the_engine(client: TestClient, triton: ScriptedTriton, text: str, status: int, stream: bool) -> None:
    triton.script = (refused(text),)
    assert error(complete(client, stream=stream))[:2] == (status, text)


def test_an_error_within_a_stream_is_an_event(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script = ("He", refused("the engine failed"))
    found = events(complete(client, stream=True))
    assert "".join(each["choices"][0]["text"] for each in found[:-1]) == "He"
    assert found[-1]["error"]["message"] == "the engine failed"


def test_a_repository_that_does_not_stream(folder: Path) -> None:
    triton = ScriptedTriton(folder, decoupled=False)
    app = FastAPI()
    app.include_router(openai_router(triton, Measures()))
    with TestClient(app) as client:
        found = events(chat(client, stream=True))
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in found) == "Hello"
    assert triton.requests[0].get("streaming", [False]) == [False]


def test_a_model_that_takes_text(folder: Path) -> None:
    triton = ScriptedTriton(folder, text=True)
    app = FastAPI()
    app.include_router(openai_router(triton, Measures()))
    with TestClient(app) as client:
        answer = chat(client, stop="lo").json()
        assert answer["choices"][0]["message"]["content"] == "Hel"
        assert answer["usage"]["prompt_tokens"] == len("[user]Hi>") + 1
        assert error(complete(client, logit_bias={"5": 1}))[2] == "logit_bias"
    assert (triton.requests[0]["text_input"], triton.requests[0]["stop_words"]) == (["[user]Hi>"], ["lo"])


def test_an_api_key(triton: ScriptedTriton) -> None:
    app = FastAPI()
    app.include_router(openai_router(triton, Measures(), api_keys=["secret"]))
    with TestClient(app) as client:
        assert error(complete(client))[:2] == (401, "Incorrect API key provided.")
        client.headers["Authorization"] = "Bearer secret"
        assert complete(client).status_code == 200


def test_a_model_that_cannot_answer_is_refused(triton: ScriptedTriton) -> None:
    async def require(_: Request, model: str) -> None:
        raise RefusedError(503, f"a process of the model {model} has ended")

    app = FastAPI()
    app.include_router(openai_router(triton, Measures(), require=require))
    with TestClient(app) as client:
        assert error(complete(client, stream=True))[:2] == (503, "a process of the model tensorrt_llm has ended")
    assert not triton.requests


def test_improbable_tokens_have_a_number(client: TestClient, triton: ScriptedTriton) -> None:
    triton.lowest = float("-inf")
    response = chat(client, logprobs=True, top_logprobs=2)
    tops = response.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [top["logprob"] for top in tops] == [0.0, -9999.0]


def test_times_of_streams_are_measured(triton: ScriptedTriton) -> None:
    measures, app = Measures(), FastAPI()
    app.include_router(openai_router(triton, measures))
    with TestClient(app) as client:
        pieces = len(events(complete(client, stream=True)))
    page = measures.page().decode()
    assert "trtserve_openai_time_to_first_token_seconds_count 1.0" in page
    assert f"trtserve_openai_inter_token_seconds_count {pieces - 1}.0" in page
