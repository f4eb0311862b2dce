"""Speculative decoding through the BLS model: the text of plain greedy decoding, with a draft that is often right."""

from __future__ import annotations

import json
import runpy
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import RUNTIME
from tests.support.model_server import ModelServer, Tensors, flags, integers, serving, texts
from tests.support.stages import build_engine, convert_model, make_repository
from tests.support.text_requests import ask, is_idle, request, text_of, word_in
from tests.support.tiny_models import read_safetensors, write_safetensors
from tests.support.waiting import wait_until
from trtserve.artifacts import Engine, Model
from trtserve.cli import run
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec

pytestmark = pytest.mark.triton

NAME = "tiny"
TWIN = "twin"
"""A BLS model whose target is its own draft model, so that every draft is right."""
PROMPT = "What is machine learning? " * 3
COUNT = 40
DRAFT_LENGTH = 400


@pytest.fixture(scope="module")
def draft_engine(features_root: Path, features_model: Path) -> Engine:
    """The target with disturbed output weights: often right; shorter than the target, and it gives logits."""
    folder = Path(shutil.copytree(features_model, features_root / "draft-model"))
    tensors = read_safetensors(folder / "model.safetensors")
    noise = np.random.default_rng(1).standard_normal(tensors["lm_head.weight"].shape, dtype=np.float32)
    write_safetensors(
        folder / "model.safetensors", tensors | {"lm_head.weight": tensors["lm_head.weight"] + 0.08 * noise}
    )
    checkpoint = convert_model(Model(path=folder), ConvertSpec(dtype="float32"), out=features_root / "draft-checkpoint")
    spec = BuildSpec(max_batch_size=8, max_seq_len=DRAFT_LENGTH, gather_generation_logits=True, **RUNTIME)
    return build_engine(checkpoint, spec, out=features_root / "draft-engine")


@pytest.fixture(scope="module")
def drafting(
    features_root: Path, features_model: Path, features_engine: Engine, draft_engine: Engine
) -> Iterator[ModelServer]:
    out = features_root / "drafting"
    made = make_repository(features_engine, features_model, RepositorySpec(name=NAME), draft=draft_engine, out=out)
    shutil.copytree(made.path / NAME, made.path / TWIN)
    config = (made.path / TWIN / "config.pbtxt").read_text()
    config = config.replace(f'name: "{NAME}"', f'name: "{TWIN}"').replace('"tensorrt_llm_draft"', '"tensorrt_llm"')
    (made.path / TWIN / "config.pbtxt").write_text(config)
    with serving(made.path, features_root / "drafting-server") as server:
        yield server


def plain(server: ModelServer, prompt: str = PROMPT, count: int = COUNT, **options: Any) -> str:
    return text_of(ask(server, NAME, prompt, count, **{"end_id": -1, **options}))


@pytest.mark.parametrize("drafts", [1, 3, 8])
@pytest.mark.parametrize("model", [NAME, TWIN])
def test_equal_to_greedy_decoding(drafting: ModelServer, model: str, drafts: int) -> None:
    for prompt in (PROMPT, "a", "häßlich ☃"):
        options = {"end_id": -1, "num_draft_tokens": drafts, "stream": False}
        assert text_of(ask(drafting, model, prompt, COUNT, **options)) == plain(drafting, prompt)


