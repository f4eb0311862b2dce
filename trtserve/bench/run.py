"""One run: calibrate the client, send the plan's requests, count the tokens of the answers, and make the report."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import itertools
import os
import platform
import re
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trtserve._version import __version__
from trtserve.artifacts import Manifest
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.bench.echo_server import Echo, Spoken, running_echo
from trtserve.bench.messages import count_answers, takes_text
from trtserve.bench.monitoring import LoadSampler, queue_wait_ms
from trtserve.bench.plan import BenchPlan
from trtserve.bench.records import RequestRecord, TrafficRequest, engine_of_repository
from trtserve.bench.report import BenchReport, brief
from trtserve.bench.statistics import percentile
from trtserve.bench.transport import LoadTarget
from trtserve.bench.verdict import Calibration, Machine, find_machine
from trtserve.bench.worker import Load, run_load
from trtserve.client.grpc_transport import grpc_client
from trtserve.client.tensors import CORE_MODEL, ModelDescription, ModelRequest, Tensor
from trtserve.client.transport import SyncClient
from trtserve.errors import AnswerMismatchError, ArtifactError
from trtserve.host.ports import is_here
from trtserve.process import listeners, tree
from trtserve.progress import SILENT, Progress
from trtserve.server.state import list_servers

if TYPE_CHECKING:
    from trtserve.bench.monitoring import Totals
    from trtserve.progress import Task


def run_benchmark(plan: BenchPlan, *, progress: Progress = SILENT, metrics: str | None = None) -> BenchReport:
    """Send the traffic of `plan` and measure the answers; `metrics` is the address of the server's metrics page.

    Failed requests and an interrupt do not raise: the report contains them (`report.interrupted`). Errors:
    ServerUnreachableError, RequestError (every warm-up request was refused).
    """
    spec, endpoint, measured, requests = plan.spec, plan.endpoint, plan.measured, plan.traffic.requests
    load = plan.load()
    target = load.target
    calibration = _calibrate(plan, progress)
    progress.step(f"Benchmark of {measured.name!r} at {target.address}: {plan.pace}")
    started = datetime.datetime.now(datetime.timezone.utc).isoformat()
    with progress.task(f"Sending {len(load.warmup)} + {len(requests)} requests", total=len(requests)) as task:
        server = _server_processes(target)
        sampler = LoadSampler(metrics, server=server, on_sample=_reporter(task))
        outcome = run_load(load, workers=spec.workers, sampler=sampler)
    counted_by, notes = "output_ids", list(plan.notes)
    if measured.takes_text:
        counted = count_answers(
            outcome.records, requests, target.model, measured.tokenizer, whole=target.openai is not None
        )
        counted_by = counted.by
        notes += counted.notes(measured.tokenizer)
    if outcome.interrupted:
        notes.append("Interrupted: the figures cover what had been sent.")
    if outcome.timed_out:
        notes.append(f"--timeout {spec.timeout:g} ended the run: the figures cover the requests sent before.")
    served = endpoint.repository if target.openai is None and target.engine is None else None
    engine = EngineConfig() if served is None else engine_of_repository(served, measured.core_model)
    found = hashlib.sha256()
    for request in requests:
        found.update(request.token_ids.tobytes() + request.output_len.to_bytes(4, "little"))
    return BenchReport(
        records=tuple(outcome.records),
        spec=_plain({**asdict(spec), "concurrency": plan.concurrency}),
        endpoint=target.address,
        model=measured.name,
        protocol=target.protocol,
        streaming=target.streams,
        tokens_counted_by=counted_by,
        prompts_sha256=found.hexdigest(),
        started=started,
        runtime=engine.runtime,
        precision=engine.precision,
        limits={name: getattr(plan.limits, name) for name in ("vocab_size", "max_input_len", "max_seq_len")},
        fingerprint=fingerprint(target.engine or served),
        command=command(),
        versions=versions(),
        machine=machine()
        | {
            "other_programs": sampler.samples.others,
            "server_here": bool(server),
            "server_waited": sampler.samples.server_waited,
        },
        bounds=_bounds(target.engine, served, measured.core_model),
        calibration=calibration,
        health=tuple(outcome.health),
        samples=sampler.samples,
        queue_wait_ms=queue_wait_ms(sampler.samples.server, measured.core_model),
        interrupted=outcome.interrupted,
        timed_out=outcome.timed_out,
        planned_notes=tuple(notes),
    )


def _calibrate(plan: BenchPlan, progress: Progress) -> Calibration | None:
    if not plan.spec.calibrate:
        return None
    load = plan.load()
    progress.step("Measuring what this client can do, on an echo server")
    found = calibrate(load.target, load.requests, workers=plan.spec.workers, concurrency=plan.concurrency)
    if found is not None:
        progress.step(
            f"Client on the echo server: {found.answers_per_second:.0f} answers/s of {found.responses_per_answer} "
            f"responses, first response after {found.floor_p50_ms:.2f} ms, sends {found.dispatch_p99_ms:.2f} ms late "
            "(p99)"
        )
    return found


_FEWEST_ANSWERS, _MOST_ANSWERS = 100, 400
_IN_FLIGHT = 16
_PACED = 60
_PACE = 200.0
_MOST_CHUNKS = 64


def calibrate(
    target: LoadTarget, requests: Sequence[TrafficRequest], *, workers: int, concurrency: int | None
) -> Calibration | None:
    """Return the limits of the client for requests like these, or None for a target without a protocol."""
    if target.protocol == "in-process":
        return None
    answers = min(_MOST_ANSWERS, max(_FEWEST_ANSWERS, len(requests)))  # a short run is calibrated shortly
    mean = sum(request.output_len for request in requests) / len(requests)
    chunks = min(_MOST_CHUNKS, max(1, round(mean))) if target.streams else 1
    sample = [replace(request, session=None, cancel_after=None) for request in requests[:answers]]
    sample = (sample * (1 + answers // len(sample)))[:answers]
    with running_echo(Echo(spoken=_spoken(target), chunks=chunks, text=takes_text(target.model))) as port:
        echo = _at(target, port)
        offsets = [index / _PACE for index in range(_PACED)]
        paced = _records(Load(target=echo, requests=sample[:_PACED], warmup=sample[:5], offsets=offsets, timeout=30))
        in_flight = max(workers, min(concurrency or _IN_FLIGHT, _IN_FLIGHT * workers))
        full = Load(target=echo, requests=sample, warmup=sample[:workers], concurrency=in_flight, timeout=30)
        fast = _records(full, workers=workers)
    delays = sorted((record.sent_ns or 0) - record.intended_ns for record in paced)
    firsts = sorted(_first_ns(record) - record.intended_ns for record in paced)
    begin, end = min(record.sent_ns or 0 for record in fast), max(record.ended_ns for record in fast)
    return Calibration(
        protocol=_spoken(target),
        workers=workers,
        responses_per_answer=chunks,
        answers_per_second=len(fast) / ((end - begin) / 1e9),
        dispatch_p50_ms=percentile(delays, 0.5) / 1e6,
        dispatch_p99_ms=percentile(delays, 0.99) / 1e6,
        dispatch_max_ms=delays[-1] / 1e6,
        floor_p50_ms=percentile(firsts, 0.5) / 1e6,
        floor_p99_ms=percentile(firsts, 0.99) / 1e6,
    )


def _first_ns(record: RequestRecord) -> int:
    """Return the time of the first response; texts have not been counted here."""
    times = [time for time, _ in record.arrivals] or [each.time_ns for each in record.responses]
    return times[0] if times else record.ended_ns


def _records(load: Load, *, workers: int = 1) -> list[RequestRecord]:
    outcome = run_load(load, workers=workers)
    if outcome.interrupted:
        raise KeyboardInterrupt
    return outcome.records


def _spoken(target: LoadTarget) -> Spoken:
    if target.protocol == "openai":
        return "openai-stream" if target.streams else "openai"
    if target.protocol == "http":
        return "http-stream" if target.streams else "http"
    return "grpc-stream" if target.model.decoupled else "grpc-unary"


def _at(target: LoadTarget, port: int) -> LoadTarget:
    """Return the target moved to a port of this machine."""
    endpoint = replace(target.endpoint, host="127.0.0.1", http_port=port, grpc_port=port, tls=None)
    openai = None if target.openai is None else replace(target.openai, url=f"http://127.0.0.1:{port}/v1")
    return replace(target, endpoint=endpoint, openai=openai)


def _server_processes(target: LoadTarget) -> list[int]:
    """Return the processes of a server on this machine; of one that trtserve did not start, those that are known."""
    address = urlsplit(target.address if "//" in target.address else f"//{target.address}")
    port = address.port or {"https": 443}.get(address.scheme, 80)
    if target.protocol == "in-process" or not is_here(address.hostname or ""):
        return []
    started = (server.roots for server in list_servers() if port in server.ports)
    roots = next(started, listeners(port))
    return [each.pid for root in roots for each in (root, *tree(root))]


def _reporter(task: Task) -> Callable[[Totals], None]:
    shown, began = 0, 0.0

    def report(totals: Totals) -> None:
        nonlocal shown, began
        task.advance(totals.ended - shown)
        shown = totals.ended
        began = began or time.monotonic()  # the first sample is taken after the warm-up
        rate = shown / max(1e-9, time.monotonic() - began)
        median, late = totals.first_ms(0.5), totals.first_ms(0.99)
        times = "" if median is None or late is None else f", TTFT p50 {brief(median)} p99 {brief(late)} ms"
        speed = f"{brief(rate)} requests/s, " if shown else ""
        task.describe(f"{speed}{totals.in_flight} in flight{times}")

    return report


def _bounds(engine: Path | None, repository: Path | None, core_model: str) -> Machine:
    from trtserve.executor.loaders import device_of
    from trtserve.files import read_json_object

    folder = engine or (None if repository is None else repository / core_model / "1")
    if folder is None or not (folder / "config.json").is_file():
        return Machine()
    return find_machine(folder, gpu=device_of(EngineConfig.of(read_json_object(folder / "config.json"))) != "cpu")


def _plain(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec as JSON values, with units in the names of times."""
    named = {"timeout_s" if name == "timeout" else name: value for name, value in spec.items()}
    return {name: str(value) if hasattr(value, "__fspath__") else value for name, value in named.items()}


