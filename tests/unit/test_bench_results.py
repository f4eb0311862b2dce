"""Results: written, read again with the same figures, exported for NVIDIA's tools, and compared."""

from __future__ import annotations

import csv
import html
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.bench_records import answered, correlated, report_of
from trtserve.bench.compare import compare
from trtserve.bench.exports import write_result
from trtserve.bench.monitoring import Samples, WorkerHealth
from trtserve.bench.plots import _logarithmic, chart, write_plots
from trtserve.bench.report import BenchReport, brief, milliseconds, read_report, sparkline
from trtserve.bench.run import _reporter, command
from trtserve.cli import run
from trtserve.errors import UsageError


def made(seed: int, *, factor: float = 1.0, count: int = 300, **more: object) -> BenchReport:
    """A run of one made-up server; `factor` makes it slower."""
    times = correlated(count, seed=seed)
    return report_of(
        [answered(index, intended=index * 50, first=first * factor) for index, first in enumerate(times)], **more
    )


def test_a_result_is_read_again_with_the_same_figures(tmp_path: Path) -> None:
    rows = [{"time_ns": 1.0, "in_flight": 2.0}]
    report = made(1, samples=Samples(rows=rows), planned_notes=("A note.",), spec={"slo": {"ttft": "20ms"}})
    write_result(report, tmp_path / "out")
    for place in (tmp_path / "out", tmp_path / "out" / "requests.jsonl"):
        again = read_report(place)
        assert again.to_json() == report.to_json()
        assert again.rows() == report.rows()


def test_the_answer_in_one_line() -> None:
    closed = made(1)
    rate, most = closed.statistics.requests_per_second, closed.statistics.latency_ms.p95  # too few answers for p99
    assert closed.answer == f"{rate:.3g} requests/s, 95 % of answers within {most:.3g} ms, limited by the server, valid"
    goal = made(1, spec={"slo": {"ttft": "20ms"}, "concurrency": None, "request_rate": 2.0})
    good = goal.statistics.goodput_per_second
    answer = replace(goal, records=tuple(replace(each, scheduled=True) for each in goal.records)).answer
    assert answer.startswith(f"{good:.3g} requests/s with ttft ≤ 20 ms, as fast as the requests came (2/s), ")
    slow = WorkerHealth(worker=0, seconds=1.0, cpu=0.99)
    assert replace(closed, health=(slow,)).answer.endswith("limited by the client, client-limited")
    starved = replace(slow, cpu=0.1, run_queue_ms=900.0)
    assert "limited" not in replace(closed, health=(starved,)).answer


def test_large_figures_have_no_exponents() -> None:
    assert [brief(value) for value in (0.00004, 0.5741, 57.41, 99.96, 1159.4)] == ["0", "0.574", "57.4", "100", "1,159"]
    assert [milliseconds(value) for value in (9.8765, 1159, 12_345)] == ["9.88 ms", "1,159 ms", "12,345 ms"]
    assert "e+" not in made(1, factor=500).answer


