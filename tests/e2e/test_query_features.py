"""`trtserve query` on an engine with everything built in: beams, adapters, drafts, logits, chat, by every model."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.model_server import ModelServer
from tests.support.text_requests import ENDLESS, MAX_SEQ_LEN, is_idle
from tests.support.waiting import wait_until
from trtserve.cli import run
from trtserve.client.answer import Generation
from trtserve.client.endpoint import Endpoint
from trtserve.client.query import generate
from trtserve.client.spec import QuerySpec

pytestmark = pytest.mark.triton

MODELS = ("tiny", "ensemble", "tensorrt_llm")
PROMPT = "What is machine learning?"


@pytest.fixture
def flags(endpoint: Endpoint, features_model: Path) -> list[str]:
    """Flags that name the server, which is not recorded."""
    return ["-u", endpoint.grpc, "--tokenizer", str(features_model)]


def ask(endpoint: Endpoint, *prompts: str, **settings: Any) -> Generation:
    fields = {name: settings.pop(name) for name in list(settings) if name in QuerySpec.__dataclass_fields__}
    options = {"max_tokens": 8, **settings}
    return generate(QuerySpec(prompts=prompts or (PROMPT,), options=options, **fields), endpoint)


def texts(generation: Generation) -> list[str | None]:
    return [sequence.text for sequence in generation.sequences]


@pytest.fixture(scope="module")
def plain(endpoint: Endpoint) -> Generation:
    """The core model's answer without anything special."""
    return ask(endpoint, model="tensorrt_llm")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("stream", [False, True])
def test_models_agree(endpoint: Endpoint, plain: Generation, model: str, protocol: str, stream: bool) -> None:
    got = ask(endpoint, model=model, protocol=protocol, stream=stream)
    if model == "ensemble" and stream:  # a character split across responses is its documented limit
        assert got.output_tokens == plain.output_tokens
    else:
        assert got.text == plain.text
    assert (got.sequences[0].finish_reason, got.output_tokens) == ("length", 8)


@pytest.mark.parametrize("model", MODELS)
def test_beams_come_best_first(endpoint: Endpoint, model: str) -> None:
    got = ask(endpoint, model=model, beam_width=3, return_log_probs=True, length_penalty=1.0)
    sums = [sequence.cum_log_prob for sequence in got.sequences]
    assert [(each.prompt, each.sequence, each.beam) for each in got.sequences] == [(0, 0, beam) for beam in range(3)]
    assert sums == sorted(sums, key=lambda each: -(each or 0.0))
    assert all(each.log_probs and len(each.log_probs) == 8 for each in got.sequences)
    streamed = ask(endpoint, model=model, beam_width=3, length_penalty=1.0, stream=True)
    assert texts(streamed) == texts(got)


def test_samples_of_one_prompt(endpoint: Endpoint) -> None:
    got = ask(endpoint, model="tensorrt_llm", num_return_sequences=3, top_k=20, seed=5)
    assert [each.sequence for each in got.sequences] == [0, 1, 2]
    assert len({tuple(each.token_ids or ()) for each in got.sequences}) == 3
    assert texts(ask(endpoint, model="tensorrt_llm", num_return_sequences=3, top_k=20, seed=5)) == texts(got)


@pytest.mark.parametrize("model", MODELS)
def test_batch_answers_as_single_requests_do(endpoint: Endpoint, model: str) -> None:
    prompts = (PROMPT, "Tell me more", "x")
    together = ask(endpoint, *prompts, model=model, batch=True)
    assert [each.prompt for each in together.sequences] == [0, 1, 2]
    assert texts(together) == [ask(endpoint, prompt, model=model).text for prompt in prompts]


def test_adapter_by_name_and_by_its_files(
    endpoint: Endpoint, plain: Generation, features_adapters: dict[str, Path]
) -> None:
    folder = str(features_adapters["left"])
    by_name = ask(endpoint, lora="left")
    assert by_name.text != plain.text
    assert ask(endpoint, model="tensorrt_llm", lora_path=folder, lora_task_id=901).text == by_name.text
    assert ask(endpoint, model="tensorrt_llm", lora_task_id=901).text == by_name.text
    assert ask(endpoint, model="tensorrt_llm", lora="left").text == by_name.text


def test_draft_tokens_do_not_change_the_answer(endpoint: Endpoint, plain: Generation) -> None:
    ids = plain.sequences[0].token_ids or []
    draft = ",".join(map(str, ids[:3]))
    got = ask(endpoint, model="tensorrt_llm", draft_tokens_csv=draft, return_perf_metrics=True)
    assert got.sequences[0].token_ids == ids[: len(got.sequences[0].token_ids or [])]
    assert got.outputs["total_draft_tokens", 0, 0].item() == 3
    assert got.outputs["acceptance_rate", 0, 0].item() == 1.0


