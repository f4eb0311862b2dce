"""`trtserve bench` against a real Triton whose core models compute nothing."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import write_byte_tokenizer
from tests.support.waiting import wait_until
from trtserve.bench.plan import plan_benchmark
from trtserve.bench.report import BenchReport
from trtserve.bench.run import run_benchmark
from trtserve.cli import run
from trtserve.client.endpoint import Endpoint
from trtserve.errors import RequestError, ServerUnreachableError, UsageError
from trtserve.specs import BenchSpec

pytestmark = pytest.mark.triton


def measure(echo: Endpoint, **settings: object) -> BenchReport:
    """A small benchmark; `settings` are BenchSpec's."""
    defaults: dict[str, object] = {"model": "tensorrt_llm", "calibrate": False, "warmup_requests": 2}
    defaults |= {"num_requests": 12, "input_mean": 20, "output_mean": 8, "vocab_size": 100}
    return run_benchmark(plan_benchmark(BenchSpec(**{**defaults, **settings}), echo))  # type: ignore[arg-type]


def test_stream(echo: Endpoint) -> None:
    report = measure(echo)
    statistics = report.statistics
    assert report.streaming
    assert (statistics.counts.planned, statistics.counts.completed, statistics.short_answers) == (12, 12, 0)
    assert statistics.inter_token_ms.count == sum(record.output_tokens - 1 for record in report.records)
    for record in report.records:
        assert record.sent_ns is not None
        assert record.intended_ns <= record.sent_ns < record.arrivals[0][0] <= record.arrivals[-1][0] <= record.ended_ns
        # Every token is its own response.
        assert len(record.arrivals) == record.requested_tokens


def test_one_response_per_request(echo: Endpoint) -> None:
    report = measure(echo, model="core_plain")
    assert not report.streaming
    assert report.statistics.short_answers == 0
    assert report.statistics.time_to_first_token_ms.count == 0
    assert dict(report.rows())["Avg. TTFT (ms)"].startswith("n/a")


def test_concurrency_is_kept(echo: Endpoint) -> None:
    report = measure(echo, model="core_slow", concurrency=3, output_stdev=0, warmup_requests=0)
    events = [(record.sent_ns or 0, 1) for record in report.records] + [
        (record.ended_ns, -1) for record in report.records
    ]
    level = highest = 0
    for _, change in sorted(events):
        level += change
        highest = max(highest, level)
    assert highest == 3


def test_failures_stay_in_the_figures(echo: Endpoint) -> None:
    report = measure(echo, model="core_failing", num_requests=40, warmup_requests=0)
    counts = report.statistics.counts
    assert (counts.sent, counts.completed, counts.failed) == (40, 30, 10)
    assert report.statistics.latency_ms.censored == 10
    assert {record.error for record in report.records} == {None, "asked to fail"}


def test_run_is_bounded_in_time(echo: Endpoint) -> None:
    report = measure(
        echo, model="core_slow", output_mean=500, output_stdev=0, concurrency=2, timeout=1.0, warmup_requests=0
    )
    counts = report.statistics.counts
    assert (counts.planned, counts.completed) == (12, 0)
    # A request that gives up a moment before the run does leaves its place to another one.
    assert 2 <= counts.sent == counts.failed == 12 - counts.unsent <= 4
    assert "time limit" in str(report.records[0].error) or "time allowed" in str(report.records[0].error)


def test_same_seed_sends_the_same_prompts(echo: Endpoint) -> None:
    first, again, other = (measure(echo, seed=seed).prompts_sha256 for seed in (4, 4, 5))
    assert first == again != other


def test_text_model_needs_a_tokenizer(echo: Endpoint) -> None:
    with pytest.raises(UsageError, match=r"'echo' are texts .* tokenizer is not available"):
        measure(echo, model="echo")


@pytest.fixture(scope="module")
def tokenizer(echo_folder: Path) -> Path:
    (echo_folder / "tokenizer").mkdir()
    write_byte_tokenizer(echo_folder / "tokenizer")
    return echo_folder / "tokenizer"


@pytest.mark.parametrize("model", ["echo", "text_plain", "text_accumulating"])
def test_text_model_gets_texts_of_the_drawn_length(echo: Endpoint, tokenizer: Path, model: str) -> None:
    """Answers are " Echo: " and the prompt, in one response per word, after the prompt or with all text so far."""
    report = measure(echo, model=model, tokenizer=tokenizer, output_mean=26, input_stdev=0)
    assert (report.tokens_counted_by, report.streaming) == ("tokenizer", model != "text_plain")
    for record in report.records:
        # The prompt's 20 tokens are <s> and 19 characters.
        assert (record.input_tokens, record.output_tokens) == (20, 7 + 19)
        assert [tokens for _, tokens in record.arrivals] == ([6, 20] if report.streaming else [26])
    assert report.statistics.time_to_first_token_ms.count == (12 if report.streaming else 0)
    assert any("The server does not count output tokens" in note for note in report.notes)
    assert any("no input to ignore its end token" in note for note in report.notes)


