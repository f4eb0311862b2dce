"""Guided decoding through Triton: the answer of a random model follows the guide."""

from __future__ import annotations

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.support.model_server import ModelServer
from tests.support.release_client import NEWEST

pytestmark = pytest.mark.triton

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls", "tiny")
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
GRAMMAR = 'start: "yes" | "no" " " "no"'
# Which bound a fast machine meets first differs.
TOO_MUCH = re.compile(r"it needs more than (2 s of CPU time|256 MiB of memory)")


def guided(server: ModelServer, model: str, kind: str, guide: str, count: int = 64, **more: Any) -> str:
    """The new text of a guided request."""
    body = {"text_input": "Say:", "max_tokens": count, "exclude_input_in_output": True, **more}
    status, answer = server.generate(
        model, {**body, "guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
    )
    assert status == 200, answer
    text: str = answer["text_output"]
    return text


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_regular_expression(features: ModelServer, model: str) -> None:
    for seed in range(3):
        text = guided(features, model, "regex", "[0-9]{3}-[a-f]{2}", top_k=50, seed=seed)
        assert re.fullmatch("[0-9]{3}-[a-f]{2}", text)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_schema(features: ModelServer, model: str) -> None:
    value = json.loads(guided(features, model, "json_schema", json.dumps(SCHEMA), 200, temperature=0.5, top_k=20))
    assert value["kind"] in ("cat", "dog")
    assert 0 <= value["legs"] <= 9
    assert set(value) == {"kind", "legs"}


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_grammar(features: ModelServer, model: str) -> None:
    assert guided(features, model, "ebnf_grammar", GRAMMAR) in ("yes", "no no")


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_json_without_a_guide(features: ModelServer, model: str) -> None:
    """A bias towards closing tokens lets even a random model finish."""
    closing: dict[str, Any] = {"embedding_bias_words": ['"', "}", "]"], "embedding_bias_weights": [90.0, 100.0, 100.0]}
    text = guided(features, model, "json", "", 60, **closing)
    assert isinstance(json.loads(text), dict | list | str | int | float | bool | None)
    free = guided(features, model, "json", "", 40, top_k=50, seed=4)
    assert free.lstrip()[:1] in tuple('{["-0123456789tfn')


def test_a_guided_stream_of_the_core_model(features: ModelServer, features_tokenizer: Any) -> None:
    words = {
        "guided_decoding_guide_type": np.array([[b"regex"]], dtype=np.object_),
        "guided_decoding_guide": np.array([[b"(ab){4}"]], dtype=np.object_),
    }
    with features.stream() as stream:
        answers = stream.all("tensorrt_llm", {**NEWEST.core([1, 50], 30, streaming=True), **words})
    tokens = [token for answer in answers for token in answer["output_ids"].reshape(-1).tolist()]
    assert features_tokenizer.decode(tokens, skip_special_tokens=True) == "abababab"


EXPENSIVE = '{"type": "integer", "multipleOf": 10000019}'


def test_nobody_waits_for_a_guide_that_takes_too_much(features: ModelServer, url: str) -> None:
    """Through Triton and through the OpenAI API, which names the bound in an error of its own form."""
    schema = {"name": "costly", "schema": {**json.loads(EXPENSIVE), "description": "another guide than the first"}}
    direct = {
        "text_input": "Say:",
        "max_tokens": 4,
        "guided_decoding_guide_type": "json_schema",
        "guided_decoding_guide": EXPENSIVE,
    }
    openai = pytest.importorskip("openai")  # a GPU machine without network lacks it
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    with ThreadPoolExecutor(2) as pool:
        refused = pool.submit(features.generate, "tensorrt_llm_bls", direct)
        over_http = pool.submit(
            lambda: client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "Hi"}],
                extra_body={"response_format": {"type": "json_schema", "json_schema": schema}},
            )
        )
        for _ in range(3):
            assert features.generate("ensemble", {"text_input": "Say:", "max_tokens": 4})[0] == 200
            assert urllib.request.urlopen(f"{url.removesuffix('/v1')}/health", timeout=60).status == 200
        assert not (refused.done() and over_http.done())
        status, answer = refused.result()
        assert status >= 400
        assert TOO_MUCH.search(str(answer)), answer
        with pytest.raises(openai.BadRequestError, match=TOO_MUCH):
            over_http.result()


def test_a_guide_that_is_too_long(url: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=url, api_key="none")
    with pytest.raises(openai.BadRequestError, match="the guide has 200000 characters; at most 131072"):
        client.completions.create(model="tiny", prompt="Hi", extra_body={"guided_regex": "a" * 200_000})
