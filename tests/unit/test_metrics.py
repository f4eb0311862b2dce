"""`trtserve metrics`: the page is read, summed up, compared with the reading before and shown."""

from __future__ import annotations

import json
import re
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from rich.text import Text

from tests.support.http_pages import answering
from tests.support.server_records import server_record
from trtserve.cli import run
from trtserve.client.metrics import CoreMetrics, core_metrics, gpu_metrics, kv_blocks, model_metrics, parse
from trtserve.errors import ServerDiedError, ServerUnreachableError
from trtserve.host.ports import free_ports
from trtserve.server.state import Server, write_state
from trtserve.server.status import MetricsSource, Reading, rates, read_metrics, remote_source, watch_metrics
from trtserve.store import Store

PAGE = """
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="tensorrt_llm",version="1"} 4
nv_inference_request_failure{model="tensorrt_llm",reason="OTHER",version="1"} 1
nv_inference_request_failure{model="tensorrt_llm",reason="REJECTED",version="1"} 2
nv_inference_request_duration_us{model="tensorrt_llm",version="1"} 50000
nv_inference_request_success{model="ensemble",version="1"} 0
nv_inference_request_duration_us{model="ensemble",version="1"} 0
nv_cpu_utilization 0.5
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 3
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 16
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 96
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 24
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.25
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="a_draft",version="1"} 7
nv_trt_llm_general_metrics{general_type="iteration_counter",model="tensorrt_llm",version="1"} 40
nv_llm_output_token_len_count{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1"} 3
nv_llm_output_token_len_sum{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1"} 72
nv_llm_output_token_len_bucket{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1",le="10"} 1
nv_llm_output_token_len_bucket{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1",le="50"} 3
nv_llm_output_token_len_bucket{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1",le="+Inf"} 3
nv_trtserve_tokens_total{model="tensorrt_llm",token_type="generated",version="1"} 100
nv_trtserve_tokens_total{model="tensorrt_llm",token_type="prompt",version="1"} 500
"""


def grown(page: str = PAGE) -> str:
    return page.replace("} 100\n", "} 160\n").replace("} 40\n", "} 100\n")


def serving(*pages: str) -> AbstractContextManager[int]:
    """A metrics port that answers one page after the other, the last for ever."""
    left = list(pages)
    return answering(lambda _path: left.pop(0) if len(left) > 1 else left[0])


def server_at(port: int, *, alive: bool = True) -> Server:
    return server_record(metrics_port=port, age=0 if alive else 1000, repository=Path("gone"), model="probe")


def record(port: int) -> None:
    write_state(server_at(port), Store())


def test_lines_of_the_format() -> None:
    page = 'nv_a{x="1",y="a \\"b\\" \\\\ \\n{c}"} 1e3\nnv_b 2.5 1700000000\n# TYPE nv_b counter\nnv_c{} NaN\n'
    for damaged in ("", "not a sample\nnv_d x\n"):
        first, second, third = parse(page + damaged)
        assert (first.name, first.value) == ("nv_a", 1000.0)
        assert first.labels == {"x": "1", "y": 'a "b" \\ \n{c}'}
        assert (second.name, second.labels, second.value) == ("nv_b", {}, 2.5)
        assert third.value != third.value


def test_core_models_and_their_families() -> None:
    draft, core = core_metrics(parse(PAGE))
    assert (draft.model, core.model) == ("a_draft", "tensorrt_llm")
    assert core.families["nv_trt_llm_request_metrics"] == {"active": 3, "waiting": 1, "max": 16}
    assert core.value("nv_trt_llm_general_metrics", "iteration_counter") == 40
    assert core.value("nv_trt_llm_v1_metrics", "empty_generation_slots") is None
    assert list(core.families["nv_llm_output_token_len"].items()) == [
        ("count", 3),
        ("sum", 72),
        ("le 10", 1),
        ("le 50", 3),
        ("le +Inf", 3),
    ]


def test_counts_of_triton_are_summed_over_other_labels() -> None:
    ensemble, core = model_metrics(parse(PAGE))
    assert core.values == {"request_success": 4, "request_failure": 3, "request_duration_us": 50000}
    assert core.mean_ms("request_duration_us") == 12.5
    assert core.mean_ms("queue_duration_us") is None
    assert ensemble.mean_ms("request_duration_us") is None


def test_blocks_are_those_of_the_asked_model() -> None:
    assert kv_blocks(PAGE, "tensorrt_llm") == {"max": 96, "used": 24}
    assert kv_blocks(PAGE, "elsewhere") == {"max": 7}
    assert kv_blocks("", "tensorrt_llm") == {}


def reading(seconds: float, **counters: float) -> Reading:
    families = {
        "nv_trtserve_tokens_total": {"generated": counters["tokens"]},
        "nv_trt_llm_general_metrics": {"iteration_counter": counters["iterations"]},
    }
    core = CoreMetrics(model="core", version="1", families=families)
    return Reading(seconds=seconds, text="", core=(core,), models=())


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [(30, {"generated_tokens": 25.0, "iterations": 12.5}), (0, {"generated_tokens": 25.0})],
    ids=["grown", "set back"],
)
def test_rates_are_growth_per_second(iterations: float, expected: dict[str, float]) -> None:
    before, after = reading(10, tokens=100, iterations=5), reading(12, tokens=150, iterations=iterations)
    assert rates(before, after) == {"core": expected}


