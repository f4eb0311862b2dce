"""NVIDIA's clients of each release, unchanged, with the default repository and the repository of their release."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.in_process import InProcess
from tests.support.model_server import ModelServer, Tensors, integers, serving, texts
from tests.support.release_client import KV_CACHE_OUTPUTS, PERF_OUTPUTS, ReleaseClient, long_integers
from tests.support.stages import make_repository
from trtserve.artifacts import Engine
from trtserve.cli import run
from trtserve.executor import api
from trtserve.nvidia.releases import RELEASES, order
from trtserve.specs import RepositorySpec

pytestmark = pytest.mark.triton

PROMPT = [1, 90, 91, 92]
TEXT = "Releases"
VOCABULARY, HIDDEN, ROWS = 320, 64, 4
DECOUPLED = ("0.12", "0.13", "0.14", "0.18", "0.19", "0.21", "1.1")
"""Releases whose repository is decoupled here; NVIDIA's guides show both policies."""
DIFFERENT = ("0.12", "0.16", "0.18", "0.20", "1.2")
"""Releases that stand for those whose models have the same inputs and outputs; TRTSERVE_ALL=1 serves every release."""
SERVED = RELEASES if os.environ.get("TRTSERVE_ALL") else DIFFERENT


@dataclass(frozen=True)
class Served:
    """A server, its client, and the release whose outputs it has."""

    server: ModelServer
    client: ReleaseClient
    release: str
    decoupled: bool
    all_releases: bool = False

    def ask(self, model: str, tensors: Tensors, *, stream: bool, outputs: Sequence[str] = ()) -> list[Tensors]:
        """The answers, by the kind of call that the client makes.

        To a decoupled model all requests go through a stream, which is what `--decoupled` and `--streaming` switch on:
        a unary call is refused, as `test_unary_calls_are_refused_by_a_decoupled_model` shows.
        """
        if not stream and not self.decoupled:
            return [self.server.infer(model, tensors, outputs=outputs)]
        with self.server.stream() as answers:
            return answers.all(model, tensors, outputs=outputs)

    def before(self, release: str) -> bool:
        """Whether the server's release is older than `release`."""
        return order(self.release) < order(release)


