"""OpenAI's responses, Anthropic's messages and vLLM's /tokenize in front of a scripted engine."""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.scripted_endpoint import (
    TEMPLATE,
    WEATHER,
    chat,
    endpoint_of,
    error,
    named_events,
    respond,
    send_message,
    write_chat_model,
)
from tests.support.scripted_triton import NAME, ScriptedTriton
from trtserve.client.endpoint import refused
from trtserve.gateway.openai.errors import ApiError
from trtserve.gateway.openai.responses import ResponseStore

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
TOOL = {"name": "weather", "input_schema": {"type": "object"}}
ANSWER = 'Hm.</think>Well. <tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that thinks, unless it is told not to."""
    folder = write_chat_model(tmp_path_factory.mktemp("apis") / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE + "{% if enable_thinking | default(true) %}<think>{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def prompts(triton: ScriptedTriton) -> list[str]:
    return [triton.files.decode(sent["input_ids"]) for sent in triton.requests]


def test_a_response(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script = (ANSWER,)
    found = Response.model_validate(respond(client, tools=[FUNCTION]).json())
    thought, message, call = found.output
    assert (thought.type, message.type, call.type) == ("reasoning", "message", "function_call")
    assert (found.status, found.output_text) == ("completed", "Well. ")
    assert thought.type == "reasoning"
    assert [each.text for each in thought.content or []] == ["Hm."]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Ulm"})
    assert found.usage is not None
    assert 0 < found.usage.output_tokens_details.reasoning_tokens < found.usage.output_tokens
    assert found.usage.input_tokens == len(triton.requests[0]["input_ids"])


def test_the_events_of_a_response_are_its_document(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script, triton.pause = (ANSWER,), 0.002  # pieces that are ready at the same time are sent as one
    found = named_events(respond(client, tools=[FUNCTION], stream=True))
    for each in found:
        EVENT.validate_python(each)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert [each["type"] for each in found[:2]] == ["response.created", "response.in_progress"]
    last = found[-1]
    assert last["type"] == "response.completed"
    items = last["response"]["output"]
    assert [each["item"] for each in found if each["type"] == "response.output_item.done"] == items
    for number, (kind, whole) in enumerate(
        (("reasoning_text", "Hm."), ("output_text", "Well. "), ("function_call_arguments", '{"city": "Ulm"}'))
    ):
        deltas = [each for each in found if each["type"] == f"response.{kind}.delta"]
        assert len(deltas) > 1
        assert "".join(each["delta"] for each in deltas) == whole
        assert {(each["output_index"], each["item_id"]) for each in deltas} == {(number, items[number]["id"])}


@pytest.mark.parametrize("pause", [0, 0.001])
def test_log_probabilities_of_a_response_are_those_of_its_text(
    client: TestClient, triton: ScriptedTriton, pause: float
) -> None:
    """Tokens of thoughts and calls come beside, in one piece or in many."""
    triton.script, triton.pause = (ANSWER,), pause
    asked: dict[str, Any] = {"tools": [FUNCTION], "include": ["message.output_text.logprobs"]}
    message = respond(client, **asked).json()["output"][1]
    (content,) = message["content"]
    assert "".join(each["token"] for each in content["logprobs"]).strip() == "Well."
    assert {each["logprob"] for each in content["logprobs"]} == {-0.5}
    streamed = named_events(respond(client, **asked, stream=True))
    for each in streamed:
        EVENT.validate_python(each)
    deltas = [each["logprobs"] for each in streamed if each["type"] == "response.output_text.delta"]
    (done,) = [each["logprobs"] for each in streamed if each["type"] == "response.output_text.done"]
    assert [token for tokens in deltas for token in tokens] == done == content["logprobs"]
    assert respond(client).json()["output"][1]["content"][0]["logprobs"] == []


def test_a_response_is_continued(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script = ('</think><tool_call>{"name": "weather", "arguments": {}}</tool_call>',)
    first = respond(client, "One", instructions="Be brief.", tools=[FUNCTION]).json()
    call = first["output"][0]
    triton.script = ("</think>Rain.",)
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    second = respond(client, [output], previous_response_id=first["id"], tools=[FUNCTION]).json()
    respond(client, "Two", previous_response_id=second["id"])
    assert "[system]Be brief.[user]One>" in prompts(triton)[0]
    assert prompts(triton)[1].endswith("[user]One[assistant][tool]rain><think>")
    assert prompts(triton)[2] == "[user]One[assistant][tool]rain[assistant]Rain.[user]Two><think>"
    assert client.get(f"/v1/responses/{second['id']}").json() == second
    assert client.delete(f"/v1/responses/{second['id']}").json()["deleted"]
    for status, _, _ in (
        error(respond(client, "Three", previous_response_id=second["id"])),
        error(client.get(f"/v1/responses/{second['id']}")),
    ):
        assert status == 404
    kept = respond(client, "Four", store=False).json()
    assert client.get(f"/v1/responses/{kept['id']}").status_code == 404


def found(store: ResponseStore, *names: str) -> list[str]:
    """Return the names of the responses that are kept."""
    kept = []
    for name in names:
        with suppress(ApiError):
            asyncio.run(store.find(name))
            kept.append(name)
    return kept


RESPONSES = [f"resp_{number:032x}" for number in range(200)]


@pytest.mark.parametrize("together", [False, True])
def test_the_store_of_responses_is_bounded(tmp_path: Path, *, together: bool) -> None:
    """Of one process in its memory, of several in files that all of them count, one that was killed too."""
    stores = [ResponseStore(most=3, most_bytes=1000, folder=tmp_path if together else None)] * 4
    if together:
        stores = [ResponseStore(most=3, most_bytes=1000, folder=tmp_path) for _ in stores]
    names = RESPONSES[:4]
    for store, name in zip(stores, names, strict=True):
        store.add(name, {}, [])
    assert found(stores[0], *names) == names[1:]
    asyncio.run(stores[0].find(names[1]))
    stores[0].add(RESPONSES[4], {}, [])
    assert found(stores[1], *names, RESPONSES[4]) == [names[1], names[3], RESPONSES[4]]
    stores[0].add(RESPONSES[5], {"text": "x" * 950}, [])
    assert found(stores[1], *RESPONSES[:6]) == [RESPONSES[5]]
    stores[2].remove(RESPONSES[5])
    assert found(stores[1], *RESPONSES[:6]) == []
    with pytest.raises(ApiError, match="made room"):
        stores[3].remove(RESPONSES[5])


def test_a_clock_that_is_set_back_makes_no_response_old(tmp_path: Path) -> None:
    """Files are ordered by the time since the boot."""
    store = ResponseStore(folder=tmp_path)
    store.add(RESPONSES[0], {}, [])
    (file,) = tmp_path.iterdir()
    for _ in range(2):
        assert file.stat().st_mtime == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=60)
        os.utime(file, (0, 0))
        asyncio.run(store.find(RESPONSES[0]))


def test_files_of_many_responses_stay_few(tmp_path: Path) -> None:
    store = ResponseStore(most=64, folder=tmp_path)
    (tmp_path / "old.partial").write_bytes(b"{")
    os.utime(tmp_path / "old.partial", (0, 0))
    (tmp_path / "new.partial").write_bytes(b"{")  # another process may be writing it
    for name in RESPONSES:
        store.add(name, {}, [])
        assert len(list(tmp_path.iterdir())) <= 64 + 64 // 16
    assert not (tmp_path / "old.partial").exists()


def test_a_full_disk_withholds_no_answer(tmp_path: Path) -> None:
    store = ResponseStore(folder=tmp_path / "none")
    store.add(RESPONSES[0], {}, [])
    assert found(store, RESPONSES[0]) == []


@pytest.mark.parametrize("name", ["../secret", "resp_/../../secret", "resp_A", "", "resp_" + "a" * 65, "resp_a\n"])
def test_only_names_of_responses_are_looked_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.response").write_text('{"document": {}, "messages": []}')
    (tmp_path / "inner").mkdir()
    assert found(ResponseStore(folder=tmp_path / "inner"), name) == []


def test_a_killed_process_leaves_no_half_of_a_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, name = ResponseStore(folder=tmp_path), f"resp_{'a' * 32}"
    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.add(name, {"a": 1}, [])
    assert found(store, name) == []
    store.add(name, {"a": 1}, [])
    assert asyncio.run(ResponseStore(folder=tmp_path).find(name)).document == {"a": 1}


def test_items_of_a_conversation(client: TestClient, triton: ScriptedTriton) -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "S"}]},
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    assert respond(client, items).status_code == 200
    assert prompts(triton) == ["[system]S[user]a[assistant]b[tool]rain><think>"]