def test_watching_pauses_between_readings() -> None:
    pauses: list[float] = []
    with serving(PAGE, grown()) as port:
        found = list(watch_metrics(remote_source("127.0.0.1", port), interval=2.5, count=3, pause=pauses.append))
    assert pauses == [2.5, 2.5]
    assert found[0].rates == {}
    assert set(found[1].rates["tensorrt_llm"]) == {"generated_tokens", "prompt_tokens", "iterations"}
    assert found[2].rates["tensorrt_llm"]["generated_tokens"] == 0


def test_a_port_without_metrics() -> None:
    (port,) = free_ports("127.0.0.1", 1)
    with pytest.raises(ServerUnreachableError, match=f"metrics port {port}"):
        read_metrics(remote_source("127.0.0.1", port))


@pytest.mark.parametrize(("recorded", "words"), [(True, "has ended. Its last lines"), (False, "was stopped")])
def test_a_server_that_ends_while_it_is_watched(recorded: bool, words: str) -> None:
    with serving(PAGE) as port:
        dead = server_at(port, alive=False)
        if recorded:
            write_state(dead, Store())
        source = MetricsSource(name="demo", address=dead.address, server=dead)
        watching = watch_metrics(source, interval=0.1, pause=lambda _: None)
        next(watching)
    with pytest.raises(ServerDiedError, match=f"The server demo {words}"):
        next(watching)


def test_table_lines_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(PAGE) as port:
        record(port)
        assert run(["metrics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tensorrt_llm\tnv_trt_llm_kv_cache_block_metrics\tfraction\t0.25" in lines
    assert "tensorrt_llm\tnv_inference_request_failure\t-\t3" in lines
    assert lines[0] == "model\tfamily\tvalue of\tvalue"
    assert {line.count("\t") for line in lines} == {3}


def test_tables_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with serving(PAGE) as port:
        record(port)
        assert run(["metrics", "demo"]) == 0
    text = Text.from_ansi(capsys.readouterr().out).plain
    assert any(line.strip() == "tensorrt_llm" for line in text.splitlines())
    row = next(line for line in text.splitlines() if line.startswith("│ tensorrt_llm │ 4"))
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["tensorrt_llm", "4", "3", "-", "-", "12.5", "-"]
    assert "nv_" not in text  # every metric under its own name: --raw, and what a pipe gets
    assert re.search(r"^  KV cache +\d+ of \d+ blocks", text, re.MULTILINE)


def test_json_and_raw(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(PAGE) as port:
        url = f"127.0.0.1:{port}"
        assert run(["metrics", "--url", url, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)["result"]
        assert run(["metrics", "--url", url, "--raw"]) == 0
    assert capsys.readouterr().out == PAGE
    assert result["server"] == url
    assert result["core"][1]["nv_trtserve_tokens_total"] == {"generated": 100, "prompt": 500}
    assert result["models"][1]["request_success"] == 4


def test_watch_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(PAGE, grown()) as port:
        assert run(["metrics", "--url", f"127.0.0.1:{port}", "--watch", "--count", "2", "--interval", "0.1"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "\ttensorrt_llm\t" in line]
    first, second = (line.split("\t")[2:] for line in lines)
    assert first[:3] == ["kv 24 of 96 blocks (25%)", "3 active, 1 waiting of at most 16", "- tokens/s"]
    assert float(second[2].split()[0]) > 0
    assert second[3] == "0.0 prompt tokens/s"


def test_watch_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with serving(PAGE, grown()) as port:
        assert run(["metrics", "--url", f"127.0.0.1:{port}", "--watch", "--count", "2", "--interval", "0.1"]) == 0
    text = capsys.readouterr().out
    assert "24 of 96 blocks (25%)" in text
    assert "3 active, 1 waiting of at most 16" in text
    assert "prompt tokens/s" in text


def test_watch_reports_that_tokens_are_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    page = "\n".join(line for line in PAGE.splitlines() if "tokens_total" not in line)
    with serving(page) as port:
        assert run(["metrics", "--url", f"127.0.0.1:{port}", "--watch", "--count", "1"]) == 0
    captured = capsys.readouterr()
    assert "has no nv_trtserve_tokens_total: tokens per second are not shown" in captured.err
    assert "- tokens/s" in captured.out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--watch", "--json"], 2),
        (["demo", "--url", "localhost:1"], 2),
        (["--url", "localhost"], 2),
        (["nowhere"], 33),
        ([], 33),
    ],
)
def test_wrong_calls(arguments: list[str], code: int) -> None:
    assert run(["metrics", *arguments]) == code


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trtserve.cli.metrics.time.sleep", interrupt)
    with serving(PAGE) as port:
        assert run(["metrics", "--url", f"127.0.0.1:{port}", "--watch"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_gpus_of_a_page() -> None:
    page = (
        'nv_gpu_utilization{gpu_uuid="GPU-b"} 0.5\n'
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-b"} 1073741824\n'
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-a"} 2147483648\n'
    )
    first, second = gpu_metrics(parse(page))
    assert (first.uuid, dict(first.values)) == ("GPU-a", {"memory_total_bytes": 2**31})
    assert (second.uuid, dict(second.values)) == ("GPU-b", {"utilization": 0.5, "memory_used_bytes": 2**30})
