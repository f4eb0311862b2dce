"""vLLM itself on a CPU behind one Triton server with three models of NVIDIA's backend: texts, vectors and scores.

Vectors and scores are those of transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.real_vllm.nodes import DEMO, ENVIRONMENT
from tests.support.counting_vllm import nvidia_repository
from tests.support.servers import running_server
from tests.support.tiny_models import write_tiny_model
from trtserve.client.endpoint import Endpoint
from trtserve.client.query import generate, generate_each
from trtserve.client.spec import QuerySpec
from trtserve.server.state import Server

pytestmark = pytest.mark.triton

TEXTS = ["What is ML?", "What is machine learning?", "A recipe of bread"]
ORACLE = """
import json, sys, torch
from transformers import AutoModel, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModel.from_pretrained(sys.argv[1], dtype=torch.float32)
for text in json.loads(sys.argv[2]):
    ids = tokenizer(text, return_tensors="pt").input_ids
    row = model(ids).last_hidden_state[0, -1]
    print(json.dumps([ids.shape[1], (row / row.norm()).tolist()]))
"""
# Random weights give all documents nearly one score; with larger ones the documents differ.
CROSS_ENCODER = """
import string, sys, torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast
letters = string.ascii_lowercase
marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "?", *letters, *("##" + each for each in letters)]
open(sys.argv[1] + ".txt", "w").write("\\n".join(marks))
tokenizer = BertTokenizerFast(sys.argv[1] + ".txt", model_max_length=128)
torch.manual_seed(1)
sizes = dict(vocab_size=len(marks), hidden_size=64, num_attention_heads=2, num_hidden_layers=2, intermediate_size=128)
config = BertConfig(**sizes, num_labels=1, max_position_embeddings=128, initializer_range=0.3)
model = BertForSequenceClassification(config)
model.save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
"""
SCORES = """
import json, sys, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
query, *documents = json.loads(sys.argv[2])
pairs = tokenizer([query] * len(documents), documents, return_tensors="pt", padding=True)
print(json.dumps([pairs.attention_mask.sum().item(), model(**pairs).logits[:, 0].sigmoid().tolist()]))
"""


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", dtype="float32")


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cross-encoder") / "model"
    in_vllms_environment(CROSS_ENCODER, folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, embedder: Path, cross_encoder: Path) -> Iterator[Server]:
    os.environ.update(ENVIRONMENT)
    home = tmp_path_factory.mktemp("home")
    shared: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 200_000_000,
    }
    pools: dict[str, Any] = {**shared, "runner": "pooling", "max_model_len": 128}
    repository = home / "repository"
    nvidia_repository(repository, "writer", model=str(DEMO), max_model_len=256, **shared)
    nvidia_repository(repository, "embedder", model=str(embedder), **pools)
    nvidia_repository(repository, "ranker", model=str(cross_encoder), **pools)
    with running_server(repository, home=home, gateway=True, ready_timeout=600) as running:
        yield running


def in_vllms_environment(script: str, *words: object) -> str:
    python = Path(os.environ["TRTSERVE_VLLM_PYTHON"])
    python = python / "bin" / "python" if python.is_dir() else python
    command = [str(python), "-c", script, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def asked(server: Server, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"http://127.0.0.1:{server.address.http_port}/v1/{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_vectors_are_those_of_transformers(server: Server, embedder: Path) -> None:
    lines = in_vllms_environment(ORACLE, embedder, json.dumps(TEXTS)).splitlines()
    counts, rows = zip(*map(json.loads, lines), strict=True)
    found = asked(server, "embeddings", model="embedder", input=TEXTS)
    vectors = np.array([each["embedding"] for each in found["data"]])
    np.testing.assert_allclose(vectors, np.array(rows), atol=1e-4)
    assert found["usage"]["prompt_tokens"] == sum(counts)


def test_documents_are_ranked_by_their_vectors(server: Server) -> None:
    results = asked(server, "rerank", model="embedder", query=TEXTS[0], documents=TEXTS)["results"]
    assert (results[0]["index"], results[0]["relevance_score"]) == (0, pytest.approx(1, abs=1e-4))
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True)


def test_documents_are_ranked_by_a_model_that_reads_them_with_the_query(server: Server, cross_encoder: Path) -> None:
    documents = [*TEXTS[1:], "bread?", "z"]
    tokens, expected = json.loads(in_vllms_environment(SCORES, cross_encoder, json.dumps([TEXTS[0], *documents])))
    found = asked(server, "rerank", model="ranker", query=TEXTS[0], documents=documents)
    scores = {each["index"]: each["relevance_score"] for each in found["results"]}
    assert [scores[index] for index in range(len(documents))] == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 0.01
    assert found["usage"]["total_tokens"] == tokens


def test_texts_are_answered_as_the_five_models_do(server: Server) -> None:
    endpoint = Endpoint(http_port=server.address.http_port, grpc_port=server.address.grpc_port)
    options = {"max_tokens": 12, "return_log_probs": True}
    pieces: list[str] = []
    plain = generate(QuerySpec(model="writer", prompts=("What is ML?",), options=options), endpoint)
    spec = QuerySpec(model="writer", prompts=("What is ML?",), options=options, stream=True)
    streamed = generate(spec, endpoint, on_text=pieces.append)
    assert plain.text == streamed.text == "".join(pieces).lstrip()
    assert plain.text.startswith("Machine learning is")
    assert (plain.output_tokens, streamed.output_tokens) == (12, 12)
    assert plain.sequences[0].log_probs == pytest.approx(streamed.sequences[0].log_probs, abs=1e-4)
    sampled = {"max_tokens": 8, "num_return_sequences": 3, "top_p": 0.9, "temperature": 1.8, "seed": 5}
    first, again = generate_each(QuerySpec(model="writer", prompts=("What is",) * 2, options=sampled), endpoint)
    assert [each.text for each in first.sequences] == [each.text for each in again.sequences]
    assert len({each.text for each in first.sequences}) > 1
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
    guide = {"guide_type": "json_schema", "guide": json.dumps({**schema, "additionalProperties": False})}
    wanted = {**guide, "max_tokens": 64}
    (answer,) = generate_each(QuerySpec(model="writer", prompts=("hi",), options=wanted), endpoint)
    assert answer.text.startswith("{")
