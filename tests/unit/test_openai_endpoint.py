"""The OpenAI endpoint in front of a scripted engine: what reaches the engine, and what the client gets."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from fastapi.testclient import TestClient
from llguidance import LLMatcher
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support.scripted_endpoint import WEATHER, chat, complete, endpoint_of, error, events, write_chat_model
from tests.support.scripted_triton import NAME, ScriptedTriton
from tests.support.tiny_models import write_tiny_model
from tests.support.waiting import wait_until
from trtserve.client.metrics import parse
from trtserve.client.request import RequestContext
from trtserve.client.tensors import Reply
from trtserve.client.tokenizer import TokenizerFiles
from trtserve.errors import RequestError
from trtserve.executor.engine.guide_trial import grammar_of
from trtserve.executor.engine.requests import GuideType
from trtserve.gateway.openai.answering import Measures, engine_page
from trtserve.gateway.openai.answers import (
    Message,
    TextPiece,
    Token,
    TokenLogProb,
    completion_log_probs,
    token_log_probs,
)
from trtserve.gateway.openai.bodies import ChatBody
from trtserve.gateway.openai.dialects import dialect_of
from trtserve.gateway.openai.errors import ApiError
from trtserve.gateway.openai.reading import reader_of
from trtserve.gateway.openai.request import adapter_tensors
from trtserve.gateway.openai.served import QuietMoment
from trtserve.programs.shared.lora_names import LoraNames


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("openai") / "model")


@pytest.mark.parametrize(
    "outputs",
    [
        {},
        {"output_ids": np.array([[[3]]], dtype=np.int32)},
        {"output_ids": np.array([[[3]]], dtype=np.int32), "sequence_length": np.zeros((1, 0), dtype=np.int32)},
        {"output_ids": np.array([[[3]]], dtype=np.int32), "sequence_length": np.array([[b"x"]], dtype=object)},
        {"output_ids": np.array([[[-2]]], dtype=np.int32), "sequence_length": np.array([[1]], dtype=np.int32)},
    ],
    ids=["nothing", "no length", "an empty length", "a text as length", "a negative token"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_tensors_of_a_server_are_not_the_clients_fault(
    client: TestClient, triton: ScriptedTriton, outputs: dict[str, Any], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "_reply", lambda *_, **__: Reply(outputs=outputs, parameters={}))
    answer = complete(client, stream=stream)
    assert answer.status_code == 503
    assert "not of Triton's protocol" in answer.json()["error"]["message"]


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


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_the_request_in_the_engine(client: TestClient, triton: ScriptedTriton, stream: bool) -> None:
    triton.script, triton.pause = ("Hello" * 40,), 0.002
    answer = complete(client, stop="lo", stream=stream)
    assert answer.status_code == 200
    assert stream or answer.json()["usage"]["completion_tokens"] < 10
    wait_until(lambda: len(triton.stops) >= 1)


def test_stop_ids_and_bias_reach_the_engine(client: TestClient, triton: ScriptedTriton) -> None:
    assert complete(client, stop_token_ids=[7, 9], logit_bias={"5": -100, "6": 2.5}).status_code == 200
    (sent,) = triton.requests
    assert sent["stop_words_list"] == [7, 9, 1, 2]
    assert (sent["embedding_bias"][5], sent["embedding_bias"][6], sum(sent["embedding_bias"])) == (-100, 2.5, -97.5)


def test_bad_words_reach_the_engine_in_all_spellings(client: TestClient, triton: ScriptedTriton, folder: Path) -> None:
    assert complete(client, bad_words=["lo"]).status_code == 200
    spelled = TokenizerFiles(folder).encode("lo", special=False)
    assert triton.requests[0]["bad_words_list"][: len(spelled)] == spelled
    assert complete(client, bad_words=[]).status_code == 200
    assert "bad_words_list" not in triton.requests[1]


@pytest.mark.parametrize("ask", [complete, chat])
def test_every_end_id_of_the_model_ends_an_answer(ask: Callable[..., Any], tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 11, 12]}')
    triton = ScriptedTriton(folder)
    with endpoint_of(triton) as client:
        ask(client)
        ask(client, ignore_eos=True)
    assert triton.requests[0]["stop_words_list"] == [11, 12, 1, 2]
    assert "stop_words_list" not in triton.requests[1]


def test_sampling_has_the_defaults_of_openai(client: TestClient, triton: ScriptedTriton) -> None:
    complete(client)
    complete(client)
    complete(client, temperature=0, seed=-1)
    said = client.get("/v1/models").json()["data"][0]["default_parameters"]
    assert (said["temperature"], said["top_p"], said["top_k"], said["repetition_penalty"]) == (1.0, 1.0, 0, 1.0)
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


def test_tokens_that_have_arrived_go_out_together(
    client: TestClient, triton: ScriptedTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtserve.gateway.openai.served._LONGEST_JOIN", 60.0)  # however busy this machine is
    triton.script = ("Hello " * 20,)
    streamed = events(complete(client, stream=True, return_token_ids=True))
    tokens = [len(each["choices"][0]["token_ids"]) for each in streamed]
    assert tokens[0] == 1  # the first one waits for nothing
    assert sum(tokens) == 120
    assert len(tokens) < 30
    assert "".join(each["choices"][0]["text"] for each in streamed) == "Hello " * 20


@pytest.mark.parametrize("together", [1, 2, 3, 4, 5, 11])
def test_every_token_of_a_text_keeps_its_log_probability(together: int) -> None:
    """However tokens come together, beside marks that have the letters of the text and ends that wait."""
    words = ["<think>", "a", "</think>", "\n\n", "t", "h", " x", "<", "tool", "_", " caf", "é", "</", "p>"]
    tokens = [TokenLogProb(token=Token(text=each, raw=each.encode()), log_prob=-1.0) for each in words]
    dialect = dialect_of("<think></think><tool_call>")
    message = Message(index=0, reader=reader_of(dialect, {}, thinks=False, thoughts=True, required=False))
    for place in range(0, len(tokens), together):
        some = tokens[place : place + together]
        last = place + together >= len(tokens)
        message.add(
            TextPiece(
                text="".join(words[place : place + together]), tokens=some, finish_reason="stop" if last else None
            )
        )
    block = message.blocks[-1]
    assert (block.kind, block.text.strip()) == ("text", "".join(words[4:]))
    assert [each.token.text for each in block.tokens if each.token.text.strip()] == words[4:]


async def _turns_until_quiet(arrivals: int) -> tuple[int, float]:
    """Return the turns of the loop until a waiting one is woken, while a token arrives in each of the first turns."""
    moment, loop = QuietMoment(), asyncio.get_running_loop()
    waiting, began = loop.create_future(), loop.time()
    for turn in range(1_000_000):
        if turn < arrivals:
            moment.wake(waiting)
        await asyncio.sleep(0)
        if waiting.done():
            return turn, loop.time() - began
    raise AssertionError("nobody was woken")


def test_a_lone_token_waits_three_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtserve.gateway.openai.served._LONGEST_JOIN", 60.0)  # however busy this machine is
    turns, _ = asyncio.run(_turns_until_quiet(1))
    assert turns <= 3
    turns, _ = asyncio.run(_turns_until_quiet(5))
    assert 5 <= turns <= 8


def test_tokens_that_never_cease_are_waited_for_20_ms() -> None:
    turns, seconds = asyncio.run(_turns_until_quiet(1_000_000))
    assert turns < 999_999
    assert seconds >= 0.02


def test_many_answers_hold_up_nobody_else(client: TestClient, triton: ScriptedTriton) -> None:
    """Those that wait do so outside the engine, whose queue is for all clients."""
    answer = complete(client, prompt=["a", "b"], n=128).json()
    assert [choice["text"] for choice in answer["choices"]] == ["Hello"] * 256
    assert triton.most_running == 64
    streamed = events(complete(client, prompt=["a"], n=100, stream=True))
    assert len({choice["index"] for each in streamed for choice in each["choices"]}) == 100
    assert triton.most_running == 64


def test_a_large_body_is_read_as_a_small_one(client: TestClient, triton: ScriptedTriton) -> None:
    bodies: list[dict[str, Any]] = [{}, {"metadata": {"a": "b" * 100_000}}]
    answers = [complete(client, prompt=["a"], seed=1, **more).json() for more in bodies]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert triton.requests[0] == triton.requests[1]


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


@pytest.mark.parametrize("tops", [0, 2])
def test_log_probs_of_an_echoed_prompt(client: TestClient, triton: ScriptedTriton, tops: int) -> None:
    choice = complete(client, prompt="Hi", echo=True, logprobs=tops).json()["choices"][0]
    found = choice["logprobs"]
    assert choice["text"] == "HiHello"
    assert found["tokens"] == ["<s>", *"HiHello"]  # the tokenizer's own token is not in the text
    assert found["text_offset"] == [0, *range(7)]
    assert found["token_logprobs"][0] is None
    likely = 9 - math.log(math.exp(9) + len(triton.files.tokenizer) - 1)
    assert found["token_logprobs"][1:3] == pytest.approx([likely] * 2)
    assert all(value < 0 for value in found["token_logprobs"][1:])
    first, *rest = found["top_logprobs"]
    assert first is None
    assert [next(iter(top)) for top in rest] == list("HiHello")  # the token itself, with logprobs=0 too
    assert all(len(top) == max(1, tops) for top in rest)
    assert triton.requests[0]["return_context_logits"] == [True]


def test_log_probs_of_a_prompt_beside_the_answer(client: TestClient, triton: ScriptedTriton) -> None:
    alone = complete(client, prompt="Hi", prompt_logprobs=2).json()["choices"][0]
    assert (alone["text"], alone["logprobs"]) == ("Hello", None)
    first, *rest = alone["prompt_logprobs"]
    assert first is None
    ids = triton.files.encode("Hi", special=False)
    assert [next(iter(each)) for each in rest] == [str(number) for number in ids]
    assert [each[str(number)]["decoded_token"] for each, number in zip(rest, ids, strict=True)] == ["H", "i"]
    assert [[each["rank"] for each in row.values()] for row in rest] == [[1, 2], [1, 2]]
    both = complete(client, prompt="Hi", prompt_logprobs=0, logprobs=0).json()["choices"][0]
    assert both["logprobs"]["tokens"] == list("Hello")  # without echo the prompt is no part of it
    assert [row and next(iter(row.values()))["rank"] for row in both["prompt_logprobs"]] == [None] * 3
    assert error(complete(client, prompt_logprobs=2, logprobs=1))[0] == 400
    assert error(complete(client, prompt_logprobs=2, stream=True))[0] == 400


def test_log_probs_of_a_conversation_beside_the_answer(client: TestClient) -> None:
    whole = chat(client, prompt_logprobs=1).json()
    assert whole["choices"][0]["logprobs"] is None
    first, *rest = whole["prompt_logprobs"]
    assert first is None
    assert all(len(row) == 1 for row in rest)
    assert len(rest) == whole["usage"]["prompt_tokens"] - 1
    assert chat(client).json()["prompt_logprobs"] is None
    assert error(chat(client, prompt_logprobs=1, logprobs=True, top_logprobs=2))[0] == 400


def test_tokens_are_named_by_their_ids(client: TestClient, triton: ScriptedTriton) -> None:
    names = [f"token_id:{number}" for number in triton.files.encode("Hello", special=False)]
    found = complete(client, logprobs=1, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    assert found["tokens"] == names
    assert [next(iter(top)) for top in found["top_logprobs"]] == names
    assert found["text_offset"] == list(range(5))
    content = chat(client, logprobs=True, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == names


@pytest.mark.parametrize(("side", "kept"), [("left", [6, 7]), ("right", [4, 5]), (None, [6, 7])])
def test_a_prompt_is_cut_where_the_client_asks(client: TestClient, side: str | None, kept: list[int]) -> None:
    asked = {"truncate_prompt_tokens": 2, "truncation_side": side, "return_token_ids": True}
    answer = complete(client, prompt=[4, 5, 6, 7], **asked).json()
    assert answer["choices"][0]["prompt_token_ids"] == answer["prompt_token_ids"] == kept
    assert answer["usage"]["prompt_tokens"] == 2
    assert len(chat(client, **asked).json()["prompt_token_ids"]) == 2
    first, *others = events(complete(client, prompt=[4, 5, 6, 7], stream=True, **asked))
    assert first["choices"][0]["prompt_token_ids"] == kept
    assert not any("prompt_token_ids" in each["choices"][0] for each in others)
    assert complete(client, prompt=[4, 5], **asked).json()["prompt_token_ids"] == [4, 5]
    text = "Hi" + 50_000 * " you" + "Hello"  # longer than the model can read
    ends = [complete(client, prompt=each, **asked).json()["prompt_token_ids"] for each in (text, "Hello", "Hi")]
    assert ends[0] == ends[2 if side == "right" else 1]


def test_the_only_model_needs_no_name(client: TestClient) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}]}
    answer = client.post("/v1/chat/completions", json=asked).json()
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == (NAME, "Hello")
    assert client.post("/v1/responses", json={"input": "Hi"}).json()["model"] == NAME
    others: dict[str, dict[str, Any]] = {"/v1/messages": {"max_tokens": 4}, "/api/chat": {"stream": False}}
    for path, more in others.items():
        assert client.post(path, json={**asked, **more, "model": ""}).json()["model"] == NAME
    assert client.post("/tokenize", json={"prompt": "Hi"}).json()["count"] == 3
    assert client.post("/tokenize", json={**asked, "add_special_tokens": True}).json()["tokens"][0] == 1


def test_usage_comes_with_every_chunk_only_where_usage_is_wanted(client: TestClient) -> None:
    text = complete(client, stream=True, stream_options={"continuous_usage_stats": True}).text
    assert "usage" not in text


def test_an_echoed_prompt_does_not_count_for_the_best_answer(client: TestClient) -> None:
    answer = complete(client, prompt=[[5, 6], [7]], echo=True, logprobs=0, n=1, best_of=2).json()
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [2 + 5, 1 + 5]


def test_guides(client: TestClient, triton: ScriptedTriton) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat(client, response_format={"type": "json_object"})
    chat(client, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    chat(client, guided_choice=["a.b", "c"])
    chat(client, guided_regex="@/etc/passwd")
    chat(client, response_format={"type": "text"}, guided_grammar="start: 'a'")
    chat(client, structured_outputs={"json": schema, "whitespace_pattern": " "})
    chat(client, structured_outputs={"choice": ["x"]})
    chat(client, response_format={"type": "json_object", "schema": schema})  # llama.cpp's form
    assert triton.requests.pop()["guided_decoding_guide"][0] == json.dumps(schema)
    kinds = [sent["guided_decoding_guide_type"] for sent in triton.requests]
    guides = [sent["guided_decoding_guide"][0] for sent in triton.requests]
    assert kinds == [
        ["json_schema"],
        ["json_schema"],
        ["regex"],
        ["regex"],
        ["ebnf_grammar"],
        ["json_schema"],
        ["regex"],
    ]
    assert json.loads(guides[0]) == {"type": "object"}
    assert json.loads(guides[1]) == schema
    assert guides[2:5] == [r"a\.b|c", "@/etc/passwd", "start: 'a'"]
    assert json.loads(guides[5]) == {**schema, "x-guidance": {"whitespace_pattern": " "}}
    assert guides[6] == "x"


def test_a_model_without_a_template_gets_schemas_that_end(tmp_path: Path) -> None:
    """It was not trained to answer, and so ends neither texts nor lists by itself."""
    write_tiny_model(tmp_path)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "type": {"type": "string"},
            "short": {"type": ["string", "null"], "maxLength": 3},
            "long": {"type": "string", "minLength": 50},
            "kind": {"enum": ["a", {"type": "string"}]},
            "list": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "string", "pattern": "a+"}]}},
            "any": {"type": "object"},
            "id": {"type": "string", "format": "uuid"},
            "telephone": {"type": "string", "format": "phone"},
            "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
            "pair": {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": True},
            "open": {"type": "object", "properties": {"a": {}}, "required": ["b"]},
            "named": {"type": "object", "$ref": "#/$defs/o"},
            "either": {
                "type": "object",
                "anyOf": [{"$ref": "#/$defs/o"}, {"properties": {"y": {}}, "required": ["y"]}],
            },
        },
        "required": ["named", "either"],
        "$defs": {
            "n": {"type": "integer"},
            "small": {"type": "integer", "maximum": 3},
            "o": {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]},
        },
    }
    triton = ScriptedTriton(tmp_path)
    with endpoint_of(triton) as client:
        assert chat(client, tools=[WEATHER]).json()["choices"][0]["message"]["content"] == "Hello"
        chat(client, guided_json=schema)
        complete(client, guided_json=schema)
    made, same = (json.loads(sent["guided_decoding_guide"][0]) for sent in triton.requests[1:])
    assert same == schema
    assert LLMatcher.validate_grammar(grammar_of(GuideType.JSON_SCHEMA, json.dumps(made))) == ""
    properties = made["properties"]
    assert properties["type"] == {"type": "string", "maxLength": 32}
    assert (properties["short"], properties["kind"]) == (schema["properties"]["short"], schema["properties"]["kind"])
    assert (properties["long"]["maxLength"], properties["list"]["maxItems"]) == (50, 4)
    assert properties["list"]["items"] == schema["properties"]["list"]["items"]
    assert properties["any"]["maxProperties"] == 4
    assert (properties["id"]["maxLength"], properties["telephone"]["maxLength"]) == (64, 64)
    (count,) = properties["counts"]["patternProperties"].values()
    assert (count["maximum"], properties["counts"]["additionalProperties"]) == (999_999, False)
    assert properties["pair"]["additionalProperties"] is False
    assert properties["open"] == schema["properties"]["open"]
    assert (made["$defs"]["n"]["maximum"], made["$defs"]["small"]) == (999_999, schema["$defs"]["small"])
    assert made["additionalProperties"] is False


def test_tools_are_in_the_prompt_and_their_calls_in_the_answer(client: TestClient, triton: ScriptedTriton) -> None:
    triton.script = ('Well. <tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>',)
    answer = ChatCompletion.model_validate(chat(client, tools=[WEATHER]).json(), strict=True)
    assert '"name": "weather"' in triton.files.decode(triton.requests[0]["input_ids"])
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Well. ")
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Ulm"})
    triton.pause = 0.002  # pieces that are ready at the same time are sent as one
    streamed = [ChatCompletionChunk.model_validate(each) for each in events(chat(client, tools=[WEATHER], stream=True))]
    deltas = [each.choices[0].delta for each in streamed]
    assert "".join(delta.content or "" for delta in deltas) == "Well. "
    first, *rest = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert (first.index, first.id is not None, first.function and first.function.name) == (0, True, "weather")
    assert len(rest) > 1
    assert json.loads("".join((each.function and each.function.arguments) or "" for each in rest)) == {"city": "Ulm"}
    assert streamed[-1].choices[0].finish_reason == "tool_calls"


def test_thoughts_are_no_text(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    thinking = "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": config["chat_template"] + thinking})
    )
    triton = ScriptedTriton(folder)
    triton.script = ("Let me see.</think>\n\nFive.",)
    with endpoint_of(triton) as client:
        answer = chat(client).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["reasoning"], message["content"]) == (
            *["Let me see."] * 2,
            "Five.",
        )
        assert (
            0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < answer["usage"]["completion_tokens"]
        )
        deltas = [each["choices"][0]["delta"] for each in events(chat(client, stream=True))]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Let me see."
        assert "".join(delta.get("content") or "" for delta in deltas) == "Five."
        hidden = chat(client, include_reasoning=False).json()["choices"][0]["message"]
        assert "reasoning_content" not in hidden
        whole = chat(client, separate_reasoning=False).json()["choices"][0]["message"]["content"]
        assert whole == "Let me see.</think>\n\nFive."
        triton.script = ("Five.",)
        for off in ({"enable_thinking": False}, {"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}):
            assert chat(client, **off).json()["choices"][0]["message"]["content"] == "Five."
        triton.script = ('{"a": 1}',)
        for guided in ({"enable_thinking": True}, {}):
            answer = chat(client, response_format={"type": "json_object"}, **guided).json()
            assert answer["choices"][0]["message"]["content"] == '{"a": 1}'
        prompts = [triton.files.decode(sent["input_ids"])[-20:] for sent in triton.requests[-2:]]
        assert prompts[0].endswith("<think>\n</think>\n\n")
        assert prompts[1].endswith(">")
        assert "think" not in prompts[1]


def test_the_last_message_is_continued(client: TestClient, triton: ScriptedTriton) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    assert chat(client, messages=messages, continue_final_message=True).status_code == 200
    chat(client, messages=messages, add_generation_prompt=False)
    prompts = [triton.files.decode(sent["input_ids"]) for sent in triton.requests]
    assert prompts == ["[user]Hi[assistant]Well,", "[user]Hi[assistant]Well, "]
    both = error(chat(client, messages=messages, continue_final_message=True, add_generation_prompt=True))
    assert "leave add_generation_prompt out" in both[1]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ask", [complete, chat])
def test_ids_of_prompt_and_answer(
    client: TestClient, triton: ScriptedTriton, ask: Callable[..., Any], stream: bool
) -> None:
    response = ask(client, return_token_ids=True, stream=stream, min_p=0.25)
    chunks = events(response) if stream else [response.json()]
    ids = [number for each in chunks for number in each["choices"][0].get("token_ids", [])]
    assert ids == triton.files.encode("Hello", special=False)
    assert [each["prompt_token_ids"] for each in chunks if "prompt_token_ids" in each] == [
        triton.requests[0]["input_ids"]
    ]
    assert triton.requests[0]["min_p"] == [0.25]


def test_some_of_the_tools_are_allowed(client: TestClient, triton: ScriptedTriton) -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    named = {"type": "function", "function": {"name": "weather"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    triton.script = ('<tool_call>{"name": "other", "arguments": {}}</tool_call>',)
    message = chat(client, tools=[WEATHER, other], tool_choice=allowed).json()["choices"][0]["message"]
    assert (message.get("tool_calls"), message["content"]) == (None, triton.script[0])
    assert '"name": "other"' in triton.files.decode(triton.requests[0]["input_ids"])
    triton.script = ('{"name": "weather", "arguments": {}}' * 2,)
    allowed["allowed_tools"]["mode"] = "required"  # type: ignore[index]
    asked = {"tools": [WEATHER, other], "tool_choice": allowed}
    assert len(chat(client, **asked).json()["choices"][0]["message"]["tool_calls"]) == 2
    assert len(chat(client, **asked, parallel_tool_calls=False).json()["choices"][0]["message"]["tool_calls"]) == 1
    guide = json.loads(triton.requests[-1]["guided_decoding_guide"][0])
    assert [each["properties"]["name"]["const"] for each in guide["anyOf"]] == ["weather"]


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
    assert schema["anyOf"][0]["properties"]["name"] == {"const": "weather"}
    streamed: list[dict[str, Any]] = []
    for shows_ids in (False, True):
        streamed = events(
            chat(client, tools=[WEATHER], tool_choice="required", stream=True, return_token_ids=shows_ids)
        )
        deltas = [each["choices"][0]["delta"] for each in streamed]
        assert (deltas[0]["content"] is None) != shows_ids, "an empty text would begin one in the AI SDK"
    ids = [number for each in streamed for number in each["choices"][0].get("token_ids", ())]
    assert triton.files.decode(ids) == triton.script[0]
    choice = chat(client, tools=[WEATHER], tool_choice="required").json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    triton.script = ('{"name": "weather", "argum',)
    assert chat(client, tools=[WEATHER], tool_choice="required").json()["choices"][0]["message"]["content"] == ""


def test_definitions_of_a_tool_are_found_where_its_schema_is_part_of_a_guide(
    client: TestClient, triton: ScriptedTriton
) -> None:
    parameters = {
        "type": "object",
        "properties": {"colour": {"$ref": "#/$defs/Colour"}, "itself": {"$ref": "#"}},
        "$defs": {"Colour": {"enum": ["red", "blue"]}},
    }
    tool = {"type": "function", "function": {"name": "paint", "parameters": parameters}}
    triton.script = ('{"name": "paint", "arguments": {}}',)
    chat(client, tools=[WEATHER, tool], tool_choice="required")
    schema = json.loads(triton.requests[0]["guided_decoding_guide"][0])
    assert schema["anyOf"][1]["properties"]["arguments"] == {"$ref": "#/$defs/1"}
    places = schema["$defs"]["1"]["properties"]
    assert (places["colour"], places["itself"]) == ({"$ref": "#/$defs/1/$defs/Colour"}, {"$ref": "#/$defs/1"})
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema)) == ""


@pytest.mark.parametrize(
    "parameters", [{}, {"properties": {"a": {"const": 1}}}, {"type": ["object", "null"]}, {"anyOf": [{}, {}]}]
)
def test_the_arguments_of_a_call_are_an_object_whether_its_schema_says_so_or_not(
    parameters: dict[str, Any], client: TestClient, triton: ScriptedTriton
) -> None:
    tool = {"type": "function", "function": {"name": "paint", "parameters": parameters}}
    triton.script = ('{"name": "paint", "arguments": {}}',)
    chat(client, tools=[tool], tool_choice="required")
    schema = json.loads(triton.requests[0]["guided_decoding_guide"][0])
    assert schema["$defs"]["0"] == {**parameters, "type": "object"}
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema)) == ""


@pytest.mark.parametrize("arguments", ["", None, {}, "{}", {"city": "Ulm"}, '{"city": "Ul'])
def test_any_arguments_of_a_past_call_are_taken(client: TestClient, arguments: object) -> None:
    function = {"name": "weather"} if arguments is None else {"name": "weather", "arguments": arguments}
    past = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    asked = {"role": "user", "content": "Hi"}
    assert chat(client, messages=[asked, past, refusal, asked]).status_code == 200


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"\\ud800": 1}', '{"a": "b'])
@pytest.mark.parametrize("former", [False, True])
def test_arguments_that_no_prompt_can_have_stay_text(arguments: str, *, former: bool) -> None:
    function = {"name": "f", "arguments": arguments}
    said = {"function_call": function} if former else {"tool_calls": [{"id": "c", "function": function}]}
    messages = [{"role": "assistant", "content": None, **said}, {"role": "function", "name": "f", "content": "1"}]
    made = ChatBody.model_validate({"model": "m", "messages": messages}).messages
    assert made[0]["tool_calls"][0]["function"] == function
    assert made[1]["role"] == "tool"


def test_only_strict_tools_and_schemas_must_be_kept_to_the_letter() -> None:
    def options(**asked: Any) -> Any:
        body = ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **asked})
        assert body.guide is not None
        return json.loads(body.guide[1]).get("x-guidance")

    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    named: dict[str, Any] = {"name": "n", "schema": {"type": "array", "uniqueItems": True}}
    assert options(tools=[WEATHER], tool_choice="required") == {"lenient": True}
    assert options(tools=[WEATHER, strict], tool_choice="required") is None
    assert options(response_format={"type": "json_schema", "json_schema": named}) is None
    loose = {"type": "json_schema", "json_schema": {**named, "strict": False}}
    assert options(response_format=loose, guided_whitespace_pattern=" ") == {"lenient": True, "whitespace_pattern": " "}


def test_models_of_nvidias_front_end_are_the_alias(client: TestClient) -> None:
    for name in ("tensorrt_llm_bls", "ensemble"):
        assert complete(client, model=name).json()["model"] == name


def test_max_tokens_of_zero_returns_the_prompt_alone(client: TestClient) -> None:
    answer = complete(client, prompt="Say", max_tokens=0, echo=True).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("Say", "length")
    prompt = answer["usage"]["prompt_tokens"]
    assert answer["usage"] == {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = events(complete(client, prompt="Say", max_tokens=0, echo=True, **streamed))
    assert last["usage"] == answer["usage"]


def test_values_of_earlier_tokens_are_not_those_of_new_ones() -> None:
    """The engine's responses repeat the log-probabilities of all tokens so far, or have the new ones alone."""
    for values in ([-0.5, -1.5, -2.5], [-2.5]):
        outputs = {"output_log_probs": np.array([[values]], np.float32)}
        (found,) = token_log_probs(outputs, [7], before=2, tops=0, token=lambda _: Token("x", b"x"))
        assert found.log_prob == -2.5