def test_damaged_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_report(tmp_path)
    write_result(made(1, count=3), tmp_path)
    (tmp_path / "requests.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match=r"Line 1 .* cannot be read as the record of a request: missing key"):
        read_report(tmp_path)


def test_exports_have_the_layouts_of_nvidias_tools(tmp_path: Path) -> None:
    report = made(2)
    write_result(report, tmp_path)
    firsts = np.array(correlated(300, seed=2))
    for name in ("genai_perf", "aiperf"):
        content = json.loads((tmp_path / f"profile_export_{name}.json").read_text())
        assert content["time_to_first_token"]["unit"] == "ms"
        assert content["time_to_first_token"]["p99"] == pytest.approx(np.percentile(firsts, 99), abs=1e-3)
        assert content["inter_token_latency"]["avg"] == pytest.approx(5.0)
        assert content["output_token_throughput"]["avg"] == report.statistics.output_tokens_per_second
        rows = list(csv.reader((tmp_path / f"profile_export_{name}.csv").read_text().splitlines()))
        assert rows[0][:4] == ["Metric", "avg", "min", "max"]
        assert rows[1][0] == "Time To First Token (ms)"
    lines = [json.loads(line) for line in (tmp_path / "profile_export.jsonl").read_text().splitlines()]
    assert lines[0]["metrics"]["time_to_first_token"] == {"unit": "ms", "value": pytest.approx(firsts[0], abs=1e-3)}
    assert lines[0]["metadata"]["was_cancelled"] is False
    assert lines[0]["metadata"]["record_processor_id"] == "worker_0"  # AIPerf's reader requires it
    assert lines[0]["metrics"]["inter_chunk_latency"]["value"] == pytest.approx([5.0] * 7, abs=1e-3)
    (experiment,) = json.loads((tmp_path / "profile_export.json").read_text())["experiments"]
    assert experiment["experiment"] == {"mode": "concurrency", "value": 8}
    assert len(experiment["requests"]) == 300
    first = experiment["requests"][0]
    assert first["response_timestamps"][0] - first["timestamp"] == pytest.approx(firsts[0] * 1e6, abs=1)
    assert len(first["response_timestamps"]) == len(first["response_outputs"]) == 8
    # genai-perf counts the tokens of this kind of profile by their ids.
    assert json.loads((tmp_path / "profile_export.json").read_text())["service_kind"] == "triton_c_api"
    assert len(first["request_inputs"]["input_ids"]) == 16
    assert [len(each["output_ids"]) for each in first["response_outputs"]] == [1] * 8
    assert experiment["window_boundaries"][0] == first["timestamp"]


@pytest.mark.parametrize(
    ("spec", "load"),
    [
        ({"concurrency": 8}, {"type": "concurrency", "concurrency": 8}),
        (
            {"request_rate": 5.0, "arrivals": "gamma", "burstiness": 2.0, "concurrency": None},
            {"type": "gamma", "rate": 5.0, "smoothness": 2.0},
        ),
        ({"request_rate": 5.0, "arrivals": "exponential"}, {"type": "poisson", "rate": 5.0}),
        ({"traffic": "replay"}, {"type": "fixed_schedule"}),
    ],
)
def test_load_is_told_in_the_words_of_aiperf(spec: dict[str, object], load: dict[str, object], tmp_path: Path) -> None:
    write_result(report_of([answered(0, intended=0)], spec=spec), tmp_path)
    settings = json.loads((tmp_path / "profile_export_aiperf.json").read_text())["input_config"]
    assert settings["phases"] == [{"name": "profiling", "requests": 1, **load}]
    assert settings["models"] == {"items": [{"name": "demo"}]}
    assert settings["datasets"][0]["prompts"] == {"isl": 16, "osl": 8}


def repeated(
    side: int, *, runs: int = 6, factor: float = 1.0, turns: bool = True, drift: float = 0.1
) -> list[BenchReport]:
    """Runs of one side (0 or 1) on a machine that becomes slower by `drift` from run to run, and by chance.

    They take turns as in 0 1 1 0 0 1 1 0, or one side follows the other.
    """
    made_runs = []
    for number in range(runs):
        moment = 2 * number + (side + number) % 2 if turns else side * runs + number
        slower = factor * (1 + drift * moment + float(np.random.default_rng(moment).normal(0.0, 0.01)))
        started = f"2026-01-01T00:00:{moment:02}+00:00"
        made_runs.append(made(moment, count=64, factor=slower, started=started))
    return made_runs


def test_one_run_on_each_side_is_rarely_called_different() -> None:
    """Two runs of one server that differ by 3 % of their mean by chance are within the allowance for drift."""
    alarms = 0
    for seed in range(60):
        prompts = "1" * 64 if seed % 2 else "0" * 64
        pair = made(seed, count=200), made(seed + 1000, count=200, factor=1.03, prompts_sha256=prompts)
        alarms += any(each.worse_than(0.0) for each in compare(*([each] for each in pair)))
    assert alarms / 60 <= 0.05


def test_runs_that_take_turns_cancel_drift() -> None:
    same, *_ = compare(repeated(0), repeated(1))
    assert (same.paired, same.pairs, same.runs) == (True, 6, (6, 6))
    assert same.relative == pytest.approx(0.0, abs=0.02)
    assert not same.worse_than(0.0)
    slower, *_ = compare(repeated(0, drift=0.01), repeated(1, drift=0.01, factor=1.2))
    assert slower.worse_than(0.05)


def test_runs_one_side_after_the_other_are_compared_without_pairs() -> None:
    difference, *_ = compare(repeated(0, turns=False, drift=0.0), repeated(1, turns=False, drift=0.0))
    assert not difference.paired
    assert not difference.worse_than(0.0)
    uneven, *_ = compare(repeated(0, runs=3), repeated(1, runs=2))
    assert uneven.runs == (3, 2)
    with pytest.raises(UsageError, match="2 runs before and 1 after"):
        compare(repeated(0, runs=2), repeated(1, runs=1))


def test_a_slower_server_is_found_and_allowed_up_to_the_limit() -> None:
    first, *_ = compare([made(1)], [made(2, factor=1.2)])
    assert first.paired
    assert first.relative == pytest.approx(0.2, abs=0.1)
    assert first.worse_than(0.0)
    assert not first.worse_than(0.5)
    assert not compare([made(1)], [made(2, factor=1.2)], drift=0.3)[0].worse_than(0.0)
    assert compare([made(2, factor=1.2)], [made(1)])[0].better


def test_other_requests_are_compared_without_pairs() -> None:
    difference = compare([made(1)], [made(2, prompts_sha256="1" * 64)])[0]
    assert not difference.paired
    assert difference.interval is not None


def test_too_few_requests_give_no_judgement() -> None:
    difference = compare([made(1, count=10)], [made(2, count=10)])[0]
    assert difference.interval is None
    assert not difference.worse_than(0.0)


def test_compare_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_result(made(1), tmp_path / "a")
    write_result(made(2, factor=1.2), tmp_path / "b")
    arguments = ["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")]
    assert run(arguments) == 52
    assert "is worse than" in capsys.readouterr().err
    assert run([*arguments, "--max-regression", "40%"]) == 0
    assert run([*arguments, "--max-regression", "much"]) == 2
    capsys.readouterr()
    assert run([*arguments, "--json"]) == 52
    differences = json.loads(capsys.readouterr().out)["result"]["differences"]
    assert [each["regression"] for each in differences] == [True, False, True]