def test_prompt_table_stands_for_tokens(endpoint: Endpoint, tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", np.random.default_rng(0).normal(size=(2, 4, 64)).astype(np.float16))
    settings: dict[str, Any] = {"prompt_embedding_table_path": str(tmp_path / "table.npy")}
    ids = ((320, 321, 322, 323, 5),)

    def tokens(task: int) -> Any:
        # The cache is reused: a number identifies each table.
        options = {**settings, "prompt_task_id": task, "prompt_table_extra_id": 70 + task, "max_tokens": 6}
        return (
            generate(QuerySpec(token_ids=ids, model="tensorrt_llm", options=options), endpoint).sequences[0].token_ids
        )

    assert len(tokens(0)) == 6
    assert tokens(0) != tokens(1)


def test_guide_holds_the_answer(endpoint: Endpoint) -> None:
    assert ask(endpoint, guide_type="regex", guide="[0-9]+").text.isdigit()


def test_words_and_bias_mean_the_same_to_core_and_text_models(endpoint: Endpoint) -> None:
    settings: dict[str, Any] = {"embedding_bias": ["7=100"], "bad_words": ["8"], "max_tokens": 4}
    text = ask(endpoint, **settings).text
    assert set(text) <= {"7"}
    assert ask(endpoint, model="tensorrt_llm", **settings).text == text
    stopped = ask(endpoint, model="tensorrt_llm", embedding_bias=["7=100"], stop_words=["7"])
    assert (stopped.sequences[0].finish_reason, stopped.output_tokens) == ("stop_words", 1)


def test_everything_is_in_the_json(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--max-tokens", "5", "--return-log-probs", "--return-generation-logits", "--return-perf-metrics"]
    where = ["--output-dir", str(tmp_path / "out"), "--model", "tensorrt_llm", "--json"]
    assert run(["query", PROMPT, *asked, *where, *flags]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    (sequence,) = result["sequences"]
    assert (len(sequence["token_ids"]), len(sequence["log_probs"]), sequence["finish_reason"]) == (5, 5, "length")
    outputs = {output["name"]: output for output in result["outputs"]}
    logits = np.load(outputs["generation_logits"]["file"])
    assert outputs["generation_logits"]["shape"] == [1, 1, 5, 320] == list(logits.shape)
    assert logits[0, 0].argmax(-1).tolist() == sequence["token_ids"]
    assert outputs["last_token_time_ns"]["value"] > outputs["arrival_time_ns"]["value"] > 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["generation_logits.npy"]
    assert (result["input_tokens"], result["output_tokens"]) == (len(PROMPT) + 1, 5)


def test_logits_of_a_stream_are_those_of_the_whole_answer(endpoint: Endpoint) -> None:
    whole, streamed = (
        ask(endpoint, model="tensorrt_llm", return_generation_logits=True, stream=stream).outputs[
            "generation_logits", 0, 0
        ]
        for stream in (False, True)
    )
    assert streamed.shape == whole.shape
    np.testing.assert_allclose(streamed, whole, rtol=1e-4, atol=1e-4)


def test_named_outputs_are_saved(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["query", PROMPT, "--max-tokens", "3", "--model", "tensorrt_llm", "--output-dir", str(tmp_path)]
    saved = ["--save", "kv_cache_reused_blocks", "--return-perf-metrics"]
    assert run([*asked, *saved, *flags]) == 0
    assert np.load(tmp_path / "kv_cache_reused_blocks.npy").shape == (1, 1)
    assert "arrival_time_ns: " in capsys.readouterr().err
    assert run([*asked, "--save", "context_logits", *flags]) == 2
    assert "--return-context-logits" in capsys.readouterr().err


def test_sequences_are_labelled(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--prompt", "a", "--prompt", "b", "--batch", "--beam-width", "2", "--max-tokens", "2"]
    assert run(["query", *asked, *flags]) == 0
    lines = capsys.readouterr().out.split("\n")
    labels = [line.partition(": ")[0] for line in lines if line.startswith("prompt")]
    assert labels == ["prompt 0, beam 0", "prompt 0, beam 1", "prompt 1, beam 0", "prompt 1, beam 1"]


@pytest.mark.parametrize("model", ["tiny", "tensorrt_llm"])
def test_chat_model_is_asked_in_its_template(
    endpoint: Endpoint, features_model: Path, tmp_path: Path, model: str
) -> None:
    folder = Path(shutil.copytree(features_model, tmp_path / "chat"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}>"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    got = ask(endpoint, "Hi", model=model, tokenizer=folder, system="S", return_num_input_tokens=True)
    # One BOS, two EOS, and a token for every byte of the rest.
    assert got.input_tokens == 1 + len("[system]S") + 1 + len("[user]Hi") + 1 + len(">")
    raw = ask(endpoint, "Hi", model=model, tokenizer=folder, raw=True, return_num_input_tokens=True)
    assert raw.input_tokens == 1 + len("Hi")


@pytest.mark.parametrize(
    ("model", "protocol"),
    # Rows of ids cannot be sent over HTTP.
    [("tiny", "grpc"), ("tiny", "http"), ("ensemble", "grpc"), ("ensemble", "http"), ("tensorrt_llm", "grpc")],
)
def test_stopped_request_frees_its_blocks(features: ModelServer, endpoint: Endpoint, model: str, protocol: str) -> None:
    prompts = tuple(f"prompt {number}" for number in range(8))  # so many and so long that they take seconds
    endless: dict[str, Any] = {"max_tokens": ENDLESS, "end_id": -1, "stream": True, "batch": True}
    got = ask(endpoint, *prompts, model=model, protocol=protocol, stop_after_ms=100, **endless)
    assert got.stopped
    assert (got.output_tokens or 0) < 8 * ENDLESS
    wait_until(lambda: is_idle(features))
    assert features.metric("nv_trt_llm_kv_cache_block_metrics", 'type="used"') == 0


@pytest.mark.parametrize(("model", "protocol"), [("tiny", "grpc"), ("tiny", "http"), ("ensemble", "grpc")])
def test_ctrl_c_stops_the_engine(features: ModelServer, model: str, protocol: str) -> None:
    address = features.address
    # The client postpones the signal while it imports NumPy, seconds on a busy machine: the answer takes longer.
    settings = ["--stream", "--max-tokens", str(ENDLESS), "--end-id", "-1", "--num-return-sequences", "8"]
    command = [sys.executable, "-m", "trtserve", "query", PROMPT, *settings]
    # The command stops its request in the core model by its own request id.
    ports = ["--host", address.host, "--http-port", str(address.http_port), "--grpc-port", str(address.grpc_port)]
    before = features.metric("nv_llm_output_token_len_sum")
    process = subprocess.Popen(
        [*command, "--model", model, "--protocol", protocol, *ports], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_until(lambda: not is_idle(features))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    wait_until(lambda: is_idle(features))
    assert features.metric("nv_llm_output_token_len_sum") - before < 8 * ENDLESS


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--beam-width", "9"], 41, "beam"),
        (["--lora-task-id", "77777"], 41, "not found in cache"),
        (["--lora", "nope"], 41, "nope"),
        (["--guide-type", "sonnet", "--guide", "x"], 2, "sonnet"),
        (["--input", "temperatur=1"], 2, "Did you mean 'temperature'"),
        (["--input", "beam_width=many"], 2, "expected INT32 [1]"),
        (["--draft-tokens-csv", "1,2"], 2, "no input 'draft_input_ids'"),
        (["--early-stopping"], 2, "no input 'early_stopping'"),
        (["--system", "s"], 2, "--tokenizer"),
        (["--model", "preprocessing"], 41, "neither text nor token ids"),
    ],
)
def test_wrong_requests(
    flags: list[str], arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["query", PROMPT, "--max-tokens", "4", *arguments, *flags]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("model", ["tiny", "tensorrt_llm"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_reduced_max_tokens_is_reported(
    flags: list[str], model: str, stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompt leaves less room than the engine's tokens, which only the answer shows."""
    way = ["--model", model, *(["--stream"] if stream else [])]
    assert run(["query", "x" * (MAX_SEQ_LEN - 100), "--max-tokens", "200", "--end-id", "-1", *way, *flags]) == 0
    assert "note: the engine reduced --max-tokens 200" in capsys.readouterr().err
    assert run(["query", PROMPT, "--max-tokens", "6", *way, *flags]) == 0
    assert "reduced" not in capsys.readouterr().err


def test_bench_counts_why_answers_ended(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--num-requests", "6", "--warmup-requests", "1", "--input-mean", "8", "--output-mean", "4"]
    limits = ["--vocab-size", "320", "--max-seq-len", "256", "--url", endpoint.grpc]
    limits += ["--model", "tensorrt_llm", "--no-calibrate"]
    assert run(["bench", "token-norm-dist", *asked, *limits, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["statistics"]["finish_reasons"] == {"length": 6}
    assert run(["bench", "token-norm-dist", *asked, *limits]) == 0
    assert "Ended by length\t6" in capsys.readouterr().out