def test_a_log_probability_that_is_no_number_becomes_the_lowest_one() -> None:
    outputs = {"output_log_probs": np.array([[[np.nan, -np.inf]]], np.float32)}
    found = token_log_probs(outputs, [7, 8], before=0, tops=0, token=lambda _: Token("x", b"x"))
    assert [each.log_prob for each in found] == [-9999.0, -9999.0]


def test_parts_of_characters_have_their_own_bytes() -> None:
    parts = [TokenLogProb(token=Token("\ufffd", raw), log_prob=-1.0) for raw in (b"\xc3", b"\xa9")]
    parts.append(TokenLogProb(token=Token("x", b"x"), log_prob=-1.0))
    found = completion_log_probs(parts, 2)
    assert (found["text_offset"], found["tokens"]) == ([2, 2, 3], [r"bytes:\xc3", r"bytes:\xa9", "x"])
    assert parts[0].chat()["bytes"] == [0xC3]


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


def test_models(client: TestClient) -> None:
    (only,) = client.get("/v1/models").json()["data"]
    assert Model.model_validate(only, strict=True).id == NAME
    assert client.get(f"/v1/models/{NAME}").json() == only


def test_a_repository_that_does_not_stream(folder: Path) -> None:
    triton = ScriptedTriton(folder, decoupled=False)
    with endpoint_of(triton) as client:
        found = events(chat(client, stream=True))
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in found) == "Hello"
    assert triton.requests[0].get("streaming", [False]) == [False]