_PACKAGES = ("grpcio", "httptools", "uvloop", "numpy", "tritonclient")
_CPU_INFO = Path("/proc/cpuinfo")


def versions() -> dict[str, str]:
    """Return the versions of this program and of what sends its requests."""
    found = {"trtserve": __version__, "python": platform.python_version()}
    return found | {name: importlib.metadata.version(name) for name in _PACKAGES}


def machine() -> dict[str, Any]:
    import psutil

    lines = _CPU_INFO.read_text(errors="replace").splitlines() if _CPU_INFO.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "host": platform.node(),
        "kernel": platform.release(),
        "cpu": model or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": os.getloadavg()[0],
    }


def command() -> str:
    """Return the command line of this process, with KEY instead of an API key: results are shown to others."""
    shown = [
        "KEY" if before == "--api-key" else re.sub("^--api-key=.*", "--api-key=KEY", each, flags=re.DOTALL)
        for before, each in itertools.pairwise(sys.argv)
    ]
    return shlex.join([Path(sys.argv[0]).name, *shown])


def fingerprint(folder: Path | None) -> str | None:
    """Return the fingerprint of a repository or an engine, or None when it has no manifest."""
    if folder is None:
        return None
    try:
        return Manifest.read(folder).fingerprint
    except ArtifactError:
        return None


