"""vLLM itself on a CPU with pooling models in NVIDIA's shape: vectors and scores are those of transformers.

Each of the two servers takes a minute to start.
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

from tests.real_vllm.served import ENVIRONMENT
from tests.support.servers import running_server
from tests.support.tiny_models import write_tiny_model
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
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", dtype="float32")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    yield from pooling_server(tmp_path_factory.mktemp("home"), model)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cross-encoder") / "model"
    in_vllms_environment(CROSS_ENCODER, folder)
    return folder


@pytest.fixture(scope="module")
def scoring(tmp_path_factory: pytest.TempPathFactory, cross_encoder: Path) -> Iterator[Server]:
    yield from pooling_server(tmp_path_factory.mktemp("home"), cross_encoder)


def pooling_server(home: Path, model: Path) -> Iterator[Server]:
    os.environ.update(ENVIRONMENT)
    version = home / "repository" / "tiny" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "vllm"\ninstance_group [{ kind: KIND_MODEL }]\n')
    arguments = {"model": str(model), "runner": "pooling", "dtype": "float32", "enforce_eager": True}
    limits = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20}
    (version / "model.json").write_text(json.dumps(arguments | limits))
    with running_server(version.parents[1], home=home, gateway=True, ready_timeout=300) as running:
        yield running


def in_vllms_environment(script: str, *words: object) -> str:
    python = Path(os.environ["TRTSERVE_VLLM_PYTHON"])
    python = python / "bin" / "python" if python.is_dir() else python
    command = [str(python), "-c", script, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def asked(server: Server, path: str, **body: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{server.address.http_port}/v1/{path}"
    answer = httpx.post(url, json={"model": "tiny", **body}, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_vectors_are_those_of_transformers(server: Server, model: Path) -> None:
    lines = in_vllms_environment(ORACLE, model, json.dumps(TEXTS)).splitlines()
    counts, rows = zip(*map(json.loads, lines), strict=True)
    found = asked(server, "embeddings", input=TEXTS)
    vectors = np.array([each["embedding"] for each in found["data"]])
    np.testing.assert_allclose(vectors, np.array(rows), atol=1e-4)
    assert found["usage"]["prompt_tokens"] == sum(counts)


def test_documents_are_ranked_by_their_vectors(server: Server) -> None:
    results = asked(server, "rerank", query=TEXTS[0], documents=TEXTS)["results"]
    assert (results[0]["index"], results[0]["relevance_score"]) == (0, pytest.approx(1, abs=1e-4))
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True)


def test_documents_are_ranked_by_a_model_that_reads_them_with_the_query(scoring: Server, cross_encoder: Path) -> None:
    documents = [*TEXTS[1:], "bread?", "z"]
    tokens, expected = json.loads(in_vllms_environment(SCORES, cross_encoder, json.dumps([TEXTS[0], *documents])))
    found = asked(scoring, "rerank", query=TEXTS[0], documents=documents)
    scores = {each["index"]: each["relevance_score"] for each in found["results"]}
    assert [scores[index] for index in range(len(documents))] == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 0.01
    assert found["usage"]["total_tokens"] == tokens
