"""For the session, one engine with every feature, a Triton server on it, its answers, and a server that echoes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.devices import DEVICE
from tests.support.echo_server import running_echo_server
from tests.support.in_process import InProcess
from tests.support.model_server import ModelServer, restart_broken, serving
from tests.support.openai_endpoint import openai_endpoint
from tests.support.peft_adapters import write_adapter
from tests.support.stages import build_engine, convert_adapter, convert_model, make_repository
from tests.support.text_requests import MAX_SEQ_LEN
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Checkpoint, Engine, Model
from trtserve.client.endpoint import Endpoint
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec

NAME = "tiny"
# `make gpu-test` runs the tests of request features on the torch runtime.
RUNTIME: dict[str, Any] = (
    {"runtime": "torch", "device": DEVICE}
    if os.environ.get("TRTSERVE_TEST_RUNTIME") == "torch"
    else {"runtime": "openvino"}
)
LENGTHS = {"max_input_len": MAX_SEQ_LEN, "max_seq_len": MAX_SEQ_LEN}
LIMITS: dict[str, Any] = {"max_batch_size": 8, "max_beam_width": 4, **LENGTHS, **RUNTIME}
ADAPTERS = ("left", "right")


@pytest.fixture(autouse=True)
def whole_servers(pytestconfig: pytest.Config) -> None:
    """Start servers again that a former test lost, so that it fails alone, and show how they ended."""
    for log in restart_broken():
        with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            sys.stderr.write(f"\n--- a server of the former test has ended:\n{log}\n---\n")


@pytest.fixture(scope="session")
def echo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("echo")


@pytest.fixture(scope="session")
def echo(echo_folder: Path) -> Iterator[Endpoint]:
    """The models that do no arithmetic."""
    with running_echo_server(echo_folder) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def features_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="session")
def features_model(features_root: Path) -> Path:
    return write_tiny_model(features_root / "model", max_position_embeddings=MAX_SEQ_LEN)


@pytest.fixture(scope="session")
def features_checkpoint(features_root: Path, features_model: Path) -> Checkpoint:
    return convert_model(Model(path=features_model), ConvertSpec(dtype="float32"), out=features_root / "checkpoint")


@pytest.fixture(scope="session")
def features_engine(features_root: Path, features_checkpoint: Checkpoint) -> Engine:
    """Float32, beams, generation logits, prompt tables, drafts and adapters."""
    spec = BuildSpec(
        **LIMITS,
        max_draft_len=8,
        speculative_decoding_mode="draft_tokens_external",
        gather_generation_logits=True,
        max_prompt_embedding_table_size=64,
        lora_plugin="auto",
        lora_target_modules=("attn_q", "attn_k", "attn_v"),
        max_lora_rank=8,
    )
    return build_engine(features_checkpoint, spec, out=features_root / "engine")


@pytest.fixture(scope="session")
def logits_engine(features_root: Path, features_checkpoint: Checkpoint) -> Engine:
    """Context logits, which TensorRT-LLM builds into no engine that takes drafts, and prompt tables."""
    gathered: dict[str, Any] = {"gather_context_logits": True, "gather_generation_logits": True}
    spec = BuildSpec(**LIMITS, **gathered, max_prompt_embedding_table_size=64)
    return build_engine(features_checkpoint, spec, out=features_root / "logits-engine")


@pytest.fixture(scope="session")
def features_adapters(features_root: Path, features_model: Path) -> dict[str, Path]:
    """Name → folder with the two npy files of an adapter."""
    modules = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (64, 32), "self_attn.v_proj": (64, 32)}
    folders = {}
    for seed, name in enumerate(ADAPTERS):
        source = write_adapter(features_root / "peft" / name, modules=modules, rank=8, seed=seed)
        folders[name] = convert_adapter(str(source), out=features_root / "adapters" / name).path
    return folders


@pytest.fixture(scope="session")
def features(
    features_root: Path, features_model: Path, features_engine: Engine, features_adapters: dict[str, Path]
) -> Iterator[ModelServer]:
    """The default repository: decoupled, inputs of all releases. Without drafts, which would end long answers soon."""
    settings = {"enable_kv_cache_reuse": "true", "ngram_max_draft_len": "0"}
    spec = RepositorySpec(name=NAME, settings=settings, lora=features_adapters)
    repository = make_repository(features_engine, features_model, spec, out=features_root / "repository")
    with serving(repository.path, features_root / "server") as server:
        yield server


@pytest.fixture(scope="session")
def features_tokenizer(features_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(features_model))


@pytest.fixture(scope="session")
def oracle(features_engine: Engine) -> Iterator[InProcess]:
    """The executor of the same engine, without Triton."""
    executor = InProcess(features_engine.path, max_beam_width=4)
    yield executor
    executor.close()


@pytest.fixture(scope="session")
def endpoint(features: ModelServer, features_root: Path) -> Endpoint:
    """The server for `trtserve query`."""
    address, repository = features.address, features_root / "repository"
    return Endpoint(http_port=address.http_port, grpc_port=address.grpc_port, model="tiny", repository=repository)


@pytest.fixture(scope="session")
def url(features: ModelServer, features_root: Path) -> Iterator[str]:
    """Its gateway with the OpenAI API and the page."""
    with openai_endpoint(features, repository=features_root / "repository", ui=True) as url:
        yield url