_TIMEOUT = 600.0


def check_pipeline(plan: BenchPlan, *, draft_tokens: int | None = None, progress: Progress = SILENT) -> int:
    """Compare the texts of every prompt of the plan; return how many were compared.

    With `draft_tokens` also the answers of the model with and without speculative decoding. Raises
    AnswerMismatchError for the first difference, and RequestError.
    """
    target = plan.load().target
    with closing(grpc_client(plan.endpoint, timeout=_TIMEOUT)) as client:
        models = {name: client.describe(name) for name in ("preprocessing", CORE_MODEL, "postprocessing")}
        with progress.task(f"Checking {len(plan.traffic.requests)} answers", total=len(plan.traffic.requests)) as task:
            for request in plan.traffic.requests:
                prompt, tokens = request.text or "", request.output_len
                whole = _answer(client, target.model, prompt, tokens)
                _same(
                    _by_hand(client, models, prompt, tokens),
                    whole,
                    prompt,
                    f"the models one by one and {target.model.name}",
                )
                if draft_tokens is not None:
                    drafted = _answer(client, target.model, prompt, tokens, num_draft_tokens=[draft_tokens])
                    _same(drafted, whole, prompt, f"{target.model.name} with and without draft tokens")
                task.advance(1)
    return len(plan.traffic.requests)


