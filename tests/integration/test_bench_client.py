"""The load generator against the built-in echo server, whose answers and times are known.

Nothing here depends on how fast the machine is: counts are exact, and times have lower bounds only. `make bench
ARGS="--only client"` measures the rest.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.echo_targets import echo_target, requests, target_at
from tests.support.tiny_models import write_byte_tokenizer
from trtserve.bench.echo_server import Echo, Spoken, running_echo
from trtserve.bench.monitoring import LoadSampler, Totals
from trtserve.bench.records import RequestRecord
from trtserve.bench.run import calibrate
from trtserve.bench.statistics import compute, percentile
from trtserve.bench.transport import Chunk
from trtserve.bench.worker import Load, LoadOutcome, run_load
from trtserve.cli import run
from trtserve.client.http_transport import HttpPool, Pressure, http_request
from trtserve.errors import BenchmarkError, MissingDependencyError, ServerUnreachableError
from trtserve.repository.tokenizer import check_tokenizer

MS = 1_000_000


def send(load: Load, *, workers: int = 1) -> LoadOutcome:
    outcome = run_load(load, workers=workers)
    assert outcome is not None
    return outcome


def arrived(record: RequestRecord) -> list[int]:
    return [time for time, _ in record.arrivals] or [each.time_ns for each in record.responses]


def test_the_echo_server_ends_in_order_when_the_process_that_asked_for_it_is_gone() -> None:
    program = (
        "from multiprocessing import Pipe\n"
        "from trtserve.bench.echo_server import Echo, _serve\n"
        "ours, theirs = Pipe()\n"
        "ours.close()\n"
        "_serve(Echo(spoken='http'), theirs)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("spoken", ["grpc-stream", "grpc-unary", "http-stream", "http"])
def test_every_protocol_receives_the_whole_answer(spoken: Spoken, text: bool) -> None:
    with echo_target(Echo(spoken=spoken, chunks=5, delay=0.02, gap=0.002, text=text)) as target:
        outcome = send(Load(target=target, requests=requests(12, tokens=5, text=text), concurrency=4))
    assert [record.status for record in outcome.records] == ["completed"] * 12
    for record in outcome.records:
        tokens = sum(len(each.text or "") // 2 for each in record.responses) if text else record.output_tokens
        assert tokens == 5
        assert len(arrived(record)) == (5 if target.streams else 1)
        assert record.sent_ns is not None
        assert arrived(record)[0] - record.sent_ns >= 20 * MS
        assert record.ended_ns - record.sent_ns >= (28 * MS if target.streams else 20 * MS)


@pytest.mark.parametrize("spoken", ["openai-stream", "openai"])
def test_openai_servers_are_measured(spoken: Spoken) -> None:
    frozen = gc.get_freeze_count()  # by tests/conftest.py: a run in this process must not undo it
    with echo_target(Echo(spoken=spoken, chunks=5, text=True)) as target:
        outcome = send(Load(target=target, requests=requests(8, tokens=5, text=True), concurrency=2))
    for record in outcome.records:
        assert record.status == "completed"
        assert "".join(each.text or "" for each in record.responses) == " a" * 5
        assert sum(each.tokens or 0 for each in record.responses) == 5
    assert gc.get_freeze_count() > frozen // 2 > 0  # after a thaw it is 0; frozen objects may be freed meanwhile


def test_a_stalled_server_cannot_hide_its_stall() -> None:
    """Frozen for 0.6 s, 100 requests/s, at most 8 in flight: every request is sent, and its wait counts."""
    offsets = [index / 100 for index in range(150)]
    echo = Echo(spoken="grpc-stream", chunks=1, stall_at=0.5, stall=0.6)
    with echo_target(echo) as target:
        load = Load(target=target, requests=requests(150, tokens=1), offsets=offsets, concurrency=8)
        records = send(load).records
    assert len([record for record in records if record.sent_ns is not None]) == 150
    planned = [record.intended_ns - records[0].intended_ns for record in records]
    assert planned == pytest.approx([offset * 1e9 for offset in offsets], abs=2)
    late = sorted((record.ended_ns - record.intended_ns) / MS for record in records)
    # Those that were due in the first 0.3 s of the stall wait for its second half; a few may come before it begins.
    assert sum(latency >= 290 for latency in late) >= 25
    assert percentile(late, 0.9) >= 250
    # From the actual send the stall is almost invisible: only those in flight see it.
    behind = [record for record in records if record.sent_ns and record.sent_ns - record.intended_ns > 200 * MS]
    assert len(behind) >= 20
    assert compute(records).delivered_ratio is not None


def test_a_worker_that_a_signal_has_stopped_ends_the_run() -> None:
    others = set(multiprocessing.active_children())

    class Sampler(LoadSampler):
        def begin(self, totals: Callable[[], Totals]) -> None:
            workers = set(multiprocessing.active_children()) - others
            os.kill(min(each.pid or 0 for each in workers), signal.SIGSTOP)

        def end(self) -> None:
            pass

    with echo_target(Echo(spoken="http-stream")) as target:
        others |= set(multiprocessing.active_children())
        load = Load(target=target, requests=requests(40), concurrency=2)
        with pytest.raises(BenchmarkError, match=r"stopped by a signal \(SIGSTOP\), and was ended"):
            run_load(load, workers=2, sampler=Sampler())
        assert set(multiprocessing.active_children()) <= others


def test_workers_send_every_request_once_and_pool_their_records() -> None:
    with echo_target(Echo(spoken="http-stream", chunks=32)) as target:
        # The records of a worker are more than a pipe holds at once.
        load = Load(target=target, requests=requests(900, tokens=32), warmup=requests(4, tokens=32), concurrency=6)
        outcome = send(load, workers=3)
        load = replace(load, requests=load.requests[:41], concurrency=None)
        scheduled = send(replace(load, offsets=[index / 200 for index in range(41)]), workers=3)
    for each, count in ((outcome, 900), (scheduled, 41)):
        assert [record.index for record in each.records] == list(range(count))
        assert {record.worker for record in each.records} == {0, 1, 2}
        assert {record.status for record in each.records} == {"completed"}
        assert sorted(health.worker for health in each.health) == [0, 1, 2]
    starts = [record.intended_ns - scheduled.start_ns for record in scheduled.records]
    assert starts == pytest.approx([index * 5 * MS for index in range(41)], abs=2)
    # Percentiles of the pooled records are those of all values, not averages of the workers' percentiles.
    pooled = compute(scheduled.records).latency_ms
    values = sorted((record.ended_ns - record.intended_ns) / MS for record in scheduled.records)
    assert (pooled.p50, pooled.p99) == (percentile(values, 0.5), percentile(values, 0.99))


@pytest.mark.parametrize("spoken", ["grpc-stream", "http-stream"])
def test_cancelled_requests_are_counted_apart(spoken: Spoken) -> None:
    wanted = [replace(each, cancel_after=2 if number % 2 else None) for number, each in enumerate(requests(10))]
    with echo_target(Echo(spoken=spoken, chunks=16, gap=0.01)) as target:
        records = send(Load(target=target, requests=wanted, concurrency=2)).records
    assert [record.status for record in records] == ["completed", "cancelled"] * 5
    assert {record.error for record in records} == {None, "cancelled by --cancel-rate"}
    counts = compute(records).counts
    assert counts.sent == counts.completed + counts.failed + counts.cancelled == 10


class Busy(BaseHTTPRequestHandler):
    """A server that refuses every request."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(503, "busy")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        pass


