"""Parameters of config.pbtxt in a real Triton: effective ones and what they do, ones without meaning, refused ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.in_process import InProcess
from tests.support.model_server import ModelServer, Tensors, flags, serving
from tests.support.release_client import NEWEST, long_integers
from tests.support.text_requests import answers, ask, request, text_of
from trtserve.artifacts import Checkpoint, Engine
from trtserve.build import build_engine
from trtserve.executor import api
from trtserve.repo import assemble_repository
from trtserve.specs import BuildSpec, RepositorySpec

pytestmark = pytest.mark.triton

NAME = "tiny"
STEP, WINDOW = 64, 48
LONG = [1, *range(20, 220)]
"""Longer than a step of the engine, and than its attention sees."""
WITHOUT_MEANING = {
    "gpu_device_ids": "0,1;2,3",
    "cuda_graph_mode": "true",
    "xgrammar_tokenizer_info_path": "/of/a/machine/with/GPUs.json",
}
UNKNOWN_WORD = 'parameters { key: "batch_scheduler_policy" value { string_value: "first_come" } }\n'
EFFECTIVE = {
    "enable_chunked_context": "true",
    "max_attention_window_size": str(WINDOW),
    "exclude_input_in_output": "true",
    "normalize_log_probs": "false",
    "decoding_mode": "top_k",
    "max_queue_delay_microseconds": "1000",
    "cancellation_check_period_ms": "10",
    "stats_check_period_ms": "10",
    "iter_stats_max_iterations": "50",
    "request_stats_max_iterations": "50",
    "preprocessing.add_special_tokens": "false",
    "postprocessing.skip_special_tokens": "false",
    "tensorrt_llm_bls.accumulate_tokens": "true",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parameters")


@pytest.fixture(scope="module")
def repository(root: Path, features_checkpoint: Checkpoint, features_model: Path) -> Path:
    """The same weights as those of every other test, on an engine with short steps."""
    limits = BuildSpec(max_batch_size=8, max_seq_len=512, max_num_tokens=STEP, runtime="openvino")
    engine = build_engine(features_checkpoint, limits, out=root / "engine")
    spec = RepositorySpec(
        name=NAME,
        preprocessing_instance_count=2,
        postprocessing_instance_count=2,
        settings=WITHOUT_MEANING | EFFECTIVE,
    )
    made = assemble_repository(engine, features_model, spec, out=root / "repository").path
    # `repo` refuses what is no such word; NVIDIA's tool fills in anything.
    config = made / "tensorrt_llm" / "config.pbtxt"
    config.write_text(config.read_text() + UNKNOWN_WORD)
    return made


@pytest.fixture(scope="module")
def server(root: Path, repository: Path) -> Iterator[ModelServer]:
    with serving(repository, root / "server") as ready:
        yield ready


@pytest.fixture(scope="module")
def windowed(features_engine: Engine) -> Iterator[InProcess]:
    """The same window, but prompts that are computed in one step."""
    cache = api.KvCacheConfig(max_attention_window=[WINDOW])
    executor = InProcess(features_engine.path, kv_cache_config=cache, normalize_log_probs=False)
    yield executor
    executor.close()


def core(server: ModelServer, tensors: Tensors) -> Tensors:
    (answer,) = answers(server, "tensorrt_llm", tensors)
    return answer


@pytest.mark.usefixtures("server")
def test_what_has_no_meaning_is_listed_once(root: Path) -> None:
    log = (root / "server" / "triton.log").read_text()
    assert log.count(f"Parameters without meaning on this runtime: {', '.join(WITHOUT_MEANING)}") == 1
    (listed,) = [line for line in log.splitlines() if "without meaning" in line]
    assert "executor_worker_path" not in listed


@pytest.mark.usefixtures("server")
def test_an_unknown_word_is_a_warning_as_upstream(root: Path) -> None:
    log = (root / "server" / "triton.log").read_text()
    assert "Parameter batch_scheduler_policy is 'first_come'" in log


def test_long_prompts_go_in_chunks_through_a_sliding_window(
    server: ModelServer, windowed: InProcess, oracle: InProcess
) -> None:
    expected = windowed.tokens(LONG, 40)
    assert expected != oracle.tokens(LONG, 40)
    # `exclude_input_in_output` is the model's: the request does not ask for it.
    assert core(server, NEWEST.core(LONG, 40))["output_ids"].tolist() == [[expected]]


def test_log_probs_are_not_scaled_to_the_tokens_that_were_left(server: ModelServer, windowed: InProcess) -> None:
    sampling: dict[str, Any] = {"top_k": 3, "seed": 8}
    expected: Any = windowed.result([1, 30, 31], 8, sampling=sampling, output={"return_log_probs": True})
    asked = NEWEST.core([1, 30, 31], 8, top_k=3, return_log_probs=True)
    answer = core(server, {**asked, "seed": long_integers(8)})
    assert answer["output_ids"].tolist() == [expected.output_token_ids]
    np.testing.assert_allclose(answer["output_log_probs"][0], expected.log_probs, rtol=1e-5)
    np.testing.assert_allclose(answer["output_log_probs"].sum(), answer["cum_log_probs"].sum(), rtol=1e-5)


@pytest.mark.parametrize("model", ["ensemble", NAME])
def test_special_tokens_are_not_added_and_not_hidden(server: ModelServer, model: str) -> None:
    words: dict[str, Any] = {"embedding_bias_words": ["<s>"], "embedding_bias_weights": np.array([[200.0]], "f4")}
    asked = request("abc", 3, exclude_input_in_output=True, return_num_input_tokens=flags(True), **words)
    (answer,) = answers(server, model, asked)
    assert answer["num_input_tokens"].item() == 3
    assert text_of(answer).replace(" ", "") == "<s><s><s>"


def test_an_accumulating_stream_repeats_what_it_said(server: ModelServer) -> None:
    whole = text_of(ask(server, NAME, "abc", 12, end_id=-1, exclude_input_in_output=True))
    pieces = [text_of(piece) for piece in answers(server, NAME, request("abc", 12, stream=True, end_id=-1))]
    assert len(pieces) > 6
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(pieces))
    assert pieces[-1] == whole


def test_beams_that_the_model_does_not_allow(server: ModelServer) -> None:
    """Neither engine nor `max_beam_width` has room for a second beam."""
    status, answer = server.generate("ensemble", {"text_input": "x", "max_tokens": 2, "beam_width": 2})
    assert status >= 400
    assert "beam width 2 is larger than configured max beam width 1" in answer["error"]


def test_what_cannot_be_done_is_a_load_error(repository: Path, tmp_path: Path) -> None:
    """As when a config.pbtxt was filled by NVIDIA's tool, which knows nothing of this runtime."""
    config = repository / "tensorrt_llm" / "config.pbtxt"
    text = config.read_text()
    config.write_text(text + 'parameters { key: "sink_token_length" value { string_value: "4" } }\n')
    words = "Parameter sink_token_length is '4', which this runtime cannot carry"
    try:
        with pytest.raises(AssertionError, match=words), serving(repository, tmp_path):
            pass
    finally:
        config.write_text(text)
