"""vLLM itself on a CPU as a pooling model of NVIDIA's backend: its vectors are those of transformers. A minute."""

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", dtype="float32")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Server]:
    os.environ.update(ENVIRONMENT)
    home = tmp_path_factory.mktemp("home")
    version = home / "repository" / "tiny" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "vllm"\ninstance_group [{ kind: KIND_MODEL }]\n')
    arguments = {"model": str(model), "runner": "pooling", "dtype": "float32", "enforce_eager": True}
    limits = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20}
    (version / "model.json").write_text(json.dumps(arguments | limits))
    with running_server(version.parents[1], home=home, gateway=True, ready_timeout=300) as running:
        yield running


def asked(server: Server, path: str, **body: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{server.address.http_port}/v1/{path}"
    answer = httpx.post(url, json={"model": "tiny", **body}, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_vectors_are_those_of_transformers(server: Server, model: Path) -> None:
    python = Path(os.environ["TRTSERVE_VLLM_PYTHON"])
    python = python / "bin" / "python" if python.is_dir() else python
    words = [str(python), "-c", ORACLE, str(model), json.dumps(TEXTS)]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
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
