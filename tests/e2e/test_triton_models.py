"""The five Triton models and the alias in a real Triton server, on a tiny model: the contract that clients rely on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.in_process import InProcess
from tests.support.model_server import ModelServer, Tensors, flags, inputs_of, integers, serving
from tests.support.release_client import NEWEST
from tests.support.stages import build_engine, convert_model, make_repository
from tests.support.text_requests import ENDLESS, MAX_SEQ_LEN, is_idle
from tests.support.tiny_models import write_tiny_model
from tests.support.waiting import wait_until
from trtserve.artifacts import Engine, Model
from trtserve.executor import api
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec

pytestmark = pytest.mark.triton

NAME = "tiny"
PROMPT = "What is machine learning?"
GUIDE_BODY = {"text_input": PROMPT, "max_tokens": 20, "bad_words": "", "stop_words": ""}
GUIDE_BODY_WITH_IDS = {**GUIDE_BODY, "pad_id": 2, "end_id": 2}
TEXT_MODELS = ("ensemble", "tensorrt_llm_bls", NAME)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    return write_tiny_model(root / "model", max_position_embeddings=MAX_SEQ_LEN)


@pytest.fixture(scope="module")
def engine(root: Path, model: Path) -> Engine:
    checkpoint = convert_model(Model(path=model), ConvertSpec(dtype="float32"), out=root / "checkpoint")
    spec = BuildSpec(max_batch_size=8, max_seq_len=MAX_SEQ_LEN, max_prompt_embedding_table_size=8, runtime="openvino")
    return build_engine(checkpoint, spec, out=root / "engine")


@pytest.fixture
def streaming(features: ModelServer) -> ModelServer:
    return features


@pytest.fixture(scope="module")
def plain(root: Path, model: Path, engine: Engine) -> Iterator[ModelServer]:
    # Relocated after it was made: nothing in it may be an absolute path.
    # Triton loads no ensemble whose tensors differ in type between its models: the type set here reaches all of them.
    settings = {"prompt_embedding_table_data_type": "TYPE_BF16", "ngram_max_draft_len": "0"}
    spec = RepositorySpec(name=NAME, streaming=False, settings=settings)
    made = make_repository(engine, model, spec, out=root / "made")
    repository = made.path.rename(root / "moved")
    with serving(repository, root / "plain-server") as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model))


@pytest.fixture(scope="module")
def greedy(engine: Engine) -> Callable[[list[int], int], list[int]]:
    """Greedy tokens of the executor in this process: the expected result of every model."""
    executor = api.Executor(engine.path, api.ModelType.DECODER_ONLY, api.ExecutorConfig())

    def generate(ids: list[int], count: int) -> list[int]:
        output = api.OutputConfig(exclude_input_from_output=True)
        number = executor.enqueue_request(api.Request(ids, count, output_config=output, end_id=2))
        answers: Any = executor.await_responses(number)
        tokens: list[int] = answers[0].result.output_token_ids[0]
        return tokens

    return generate


@pytest.mark.parametrize("body", [GUIDE_BODY, GUIDE_BODY_WITH_IDS], ids=["plain body", "with ids"])
@pytest.mark.parametrize("name", TEXT_MODELS)
@pytest.mark.parametrize("policy", ["streaming", "plain"])
def test_the_guides_request_bodies(
    policy: str, name: str, body: dict[str, Any], tokenizer: Any, greedy: Any, request: pytest.FixtureRequest
) -> None:
    server: ModelServer = request.getfixturevalue(policy)
    status, answer = server.generate(name, body)
    ids = tokenizer.encode(PROMPT)
    expected = tokenizer.decode(ids + greedy(ids, 20), skip_special_tokens=True)
    sequence = {"sequence_end": False, "sequence_id": 0, "sequence_start": False} if name == "ensemble" else {}
    assert status == 200
    fields = {"model_name": name, "model_version": "1", "batch_index": 0, **sequence}
    assert answer == {"text_output": expected, **fields}
    assert expected.startswith(PROMPT)


def tokens_of(answers: list[Tensors]) -> list[int]:
    for answer in answers:
        assert answer["sequence_length"].tolist() == [[answer["output_ids"].shape[2]]]
    return [token for answer in answers for token in answer["output_ids"].reshape(-1).tolist()]


def test_core_model_answers_once(streaming: ModelServer, plain: ModelServer, greedy: Any) -> None:
    prompt = [1, 100, 101, 102]
    expected = prompt + greedy(prompt, 24)
    with streaming.stream() as stream:
        (answer,) = stream.all("tensorrt_llm", NEWEST.core(prompt, 24))
    assert tokens_of([answer]) == expected
    assert tokens_of([plain.infer("tensorrt_llm", NEWEST.core(prompt, 24))]) == expected


@pytest.mark.parametrize("prompt", [PROMPT, "häßlich ☃ 東京", "a", "  two spaces ", "42"])
def test_streamed_pieces_join_to_the_text(streaming: ModelServer, prompt: str, tokenizer: Any, greedy: Any) -> None:
    # A random model writes random bytes: complete, cut and impossible characters.
    ids = tokenizer.encode(prompt)
    expected = tokenizer.decode(greedy(ids, 60), skip_special_tokens=True)
    with streaming.stream() as stream:
        answers = stream.all(NAME, NEWEST.text(prompt, 60, streaming=True))
    pieces = [answer["text_output"].item().decode("utf-8") for answer in answers]
    assert "".join(pieces) == expected
    assert not any(piece.endswith("\N{REPLACEMENT CHARACTER}") for piece in pieces[:-1])
    assert len(pieces) > 1


def test_ensemble_streams(streaming: ModelServer, tokenizer: Any, greedy: Any) -> None:
    ids = tokenizer.encode(PROMPT)
    expected = [tokenizer.decode([token]) for token in greedy(ids, 12)]
    with streaming.stream() as stream:
        answers = stream.all("ensemble", NEWEST.text(PROMPT, 12, streaming=True))
    assert [answer["text_output"].item().decode("utf-8") for answer in answers] == expected


def test_generate_stream_events(streaming: ModelServer) -> None:
    events = streaming.generate_stream(NAME, {"text_input": PROMPT, "max_tokens": 6, "stream": True})
    assert len(events) > 1
    assert all(set(event) == {"model_name", "model_version", "text_output", "batch_index"} for event in events)


def test_batch_of_prompts(streaming: ModelServer, tokenizer: Any, greedy: Any) -> None:
    prompts = ("one", "and two", "three, at last")
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    tensors = NEWEST.text(prompts, 10, streaming=True)
    with streaming.stream() as stream:
        answers = stream.all(NAME, tensors)
    joined = ["", "", ""]
    for answer in answers:
        joined[answer["batch_index"].item()] += answer["text_output"].item().decode("utf-8")
    assert joined == [tokenizer.decode(greedy(row, 10), skip_special_tokens=True) for row in ids]


def test_batch_of_ids_is_trimmed_to_its_lengths(streaming: ModelServer, greedy: Any) -> None:
    rows = [[1, 60, 61, 62], [1, 70]]
    tensors = {
        "input_ids": np.array([rows[0], [*rows[1], 2, 2]], dtype=np.int32),
        "input_lengths": integers(4, 2),
        "request_output_len": integers(5, 7),
    }
    with streaming.stream() as stream:
        answers = stream.all("tensorrt_llm", tensors)
    found = {answer["batch_index"].item(): tokens_of([answer]) for answer in answers}
    assert found == {0: rows[0] + greedy(rows[0], 5), 1: rows[1] + greedy(rows[1], 7)}


BAD_BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "no text": ({"max_tokens": 4}, ""),
    "synonyms": (
        {"text_input": "x", "max_tokens": 4, "seed": 1, "random_seed": 2},
        "Two names of one setting were given with different values: seed 1 and random_seed 2",
    ),
    "drafts": ({"text_input": "x", "max_tokens": 4, "num_draft_tokens": 2}, "without draft model"),
    "image": ({"text_input": "x", "max_tokens": 4, "image_url_input": "x"}, "image_url_input"),
    "guide": ({"text_input": "x", "max_tokens": 4, "guided_decoding_guide": "a+"}, "needs guided_decoding_guide_type"),
    "decoder": ({"text_input": "x", "max_tokens": 4, "decoder_text_input": "y"}, "decoder_text_input"),
    "half a request": ({"text_input": "x", "max_tokens": 4, "request_type": "context_only"}, "request_type"),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_errors_name_what_is_wrong(streaming: ModelServer, case: str) -> None:
    body, message = BAD_BODIES[case]
    status, answer = streaming.generate(NAME, body)
    assert status >= 400
    assert message in answer["error"]
    assert "Traceback" not in answer["error"]


def test_core_errors(plain: ModelServer) -> None:
    from tritonclient.utils import InferenceServerException

    prompt = NEWEST.core([1, 5], 4)
    for change, message in (
        ({"streaming": flags(True)}, "Streaming is only supported in decoupled mode."),
        ({"stop": flags(True)}, "A request id must be provided for request cancellation"),
        ({"request_output_len": integers(0)}, "max_tokens"),
        ({"input_lengths": integers(-1)}, "input_lengths is -1"),
        ({"input_lengths": integers(9)}, "input_lengths is 9"),
        ({"context_phase_params": np.ones((1, 3), dtype=np.uint8)}, "context_phase_params is not supported"),
        ({"mrope_position_deltas": np.array([[3]])}, "mrope_position_deltas needs mrope_rotary_cos_sin"),
    ):
        with pytest.raises(InferenceServerException, match=message):
            plain.infer("tensorrt_llm", {**prompt, **change})
    batch = {name: np.repeat(value, 2, axis=0) for name, value in prompt.items()}
    with pytest.raises(InferenceServerException, match="Batch size 2 needs the decoupled"):
        plain.infer("tensorrt_llm", batch)


def test_a_table_in_bf16(plain: ModelServer, engine: Engine) -> None:
    """NumPy has no such type, and the embedded executor gets the same numbers as float32."""
    from ml_dtypes import bfloat16

    table = np.random.default_rng(0).normal(0, 0.5, (2, 64)).astype(bfloat16)
    prompt = [320, 321, 60, 61]
    extra = [7, 7, 0, 0]  # needed, since blocks are reused
    tensors = {
        **NEWEST.core(prompt, 8),
        "prompt_embedding_table": table[np.newaxis],
        "prompt_table_extra_ids": np.array([extra], dtype=np.uint64),
    }
    oracle = InProcess(engine.path)
    tuning = api.PromptTuningConfig(table.astype(np.float32), extra)
    assert tokens_of([plain.infer("tensorrt_llm", tensors)])[len(prompt) :] == oracle.tokens(
        prompt, 8, prompt_tuning_config=tuning
    )
    oracle.close()


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_a_table_in_bf16_passes_the_text_models(plain: ModelServer, name: str) -> None:
    """No text has a virtual token, so that the table changes nothing."""
    from ml_dtypes import bfloat16

    tensors = NEWEST.text("x", 4)
    with_table = {
        **tensors,
        "prompt_embedding_table": np.ones((1, 2, 64), dtype=bfloat16),
        "prompt_table_extra_id": np.array([[7]], dtype=np.uint64),
    }
    answers = [plain.infer(name, each)["text_output"].item() for each in (tensors, with_table)]
    assert answers[0] == answers[1]


def test_neutral_values_are_accepted(plain: ModelServer) -> None:
    body = {
        **GUIDE_BODY,
        "beam_width": 1,
        "top_p": 0.0,
        "top_k": 1,
        "temperature": 1.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "return_log_probs": False,
        "num_return_sequences": 1,
        "decoder_text_input": "",
        "guided_decoding_guide_type": "",
        "guided_decoding_guide": "",
        "num_draft_tokens": 0,
        "use_draft_logits": False,
        "request_type": "context_and_generation",
        "random_seed": 7,
        "seed": 7,
    }
    assert plain.generate(NAME, body) == plain.generate(NAME, GUIDE_BODY)


def test_requests_run_at_once_and_fail_alone(streaming: ModelServer) -> None:
    """Through one BLS instance the core model has many requests in flight; a bad one disturbs no other."""
    most = 0.0

    def ask(number: int) -> tuple[int, dict[str, Any]]:
        body = {"text_input": f"Question {number}", "max_tokens": 1000, "end_id": -1}
        return streaming.generate(NAME, body | ({"beam_width": 5} if number == 3 else {}))

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, number) for number in range(8)]
        while not all(future.done() for future in asked):
            label = 'inflight_batcher_specific_metric="generation_requests"'
            most = max(most, streaming.metric("nv_trt_llm_inflight_batcher_metrics", label))
            time.sleep(0.02)
    assert [status for status, _ in (future.result() for future in asked)].count(200) == 7
    assert asked[3].result()[0] != 200
    assert most > 2


def test_stop_request_on_a_model_that_answers_once(plain: ModelServer) -> None:
    tensors = {**NEWEST.core([1, 70, 80], ENDLESS), "end_id": integers(-1)}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(plain.infer, "tensorrt_llm", tensors, "long")
        wait_until(lambda: plain.metric("nv_trt_llm_request_metrics", 'request_type="active"') > 0)
        stopped = plain.infer("tensorrt_llm", {**NEWEST.core([1], 1), "stop": flags(True)}, "long")
        answer = asked.result(timeout=30)
    assert stopped == {}
    assert answer["sequence_length"].item() < ENDLESS
    wait_until(lambda: is_idle(plain))


def test_a_cancelled_call_stops_a_model_that_answers_once(plain: ModelServer) -> None:
    from tritonclient import grpc

    before = plain.metric("nv_llm_output_token_len_sum")
    tensors = {**NEWEST.core([1, 70, 80], ENDLESS), "end_id": integers(-1)}
    with closing(grpc.InferenceServerClient(f"{plain.address.host}:{plain.address.grpc_port}")) as client:
        call = client.async_infer("tensorrt_llm", inputs_of(tensors), callback=lambda result, error: None)
        wait_until(lambda: plain.metric("nv_trt_llm_request_metrics", 'request_type="active"') > 0)
        call.cancel()
        wait_until(lambda: is_idle(plain))
    assert plain.metric("nv_llm_output_token_len_sum") - before < ENDLESS


def test_a_lost_connection_does_not_stop_a_model_that_answers_once(plain: ModelServer) -> None:
    """Triton does not look at the connection of such a call: the request runs to its end."""
    before = plain.metric("nv_llm_output_token_len_sum")
    requests = plain.metric("nv_llm_output_token_len_count")
    with closing(plain.connection(30)) as connection:
        body = {"text_input": PROMPT, "max_tokens": 2000, "end_id": -1}
        connection.request("POST", f"/v2/models/{NAME}/generate", body=json.dumps(body))
        wait_until(lambda: plain.metric("nv_trt_llm_request_metrics", 'request_type="active"') > 0)
    wait_until(lambda: plain.metric("nv_llm_output_token_len_count") > requests)
    assert plain.metric("nv_llm_output_token_len_sum") - before == 2000