@pytest.fixture(scope="module")
def tuned_tokenizer(features_root: Path, features_model: Path) -> Path:
    """The tokenizer with words for the first ids after the engine's vocabulary: rows of a prompt table."""
    from tokenizers import AddedToken, Tokenizer

    folder = Path(shutil.copytree(features_model, features_root / "tuned-tokenizer"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    unused = [f"<unused {number}>" for number in range(tokenizer.get_vocab_size(), VOCABULARY)]
    words = [*unused, *(f"<row {number}>" for number in range(ROWS))]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=SERVED)
def own(
    request: pytest.FixtureRequest, features_root: Path, logits_engine: Engine, tuned_tokenizer: Path
) -> Iterator[Served]:
    """The exact repository of a release; logits are FP16 where the release lets them be."""
    release: str = request.param
    settings = {"logits_datatype": "TYPE_FP16"} if order(release) >= (0, 17) else {}
    streaming = release in DECOUPLED
    spec = RepositorySpec(name="tiny", release=release, streaming=streaming, settings=settings)
    with ExitStack() as stack:
        root = features_root / f"release-{release}"
        repository = make_repository(logits_engine, tuned_tokenizer, spec, out=root / "repository")
        server = stack.enter_context(serving(repository.path, root / "server"))
        yield Served(server, ReleaseClient(release), release, streaming)


@pytest.fixture
def default(features: ModelServer) -> Served:
    return Served(features, ReleaseClient("1.2"), "1.2", True, all_releases=True)


@pytest.fixture(scope="module")
def tokens(oracle: InProcess) -> list[int]:
    return oracle.tokens(PROMPT, 8)


def asked_for(served: Served, *, text: bool) -> dict[str, bool]:
    """Every switch that the client has."""
    names = ("return_log_probs", "return_generation_logits", "return_kv_cache_reuse_stats", "return_perf_metrics")
    return {name: True for name in names if served.client.has(name, text=text)}


def expected_outputs(served: Served, asked: dict[str, bool], base: set[str]) -> set[str]:
    """Return the names of the outputs."""
    names = set(base)
    if "return_log_probs" in asked:
        names |= {"cum_log_probs", "output_log_probs"}
    if "return_generation_logits" in asked:
        names.add("generation_logits")
    if served.before("0.14"):
        names |= {"cum_log_probs", "output_log_probs", "context_logits", "generation_logits", "batch_index"}
    if served.all_releases:
        names.add("batch_index")
    if {"return_kv_cache_reuse_stats", "return_perf_metrics"} & asked.keys():
        names |= set(KV_CACHE_OUTPUTS if served.before("0.19") else PERF_OUTPUTS)
    return names


def check_core(served: Served, tokens: list[int]) -> None:
    """inflight_batcher_llm_client.py."""
    client = served.client
    (answer,) = served.ask("tensorrt_llm", client.core(PROMPT, 8), stream=False)
    assert answer["output_ids"].tolist() == [[PROMPT + tokens]]
    assert set(answer) == expected_outputs(served, {}, {"output_ids", "sequence_length"})
    asked = asked_for(served, text=False)
    (answer,) = served.ask("tensorrt_llm", client.core(PROMPT, 8, **asked), stream=False)
    assert set(answer) == expected_outputs(served, asked, {"output_ids", "sequence_length"})
    assert answer["output_log_probs"].shape == (1, 1, 8)
    assert answer["generation_logits"].shape == (1, 1, 8, VOCABULARY)
    beams = client.core(PROMPT, 8, beam_width=2)
    (answer,) = served.ask("tensorrt_llm", beams, stream=False)
    assert answer["output_ids"].shape == (1, 2, len(PROMPT) + 8)
    if served.decoupled:
        answers = served.ask("tensorrt_llm", client.core(PROMPT, 8, streaming=True), stream=True)
        assert [token for each in answers for token in each["output_ids"].reshape(-1).tolist()] == tokens
        if client.has("num_return_sequences"):
            answers = served.ask("tensorrt_llm", client.core(PROMPT, 4, num_return_sequences=2, top_k=5), stream=True)
            assert sorted(each["sequence_index"].item() for each in answers) == [0, 1]


def check_text(served: Served, model: str, tokens: list[int], tokenizer: Any) -> None:
    """Ask as end_to_end_grpc_client.py does: it streams every request and gets only the outputs that it names."""
    client = served.client
    expected = tokenizer.decode([*tokenizer.encode(TEXT), *tokens], skip_special_tokens=True)
    worded = client.text(TEXT, 8, stop_words=["never"], bad_words=["neither"])
    (answer,) = served.ask(model, worded, stream=True, outputs=client.text_outputs())
    assert answer["text_output"].item().decode() == expected
    assert set(answer) == {"text_output"}
    asked = asked_for(served, text=True)
    tensors = client.text(TEXT, 8, end_id=2, pad_id=2, **asked)
    (answer,) = served.ask(model, tensors, stream=True, outputs=client.text_outputs(*asked))
    assert set(answer) == set(client.text_outputs(*asked))
    (answer,) = served.ask(model, tensors, stream=True)
    assert set(answer) == expected_outputs(served, asked, {"text_output"})
    if served.decoupled:
        two = client.text([TEXT, "Two"], 8)
        answers = served.ask(model, two, stream=True, outputs=client.text_outputs(rows=2))
        rows = {each["batch_index"].item(): each["text_output"].item().decode() for each in answers}
        assert rows[0] == expected
        assert set(rows) == {0, 1}
        if client.has("num_return_sequences", text=True):
            several = client.text(TEXT, 4, num_return_sequences=2)
            answers = served.ask(model, several, stream=True, outputs=client.text_outputs(sequences=2))
            assert sorted(each["sequence_index"].item() for each in answers) == [0, 1]


def check_benchmark(served: Served, tokens: list[int]) -> None:
    """benchmark_core_model.py: HTTP, gRPC, or a stream with `--decoupled`; it counts the tokens of the first output."""
    tensors = served.client.benchmark(PROMPT, 8)
    answers = served.ask("tensorrt_llm", tensors, stream=False)
    if not served.decoupled:
        answers.append(served.server.infer_http("tensorrt_llm", tensors))
    assert [next(iter(answer.values())).tolist() for answer in answers] == [[[PROMPT + tokens]]] * len(answers)


def test_clients_of_a_release_on_its_own_repository(
    own: Served, oracle: InProcess, tokens: list[int], features_tokenizer: Any
) -> None:
    check_core(own, tokens)
    check_benchmark(own, tokens)
    of_text = oracle.tokens(features_tokenizer.encode(TEXT), 8)
    for model in ("ensemble", "tensorrt_llm_bls"):
        check_text(own, model, of_text, features_tokenizer)


@pytest.mark.parametrize("release", RELEASES)
def test_clients_of_every_release_on_the_default_repository(
    default: Served, oracle: InProcess, tokens: list[int], features_tokenizer: Any, release: str
) -> None:
    served = Served(default.server, ReleaseClient(release), "1.2", True, all_releases=True)
    check_core(served, tokens)
    check_benchmark(served, tokens)
    of_text = oracle.tokens(features_tokenizer.encode(TEXT), 8)
    for model in ("ensemble", "tensorrt_llm_bls"):
        check_text(served, model, of_text, features_tokenizer)


def test_context_logits_in_the_declared_type(own: Served) -> None:
    (answer,) = own.ask("tensorrt_llm", own.client.core(PROMPT, 4, return_context_logits=True), stream=False)
    logits = answer["context_logits"]
    assert logits.shape == (1, len(PROMPT), VOCABULARY)
    assert logits.dtype == (np.float32 if own.before("0.17") else np.float16)
    assert logits[0, -1].argmax() == answer["output_ids"][0, 0, len(PROMPT)]
    for model in ("ensemble", "tensorrt_llm_bls", "tiny"):
        (answer,) = own.ask(model, own.client.text(TEXT, 4, return_context_logits=True), stream=True)
        assert answer["context_logits"].shape == (1, len(TEXT) + 1, VOCABULARY)
    if own.before("0.17"):  # Triton writes no FP16 into JSON
        status, body = own.server.generate("tiny", {"text_input": TEXT, "max_tokens": 4, "return_context_logits": True})
        assert (status, len(body["context_logits"])) == (200, (len(TEXT) + 1) * VOCABULARY)


def test_unrequested_outputs(own: Served, features_tokenizer: Any) -> None:
    """Up to release 0.13 they come as zeros, log probabilities one for each token of the prompt."""
    body = {"text_input": TEXT, "max_tokens": 4, "random_seed": 3, "min_length": 1}
    status, answer = own.server.generate("ensemble", body)
    assert status == 200
    if not own.before("0.14"):
        assert not answer.keys() & {"cum_log_probs", "output_log_probs", "context_logits", "generation_logits"}
        return
    assert answer["cum_log_probs"] == answer["context_logits"] == answer["generation_logits"] == 0.0
    assert answer["output_log_probs"] == [0.0] * len(features_tokenizer.encode(TEXT))
    assert answer["batch_index"] == 0


def test_several_answers_need_the_decoupled_policy(own: Served) -> None:
    from tritonclient.utils import InferenceServerException

    if own.decoupled:
        assert len(own.ask("tensorrt_llm", own.client.core(PROMPT, 4, streaming=True), stream=True)) >= 4
        return
    with pytest.raises(InferenceServerException, match="needs the decoupled transaction policy"):
        own.server.infer("tensorrt_llm", own.client.core(PROMPT, 4, num_return_sequences=2, top_k=4))
    with pytest.raises(InferenceServerException, match="Streaming is only supported in decoupled mode"):
        own.server.infer("tensorrt_llm", own.client.core(PROMPT, 4, streaming=True))


def test_unary_calls_are_refused_by_a_decoupled_model(default: Served) -> None:
    """inflight_batcher_llm_client.py without `--streaming`, benchmark_core_model.py without `--decoupled`."""
    from tritonclient.utils import InferenceServerException

    for tensors in (default.client.core(PROMPT, 4), default.client.benchmark(PROMPT, 4)):
        for infer in (default.server.infer, default.server.infer_http):
            with pytest.raises(InferenceServerException, match="decoupled transaction policy"):
                infer("tensorrt_llm", tensors)


def test_requested_outputs_of_the_core_model(own: Served) -> None:
    """inflight_batcher_llm_client.py with `--requested-outputs`, whose list must contain two names."""
    from tritonclient.utils import InferenceServerException

    tensors = own.client.core(PROMPT, 4, return_log_probs=True)
    names = ["output_ids", "sequence_length", "cum_log_probs"]
    (answer,) = own.ask("tensorrt_llm", tensors, stream=False, outputs=names)
    assert set(answer) == set(names)
    for missing in names[:2]:
        without = [name for name in names if name != missing]
        with pytest.raises(InferenceServerException, match=f"{missing} must be among the requested outputs"):
            own.ask("tensorrt_llm", tensors, stream=False, outputs=without)


def table(seed: int) -> Any:
    """FP16 embeddings of the virtual tokens."""
    return np.random.default_rng(seed).normal(0, 0.5, (ROWS, HIDDEN)).astype(np.float16)


def tuned_request(served: Served, text: str, count: int, number: int, **more: Any) -> Tensors:
    """Return a request with table `number`, named by an id in releases that can reuse blocks of tables."""
    tensors: Tensors = {"prompt_embedding_table": table(number)[np.newaxis], "prompt_vocab_size": integers(ROWS)}
    if not served.before("0.13"):
        tensors["prompt_table_extra_id"] = long_integers(number)
    return {**served.client.text(text, count, **more), **tensors}


TUNED = "<row 0><row 1><row 3>" + TEXT
MODELS = ("ensemble", "tensorrt_llm_bls", "tiny")


def reused_blocks(served: Served, model: str, number: int) -> int:
    """Blocks of a prompt of 131 tokens, all but the first rows of table `number`, that were there already."""
    tensors = tuned_request(served, "<row 2>" * 130, 2, number, return_perf_metrics=True)
    (answer,) = served.ask(model, tensors, stream=True)
    return int(answer["kv_cache_reused_blocks"].item())


@pytest.mark.parametrize("number", [5, 6])
def test_prompt_tables_of_texts(own: Served, oracle: InProcess, tuned_tokenizer: Path, number: int) -> None:
    """Words beyond the engine's vocabulary stand for rows of the request's table."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tuned_tokenizer))
    ids = tokenizer.encode(TUNED)
    assert ids[:4] == [1, VOCABULARY, VOCABULARY + 1, VOCABULARY + 3]
    tokens = oracle.tokens(ids, 8, prompt_tuning_config=api.PromptTuningConfig(table(number), [number] * len(ids)))
    expected = tokenizer.decode([*ids, *tokens], skip_special_tokens=True)
    for model in MODELS:
        (answer,) = own.ask(model, tuned_request(own, TUNED, 8, number), stream=True)
        assert answer["text_output"].item().decode() == expected
    if not own.before("0.13"):
        query = {"QUERY": texts(TUNED), "REQUEST_OUTPUT_LEN": integers(8)}
        query["PROMPT_TABLE_EXTRA_ID"] = long_integers(number)
        made = own.server.infer("preprocessing", query)
        assert made["OUT_PROMPT_TABLE_EXTRA_IDS"].tolist() == [[0, number, number, number] + [0] * len(TEXT)]
    if not own.before("0.19"):  # from here on blocks are used again by default, and the client can ask how many were
        for place, model in enumerate(MODELS):
            other = 100 * number + place
            # Another table's block begins with the same first token, which no table makes.
            assert reused_blocks(own, model, other) <= 1
            assert reused_blocks(own, model, other) >= 4


def test_query_returns_context_logits(own: Served, tuned_tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["query", TEXT, "--tokenizer", str(tuned_tokenizer), "-u", f"127.0.0.1:{own.server.address.grpc_port}"]
    for model in ("tensorrt_llm", "ensemble", "tiny"):
        assert run([*asked, "--model", model, "--max-tokens", "4", "--return-context-logits", "--json"]) == 0
        outputs = json.loads(capsys.readouterr().out)["result"]["outputs"]
        (found,) = (output for output in outputs if output["name"] == "context_logits")
        assert found["shape"] == [1, len(TEXT) + 1, VOCABULARY]