def test_a_schema_and_tools_of_responses(client: TestClient, triton: ScriptedTriton) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    respond(client, text={"format": {"type": "json_schema", "name": "n", "schema": schema}})
    assert json.loads(triton.requests[0]["guided_decoding_guide"][0]) == schema
    assert prompts(triton)[0] == "[user]Hi>"
    other = {**FUNCTION, "name": "other"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    for choice in (allowed, {"type": "function", "name": "weather"}):
        respond(client, tools=[FUNCTION, other], tool_choice=choice)
        guide = json.loads(triton.requests[-1]["guided_decoding_guide"][0])
        assert [each["properties"]["name"]["const"] for each in guide["anyOf"]] == ["weather"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": []}, "no message"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "expected input_text"),
        ({"input": [{"content": "x"}], "instructions": "Be brief."}, "item 0 of the input has no role"),
        ({"input": [{"type": "function_call"}]}, "item 0 of the input has no name"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "reads text only"),
        ({"tool_choice": "required"}, "asks for a call"),
        ({"tools": [{"type": "web_search"}]}, "'function'"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": []}]}, "'function', not 'namespace'"),
        ({"tools": [{**FUNCTION, "name": ""}]}, "at least 1 character"),
        ({"tools": [{**FUNCTION, "parameters": {"type": ["array", "null"]}}]}, "the arguments of a tool are an object"),
        ({"include": ["nonsense"]}, "'reasoning.encrypted_content'"),
        ({"top_logprobs": 2}, "top_logprobs needs 'message.output_text.logprobs' in include"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"temperature": 3}, "less than or equal to 2"),
        ({"previous_response_id": "x"}, "not found"),
        ({"model": "other"}, "does not exist"),
    ],
)
def test_a_wrong_response(client: TestClient, triton: ScriptedTriton, body: dict[str, Any], words: str) -> None:
    answer = client.post("/v1/responses", json={"model": NAME, "input": "Hi", **body})
    status, message, _ = error(answer)
    assert status in (400, 404)
    assert words in message
    assert (answer.json()["error"]["param"] or "input").partition(".")[0] in {"input", *body}
    assert not triton.requests


