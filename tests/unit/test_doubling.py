"""The time grows with the input, not with its square: every field of every API that can be large, one after the other.

Times are CPU times of this process. `make doubling` takes sizes up to a million; here they are smaller.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI

from tests.support.scripted_endpoint import WEATHER, post_to, write_chat_model
from tests.support.scripted_triton import NAME, ScriptedTriton
from trtserve.gateway.asgi import RefusedError
from trtserve.gateway.guard import check_generate, check_infer
from trtserve.gateway.openai.answering import Measures
from trtserve.gateway.openai.dialects import dialect_of
from trtserve.gateway.openai.reading import reader_of
from trtserve.gateway.openai.router import openai_router
from trtserve.gateway.settings import RequestLimits
from trtserve.programs.bls import inputs as bls
from trtserve.programs.core.request import RequestFactory
from trtserve.programs.core.settings import load_executor_module
from trtserve.programs.preprocessing.model import TritonPythonModel
from trtserve.programs.shared.lora_names import LoraNames

FULL = os.environ.get("TRTSERVE_DOUBLING") == "1"
MOST = 1 << 20 if FULL else 1 << 14
"""Size of the larger input: characters, elements or entries."""
ENOUGH = 0.1 if FULL else 0.01
"""Seconds of CPU time that are measured well."""
RATIO = 9.0
"""Of the times for n and 4·n, which tells more than n and 2·n: a cost of n² makes it 16, one of n·log n less than 5."""
ATTEMPTS = 12
"""Of which one must pass: a square fails them all, and other programs disturb single ones."""
LIMITS = RequestLimits()

Make = Callable[[int], Mapping[str, Any]]


def _nested(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": {"enum": ["a", "b"]} for number in range(count)}}


def _tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def _said(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **more}]}


def _calls(count: int, arguments: str = "{}") -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [call] * count


SAMPLING: dict[str, Make] = {
    "model": lambda n: {"model": "m" * n},
    "stop, long": lambda n: {"stop": "x" * n},
    "stop, many": lambda n: {"stop": [f"stop {each}" for each in range(n)]},
    "stop_token_ids": lambda n: {"stop_token_ids": list(range(n))},
    "logit_bias": lambda n: {"logit_bias": {str(each): 1 for each in range(n)}},
    "guided_json": lambda n: {"guided_json": _nested(n // 16)},
    "guided_json as text": lambda n: {"guided_json": json.dumps(_nested(n // 16)), "guided_whitespace_pattern": " "},
    "guided_regex": lambda n: {"guided_regex": "a" * n},
    "guided_choice, many": lambda n: {"guided_choice": [f"{each}." for each in range(n // 4)]},
    "guided_choice, long": lambda n: {"guided_choice": ["(" * n]},
    "guided_grammar": lambda n: {"guided_grammar": "[" * n},
    "user": lambda n: {"user": "u" * n},
    "metadata": lambda n: {"metadata": {str(each): "v" for each in range(n // 4)}},
    "an unknown key": lambda n: {"k" * n: 1},
    "many unknown keys": lambda n: {f"k{each}": 1 for each in range(n // 4)},
    "many null keys": lambda n: {f"k{each}": None for each in range(n // 4)},
}
COMPLETIONS: dict[str, Make] = {
    **SAMPLING,
    "prompt": lambda n: {"prompt": "word " * (n // 5)},
    "prompt without spaces": lambda n: {"prompt": "x" * n},
    "prompts": lambda n: {"prompt": ["Hi"] * (n // 8)},
    "ids": lambda n: {"prompt": [5] * n},
    "lists of ids": lambda n: {"prompt": [[5]] * (n // 8)},
    "echo": lambda n: {"prompt": "word " * (n // 5), "echo": True},
}
CHAT: dict[str, Make] = {
    **SAMPLING,
    "messages": lambda n: {"messages": [{"role": "user", "content": "Hi"}] * (n // 16)},
    "content": lambda n: _said("word " * (n // 5)),
    "parts": lambda n: _said([{"type": "text", "text": "Hi"}] * (n // 16)),
    "role": lambda n: _said("Hi", role="r" * n),
    "tool_calls": lambda n: _said(None, role="assistant", tool_calls=_calls(n // 32)),
    "arguments": lambda n: _said(None, "assistant", tool_calls=_calls(1, '{"a": "' + "x" * n)),
    "arguments, nested": lambda n: _said(None, "assistant", tool_calls=_calls(1, "[" * n)),
    "tools": lambda n: {"tools": [_tool(f"f{each}") for each in range(n // 32)]},
    "tools that must be called": lambda n: {
        "tools": [_tool(f"f{each}") for each in range(n // 32)],
        "tool_choice": "required",
    },
    "description of a tool": lambda n: {"tools": [_tool(description="d" * n)]},
    "parameters of a tool": lambda n: {"tools": [_tool(parameters=_nested(n // 16))], "tool_choice": "required"},
    "response_format": lambda n: {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _nested(n // 16)}}
    },
    "chat_template_kwargs": lambda n: {"chat_template_kwargs": {f"v{each}": 1 for each in range(n // 8)}},
}
RESPONSES: dict[str, Make] = {
    "input": lambda n: {"input": "word " * (n // 5)},
    "items": lambda n: {"input": [{"role": "user", "content": "Hi"}] * (n // 16)},
    "parts": lambda n: {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * (n // 16)}]},
    "calls": lambda n: {
        "input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * (n // 32)
    },
    "thoughts": lambda n: {"input": [{"type": "reasoning", "summary": [{"type": "text", "text": "a"}]}] * (n // 16)},
    "instructions": lambda n: {"instructions": "x" * n},
    "tools": lambda n: {"tools": [{"type": "function", "name": f"f{each}"} for each in range(n // 32)]},
    "previous_response_id": lambda n: {"previous_response_id": "x" * n},
    "metadata": lambda n: {"metadata": {str(each): "v" for each in range(n // 4)}},
}
MESSAGES: dict[str, Make] = {
    "messages": lambda n: {"messages": [{"role": "user", "content": "Hi"}] * (n // 16)},
    "blocks": lambda n: _said([{"type": "text", "text": "Hi"}] * (n // 16)),
    "results": lambda n: _said([{"type": "tool_result", "tool_use_id": "c", "content": "1"}] * (n // 16)),
    "calls": lambda n: _said([{"type": "tool_use", "id": "c", "name": "f", "input": {}}] * (n // 32), "assistant"),
    "system": lambda n: {"system": [{"type": "text", "text": "Hi"}] * (n // 16)},
    "tools": lambda n: {"tools": [{"name": f"f{each}", "input_schema": {}} for each in range(n // 32)]},
    "stop_sequences": lambda n: {"stop_sequences": [f"stop {each}" for each in range(n)]},
}
TOKENS: dict[str, Make] = {
    "prompt": lambda n: {"prompt": "word " * (n // 5)},
    "tokens": lambda n: {"tokens": [5] * n},
}
ANSWERS: dict[str, Mapping[str, Any]] = {
    "completion": {"prompt": "Hi"},
    "streamed completion": {"prompt": "Hi", "stream": True},
    "completion with stops": {"prompt": "Hi", "stream": True, "stop": ["never", "?", "a b c d"]},
    "completion with log-probabilities": {"prompt": "Hi", "logprobs": 0},
    "chat": _said("Hi"),
    "chat with tools": {**_said("Hi"), "tools": [WEATHER]},
    "streamed chat with tools": {**_said("Hi"), "tools": [WEATHER], "stream": True},
    "streamed response": {"input": "Hi", "stream": True},
}
TEXTS = {
    "marks": "<tool_call> a b c",
    "thoughts": "<think>a </think> b ",
    "objects": '<tool_call>{"a": [{',
    "a call": '<tool_call>{"name": "weather", "arguments": {"a": "' + "x" * 10,
    "pairs": "<tool_call>weather<arg_key>a</arg_key><arg_value>x",
    "Python": "[weather(a=[(",
}
DATATYPES = {"text_input": "BYTES", "max_tokens": "INT32", "stop_words": "BYTES", "ids": "INT32", "weights": "FP32"}
GENERATE: dict[str, Make] = {
    "text_input": lambda n: {"text_input": "x" * n},
    "stop_words": lambda n: {"stop_words": ["a"] * n},
    "numbers": lambda n: {"ids": list(range(n))},
    "fractions": lambda n: {"weights": [0.5] * n},
    "id": lambda n: {"id": "i" * n},
    "parameters": lambda n: {"parameters": {str(each): 1 for each in range(n)}},
    "unknown": lambda n: {f"max_token{each}": 1 for each in range(n)},
    "a long unknown key": lambda n: {"max_token" * n: 1},
}
ROW = {
    "input_ids": np.array([[1, 5, 6]], dtype=np.int32),
    "input_lengths": np.array([[3]], dtype=np.int32),
    "request_output_len": np.array([[4]], dtype=np.int32),
}


def _words(count: int) -> Any:
    """Words of one id each, in the form of TensorRT-LLM: ids and ends."""
    return np.array([[list(range(count)), list(range(1, count + 1))]], dtype=np.int32)


CORE: dict[str, Make] = {
    "input_ids": lambda n: {
        "input_ids": np.full((1, n), 5, np.int32),
        "input_lengths": np.array([[n]], dtype=np.int32),
    },
    "rows": lambda n: {
        "input_ids": np.full((n // 64, 3), 5, np.int32),
        "input_lengths": np.full((n // 64, 1), 3, np.int32),
        "request_output_len": np.full((n // 64, 1), 4, np.int32),
    },
    "stop_words_list": lambda n: {"stop_words_list": _words(n)},
    "bad_words_list": lambda n: {"bad_words_list": _words(n)},
    "embedding_bias": lambda n: {"embedding_bias": np.ones((1, n), np.float32)},
    "draft_input_ids": lambda n: {"draft_input_ids": np.full((1, n), 5, np.int32)},
    "guided_decoding_guide": lambda n: {
        "guided_decoding_guide_type": np.array([[b"regex"]], dtype=object),
        "guided_decoding_guide": np.array([[b"a" * n]], dtype=object),
    },
}
PREPROCESSING: dict[str, Make] = {
    "QUERY": lambda n: {"QUERY": np.array([[b"word " * (n // 5)]], dtype=object)},
    "rows": lambda n: {
        "QUERY": np.array([[b"Hi"]] * (n // 16), dtype=object),
        "REQUEST_OUTPUT_LEN": np.full((n // 16, 1), 4),
    },
    "STOP_WORDS_DICT": lambda n: {"STOP_WORDS_DICT": np.array([[b"a%d" % each for each in range(n // 16)]], object)},
    "BAD_WORDS_DICT, long": lambda n: {"BAD_WORDS_DICT": np.array([[b"a" * n]], object)},
    "EMBEDDING_BIAS_WORDS": lambda n: {
        "EMBEDDING_BIAS_WORDS": np.array([[b"a%d" % each for each in range(n // 16)]], object),
        "EMBEDDING_BIAS_WEIGHTS": np.ones((1, n // 16), np.float32),
    },
}


def _seconds(work: Callable[[int], Callable[[], object]], size: int, clock: Callable[[], float]) -> float:
    """Return the least CPU time of two runs; what a run needs is made before. Collections of garbage do not count."""
    best = float("inf")
    for _ in range(2):
        run = work(size)
        gc.disable()
        began = clock()
        run()
        best = min(best, clock() - began)
        gc.enable()
    return best


def require_linear(
    work: Callable[[int], Callable[[], object]], most: int = MOST, clock: Callable[[], float] = time.process_time
) -> None:
    """Fail if four times the largest size that is worth measuring takes more than RATIO times as long."""
    size = min(most // 4, 512)
    while size < most // 4 and _seconds(work, 4 * size, clock) < ENOUGH:
        size *= 2
    ratios = []
    for _ in range(ATTEMPTS):
        before, after = _seconds(work, size, clock), _seconds(work, 4 * size, clock)
        if after < ENOUGH or after < RATIO * before:
            return
        ratios.append(f"{before * 1e3:.1f} → {after * 1e3:.1f} ms")
    raise AssertionError(f"from {size} to {4 * size}: {', '.join(ratios)}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("doubling") / "model")


NEEDED: dict[str, Mapping[str, Any]] = {
    "completions": {"prompt": "Hi", "max_tokens": 1},
    "chat/completions": {**_said("Hi"), "max_tokens": 1},
    "responses": {"input": "Hi", "max_output_tokens": 1},
    "messages": {**_said("Hi"), "max_tokens": 1},
}


@contextmanager
def _application(
    folder: Path,
) -> Iterator[tuple[ScriptedTriton, Callable[[str, Mapping[str, Any]], Callable[[], object]]]]:
    triton, app = ScriptedTriton(folder), FastAPI()
    app.include_router(openai_router(triton, Measures()))
    loop = asyncio.new_event_loop()

    def post(path: str, body: Mapping[str, Any]) -> Callable[[], object]:
        content = json.dumps({"model": NAME, **NEEDED.get(path, {}), **body}).encode()
        whole = path if path.startswith("/") else f"/v1/{path}"
        return lambda: loop.run_until_complete(post_to(app, whole, content))

    try:
        yield triton, post
    finally:
        loop.close()


@pytest.mark.parametrize("field", COMPLETIONS)
def test_completions(field: str, folder: Path) -> None:
    with _application(folder) as (_, post):
        require_linear(lambda size: post("completions", COMPLETIONS[field](size)))


@pytest.mark.parametrize("field", CHAT)
def test_chat(field: str, folder: Path) -> None:
    with _application(folder) as (_, post):
        require_linear(lambda size: post("chat/completions", CHAT[field](size)))


@pytest.mark.parametrize("field", RESPONSES)
def test_responses(field: str, folder: Path) -> None:
    with _application(folder) as (_, post):
        require_linear(lambda size: post("responses", RESPONSES[field](size)))


@pytest.mark.parametrize("field", MESSAGES)
def test_messages(field: str, folder: Path) -> None:
    with _application(folder) as (_, post):
        require_linear(lambda size: post("messages", MESSAGES[field](size)))


@pytest.mark.parametrize("field", TOKENS)
def test_tokens(field: str, folder: Path) -> None:
    path = "/detokenize" if field == "tokens" else "/tokenize"
    with _application(folder) as (_, post):
        require_linear(lambda size: post(path, TOKENS[field](size)))


@pytest.mark.parametrize("kind", TEXTS)
def test_reading_answers(kind: str) -> None:
    def read(size: int) -> Callable[[], object]:
        text = TEXTS[kind] * (size // len(TEXTS[kind]))
        if kind in ("a call", "pairs"):  # one call without an end
            text = TEXTS[kind] + "x" * size

        def run() -> None:
            reader = reader_of(dialect_of("<think>"), {"weather": {}}, thinks=False, thoughts=True, required=False)
            for each in text:
                list(reader.add(each))
            list(reader.finish())

        return run

    require_linear(read)


@pytest.mark.parametrize("kind", ANSWERS)
def test_answers(kind: str, folder: Path) -> None:
    body = ANSWERS[kind]
    path = "completions" if "prompt" in body else "responses" if "input" in body else "chat/completions"
    with _application(folder) as (triton, post):

        def answer(size: int) -> Callable[[], object]:
            triton.script = ("<tool_call> a b c" * (size // 17),)
            return post(path, body)

        require_linear(answer, most=MOST // 8)


@pytest.mark.parametrize("field", GENERATE)
def test_generate(field: str) -> None:
    def check(size: int) -> Callable[[], object]:
        body = json.dumps({"text_input": "a", **GENERATE[field](size)}).encode()

        def run() -> None:
            with suppress(RefusedError):
                check_generate(body, LIMITS, DATATYPES)

        return run

    require_linear(check)


@pytest.mark.parametrize("datatype", ["INT32", "FP32", "BYTES", "BOOL"])
@pytest.mark.parametrize("form", ["flat", "nested", "inputs", "binary"])
def test_infer(form: str, datatype: str) -> None:
    value: Any = {"INT32": 5, "FP32": 0.5, "BYTES": "a", "BOOL": True}[datatype]

    def check(size: int) -> Callable[[], object]:
        data = [value] * size if form == "flat" else [[value]] * size
        entry: dict[str, Any] = {
            "name": "a",
            "datatype": datatype,
            "shape": [size] if form == "flat" else [size, 1],
            "data": data,
        }
        inputs: list[dict[str, Any]] = [entry]
        if form == "inputs":
            inputs = [{**entry, "shape": [1], "data": [value]}] * (size // 64)
        tail, length = b"", None
        if form == "binary":
            tail = b"\1\0\0\0" * size if datatype != "BYTES" else b"\1\0\0\0a" * size
            inputs = [
                {"name": "a", "datatype": datatype, "shape": [size], "parameters": {"binary_data_size": len(tail)}}
            ]
        body = json.dumps({"inputs": inputs}).encode()
        length = len(body) if tail else None

        def run() -> None:
            with suppress(RefusedError):
                check_infer(body + tail, length, LIMITS)

        return run

    require_linear(check)


@pytest.mark.parametrize("field", CORE)
def test_core(field: str) -> None:
    factory = RequestFactory(load_executor_module("openvino", "1.2"), decoupled=True, exclude_input=False)

    def make(size: int) -> Callable[[], object]:
        inputs = {**ROW, **CORE[field](size)}

        def run() -> None:
            with suppress(ValueError):
                factory.requests(inputs)

        return run

    require_linear(make)


@pytest.mark.parametrize("field", PREPROCESSING)
def test_preprocessing(field: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    engine = {"build_config": {"max_seq_len": MOST}, "pretrained_config": {"vocab_size": 320}}
    (tmp_path / "engine" / "config.json").write_text(json.dumps(engine))
    folders = {"tokenizer_dir": folder, "gpt_model_path": tmp_path / "engine"}
    parameters = {name: {"string_value": str(place)} for name, place in folders.items()}
    config = {"parameters": parameters, "output": [{"name": "STOP_WORDS_IDS", "data_type": "TYPE_INT32"}]}
    model = TritonPythonModel()
    place = str(tmp_path / "repository" / "preprocessing")
    model.initialize({"model_config": json.dumps(config), "model_repository": place, "model_version": "1"})

    def make(size: int) -> Callable[[], object]:
        text = {"QUERY": np.array([[b"Hi"]], dtype=object), "REQUEST_OUTPUT_LEN": np.array([[4]])}
        inputs = {**text, **PREPROCESSING[field](size)}

        def run() -> None:
            with suppress(ValueError):
                model._process(inputs)

        return run

    require_linear(make)


def _bls_rows(count: int, **more: Any) -> dict[str, Any]:
    rows = {"text_input": np.array([[b"Hi"]] * count, dtype=object), "max_tokens": np.full((count, 1), 4)}
    return {**rows, **more}


BLS: dict[str, Make] = {
    "text_input": lambda n: _bls_rows(1, text_input=np.array([[b"word " * (n // 5)]], dtype=object)),
    "rows": lambda n: _bls_rows(n // 16),
    "stop_words": lambda n: _bls_rows(1, stop_words=np.array([[b"a%d" % each for each in range(n // 16)]], object)),
    "lora_name": lambda n: _bls_rows(1, lora_name=np.array([[b"n" * n]], object)),
    "lora_name, rows": lambda n: _bls_rows(n // 16, lora_name=np.array([[b"n"]] * (n // 16), object)),
    "random_seed": lambda n: _bls_rows(n // 16, random_seed=np.arange(n // 16)),
    "prompt_embedding_table": lambda n: _bls_rows(1, prompt_embedding_table=np.ones((1, n, 16), np.float16)),
    "guided_decoding_guide": lambda n: _bls_rows(1, guided_decoding_guide=np.array([[b"a" * n]], object)),
}


@pytest.mark.parametrize("field", BLS)
def test_bls(field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def preprocessed(_model: str, given: Mapping[str, Any], wanted: Sequence[str], _id: str) -> dict[str, Any]:
        ids = np.array([list(bytes(row[0])) for row in given["QUERY"]], np.int32)
        return dict.fromkeys(wanted, ids) | {"REQUEST_INPUT_LEN": np.full((len(ids), 1), ids.shape[1])}

    monkeypatch.setattr(bls, "call", preprocessed)
    settings = bls.BlsSettings(
        core="tensorrt_llm", lora=LoraNames(tmp_path, "lora.json"), inputs=frozenset({"random_seed"})
    )

    def make(size: int) -> Callable[[], object]:
        inputs = dict(BLS[field](size))

        def run() -> None:
            with suppress(ValueError):
                bls.check(settings, inputs)
                bls.adapter_of(inputs)
                bls.prompts(bls.core_inputs(settings, inputs, "1"))

        return run

    require_linear(make)


def test_a_square_is_found() -> None:
    now = 0.0

    def costs(seconds: Callable[[int], float]) -> Callable[[int], Callable[[], object]]:
        def spend(size: int) -> None:
            nonlocal now
            now += seconds(size)

        return lambda size: lambda: spend(size)

    require_linear(costs(lambda size: size * 1e-5), clock=lambda: now)
    with pytest.raises(AssertionError, match="ms"):
        require_linear(costs(lambda size: size * size * 1e-7), clock=lambda: now)
