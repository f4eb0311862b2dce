"""One question on every way in has the same text, stops and number of answers, whatever the tokenizer's files say."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.support.in_process import InProcess
from tests.support.model_server import serving
from tests.support.openai_endpoint import openai_endpoint
from tests.support.stages import make_repository
from tests.support.text_requests import word_in
from trtserve.artifacts import Engine
from trtserve.client.endpoint import Endpoint
from trtserve.client.query import Conversation, generate
from trtserve.client.spec import QuerySpec
from trtserve.client.tokenizer import TokenizerFiles
from trtserve.specs import RepositorySpec

pytestmark = pytest.mark.triton

QUESTION, COUNT, ENDS_AFTER = "What is ML?", 24, 9
TEMPLATES = {"with BOS": "{{ bos_token }}[{{ messages[0].content }}]", "without BOS": "[{{ messages[0].content }}]"}
# What the tokenizer adds to every text.
ADDED = {"BOS": ["<s>", "A"], "BOS and EOS": ["<s>", "A", "</s>"]}
_TEXT_MODELS = ("tiny", "tensorrt_llm_bls", "ensemble")


@dataclass(kw_only=True)
class Served:
    """A server whose tokenizer is unusual, and every way to ask it."""

    url: str
    endpoint: Endpoint
    chat: list[int] = field(default_factory=list)
    """The ids that the conversation becomes in transformers."""
    end: int
    """A further end id of generation_config.json, which ends the answer to the conversation."""

    def openai(self) -> OpenAI:
        return OpenAI(base_url=self.url, api_key="none", max_retries=0)

    def queried(self, **settings: Any) -> list[str]:
        """Return the texts of `trtserve query`."""
        options = {"max_tokens": COUNT, **settings.pop("options", {})}
        answer = generate(QuerySpec(prompts=(QUESTION,), options=options, **settings), self.endpoint)
        return [sequence.text or "" for sequence in answer.sequences]


@pytest.fixture(scope="module", params=zip(TEMPLATES, ADDED, strict=True), ids=" / ".join)
def served(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    features_model: Path,
    features_engine: Engine,
    oracle: InProcess,
) -> Iterator[Served]:
    root, (template, added) = tmp_path_factory.mktemp("same"), request.param
    folder = root / "tokenizer"
    shutil.copytree(features_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"]["single"] = [
        {"Sequence" if name == "A" else "SpecialToken": {"id": name, "type_id": 0}} for name in ADDED[added]
    ]
    content["post_processor"]["special_tokens"]["</s>"] = {"id": "</s>", "ids": [2], "tokens": ["</s>"]}
    path.write_text(json.dumps(content))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"chat_template": TEMPLATES[template], "add_bos_token": False, "add_eos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = TokenizerFiles(folder).tokenizer
    ids = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], return_dict=False)
    answer = oracle.tokens(ids, COUNT)
    # Special, as such tokens are, and no part of the question.
    end = next(
        token
        for at, token in enumerate(answer)
        if at >= ENDS_AFTER and answer.index(token) == at and token not in ids and tokenizer.decode([token]).isascii()
    )
    content["added_tokens"].append({**content["added_tokens"][-1], "id": end, "content": tokenizer.decode([end])})
    path.write_text(json.dumps(content))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, end], "do_sample": False}))
    spec = RepositorySpec(name="tiny", settings={"ngram_max_draft_len": "0"})
    repository = make_repository(features_engine, folder, spec, out=root / "repository").path
    with serving(repository, root / "server") as server, openai_endpoint(server, repository=repository) as url:
        address = server.address
        endpoint = Endpoint(
            http_port=address.http_port, grpc_port=address.grpc_port, model="tiny", repository=repository
        )
        yield Served(url=url, endpoint=endpoint, chat=list(ids), end=end)


@pytest.mark.needs("anthropic")
def test_a_conversation(served: Served, oracle: InProcess, features_tokenizer: Any) -> None:
    ids = oracle.tokens(served.chat, COUNT)
    ids = ids[: ids.index(served.end)]
    text = features_tokenizer.decode(ids, skip_special_tokens=True).lstrip(" ")
    assert len(ids) >= ENDS_AFTER
    found: dict[str, str] = {}
    for model in (*_TEXT_MODELS, "tensorrt_llm"):
        (found[f"query {model}"],) = served.queried(model=model)
    (found["query --protocol http"],) = served.queried(protocol="http")
    (found["query --stream"],) = served.queried(stream=True)
    pieces: list[str] = []
    spec = QuerySpec(prompts=(QUESTION,), options={"max_tokens": COUNT})
    Conversation(spec=spec, server=served.endpoint).ask(QUESTION, pieces.append)
    found["chat"] = "".join(pieces)
    with served.openai() as client:
        asked: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": COUNT,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**asked)
        found["/v1/chat/completions"] = whole.choices[0].message.content or ""
        events = client.chat.completions.create(**asked, stream=True)
        found["the page"] = "".join(event.choices[0].delta.content or "" for event in events)
        response: dict[str, Any] = {"model": "tiny", "input": QUESTION, "max_output_tokens": COUNT, "temperature": 0}
        said = client.responses.create(**response)
        found["/v1/responses"] = said.output_text
        parts = client.responses.create(**response, stream=True)
        found["its stream"] = "".join(part.delta for part in parts if part.type == "response.output_text.delta")
    from anthropic import Anthropic

    with Anthropic(base_url=served.url.removesuffix("/v1"), api_key="none", max_retries=0) as talker:
        spoken = {**asked, "extra_body": {"temperature": 0}}
        del spoken["temperature"]
        message = talker.messages.create(**spoken)
        found["/v1/messages"] = "".join(block.text for block in message.content if block.type == "text")
        with talker.messages.stream(**spoken) as stream:
            found["their stream"] = "".join(stream.text_stream)
    assert found == dict.fromkeys(found, text)
    assert whole.usage is not None
    assert said.usage is not None
    counts = whole.usage.prompt_tokens, said.usage.input_tokens, message.usage.input_tokens
    assert counts == (len(served.chat),) * 3


@pytest.mark.parametrize("stopped", [False, True])
def test_a_text_its_stops_and_their_number(served: Served, stopped: bool) -> None:
    (free,) = served.queried(raw=True)
    stop = word_in(free, start=1, size=1)
    options = {"stop_words": [stop]} if stopped else {}
    text = free[: free.index(stop)] if stopped else free
    found: dict[str, list[str]] = {}
    for model in (*_TEXT_MODELS, "tensorrt_llm"):
        for count in (1, 2):
            more = {"num_return_sequences": count, "top_k": 1} if count > 1 else {}
            found[f"query {model} {count}"] = served.queried(raw=True, model=model, options={**options, **more})
    found["query --protocol http"] = served.queried(raw=True, protocol="http", options=options)
    found["query --stream"] = served.queried(raw=True, stream=True, options=options)
    found["generate"] = [_generated(served, stop if stopped else None)]
    # Triton's models end a text with its stop word.
    found = {way: [each.removesuffix(stop) if stopped else each for each in texts] for way, texts in found.items()}
    with served.openai() as client:
        asked: Callable[..., Any] = client.completions.create
        for count in (1, 2):
            answer = asked(
                model="tiny",
                prompt=QUESTION,
                max_tokens=COUNT,
                temperature=0,
                n=count,
                **({"stop": [stop]} if stopped else {}),
            )
            found[f"/v1/completions {count}"] = [choice.text.lstrip(" ") for choice in answer.choices]
    assert found == {way: [text] * (2 if way.endswith(" 2") else 1) for way in found}


def _generated(served: Served, stop: str | None) -> str:
    """Return the answer of Triton's generate endpoint."""
    body = {"text_input": QUESTION, "max_tokens": COUNT, "exclude_input_in_output": True}
    body |= {"stop_words": [stop]} if stop else {}
    url = f"http://127.0.0.1:{served.endpoint.http_port}/v2/models/tiny/generate"
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = json.load(answer)["text_output"]
    return text.lstrip(" ")