def test_a_refused_request_is_a_failed_record() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            target = target_at(Echo(spoken="http-stream"), server.server_address[1])
            (record,) = send(Load(target=target, requests=requests(1), timeout=20)).records
        finally:
            server.shutdown()
            thread.join()
    assert record.status == "failed"
    assert str(record.error).startswith("status 503")
    with pytest.raises(ServerUnreachableError):
        send(Load(target=target_at(Echo(spoken="http-stream"), 1), requests=requests(1)))


def test_turns_of_a_conversation_carry_what_was_said_before() -> None:
    turns = [replace(each, session=number // 3) for number, each in enumerate(requests(6, tokens=4))]
    with echo_target(Echo(spoken="grpc-stream", chunks=4)) as target:
        records = send(Load(target=target, requests=turns, concurrency=2)).records
    # Each prompt is 20 new tokens after the prompts and answers (4 tokens) before it.
    assert [record.input_tokens for record in records] == [20, 44, 68] * 2
    for first, second in ((0, 1), (1, 2), (3, 4), (4, 5)):
        assert records[first].ended_ns <= (records[second].sent_ns or 0)


def test_sockets_that_hold_up_the_client_are_noticed() -> None:
    """A request larger than the buffers of a socket, and 40 KiB of events that were all there at the first look."""
    event = b"data: {}\n\n"
    answer = event * (40 * 1024 // len(event))
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n".encode()
    received: list[Chunk] = []

    def on_event(time_ns: int, event: bytes) -> bool:
        received.append((time_ns, event))
        return False

    async def exchange() -> Pressure:
        ended = asyncio.Event()

        async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            start = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(start.partition(b"Content-Length: ")[2].split(b"\r\n")[0]))
            writer.write(head + answer)
            await writer.drain()
            with suppress(ConnectionError):
                await reader.read()  # until the client closes
            writer.transport.abort()
            ended.set()

        server = await asyncio.start_server(reply, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool = HttpPool("127.0.0.1", port, tls=None, timeout=60, connect_timeout=60)
        await pool.open(1)
        await pool.send(http_request("127.0.0.1", "/", b"x" * 2**25), on_event)
        await pool.close()
        await ended.wait()
        server.close()
        await server.wait_closed()
        return pool.pressure

    pressure = asyncio.run(exchange())
    assert len(received) == len(answer) // len(event)
    assert pressure.write_blocked_max_ns > 0
    assert pressure.crowded_reads > 0


def test_the_client_calibrates_itself() -> None:
    target = target_at(Echo(spoken="grpc-stream"), 1)
    found = calibrate(target, requests(50), workers=1, concurrency=8)
    assert found is not None
    assert (found.protocol, found.responses_per_answer) == ("grpc-stream", 16)
    assert found.answers_per_second > 10
    assert found.capacity(1) > found.capacity(16) > found.capacity(100)
    assert 0 <= found.dispatch_p50_ms <= found.dispatch_max_ms


def test_an_interrupt_of_the_calibration_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured until then would be called the client's limit."""
    interrupted = LoadOutcome(records=[RequestRecord(index=0, input_tokens=1, requested_tokens=1)], interrupted=True)
    monkeypatch.setattr("trtserve.bench.run.run_load", lambda *_, **__: interrupted)
    target = target_at(Echo(spoken="grpc-stream"), 1)
    with pytest.raises(KeyboardInterrupt):
        calibrate(target, requests(50), workers=1, concurrency=8)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As in a repository: with what transformers makes of it, so that the many runs here need not make it again."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    check_tokenizer(folder, None, keep=True)
    return folder


@pytest.fixture(scope="module")
def openai_server() -> Iterator[int]:
    with running_echo(Echo(spoken="openai-stream", chunks=8, delay=0.004, gap=0.001, text=True)) as port:
        yield port


def arguments(port: int, tokenizer: Path, *more: str) -> list[str]:
    asked = ["--openai", f"http://127.0.0.1:{port}/v1", "--model", "echo", "--tokenizer", str(tokenizer)]
    lengths = ["--input-mean", "20", "--output-mean", "8", "--output-stdev", "0", "--max-seq-len", "400"]
    return ["bench", "token-norm-dist", *asked, *lengths, *more]


def test_command_measures_an_openai_server(
    openai_server: int, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--num-requests", "60", "--out", str(tmp_path / "r"), "--table", "genai-perf", "--slo", "latency=10s")
    assert run(arguments(openai_server, tokenizer, *more)) == 0
    captured = capsys.readouterr()
    assert "Time to first token (ms)\t" in captured.out
    assert "Client on the echo server: " in captured.err
    assert "Verdict: " in captured.err
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert (report["protocol"], report["model"], report["tokens_counted_by"]) == ("openai", "echo", "server")
    assert report["statistics"]["good_answers"] == report["statistics"]["counts"]["completed"] == 60
    assert report["calibration"]["protocol"] == "openai-stream"
    assert report["machine"]["server_here"] is True
    assert 0 <= report["machine"]["other_programs"] < report["machine"]["cpus"] + 1
    assert 0 <= report["machine"]["server_waited"] <= 1
    assert report["statistics"]["output_tokens_per_request"] == 8
    assert "trtserve" in report["versions"]


def test_command_sweeps(
    openai_server: int, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--num-requests", "20", "--sweep-concurrency", "1,4", "--no-calibrate", "--out", str(tmp_path / "sweep"))
    assert run(arguments(openai_server, tokenizer, *more, "--quiet")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == ["Load", "1 in flight", "4 in flight"]
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == ["concurrency-1", "concurrency-4"]


def test_command_searches_a_rate(openai_server: int, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server needs at least 4 ms, so that no rate meets 1 ms."""
    more = ("--num-requests", "3", "--request-rate", "400", "--find-rate", "--slo", "ttft=1ms", "--no-calibrate")
    assert run(arguments(openai_server, tokenizer, *more, "--json")) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)["result"]
    assert found["highest_rate"]["rate"] is None
    assert found["highest_rate"]["beyond"] == 400 / 2**6
    assert found["highest_rate"]["limited_by"] in ("server", "client")
    assert len(found["stages"]) >= 7
    assert "No rate meets --slo; the lowest tried was 6.25 requests/s" in captured.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--find-rate",), "give --slo"),
        (("--sweep-rate", "1,2", "--sweep-concurrency", "1"), "Give one of"),
        (("--ramp-to", "5"), "give both"),
        (("--arrivals", "constant"), "--arrivals has no effect without --request-rate"),
        (("--burstiness", "2", "--request-rate", "3"), "--burstiness has no effect without --arrivals gamma"),
        (("--protocol", "http"), "--protocol has no effect with --openai"),
        (("--http-port", "8000"), "--http-port has no effect with --openai"),
        (("--openai", "http://localhost:abc/v1"), "expected an address such as"),
        (("--openai", "http://[::1/v1"), "expected an address such as"),
        (("--diagnose",), "--diagnose needs the server's repository"),
        (("--sweep-rate", "1,2", "--request-rate", "1"), "--request-rate has no effect with --sweep-rate"),
        (("--html", "plots.pdf"), "must end in .html"),
        (("--html", "nowhere/page.html"), "nowhere does not exist"),
        (("--sweep-rate", "1,0"), "--sweep-rate is 0.0; it must be above 0"),
    ],
)
def test_combinations_that_cannot_work_are_refused_and_leave_no_folder(
    more: Sequence[str],
    message: str,
    openai_server: int,
    tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(arguments(openai_server, tokenizer, *more, "--out", str(tmp_path / "out"))) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_plots_are_offered_where_they_can_be_drawn(
    openai_server: int,
    tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = arguments(openai_server, tokenizer, "--num-requests", "2", "--no-calibrate")
    drawing = ModuleType("vl_convert")
    drawing.__spec__ = ModuleSpec("vl_convert", None)
    monkeypatch.setitem(sys.modules, "vl_convert", drawing)
    assert run(few) == 0
    assert "Next: --html FILE writes a page with plots, --out DIR keeps" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert run(few) == 0
    assert "Next: --out DIR keeps" in capsys.readouterr().err
    assert run([*few, "--html", "page.html", "--out", str(tmp_path / "out")]) == MissingDependencyError.code
    assert "vl-convert-python" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_under_mpirun_it_says_what_to_use_instead(
    openai_server: int, tokenizer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert run(arguments(openai_server, tokenizer)) == 2
    printed = capsys.readouterr().err
    assert "started 4 times" in printed
    assert "--workers" in printed