def test_a_model_that_takes_text(folder: Path) -> None:
    triton = ScriptedTriton(folder, text=True)
    with endpoint_of(triton) as client:
        answer = chat(client, stop="lo", bad_words=["x", "y"]).json()
        assert answer["choices"][0]["message"]["content"] == "Hel"
        assert triton.requests[0]["bad_words"] == ["x", "y"]
        assert answer["usage"]["prompt_tokens"] == len("[user]Hi>") + 1
        assert error(complete(client, logit_bias={"5": 1}))[2] == "logit_bias"
    assert (triton.requests[0]["text_input"], triton.requests[0]["stop_words"]) == (["[user]Hi>"], ["lo"])


def test_improbable_tokens_have_a_number(client: TestClient, triton: ScriptedTriton) -> None:
    triton.lowest = float("-inf")
    response = chat(client, logprobs=True, top_logprobs=2)
    tops = response.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [top["logprob"] for top in tops] == [0.0, -9999.0]


def test_times_of_streams_are_measured(triton: ScriptedTriton) -> None:
    measures = Measures()
    with endpoint_of(triton, measures=measures) as client:
        pieces = len(events(complete(client, stream=True)))
    page, labels = measures.page().decode(), f'adapter="",model_name="{NAME}"'
    assert f"trtserve_openai_time_to_first_token_seconds_count{{{labels}}} 1.0" in page
    assert f"trtserve_openai_inter_token_seconds_count{{{labels}}} {pieces - 1}.0" in page


