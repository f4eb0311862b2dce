"""What the OpenAI endpoint refuses, in front of a scripted engine, and how it reports the engine's errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from inspect import isabstract
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request
from fastapi.testclient import TestClient
from pydantic import ValidationError

from tests.support.scripted_endpoint import WEATHER, chat, complete, endpoint_of, error, events, write_chat_model
from tests.support.scripted_triton import NAME, ScriptedTriton
from trtserve.client.endpoint import refused
from trtserve.gateway.asgi import RefusedError
from trtserve.gateway.openai import request
from trtserve.gateway.openai.bodies import Body
from trtserve.gateway.openai.errors import ApiError
from trtserve.gateway.openai.other_keys import NEUTRAL, NOT_SET, REFUSED, WITHOUT_EFFECT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("openai") / "model")


@pytest.mark.parametrize(
    ("body", "status", "words", "param"),
    [
        ({"model": "other"}, 404, "`other` does not exist", "model"),
        ({"temperatur": 1}, 400, "Unrecognized request argument supplied: temperatur", "temperatur"),
        ({"temperature": 3}, 400, "less than or equal to 2", "temperature"),
        ({"temperature": "hot"}, 400, "number", "temperature"),
        ({"repetition_penalty": 1e300}, 400, "less than or equal to 1000000000", "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, 400, "greater than or equal to 0.000000001", "repetition_penalty"),
        ({"n": 0}, 400, "greater than or equal to 1", "n"),
        ({"suffix": "x"}, 400, "does not fill gaps", "suffix"),
        ({"min_p": 1.1}, 400, "less than or equal to 1", "min_p"),
        ({"prompt": ""}, 400, "must not be empty", None),
        ({"prompt": []}, 400, "must not be empty", None),
        ({"prompt": [1, "a"]}, 400, "", "prompt"),
        ({"best_of": 1, "n": 2}, 400, "best_of must be at least n", None),
        ({"prompt": ["a"] * 21, "n": 100}, 400, "must be at most 2048", None),
        ({"stop": ["a"] * 65}, 400, "at most 64 stop strings", "stop"),
        ({"stop": ["b", "a" * 1025]}, 400, "has 1025 characters; at most 1024 are allowed", "stop"),
        ({"bad_words": [""]}, 400, "a bad word must not be empty", "bad_words"),
        ({"stop_token_ids": [*range(1025)]}, 400, "at most 1024 items", "stop_token_ids"),
        ({"logit_bias": {"1" * 5000: 1}}, 400, "not a token id", "logit_bias"),
        ({"logit_bias": {"²": 1}}, 400, "not a token id", "logit_bias"),
        ({"logit_bias": dict.fromkeys(map(str, range(4097)), 1)}, 400, "at most 4096 biases", "logit_bias"),
        ({"max_tokens": 0}, 400, "'max_tokens': 0 needs echo; Input should be greater than", "max_tokens"),
        ({"prompt": [5] * 3000}, 400, "3000 tokens, which exceeds the maximum input length", None),
        ({"prompt": "a" * 1_000_000}, 400, "1000000 characters, which exceeds the maximum input length", None),
        ({"prompt": [5] * 600_000}, 400, "more than 524288 values", None),
        ({"prompt": 'a,",' * 600_000}, 400, "2400000 characters, which exceeds the maximum input length", None),
        ({"metadata": {"a": [[]] * 70_000}}, 400, "more than 65536 objects, lists and keys", None),
        ({"logit_bias": dict.fromkeys(map(str, range(70_000)), 1)}, 400, "more than 65536 objects", None),
        ({"stream_options": dict.fromkeys(map(str, range(2000)), 1)}, 400, "2000 keys; at most 1024", "stream_options"),
        ({"prompt": 'a,{"b": [' * 200_000}, 400, "1800000 characters, which exceeds the maximum input length", None),
        ({"prompt": [5] * 500_000}, 400, "500000 tokens, which exceeds the maximum input length", None),
        ({"stop": ["a"] * 20_000}, 400, "at most 64 stop strings", "stop"),
        ({"guided_choice": ["a"] * 200_000}, 400, "at most 131072 choices", "guided_choice"),
        ({"prompt": ["a"] * 20_000 + [5]}, 400, "", "prompt"),
        ({"guided_regex": "a" * 200_000}, 400, "the guide has 200000 characters; at most 131072 are allowed", None),
        ({"guided_choice": ["a" * 50] * 4000}, 400, "the guide has 200000 characters; at most", None),
        ({"metadata": {"a": "b" * 50_000}, "temperatur": 1}, 400, "argument supplied: temperatur", "temperatur"),
        ({"guided_json": "[", "guided_whitespace_pattern": " "}, 400, "the schema is not JSON", None),
        ({"best_of": 2, "stream": True}, 400, "best_of must equal n", None),
        ({"stop": ""}, 400, "must not be empty", "stop"),
        ({"logit_bias": {"cat": 1}}, 400, "not a token id", "logit_bias"),
        ({"logit_bias": {"99999": 1}}, 400, "the vocabulary has", "logit_bias"),
        ({"logit_bias": {"5": 101}}, 400, "from -100 to 100", "logit_bias"),
        ({"stream_options": {"include_usage": True}}, 400, "only allowed when stream is true", None),
        ({"guided_json": {}, "guided_regex": "a"}, 400, "only one of", None),
        ({"guided_choice": []}, 400, "at least 1 item", "guided_choice"),
        ({"guided_choice": ["", ""]}, 400, "every choice is empty", "guided_choice"),
        ({"structured_outputs": {"choice": [""]}}, 400, "every choice is empty", "structured_outputs.choice"),
        ({"guided_regex": ""}, 400, "at least 1 character", "guided_regex"),
        ({"guided_grammar": ""}, 400, "at least 1 character", "guided_grammar"),
        ({"echo": True, "logprobs": 1, "stream": True}, 400, "cannot be streamed", None),
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
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "at least 1 character"),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "string"}}}]},
            'are an object, but this schema has the type "string"',
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "supplied: tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "auto"}}, "Invalid value for 'tool_choice': "),
        ({"response_format": {"type": "json_schema"}}, "needs it"),
        ({"response_format": {"type": "xml"}}, "json_object"),
        ({"response_format": {"type": "text", "schema": {}}}, "belongs to the type json_object"),
        ({"functions": [{"name": "f"}]}, "replaced by tools"),
        ({"max_tokens": 0}, "'max_tokens': Input should be greater than or equal to 1"),
        ({"max_tokens": -5}, "'max_tokens': Input should be greater than or equal to 1"),
        ({"audio": {"voice": "x"}}, "text only"),
        ({"modalities": ["audio"]}, "'text'"),
    ],
)
def test_a_wrong_chat(client: TestClient, body: dict[str, Any], words: str) -> None:
    status, message, _ = error(chat(client, **body))
    assert status == 400
    assert words in message


def test_log_probs_of_a_prompt_need_logits_of_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"echo": True, "logprobs": 0}
    triton = ScriptedTriton(folder)
    triton.returns_context = False
    with endpoint_of(triton) as client:
        assert "did not return the logits of the prompt" in error(complete(client, **asked))[1]
        monkeypatch.setattr(request, "_MOST_LOGITS", 1000)
        assert "allowed for" in error(complete(client, prompt=[5] * 500, **asked))[1]
    with endpoint_of(ScriptedTriton(folder, logits=False)) as client:
        status, text, param = error(complete(client, **asked))
        assert (status, param) == (400, "echo")
        assert "--gather-context-logits" in text
    with endpoint_of(ScriptedTriton(folder, text=True)) as client:
        assert "takes token ids" in error(complete(client, **asked))[1]


def test_top_log_probs_name_the_clients_field_and_what_to_build(folder: Path) -> None:
    with endpoint_of(ScriptedTriton(folder, logits=False)) as client:
        for ask, asked, field in (
            (chat, {"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
            (complete, {"logprobs": 2}, "logprobs"),
        ):
            status, text, param = error(ask(client, **asked))
            assert (status, param) == (400, field)
            assert text.startswith(f"{field} 2 needs the logits of the answer")
            assert "--gather-generation-logits" in text
        assert chat(client, logprobs=True).status_code == 200
        assert complete(client, logprobs=0).status_code == 200


def test_keys_of_openais_own_service_have_no_effect(client: TestClient) -> None:
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "reasoning_effort": "low"}
    nulls = {"stop": None, "tools": None, "functions": None, "seed": None, "n": None}
    assert chat(client, **ignored, **nulls, parallel_tool_calls=True).status_code == 200


def test_keys_that_ask_for_what_happens_anyway_are_taken(client: TestClient) -> None:
    own = {"best_of", "echo"}  # of completions
    for ask in (complete, chat):
        for number in range(2):
            neutral = {key: values[number % len(values)] for key, values in NEUTRAL.items() if key not in own}
            assert ask(client, **neutral).status_code == 200
        assert ask(client, **dict.fromkeys(WITHOUT_EFFECT, "anything")).status_code == 200
        assert ask(client, **{key: values[0] for key, values in NOT_SET.items()}).status_code == 200
        assert ask(client, response_format={"type": "text"}, stream_options={"include_usage": False}).status_code == 200
    assert chat(client, best_of=1, echo=False, logprobs=0, thinking={"type": "auto"}).status_code == 200
    assert complete(client, logprobs=False).json()["choices"][0]["logprobs"] is None
    assert chat(client, top_logprobs=0, logprobs=False).status_code == 200
    assert chat(client, max_tokens=16.0, n=1.0, top_k=5.0, seed=-0.0).status_code == 200  # languages without integers
    assert complete(client, stream=True, stream_options={"continuous_usage_stats": True}).status_code == 200


def test_ids_and_min_p_need_a_model_that_has_them(folder: Path) -> None:
    with endpoint_of(ScriptedTriton(folder, text=True)) as client:
        assert "takes token ids" in error(complete(client, return_token_ids=True))[1]
        assert "no such input" in error(chat(client, min_p=0.1))[1]


def test_keys_with_other_names_are_honoured(client: TestClient, triton: ScriptedTriton) -> None:
    complete(client, n_predict=7, repeat_penalty=1.5, min_new_tokens=2, regex="a+")
    (sent,) = triton.requests
    assert (sent["request_output_len"], sent["repetition_penalty"], sent["min_tokens"]) == ([7], [1.5], [2])
    assert sent["guided_decoding_guide"] == ["a+"]
    complete(client, response_format={"type": "json_object"})
    chat(client, grammar="root ::= 'a'", thinking={"type": "disabled"}, enable_thinking=True)
    kinds = [each["guided_decoding_guide_type"] for each in triton.requests[1:]]
    assert kinds == [["json_schema"], ["ebnf_grammar"]]
    assert "mean the same" in error(complete(client, n_predict=7, max_tokens=8))[1]


@pytest.mark.parametrize("key", [*NEUTRAL, *REFUSED])
def test_what_cannot_be_honoured_is_refused_by_name(client: TestClient, key: str) -> None:
    if key in ("best_of", "echo", "prompt_logprobs"):  # completions have them
        return
    for value in ({"no": "such value"}, 17, "17"):
        status, message, param = error(complete(client, **{key: value}))
        assert (status, param) == (400, key)
        assert message.startswith(f"{key} is not supported: ")


@pytest.mark.parametrize("place", ["model", "user", "prompt", "stop", "guided_regex", "messages", "metadata"])
def test_text_that_is_not_unicode_is_refused(client: TestClient, place: str) -> None:
    for text in (r"\ud800", r"a\udc00b", r"\ud800\u0041"):
        value = f'[{{"role": "user", "content": "{text}"}}]' if place == "messages" else f'"{text}"'
        body = '{"model": "%s", "prompt": "a", "%s": %s}' % (NAME, place, value)  # noqa: UP031 - braces are JSON's
        path = "chat/completions" if place == "messages" else "completions"
        answer = client.post(f"/v1/{path}", content=body.encode(), headers={"Content-Type": "application/json"})
        assert error(answer)[0] == 400
        assert "not valid JSON" in error(answer)[1]


def test_other_paths(client: TestClient) -> None:
    for path, given in (("embeddings", {"input": "x"}), ("rerank", {"query": "x", "documents": ["y"]})):
        status, message = error(client.post(f"/v1/{path}", json={"model": NAME, **given}))[:2]
        assert (status, "has no embeddings and ranks no documents" in message) == (400, True)
        assert "how-to/vllm-repositories" in message
    wrongs: list[dict[str, object]] = [
        {"input": []},
        {"input": [""]},
        {"input": "x", "dimensions": 0},
        {"input": ["x"] * 3000},
    ]
    for wrong in wrongs:
        assert error(client.post("/v1/embeddings", json={"model": NAME, **wrong}))[0] == 400
    assert error(client.get("/v1/files"))[:2] == (404, "Unknown request URL: GET /v1/files.")
    for method, path, allowed in (("GET", "/v1/chat/completions", "POST"), ("GET", "/tokenize", "POST")):
        answer = client.request(method, path)
        assert error(answer)[:2] == (405, f"{path} takes {allowed}, not {method}.")
        assert answer.headers["allow"] == allowed
    answer = client.put("/v1/responses/resp_1")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET")
    json_type = {"Content-Type": "application/json"}
    for body in (b"{", b'{"prompt": "\xff"}', b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"):
        refusal = error(client.post("/v1/completions", content=body, headers=json_type))
        assert (refusal[0], refusal[1].startswith("The body is not valid JSON")) == (400, True)
    for headers in ({}, {"Content-Type": "application/x-www-form-urlencoded"}):  # what Ollama's clients and curl send
        words = error(client.post("/v1/completions", headers=headers, content=b'{"model": "scripted"}'))[1]
        assert words == "Missing required parameter: 'prompt'."
    assert "JSON object" in error(client.post("/v1/completions", json=[]))[1]
    assert error(client.post("/v1/completions", json={"model": NAME}))[1] == "Missing required parameter: 'prompt'."
    assert error(client.get("/v1/models/other"))[0] == 404


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("Prompt length (600) exceeds maximum input length (511)", 400),
        ("Maximum queue size of 3 has been reached, please try again later", 429),
        ("Stub process 'tensorrt_llm_0_0' is not healthy.", 503),
        ("Request for unknown model: 'tensorrt_llm' is not found", 503),
        # What a request contains does not choose the status.
        ("The guide is invalid: Pointer '/queue' does not exist", 400),
        ("The guide is invalid: Pointer '/the server is not ready' does not exist", 400),
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


def test_an_api_key(triton: ScriptedTriton) -> None:
    with endpoint_of(triton, api_keys=["secret"]) as client:
        assert error(complete(client))[:2] == (401, "Incorrect API key provided.")
        client.headers["Authorization"] = "Bearer secret"
        assert complete(client).status_code == 200


def test_a_model_that_cannot_answer_is_refused(triton: ScriptedTriton) -> None:
    async def require(_: Request, model: str) -> None:
        raise RefusedError(503, f"a process of the model {model} has ended")

    with endpoint_of(triton, require=require) as client:
        assert error(complete(client, stream=True))[:2] == (503, "a process of the model tensorrt_llm has ended")
    assert not triton.requests


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (
            "text/plain",
            '{"model": "scripted"}',
            "The body must be sent with the header Content-Type: application/json.",
        ),
        ("application/json", "[1]", "The body is a JSON list; expected a JSON object."),
        ("application/json", '"x"', "The body is a JSON text; expected a JSON object."),
        ("application/json", "[]", "The body is a JSON list; expected a JSON object."),
        ("application/json", "0", "The body is no JSON object; expected a JSON object."),
        ("application/json", "", "The body is empty; expected a JSON object."),
    ],
)
def test_a_body_that_is_no_object(folder: Path, kind: str, body: str, words: str) -> None:
    with endpoint_of(ScriptedTriton(folder)) as client:
        answer = client.post("/v1/completions", content=body, headers={"Content-Type": kind})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == words


def test_an_error_can_name_half_a_character_of_a_file() -> None:
    body = ApiError("The tensor \ud800 has no place.").response().body
    assert json.loads(bytes(body))["error"]["message"] == r"The tensor \ud800 has no place."


def test_a_body_without_memory_is_asked_to_come_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: bytes) -> object:
        raise MemoryError

    monkeypatch.setattr("trtserve.gateway.openai.errors._readable", read)
    with endpoint_of(ScriptedTriton(folder)) as client:
        assert error(complete(client))[:2] == (503, "the gateway has no memory left for this request")


def _bodies(kind: type[Body] = Body) -> Iterator[type[Body]]:
    for each in kind.__subclasses__():
        yield each
        yield from _bodies(each)


_KINDS = sorted({each for each in _bodies() if not isabstract(each)}, key=attrgetter("__name__"))


@pytest.mark.parametrize("kind", _KINDS, ids=attrgetter("__name__"))
def test_a_value_with_many_faults_costs_as_much_as_the_first(kind: type[Body]) -> None:
    many: list[object] = [[wrong] * 2000 for wrong in ("a", 5, 1.5, True, None, [], {}, ["a"], {"a": 1})]
    many += [["a"] * 2000 + [5], [5] * 2000 + ["a"], [["a"] * 2000, [5]], {f"k{number}": 1 for number in range(2000)}]
    for name, field in kind.model_fields.items():
        for value in many:
            assert _faults(kind, {field.alias or name: value}) < 50, (name, str(value)[:50])


def _faults(kind: type[Body], body: dict[str, object]) -> int:
    try:
        kind.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    except ApiError:
        return 1
    return 0