def test_compare_command_with_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side, name in enumerate(("old", "new")):
        for number, report in enumerate(repeated(side, factor=1 + side / 2, drift=0.01)):
            write_result(report, tmp_path / name / str(number))
    arguments = ["bench", "compare", str(tmp_path / "old"), str(tmp_path / "new")]
    assert run(arguments) == 52
    captured = capsys.readouterr()
    assert "Time to first token (ms), 6 pairs of runs" in captured.out
    assert "drift" not in captured.err
    write_result(made(9, spec={"concurrency": 16}), tmp_path / "new" / "other")
    assert run(arguments) == 2
    assert "they differ in concurrency" in capsys.readouterr().err


def test_compare_command_tells_what_speaks_against_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that refuses requests can be faster; other loads are no fair comparison, and neither are few answers."""
    write_result(made(1), tmp_path / "a")
    quick = made(1, factor=0.5, count=20, spec={"concurrency": 16})
    failed = [replace(each, status="failed") for each in quick.records[:10]]
    write_result(replace(quick, records=(*failed, *quick.records[10:])), tmp_path / "b")
    arguments = ["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")]
    assert run([*arguments, "--max-regression", "5%"]) == 52
    said = " ".join(capsys.readouterr().err.split())
    assert "failed requests, which the means leave out, 0.0% before and 50.0% after" in said
    assert "the sides differ in concurrency" in said
    assert "b is not-steady: 10 completed answers are too few" in said
    assert run([*arguments, "--max-regression", "60%"]) == 0


def test_report_command_reads_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (16, 8):
        write_result(made(number, count=120, spec={"concurrency": number}), tmp_path / f"concurrency-{number}")
    assert run(["bench", "report", str(tmp_path), "--strict"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    # 120 answers are not enough for p99, here as in the report of each.
    assert header.split("\t")[3:5] == ["TTFT p50 (ms)", "TTFT p95 (ms)"]
    assert [row.split("\t")[0] for row in rows] == ["8 in flight", "16 in flight"]
    assert run(["bench", "report", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["result"]["stages"]) == 2
    busy = (WorkerHealth(seconds=6, cpu=0.97),)
    write_result(made(8, count=120, spec={"concurrency": 8}, health=busy), tmp_path / "concurrency-8")
    assert run(["bench", "report", str(tmp_path), "--strict"]) == 51
    write_result(made(8, spec={"concurrency": 4, "input_mean": 9}), tmp_path / "older")
    assert run(["bench", "report", str(tmp_path)]) == 2
    assert "they differ in input_mean" in capsys.readouterr().err
    assert run(["bench", "report", str(tmp_path), "--html", str(tmp_path / "page.pdf")]) == 2
    assert "must end in .html, .svg, .png" in capsys.readouterr().err
    assert run(["bench", "report", str(tmp_path), "--html", str(tmp_path / "none" / "page.html")]) == 2
    assert f"the folder {tmp_path}/none does not exist" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_report_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_result(made(1), tmp_path / "a")
    assert run(["bench", "report", str(tmp_path / "a")]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Statistic\tavg\tmin\tmax\tp50\tp75\tp90\tp95\tp99\nTime to first token (ms)\t")
    assert "*\n" in captured.out  # P99 of 300 answers
    assert captured.err.startswith("*: too few answers")
    result, verdict = captured.err.splitlines()[-2:]
    assert (result[:8], verdict) == ("Result: ", "Verdict: valid")
    assert run(["bench", "report", str(tmp_path / "a"), "-q"]) == 0
    assert capsys.readouterr() == (captured.out, "")
    write_result(made(1, count=5), tmp_path / "b")
    assert run(["bench", "report", str(tmp_path / "b"), "--strict", "--table", "upstream"]) == 51
    few = made(1, count=5)
    captured = capsys.readouterr()
    assert captured.out.startswith("Stat\tValue\nRequests/Sec\t")
    assert f"P99 latency (ms)\t{few.statistics.latency_ms.p99:.2f}*\n" in captured.out


def test_a_result_names_its_load() -> None:
    loads: list[tuple[dict[str, object], str]] = [
        ({"concurrency": 8, "request_rate": None}, "8 in flight"),
        ({"concurrency": None, "request_rate": 2.5}, "2.5/s"),
        ({"concurrency": 4, "request_rate": 5.94604}, "5.946/s"),
        ({"concurrency": 4, "request_rate": 1000.0}, "1000/s"),
        ({"request_rate": 3.0, "ramp_to": 40.0}, "3 to 40/s"),
        ({}, ""),
    ]
    for spec, load in loads:
        assert made(1, count=5, spec=spec).load == load


def test_sparklines() -> None:
    line = sparkline([(moment, float(moment)) for moment in range(80)])
    assert (len(line), line[0], line[-1]) == (40, "▁", "█")
    assert sparkline([]) == ""
    assert sparkline([(0, 4.0), (100, 4.0)]) == "█" * 40  # sampled rarely, not zero in between


@pytest.mark.needs("vl_convert")
@pytest.mark.parametrize("name", ["</script><script>alert(1)</script>", "<!--<script>", "a < b"])
def test_names_in_a_result_are_no_html(name: str, tmp_path: Path) -> None:
    records = [answered(number, intended=number / 10) for number in range(4)]
    write_plots([report_of(records, model=name)], tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert f"<title>{html.escape(name)}: " in page
    assert "<script" not in page
    assert "alert(1)<" not in page


def test_percentages_over_time_have_a_scale_each() -> None:
    rows = [{"time_ns": moment * 1e8, "in_flight": 1.0, "cpu": 90.0, "kv_use": 0.01} for moment in range(4)]
    plots = {plot["title"]: plot for plot in chart([made(1, samples=Samples(rows=rows))])["concat"]}
    machine = plots["Server and machine over time"]
    assert machine["encoding"]["row"]["field"] == "what"
    assert machine["resolve"] == {"scale": {"y": "independent"}}
    assert "row" not in plots["Requests in flight and batch size"]["encoding"]


def test_every_plot_of_a_run_says_how_to_read_it() -> None:
    rows = [{"time_ns": moment * 1e8, "in_flight": 1.0, "cpu": 90.0, "kv_use": 0.01} for moment in range(4)]
    plots = chart([made(1, samples=Samples(rows=rows))])["concat"]
    assert len(plots) == 5
    assert [plot["title"] for plot in plots if "description" not in plot] == []


def test_equal_lines_in_one_plot_differ_in_their_dashes() -> None:
    rows = [{"time_ns": moment * 1e8, "in_flight": 8.0, "batch_size": 8.0} for moment in range(4)]
    plots = {plot["title"]: plot for plot in chart([made(1, samples=Samples(rows=rows))])["concat"]}
    dashes = plots["Requests in flight and batch size"]["encoding"]["strokeDash"]["scale"]
    assert dashes == {"domain": ["in flight", "batch size"], "range": [[1, 0], [5, 5]]}


@pytest.mark.needs("vl_convert")
def test_a_report_draws_its_wide_plot_for_a_phone_too(tmp_path: Path) -> None:
    rows = [{"time_ns": moment * 1e8, "in_flight": 1.0, "cpu": 90.0} for moment in range(4)]
    write_plots([made(1, samples=Samples(rows=rows))], tmp_path / "report.html")
    wide = (tmp_path / "report.html").read_text().partition("<figure class=wide>")[2].partition("</figure>")[0]
    assert re.findall(r'viewBox="0 0 (\d+) ', wide) == ["490", "1020"]
    names = re.findall(r' id="([^"]+)"', wide)
    assert len(names) == len(set(names)) == 2  # each has the colours of its own scale
    assert set(re.findall(r"url\(#([^)]+)\)", wide)) == set(names)


def test_a_long_run_with_a_value_that_is_always_0_is_read_a_few_times_only() -> None:
    class Row(dict[str, float]):
        def get(self, name: str, default: float = 0.0) -> float:  # type: ignore[override]
            read.append(name)
            return super().get(name, default)

    read = list[str]()
    rows: list[dict[str, float]] = [
        Row(time_ns=moment * 1e9, in_flight=1.0, cpu=90.0, steal=0.0) for moment in range(200)
    ]
    assert "Server and machine over time" in {
        plot["title"] for plot in chart([made(1, samples=Samples(rows=rows))])["concat"]
    }
    assert len(read) < 50 * len(rows)


def test_valid_runs_of_a_curve_are_green_and_others_are_not() -> None:
    few, many = made(1, count=4), made(2, spec={"concurrency": 16})
    assert (few.verdict.judgement, many.verdict.judgement) == ("not-steady", "valid")
    plots = {plot.get("title"): plot for plot in chart([few, many])["concat"]}
    layers = plots["Throughput and latency of the stages"]["layer"]
    (points,) = (each for each in layers if each["mark"]["type"] == "point")
    assert points["encoding"]["color"]["scale"] == {"domain": ["valid", "not-steady"], "range": ["#4c9a2a", "#dd7d33"]}


@pytest.mark.needs("vl_convert")
@pytest.mark.parametrize("ending", ["html", "svg", "png"])
def test_plots_are_written_without_a_network(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"plots.{ending}"
    rows = [{"time_ns": moment * 1e8, "in_flight": 1.0, "cpu": 90.0, "steal": 0.0} for moment in range(4)]
    last = made(2, factor=1.5, spec={"concurrency": 16, "slo": {"ttft": "30ms"}}, samples=Samples(rows=rows))
    write_plots([made(1), last], path)
    content = path.read_bytes()
    if ending == "png":
        assert content.startswith(b"\x89PNG")
        return
    text = content.decode()
    stage = ", 16 in flight"
    of_the_last = ("Distribution of times", "Requests in flight and batch size", "Server and machine over time")
    for title in (*(f"{name}{stage}" for name in of_the_last), "Throughput and latency"):
        assert title in text
    assert text.count("valid") >= 2
    assert "<script" not in text
    if ending == "html":
        assert text.rstrip().endswith("</html>")
        assert "<td>Requests/Sec</td>" in text
        assert f"<td>P99 TTFT (ms)</td><td>{last.statistics.time_to_first_token_ms.p99:.2f}*</td>" in text
        assert text.index("too few answers") < text.index("All figures")  # right below its table
        assert "Its time counts from that moment" in text  # what "from the intended send" means
        assert ">completed<" not in text  # a legend that would tell nothing
        assert "<h2>Figures, 16 in flight</h2>" in text
        assert text.count("limited by the server</h1>") == 1
        assert text.index("</h1>") < text.index("<table>") < text.index("<svg")
        assert "{&quot;" not in text  # no raw JSON
        assert "CPU steal" not in text  # it was 0 all the time


@pytest.mark.needs("vl_convert")
def test_a_report_of_one_run_says_what_its_verdict_means(tmp_path: Path) -> None:
    write_plots([made(1)], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert text.count("he client kept up") == 1
    assert re.search(r"<dt>Began</dt><dd>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC</dd>", text)


@pytest.mark.needs("vl_convert")
def test_a_report_begins_with_what_was_measured_and_says_where(tmp_path: Path) -> None:
    precision = {"weights_precision": "float16", "compute_precision": "bf16", "kv_precision": "u8"}
    machine = {"cpus": 2, "other_programs": 0.911, "server_here": True, "server_waited": None}
    write_plots([made(1, runtime="openvino", precision=precision, machine=machine)], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert '<table class="figures">' in text  # a phone leaves out its columns min and max
    lengths = "16 tokens in a prompt and 8 in an answer, on average"
    begins = text.partition("<h1>")[0]
    assert f"runtime openvino · weights float16, arithmetic bf16, KV cache u8 · {lengths}<" in begins
    used = "other programs used 0.9 of 2 processors on average"
    assert f"<dt>Machine</dt><dd>cpus 2, {used}, client and server on this machine</dd>" in text
    write_plots([made(1)], tmp_path / "unknown.html")
    assert f"<br>{lengths}<" in (tmp_path / "unknown.html").read_text()


@pytest.mark.needs("vl_convert")
def test_what_a_report_proposes_measures_the_same_server(tmp_path: Path) -> None:
    for typed, kept in (
        ("trtserve bench token-norm-dist --server demo --html x.html", "--server demo"),
        ("trtserve bench --grpc_port=9001 -m ensemble --seed 1 --ssl", "--grpc_port=9001 -m ensemble --ssl"),
    ):
        write_plots([made(1, command=typed)], tmp_path / "report.html")
        shown = (tmp_path / "report.html").read_text().partition("What next")[2].partition("How it was measured")[0]
        assert f"<code>trtserve bench {kept} --sweep-concurrency" in shown
    write_plots([made(1, command="an unfinished ' quote")], tmp_path / "report.html")
    assert "<code>trtserve bench --sweep-concurrency" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("given", [["--api-key", "a secret"], ["--api-key=a secret"]])
def test_the_command_of_a_result_has_no_key(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/trtserve", "bench", *given, "--seed", "1"])
    assert command().replace("=", " ") == "trtserve bench --api-key KEY --seed 1"


def test_failed_requests_are_in_curves_and_tables() -> None:
    run_ = made(1, count=100)
    failed = [replace(each, status="failed", arrivals=[]) for each in run_.records[::4]]
    report = replace(run_, records=(*failed, *(each for each in run_.records if each.index % 4)))
    curve = next(plot for plot in chart([report])["concat"] if plot["title"] == "Distribution of times")
    shares = {point["measure"]: point["share"] for point in curve["data"]["values"]}  # the last ones
    assert shares == {"Time to first token": 0.75, "Time per output token": 1.0, "Request latency": 0.75}
    first = next(row for row in report.interval_rows() if row[0].startswith("Time to first"))
    assert "∞ (requests failed)" in first
    assert not any(cell.count("requests failed") > 1 for cell in first)


@pytest.fixture
def trace_result(tmp_path: Path) -> Path:
    """The result of a replayed trace, which has neither a rate nor a limit on requests in flight."""
    times = enumerate(correlated(100, seed=3))
    records = [answered(index, intended=index * 50, first=first, scheduled=True) for index, first in times]
    report = report_of(records, spec={"traffic": "replay", "request_rate": None, "concurrency": None})
    write_result(report, tmp_path / "trace")
    return tmp_path / "trace"


def test_a_trace_without_a_limit_has_no_load_to_name(trace_result: Path) -> None:
    report = read_report(trace_result)
    assert report.load == ""
    assert report.verdict.valid


@pytest.mark.needs("vl_convert")
def test_a_page_is_written_whoever_reads_the_table(
    trace_result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("trtserve.cli.output.print_table", leave)
    run(["bench", "report", str(trace_result), "--html", str(tmp_path / "trace.html")])
    assert (tmp_path / "trace.html").stat().st_size


@pytest.mark.needs("vl_convert")
def test_a_trace_without_a_limit_has_a_page(trace_result: Path, tmp_path: Path) -> None:
    page = tmp_path / "trace.html"
    assert run(["bench", "report", str(trace_result), "--html", str(page)]) == 0
    text = page.read_text()
    assert "as fast as the requests came</h1>" in text
    assert "Request latency over time, from the intended send" in text


@pytest.mark.needs("vl_convert")
def test_the_page_says_what_a_verdict_means(tmp_path: Path) -> None:
    few = report_of([answered(number, intended=number / 10) for number in range(4)])
    assert few.verdict.judgement == "not-steady"
    write_plots([few], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "A longer run may give other figures. 4 completed answers are too few to tell" in text


@pytest.mark.needs("vl_convert")
def test_a_verdict_has_two_lines_and_further_reasons_are_notes(tmp_path: Path) -> None:
    machine = {"cpus": 12, "load_average": 18.2, "server_here": True, "other_programs": 10.9, "server_waited": 0.43}
    late = WorkerHealth(seconds=60, run_queue_ms=22_000, loop_lag_p99_ms=172, gc_pause_max_ms=90)
    report = made(1, machine=machine, health=(late,))
    assert report.verdict.judgement == "disturbed"
    write_plots([report], tmp_path / "page.html")
    verdict, _, rest = (tmp_path / "page.html").read_text().partition('<p class="verdict">')[2].partition("</p>")
    assert "The server may be faster than these figures. Other programs used 10.9 of 12 cores" in verdict
    assert len(re.sub("<[^>]*>", "", verdict)) <= 310  # two lines at 1,100 pixels
    assert "garbage collector" in rest.partition("<h2>Notes</h2>")[2].partition("</ul>")[0]


@pytest.mark.needs("vl_convert")
def test_a_figure_has_one_name_and_one_rounding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = made(1, factor=30)
    write_result(report, tmp_path)
    write_plots([report], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    figures = {row[0]: row for row in report.interval_rows()}
    assert run(["bench", "compare", str(tmp_path), str(tmp_path)]) == 0
    compared = {line.partition(" (ms)")[0]: line.split("\t")[1] for line in capsys.readouterr().out.splitlines()[1:]}
    for name, mean, median, *_ in report.short_rows():
        row = figures[f"{name} (ms)"]
        assert [row[1].split()[0], row[4].split()[0]] == [mean, median]
        assert compared[name] == mean
        assert f"<strong>{median} ms</strong><span>{name}, p50</span>" in page


@pytest.mark.parametrize(
    ("times", "marks"),
    [
        ((90.0, 140.0), [50, 100, 200]),
        ((29.9, 29.9), [20, 50]),
        ((0.7, 31.0), [0.5, 1, 2, 5, 10, 20, 50]),
        ((10.0, 100.0), [10, 20, 50, 100]),
    ],
)
def test_the_axis_of_times_ends_at_labels_close_to_the_data(times: tuple[float, ...], marks: list[float]) -> None:
    found = _logarithmic([{"ms": time} for time in times])
    assert found["axis"]["values"] == pytest.approx(marks)
    assert found["scale"]["domain"] == pytest.approx([marks[0], marks[-1]])


def test_the_live_rate_is_that_of_the_measured_period(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("trtserve.bench.run.time.monotonic", lambda: now[0])
    task = SimpleNamespace(advance=lambda _: None, describe=(shown := list[str]()).append)
    report = _reporter(task)
    now[0] = 105.0  # the warm-up took five seconds
    for ended in (0, 20):
        report(SimpleNamespace(ended=ended, in_flight=8, first_ms=lambda _: None))  # type: ignore[arg-type]
        now[0] += 2.0
    assert shown == ["8 in flight", "10 requests/s, 8 in flight"]