def test_a_response_that_fails_or_is_cut(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script = ("</think>He", refused("the engine failed"))
    last = named_events(respond(client, stream=True))[-1]
    EVENT.validate_python(last)
    assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", "the engine failed")
    triton.script, triton.finish_reason = ("</think>He",), "length"
    cut = respond(client).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert named_events(respond(client, stream=True))[-1]["type"] == "response.incomplete"


def test_a_message(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script = (ANSWER,)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    found = send_message(client, system="S", tools=[TOOL], thinking=thinking).json()
    thought, text, call = found["content"]
    assert (thought["thinking"], text["text"], call["input"]) == ("Hm.", "Well. ", {"city": "Ulm"})
    assert (found["type"], found["role"], found["stop_reason"]) == ("message", "assistant", "tool_use")
    assert found["usage"]["input_tokens"] == len(triton.requests[0]["input_ids"])
    triton.script = ("Well.",)
    assert send_message(client, system=[{"type": "text", "text": "S"}]).json()["content"] == [
        {"type": "text", "text": "Well."}
    ]
    assert prompts(triton)[1] == "[system]S[user]Hi>"


def test_the_events_of_a_message_are_its_document(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script = (ANSWER,)
    asked: dict[str, Any] = {"tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = send_message(client, **asked).json()
    found = named_events(send_message(client, **asked, stream=True))
    assert (found[0]["type"], found[-1]["type"]) == ("message_start", "message_stop")
    assert found[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    blocks: list[dict[str, Any]] = []
    for each in found[1:-2]:
        assert each["index"] == len(blocks) - (each["type"] != "content_block_start")
        if each["type"] == "content_block_start":
            blocks.append({**each["content_block"], "json": ""})
        elif each["type"] == "content_block_delta":
            delta = each["delta"]
            key = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[delta.pop("type")]
            blocks[-1][key] += delta["partial_json" if key == "json" else key]
    for block in blocks:
        if text := block.pop("json"):
            block["input"] = json.loads(text)
        if block["type"] == "tool_use":
            block["id"] = whole["content"][2]["id"]
    assert blocks == whole["content"]
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_turns_with_tools_and_a_beginning_of_the_answer(client: TestClient, triton: ScriptedTriton) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "So?"},
            ],
        },
        {"role": "assistant", "content": "It"},
    ]
    assert send_message(client, messages=messages).status_code == 200
    assert prompts(triton) == ["[user]a[assistant][tool]rain[user]So?[assistant]It"]


def test_a_stop_sequence_is_named(client: TestClient, triton: ScriptedTriton) -> None:
    found = send_message(client, stop_sequences=["zz", "lo"]).json()
    assert (found["content"][0]["text"], found["stop_reason"], found["stop_sequence"]) == ("Hel", "stop_sequence", "lo")
    triton.finish_reason = "length"
    assert send_message(client).json()["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, ["weather", "other"]), ({"type": "tool", "name": "other"}, ["other"])],
)
def test_a_tool_that_must_be_used(
    client: TestClient, triton: ScriptedTriton, choice: dict[str, str], names: list[str]
) -> None:
    triton.script = ('{"name": "other", "arguments": {"a": 1}}',)
    found = send_message(client, tools=[TOOL, {**TOOL, "name": "other"}], tool_choice=choice).json()
    assert (found["content"][0]["input"], found["stop_reason"]) == ({"a": 1}, "tool_use")
    guide = json.loads(triton.requests[0]["guided_decoding_guide"][0])
    assert [each["properties"]["name"]["const"] for each in guide["anyOf"]] == names


def test_tokens_of_a_message_are_counted(client: TestClient, triton: ScriptedTriton) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "system": "S"}
    counted = client.post("/v1/messages/count_tokens", json=body).json()
    assert counted == {"input_tokens": len("[system]S[user]Hi>")}
    assert not triton.requests


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "without a url"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "expected user or assistant"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "needs a content"),
        ({"messages": [{"role": "user", "content": []}]}, 400, "no message"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, 400, "message 0 has a tool_use"),
        ({"stop_sequences": ["x" * 2000]}, 400, "'stop_sequences'"),
        ({"tool_choice": {"type": "any"}}, 400, "asks for a call"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, "tools"),
        ({"tools": [{"name": "", "input_schema": {}}]}, 400, "at least 1 character"),
        ({"tools": [{"name": "x", "input_schema": {"type": None}}]}, 400, "the arguments of a tool are an object"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, 400, "not among the tools"),
        ({"temperature": 1.5}, 400, "temperature"),
        ({"mcp_servers": [{}]}, 400, "mcp_servers"),
        ({"model": "other"}, 404, "does not exist"),
    ],
)
def test_a_wrong_message(client: TestClient, body: dict[str, Any], status: int, words: str) -> None:
    asked = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, **body}
    answer = client.post("/v1/messages", json=asked)
    assert answer.status_code == status
    content = answer.json()
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert (content["type"], content["error"]["type"]) == ("error", kind)
    assert words in content["error"]["message"]