def _answer(client: SyncClient, model: ModelDescription, prompt: str, tokens: int, **more: Sequence[Any]) -> str:
    values: dict[str, Sequence[Any]] = {"text_input": [prompt], "max_tokens": [tokens], **more}
    if "exclude_input_in_output" in model.inputs:
        values["exclude_input_in_output"] = [True]
    outputs = _call(client, model, values, ("text_output",))
    return str(outputs["text_output"].reshape(-1)[0])


def _by_hand(client: SyncClient, models: Mapping[str, ModelDescription], prompt: str, tokens: int) -> str:
    """Return the text of preprocessing → tensorrt_llm → postprocessing."""
    before = models["preprocessing"]
    asked = {"QUERY": [prompt], "REQUEST_OUTPUT_LEN": [tokens]}
    made = _call(client, before, asked, ())
    core = models[CORE_MODEL]
    values: dict[str, Any] = {
        "input_ids": made["INPUT_ID"].reshape(-1),
        "input_lengths": made["REQUEST_INPUT_LEN"].reshape(-1).tolist(),
        "request_output_len": [tokens],
    }
    for output, name in (("OUT_END_ID", "end_id"), ("OUT_PAD_ID", "pad_id")):
        if output in made and name in core.inputs:
            values[name] = made[output].reshape(-1).tolist()[:1]
    if "exclude_input_in_output" in core.inputs:
        values["exclude_input_in_output"] = [True]
    generated = _call(client, core, values, ("output_ids", "sequence_length"))
    ids, lengths = generated["output_ids"], generated["sequence_length"]
    after = models["postprocessing"]
    tensors = [
        Tensor(name="TOKENS_BATCH", datatype="INT32", shape=tuple(ids.shape), values=ids),
        Tensor(name="SEQUENCE_LENGTH", datatype="INT32", shape=tuple(lengths.shape), values=lengths),
    ]
    (reply,) = client.infer(ModelRequest(model=after, tensors=tensors, id="", outputs=("OUTPUT",)))
    return str(reply.outputs["OUTPUT"].reshape(-1)[0])


def _call(
    client: SyncClient, model: ModelDescription, values: Mapping[str, Any], outputs: Sequence[str]
) -> Mapping[str, Any]:
    tensors = [model.tensor(name, value) for name, value in values.items()]
    replies = client.infer(ModelRequest(model=model, tensors=tensors, id=uuid.uuid4().hex, outputs=outputs))
    return next(reply.outputs for reply in replies if reply.outputs)


def _same(first: str, second: str, prompt: str, between: str) -> None:
    if first != second:
        raise AnswerMismatchError(
            f"{between} answer {prompt[:60]!r} differently: {first[:200]!r} and {second[:200]!r}.",
            hint="Compare the parameters of the models: trtserve check REPOSITORY.",
        )