def test_dataset_command(echo: Endpoint, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [{"input": "a" * length, "instruction": "b", "output": "c d e"} for length in (3, 30, 4)]
    (tmp_path / "data.json").write_text(json.dumps(entries))
    arguments = ["bench", "dataset", "--url", echo.grpc, "--dataset", str(tmp_path / "data.json"), "--json"]
    arguments += ["--tokenizer-dir", str(tokenizer), "--max-input-len", "10", "--op-tokens-per-word", "2"]
    arguments += ["--model", "tensorrt_llm", "--no-calibrate"]
    arguments += ["--request-rate", "1000"]
    assert run(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    result = printed["result"]
    assert printed["command"] == "bench dataset"
    assert (result["tokens_counted_by"], result["spec"]["dataset"]) == ("output_ids", str(tmp_path / "data.json"))
    statistics = result["statistics"]
    assert statistics["counts"]["completed"] == 2
    assert (statistics["input_tokens_per_request"], statistics["output_tokens_per_request"]) == (6.5, 6)
    assert any(note.startswith("1 prompts were skipped") for note in result["notes"])


def test_unknown_model(echo: Endpoint) -> None:
    with pytest.raises(RequestError, match="no model 'nope'"):
        measure(echo, model="nope")


def test_an_unreachable_server_is_reported() -> None:
    with pytest.raises(ServerUnreachableError):
        measure(Endpoint(grpc_port=1))


def wait_for_lines(trace: Path, beginning: str, number: int) -> None:
    """Wait until the models have written this many lines that begin like this."""
    wait_until(lambda: sum(line.startswith(beginning) for line in trace.read_text().splitlines()) >= number)


def _arguments(echo: Endpoint, *more: str) -> list[str]:
    model = [] if "--model" in more else ["--model", "tensorrt_llm"]
    sent = ["--vocab-size", "100", "--num-requests", "10", "--no-calibrate"]
    return ["bench", "token-norm-dist", "--url", echo.grpc, *model, *sent, *more]


def test_command_prints_the_table(echo: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(_arguments(echo, "--max-seq-len", "100")) == 0
    captured = capsys.readouterr()
    rows = dict(line.split("\t") for line in captured.out.splitlines())
    assert list(rows)[:3] == ["Stat", "Requests/Sec", "OP tokens/sec"]
    assert rows["Total requests"] == "10"
    assert "cut to the engine's limits" in captured.err
    assert "10 warm-up requests" in captured.err
    assert f"Benchmark of 'tensorrt_llm' at {echo.grpc}: closed loop, concurrency 8" in captured.err


def test_command_writes_the_report(echo: Endpoint, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(_arguments(echo, "--json", "--out", str(tmp_path / "r"))) == 0
    printed = json.loads(capsys.readouterr().out)["result"]
    assert json.loads((tmp_path / "r" / "report.json").read_text()) == printed
    assert (printed["spec"]["concurrency"], printed["streaming"], printed["model"]) == (8, True, "tensorrt_llm")
    assert len((tmp_path / "r" / "requests.jsonl").read_text().splitlines()) == 10


def test_command_fails_when_requests_failed(echo: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(_arguments(echo, "--model", "core_failing")) == 50
    captured = capsys.readouterr()
    assert "Failed requests" in captured.out
    assert "asked to fail" in captured.err


def test_command_fails_when_its_time_was_over(echo: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    # A schedule of 10 s: most requests are neither sent nor failed when the second is over.
    schedule = ["--request-rate", "1", "--arrivals", "constant", "--timeout", "1.5", "--warmup-requests", "0"]
    assert run(_arguments(echo, *schedule)) == 50
    captured = capsys.readouterr()
    assert "Requests/Sec" in captured.out
    assert "note: --timeout 1.5 ended the run" in captured.err
    assert re.search(
        r"error: --timeout 1\.5 was over before all 10 requests were answered: \d completed, \d failed, \d never sent",
        captured.err,
    )


def test_quiet_command_prints_nothing(echo: Endpoint, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(_arguments(echo, "--quiet", "--out", str(tmp_path / "r"))) == 0
    assert capsys.readouterr().err == ""


def test_dry_run_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(_arguments(Endpoint(grpc_port=1), "--dry-run")) == 0
    assert "Would send 10 requests" in capsys.readouterr().out


def test_interrupt_prints_what_was_measured(echo: Endpoint, echo_folder: Path) -> None:
    arguments = _arguments(echo, "--model", "core_slow", "--output-mean", "100", "--output-stdev", "0")
    arguments += ["--warmup-requests", "0", "--concurrency", "2"]
    command = [sys.executable, "-m", "trtserve", *arguments]
    trace = echo_folder / "trace"
    trace.write_text("")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # Two users: when a third and a fourth request have begun, two are complete and two in flight.
    wait_for_lines(trace, "began ", 4)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    rows = dict(line.split("\t") for line in output.splitlines())
    assert int(rows["Sent requests"]) == int(rows["Completed requests"]) + int(rows["Cancelled requests"])
    assert (rows["Cancelled requests"], rows["Failed requests"]) == ("2", "0")
    assert "Interrupted" in errors
    assert "Traceback" not in errors
    wait_for_lines(trace, "ended ", 2)