def test_a_message_that_fails(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script = ("He", refused("the engine failed"))
    last = named_events(send_message(client, stream=True))[-1]
    assert (last["type"], last["error"]["message"]) == ("error", "the engine failed")
    triton.script = (refused("Maximum queue size of 3 has been reached"),)
    answer = send_message(client)
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")


def test_tokens_of_texts(client: TestClient, triton: ScriptedTriton) -> None:
    def tokenize(**body: Any) -> Any:
        return client.post("/tokenize", json={"model": NAME, **body})

    found = tokenize(prompt="Hé").json()
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 512
    assert client.post("/detokenize", json={"model": NAME, "tokens": found["tokens"]}).json()["prompt"].endswith("Hé")
    bare = tokenize(prompt="Hé", add_special_tokens=False, return_token_strs=True).json()
    assert bare["tokens"] == found["tokens"][1:]
    assert len(bare["token_strs"]) == len(bare["tokens"])
    said = tokenize(messages=[{"role": "user", "content": "Hi"}], chat_template_kwargs={"enable_thinking": False})
    assert triton.files.decode(said.json()["tokens"]) == "[user]Hi>"
    for body, words in (
        ({}, "either prompt or messages"),
        ({"prompt": "a" * 1_000_000}, "exceeds the maximum input length"),
        ({"messages": []}, "at least 1 item, not 0"),
    ):
        assert words in error(tokenize(**body))[1]
    for tokens, words in (([10**6], "beyond the vocabulary"), ([5] * 3000, "exceeds the maximum"), ([-1], "greater")):
        assert words in error(client.post("/detokenize", json={"model": NAME, "tokens": tokens}))[1]
    assert not triton.requests


def ollama(client: TestClient, path: str = "chat", **body: Any) -> Any:
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if path == "chat" else {"prompt": "Hi"}
    return client.post(f"/api/{path}", json={"model": f"{NAME}:latest", **asked, **body})


def test_a_chat_of_ollama(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script = (ANSWER,)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    called = [{"function": {"name": "weather", "arguments": {"city": "Ulm"}}}]
    past = [{"role": "assistant", "tool_calls": called}, {"role": "tool", "tool_name": "weather", "content": "rain"}]
    asked: dict[str, Any] = {"tools": [tool], "messages": [{"role": "user", "content": "Hi"}, *past]}
    options = {"temperature": 0.5, "num_predict": 90, "num_ctx": 4096, "repeat_penalty": 1.5, "seed": 3}
    whole = ollama(client, stream=False, options=options, keep_alive="5m", **asked).json()
    said = whole["message"]
    assert (said["content"], said["thinking"], whole["done_reason"]) == ("Well. ", "Hm.", "stop")
    assert said["tool_calls"][0]["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Ulm"}}
    assert whole["prompt_eval_count"] == len(triton.requests[0]["input_ids"])
    sent = triton.requests[0]
    assert [sent[name][0] for name in ("temperature", "request_output_len", "seed")] == [0.5, 90, 3]
    assert "[user]Hi[assistant][tool]rain>" in prompts(triton)[0]

    triton.pause = 0.002
    response = ollama(client, **asked)
    assert response.headers["content-type"] == "application/x-ndjson"
    *lines, last = [json.loads(line) for line in response.text.splitlines()]
    assert "".join(each["message"]["content"] for each in lines) == "Well. "
    assert "".join(each["message"].get("thinking", "") for each in lines) == "Hm."
    assert lines[-1]["message"]["tool_calls"] == said["tool_calls"]
    assert [each["done"] for each in lines] == [False] * len(lines)
    assert (last["done"], last["eval_count"]) == (True, whole["eval_count"])
    assert last["total_duration"] == last["prompt_eval_duration"] + last["eval_duration"]


def test_a_system_message_that_the_template_would_drop_is_refused(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    triton = ScriptedTriton(folder)
    system = {"role": "system", "content": "Be brief."}
    question = {"role": "user", "content": "Hi"}
    body = {"model": NAME, "messages": [question], "system": "S"}
    with endpoint_of(triton) as client:
        for answer in (
            chat(client, messages=[system, question]),
            chat(client, messages=[{**system, "role": "developer"}, question], stream=True),
            chat(client, messages=[question, system, question], tools=[WEATHER]),
            respond(client, instructions="Be brief."),
            send_message(client, system="Be brief."),
            client.post("/v1/messages/count_tokens", json=body),
            client.post("/tokenize", json={"model": NAME, "messages": [system, question]}),
            ollama(client, messages=[system, question]),
            ollama(client, "generate", system="Be brief."),
        ):
            assert answer.status_code == 400
            assert "no place for a system message" in answer.text
        assert not triton.requests
        for each in (chat(client), chat(client, messages=[{**system, "content": " "}, question])):
            assert each.status_code == 200


def test_texts_and_models_of_ollama(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script = ("</think>Well.",)
    assert ollama(client, "generate", system="Be brief.", stream=False, think=True).json()["response"] == "Well."
    streamed = ollama(client, "generate", prompt="Once", raw=True, format={"type": "object"}, think=False)
    assert json.loads(streamed.text.splitlines()[-1])["response"] == ""
    assert "[system]Be brief.[user]Hi><think>" in prompts(triton)[0]
    assert prompts(triton)[1].endswith("Once")
    assert triton.requests[1]["guided_decoding_guide"]
    (model,) = client.get("/api/tags").json()["models"]
    assert model["name"] == NAME
    shown = client.post("/api/show", json={"model": model["name"]}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert client.post("/api/show", json={"model": "ensemble"}).json() == shown
    assert client.post("/api/show", json={"name": model["name"], "model": "", "verbose": False}).json() == shown
    assert client.post("/api/embed", json={"model": NAME, "input": "a", "dimensions": 0}).status_code == 400
    assert client.get("/api/version").json()["version"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "other"}, 404, "does not exist"),
        ({"options": {"mirostat": 1}}, 400, "mirostat"),
        ({"options": {"temperature": 9}}, 400, "options.temperature"),
        ({"options": {"repeat_penalty": -1}}, 400, "options.repeat_penalty"),
        ({"messages": [{"role": "user", "content": 0}]}, 400, "must be a text"),
        ({"path": "generate", "raw": True, "system": "Be brief."}, 400, "leave system and images out"),
        ({"messages": [{"role": "user", "images": [1]}]}, 400, "list of texts"),
        ({"messages": [{"role": "user", "images": ["QUJD"]}]}, 400, "reads text only"),
    ],
)
def test_what_ollamas_clients_are_told(client: TestClient, body: dict[str, Any], status: int, words: str) -> None:
    answer = ollama(client, **body)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert words in answer.json()["error"]


def test_an_error_ends_a_stream_of_ollama_as_a_line(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script, triton.pause = ("</think>Well. ", refused("the executor has stopped working")), 0.002
    assert "stopped working" in json.loads(ollama(client).text.splitlines()[-1])["error"]
    assert client.post("/api/pull", json={}).json()["error"].startswith("Unknown request URL")


def test_a_format_belongs_to_texts_where_a_tool_must_be_called(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script = ('{"name": "weather", "arguments": {}}',)
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    sent = respond(client, tools=[FUNCTION], tool_choice="required", text=text, client_metadata={"a": "b"})
    assert sent.json()["output"][0]["name"] == "weather"
    guide = json.loads(triton.requests[0]["guided_decoding_guide"][0])
    assert guide["anyOf"][0]["properties"]["name"] == {"const": "weather"}


def test_claude_code_hears_in_its_words_that_a_prompt_is_too_long(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script = (refused("Prompt length (9) exceeds maximum input length (8)"),)
    assert send_message(client).json()["error"]["message"].startswith("prompt is too long: Prompt length (9)")