def test_engines_are_shown_under_the_names_of_vllm() -> None:
    page = engine_page(
        b'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 7\n'
        b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 25\n'
        b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 100\n'
        b'nv_trtserve_queue_seconds_sum{model="tensorrt_llm",version="1"} 3\n'
    )
    found = {sample.name: (sample.labels, sample.value) for sample in parse(page.decode(), ("vllm:",))}
    label = {"model_name": "tensorrt_llm"}
    assert found == {
        "vllm:num_requests_waiting": (label, 7),
        "vllm:kv_cache_usage_perc": (label, 0.25),
        "vllm:gpu_cache_usage_perc": (label, 0.25),
        "vllm:request_queue_time_seconds_sum": ({**label, "version": "1"}, 3),
    }


def test_dashboards_of_vllm_find_their_names(triton: ScriptedTriton) -> None:
    measures = Measures()
    with endpoint_of(triton, measures=measures) as client:
        pieces = len(events(complete(client, stream=True)))
        chat(client)
        triton.script = (RequestError("the engine failed"),)
        complete(client)
    page, label = measures.page().decode(), f'model_name="{NAME}"'
    page = page.replace('adapter="",', "")
    assert f"vllm:time_to_first_token_seconds_count{{{label}}} 1.0" in page
    assert f"vllm:inter_token_latency_seconds_count{{{label}}} {pieces - 1}.0" in page
    assert f"vllm:e2e_request_latency_seconds_count{{{label}}} 3.0" in page
    assert f"vllm:num_requests_running{{{label}}} 0.0" in page
    assert f"vllm:generation_tokens_total{{{label}}} 10.0" in page
    assert f'vllm:request_success_total{{finished_reason="stop",{label}}} 2.0' in page
    assert f'vllm:request_success_total{{finished_reason="abort",{label}}} 1.0' in page


def test_adapters_at_work_are_named_as_pickers_read_them() -> None:
    measures = Measures()
    with (
        measures.answer(("tiny", "second"), ()),
        measures.answer(("tiny", "first"), ()),
        measures.answer(("tiny", ""), ()),
    ):
        page = measures.page(3).decode()
    label = 'max_lora="3",running_lora_adapters="first,second",waiting_lora_adapters=""'
    assert f"vllm:lora_requests_info{{{label}}}" in page
    assert 'running_lora_adapters=""' in measures.page().decode()


def test_an_adapter_that_is_unloaded_after_it_was_found_is_not_found(tmp_path: Path) -> None:
    """The core model answers 500 to a name that is not in its table."""
    with pytest.raises(ApiError, match="does not know; it has none") as caught:
        adapter_tensors(LoraNames(tmp_path), cast(RequestContext, None), "gone")
    assert (caught.value.status, caught.value.body["error"]["code"]) == (404, "model_not_found")