def test_the_example_counts_right_drafts(drafting: ModelServer, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "speculative.py"
    runpy.run_path(str(example))["main"](f"127.0.0.1:{drafting.address.grpc_port}", NAME)
    printed = capsys.readouterr().out
    assert "drafted tokens were right" in printed
    assert "differ" not in printed


def test_acceptance_is_reported(drafting: ModelServer) -> None:
    options: dict[str, Any] = {"end_id": -1, "num_draft_tokens": 4, "return_perf_metrics": True}
    rates = {}
    for model in (NAME, TWIN):
        answer = ask(drafting, model, PROMPT, COUNT, **options)
        accepted, total = answer["total_accepted_draft_tokens"].item(), answer["total_draft_tokens"].item()
        rates[model] = answer["acceptance_rate"].item()
        assert rates[model] == pytest.approx(accepted / total)
        assert answer["first_token_time_ns"].item() < answer["last_token_time_ns"].item()
        # The prompt of a round is that of the round before, and more.
        assert answer["kv_cache_reused_blocks"].item() > 0
    assert rates[TWIN] == 1
    assert 0.1 < rates[NAME] < 0.95


def test_ends_on_the_end_id(drafting: ModelServer, features_tokenizer: Any) -> None:
    # Of a text that was decoded without loss, the ids are those that made it.
    text = plain(drafting, exclude_input_in_output=True)
    word = word_in(text, start=5, size=1)
    end_id = features_tokenizer.encode(word, add_special_tokens=False)[0]
    expected = plain(drafting, end_id=end_id)
    assert len(expected) < len(PROMPT) + len(text)
    for model in (NAME, TWIN):
        options: dict[str, Any] = {"end_id": end_id, "num_draft_tokens": 5, "return_finish_reason": True}
        answer = ask(drafting, model, PROMPT, COUNT, **options)
        assert text_of(answer) == expected
        assert answer["finish_reason"].reshape(-1).tolist() == [b"end_id"]


@pytest.mark.parametrize("exclude", [True, False])
def test_stop_words(drafting: ModelServer, exclude: bool) -> None:
    text = plain(drafting, exclude_input_in_output=True)
    for word in (word_in(text, start=6, size=2), "\N{REPLACEMENT CHARACTER}"):
        options: dict[str, Any] = {"stop_words": [word], "exclude_input_in_output": exclude}
        expected = plain(drafting, **options)
        assert expected.endswith(word)
        asked = {**options, "end_id": -1, "num_draft_tokens": 5, "return_finish_reason": True}
        answer = ask(drafting, NAME, PROMPT, COUNT, **asked)
        assert text_of(answer) == expected
        assert answer["finish_reason"].reshape(-1).tolist() == [b"stop_words"]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_query_asks_for_drafts(drafting: ModelServer, protocol: str, capsys: pytest.CaptureFixture[str]) -> None:
    address = drafting.address
    asked = ["query", PROMPT, "--model", NAME, "--max-tokens", str(COUNT), "--end-id", "-1", "--protocol", protocol]
    asked += ["--host", address.host, "--http-port", str(address.http_port), "--grpc-port", str(address.grpc_port)]
    assert run([*asked, "--num-draft-tokens", "4", "--use-draft-logits", "--return-perf-metrics", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["text"] == plain(drafting, exclude_input_in_output=True)
    values = {output["name"]: output.get("value") for output in result["outputs"]}
    assert 0 < values["acceptance_rate"] <= 1
    assert values["total_draft_tokens"] >= values["total_accepted_draft_tokens"] > 0


def test_draft_logits_decide_what_is_accepted(drafting: ModelServer) -> None:
    """By logits a token is taken where p > threshold · q, with p the target's and q the draft's probability."""
    options: dict[str, Any] = {"end_id": -1, "num_draft_tokens": 4, "use_draft_logits": True}
    assert text_of(ask(drafting, NAME, PROMPT, COUNT, **options)) == plain(drafting)
    sampled: dict[str, Any] = {**options, "top_k": 20, "temperature": 1.5, "return_perf_metrics": True}
    rates = [
        ask(drafting, NAME, PROMPT, COUNT, draft_acceptance_threshold=threshold, **sampled)["acceptance_rate"].item()
        for threshold in (0.001, 0.999)
    ]
    assert rates[0] > rates[1]


def test_log_probs_are_those_of_the_whole_answer(drafting: ModelServer) -> None:
    expected = ask(drafting, NAME, PROMPT, 12, end_id=-1, return_log_probs=True)
    answer = ask(drafting, NAME, PROMPT, 12, end_id=-1, return_log_probs=True, num_draft_tokens=4)
    np.testing.assert_allclose(answer["output_log_probs"], expected["output_log_probs"], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(answer["cum_log_probs"], expected["cum_log_probs"], rtol=1e-3)


def test_the_target_continues_beyond_the_drafts_limit(drafting: ModelServer) -> None:
    """The draft engine ends at 400 tokens; byte tokens make the prompt nearly that long."""
    prompt = "x" * (DRAFT_LENGTH - 20)
    found = text_of(ask(drafting, NAME, prompt, COUNT, end_id=-1, num_draft_tokens=4))
    assert found == plain(drafting, prompt)


def test_the_targets_limit_cuts_the_answer(drafting: ModelServer) -> None:
    prompt = "y" * 1000
    assert text_of(ask(drafting, NAME, prompt, 100, end_id=-1, num_draft_tokens=4)) == plain(drafting, prompt, 100)


def core_answer(server: ModelServer, model: str, ids: list[int], count: int, **more: Any) -> tuple[list[int], Tensors]:
    """Prompt and new tokens, and all outputs of a core model."""
    tensors = {"input_ids": np.array([ids], dtype=np.int32), "input_lengths": integers(len(ids))}
    tensors |= {"request_output_len": integers(count), "end_id": integers(-1), "pad_id": integers(2), **more}
    with server.stream() as stream:
        (answer,) = stream.all(model, tensors)
    length = int(answer["sequence_length"].item())
    return answer["output_ids"][0, 0, :length].tolist(), answer


@pytest.mark.parametrize("with_logits", [False, True])
def test_a_client_that_drives_both_models(drafting: ModelServer, with_logits: bool) -> None:
    """The loop of e2e_grpc_speculative_decoding_client.py: text → draft and target in turn → text."""
    query = {"QUERY": texts(PROMPT), "REQUEST_OUTPUT_LEN": integers(COUNT)}
    made = drafting.infer("preprocessing", query)
    ids: list[int] = made["INPUT_ID"][0].tolist()
    end, rounds = len(ids) + COUNT, 0
    while len(ids) < end:
        count = min(5, end - len(ids))
        wanted = {"return_generation_logits": flags(True)} if with_logits else {}
        drafted, answer = core_answer(drafting, "tensorrt_llm_draft", ids, count, **wanted)
        draft: Tensors = {"draft_input_ids": np.array([drafted[len(ids) :]], dtype=np.int32)}
        if with_logits:
            draft["draft_logits"] = answer["generation_logits"][:, 0]
        ids, _ = core_answer(drafting, "tensorrt_llm", ids, count + 1, **draft)
        rounds += 1
    tokens = {"TOKENS_BATCH": np.array([[ids[:end]]], dtype=np.int32), "SEQUENCE_LENGTH": integers(end)}
    assert drafting.infer("postprocessing", tokens)["OUTPUT"].item().decode() == plain(drafting)
    assert COUNT / 6 <= rounds < COUNT


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too many": ({"num_draft_tokens": 9}, "9"),
    "stream": ({"num_draft_tokens": 4, "stream": True}, "streaming is not supported with speculative decoding"),
    "beams": ({"num_draft_tokens": 4, "beam_width": 2}, "beam_width above 1 is not supported"),
    "context": ({"num_draft_tokens": 4, "return_context_logits": True}, "context logits are not supported"),
    "logits": ({"use_draft_logits": True}, "use_draft_logits needs num_draft_tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors_by_name(drafting: ModelServer, case: str) -> None:
    options, message = REFUSED[case]
    status, answer = drafting.generate(NAME, {"text_input": PROMPT, "max_tokens": COUNT, "end_id": -1, **options})
    assert status >= 400
    assert message in answer["error"]


def test_many_at_once(drafting: ModelServer) -> None:
    prompts = [f"Question {number}" for number in range(12)]
    expected = [plain(drafting, prompt, 24) for prompt in prompts]

    def ask_one(number: int) -> str:
        options: dict[str, Any] = {"end_id": -1, "num_draft_tokens": 1 + number % 8}
        return text_of(ask(drafting, (NAME, TWIN)[number % 2], prompts[number], 24, **options))

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask_one, range(12))) == expected
    wait_until(lambda: is_idle(drafting))


def generated(server: ModelServer) -> float:
    return server.metric("nv_llm_output_token_len_sum")


def is_quiet(server: ModelServer) -> bool:
    """Return whether no token comes for the time of several rounds; between rounds nothing is open."""
    before = generated(server)
    time.sleep(0.5)
    return generated(server) == before and is_idle(server)


@contextmanager
def long_answer(server: ModelServer) -> Iterator[float]:
    """Start a stream with a long answer and yield the token count before it."""
    wait_until(lambda: is_idle(server))
    before = generated(server)
    with server.stream() as stream:
        stream.send(NAME, request(PROMPT, 900, end_id=-1, num_draft_tokens=1))
        wait_until(lambda: generated(server) > before + 5)
        yield before


@pytest.fixture(scope="module")
def whole(drafting: ModelServer) -> float:
    """Tokens of both models for a long answer that runs to its end."""
    with long_answer(drafting) as before:
        wait_until(lambda: is_quiet(drafting))
    return generated(drafting) - before


def test_a_client_that_goes_away_ends_the_rounds(drafting: ModelServer, whole: float) -> None:
    with long_answer(drafting) as before:
        pass
    wait_until(lambda: is_quiet(drafting))
    assert generated(drafting) - before < whole


def test_a_stop_with_the_clients_id_ends_the_rounds(drafting: ModelServer, whole: float) -> None:
    wait_until(lambda: is_idle(drafting))
    before = generated(drafting)
    stop = {"input_ids": integers(1), "input_lengths": integers(1), "request_output_len": integers(1)}
    with drafting.stream() as stream, drafting.stream() as stopper:
        stream.send(NAME, request(PROMPT, 900, end_id=-1, num_draft_tokens=1, exclude_input_in_output=True), "mine")
        wait_until(lambda: generated(drafting) > before + 5)
        stopper.all("tensorrt_llm", {**stop, "stop": np.array([[True]])}, "mine")
        outputs, _, _ = stream.next()
    assert 0 < len(text_of(outputs)) < 900
    assert generated(drafting) - before < whole


@pytest.fixture(scope="module")
def old(
    features_root: Path, features_model: Path, features_engine: Engine, draft_engine: Engine
) -> Iterator[ModelServer]:
    """Core models of 0.12, which always return the prompt and no finish reason; room for 128 × 4 beams."""
    flags: dict[str, Any] = {"streaming": False, "enable_kv_cache_reuse": True, "max_tokens_in_paged_kv_cache": 512}
    spec = RepositorySpec(name=NAME, release="0.12", **flags)
    out = features_root / "old-drafting"
    made = make_repository(features_engine, features_model, spec, draft=draft_engine, out=out)
    with serving(made.path, features_root / "old-drafting-server") as server:
        yield server


@pytest.mark.parametrize(
    ("prompt", "stop"),
    [(PROMPT, ["never"]), ("x" * 100, [""]), ("abc", ["\N{REPLACEMENT CHARACTER}"])],
    ids=["whole", "cut by the cache", "stopped"],
)
def test_old_releases_and_short_caches(old: ModelServer, prompt: str, stop: list[str]) -> None:
    body = {"text_input": prompt, "max_tokens": COUNT, "stop_words": stop, "end_id": -1}
    _, expected = old.generate(NAME, body)
    status, answer = old.generate(NAME, {**body, "num_draft_tokens": 4})
    assert status == 200, answer
    assert answer["text_output"] == expected["text_output"]
    assert answer["text_output"].startswith(prompt)
