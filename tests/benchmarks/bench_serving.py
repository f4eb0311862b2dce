"""Triton (streams of `tensorrt_llm`) compared with the in-process executor: same engine, prompts, 8 streams.

Run as `python -m tests.benchmarks.bench_serving --work FOLDER --out FOLDER`; the models are random Llamas, one of 135 M
parameters, as in bench_executor, and one of 1.1 B with int8 weights. A rate is all new tokens ÷ the time from the first
send to the last end, so that prefill, scheduling, transport and the client's own work are inside on both sides. The
client shares the machine: its gRPC is that of the package grpcio, its HTTP reads events from a plain socket.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.bench_executor import KV_TOKENS, WAIT, ExecutorSide
from tests.benchmarks.engines import SIZES, make_engine
from tests.benchmarks.results import Figure, benchmark_parser, finish
from trtserve.bench.processes import run_load
from trtserve.bench.records import TrafficRequest
from trtserve.bench.statistics import Statistics, compute
from trtserve.bench.transport import LoadTarget, ProtocolName
from trtserve.bench.worker import Load
from trtserve.client.endpoint import Endpoint
from trtserve.client.grpc_transport import grpc_client
from trtserve.client.tensors import CORE_MODEL, ModelDescription
from trtserve.specs import Quantization

STREAMS = 8
PROMPT = 64
NEW = 128
TARGET = 0.95
PROTOCOLS: dict[ProtocolName, str] = {"http": "HTTP events", "grpc": "gRPC"}
# Name → (model, quantisation).
MODELS: dict[str, tuple[str, Quantization]] = {
    "135 M": ("llama-135m", "none"),
    "1.1 B int8": ("llama-1b", "int8"),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians over the pairs, tokens per second; `ratio` is the median of served over in-process pair by pair."""

    case: str
    pairs: int
    served: float
    in_process: float
    ratio: float
    ratio_lowest: float
    ratio_highest: float
    target: float
    time_to_first_token_ms: float
    inter_token_ms: float


@contextmanager
def serving(engine: Path, model: Path, work: Path) -> Iterator[Endpoint]:
    """A Triton server for the engine of `model`, with the settings of the in-process side."""
    from tests.support.servers import running_server
    from trtserve.artifacts import Engine, load_artifact
    from trtserve.repository.assembling import assemble_repository, plan_repository
    from trtserve.specs import RepositorySpec

    artifact = load_artifact(Engine, engine)
    repository = assemble_repository(
        plan_repository(
            Engine(path=engine, manifest=artifact.manifest),
            model,
            RepositorySpec(name="served", max_tokens_in_paged_kv_cache=KV_TOKENS, ngram_max_draft_len=0),
            out=engine.with_name(f"{engine.name}-repository"),
        )
    )
    with running_server(repository.path, home=work / "home") as server:
        yield Endpoint(http_port=server.address.http_port, grpc_port=server.address.grpc_port)


def measure_served(
    protocol: ProtocolName, endpoint: Endpoint, model: ModelDescription, prompts: list[list[int]]
) -> Statistics:
    """Send all prompts at once, one stream each."""
    requests = [TrafficRequest(token_ids=np.array(prompt, np.int32), output_len=NEW) for prompt in prompts]
    target = LoadTarget(protocol=protocol, endpoint=endpoint, model=model, streams=True)
    outcome = run_load(Load(target=target, requests=requests, concurrency=STREAMS, timeout=WAIT.total_seconds()))
    assert outcome is not None
    statistics_ = compute(outcome.records)
    assert statistics_.counts.completed == STREAMS
    assert statistics_.short_answers == 0
    return statistics_


def measure_in_process(side: ExecutorSide, prompts: list[list[int]]) -> float:
    """Tokens per second from the first enqueue to the last response."""
    from trtserve.executor import api

    begin = time.perf_counter()
    requests = [api.Request(prompt, NEW, streaming=True) for prompt in prompts]
    running, tokens = set(side.executor.enqueue_requests(requests)), 0
    while running:
        for response in side.executor.await_responses(WAIT):
            assert isinstance(response, api.Response)
            tokens += len(response.result.output_token_ids[0])
            if response.result.is_final:
                running.discard(response.request_id)
    assert tokens == STREAMS * NEW
    return tokens / (time.perf_counter() - begin)


def measure(case: str, endpoint: Endpoint, side: ExecutorSide, *, vocabulary: int, pairs: int) -> list[Row]:
    """Send each side new random prompts in turn: the server reuses the blocks of those that it has seen."""
    random = np.random.default_rng(0)
    with_client = grpc_client(endpoint, timeout=10)
    model = with_client.describe(CORE_MODEL)
    with_client.close()
    served: dict[ProtocolName, list[Statistics]] = {protocol: [] for protocol in PROTOCOLS}
    in_process: list[float] = []
    for number in range(pairs + 1):
        sides = [None, *PROTOCOLS]
        for protocol in sides if number % 2 else reversed(sides):
            prompts = random.integers(3, vocabulary, size=(STREAMS, PROMPT)).tolist()
            if protocol is None:
                in_process.append(measure_in_process(side, prompts))
            else:
                served[protocol].append(measure_served(protocol, endpoint, model, prompts))
    return [  # the first round warms all
        _row(f"{case}, {words}", served[protocol][1:], in_process[1:]) for protocol, words in PROTOCOLS.items()
    ]


def _row(case: str, served: Sequence[Statistics], in_process: Sequence[float]) -> Row:
    rates = [figures.output_tokens_per_second for figures in served]
    ratios = [through / direct for through, direct in zip(rates, in_process, strict=True)]
    return Row(
        case=case,
        pairs=len(ratios),
        served=statistics.median(rates),
        in_process=statistics.median(in_process),
        ratio=statistics.median(ratios),
        ratio_lowest=min(ratios),
        ratio_highest=max(ratios),
        target=TARGET,
        time_to_first_token_ms=statistics.median(figures.time_to_first_token_ms.mean or 0.0 for figures in served),
        inter_token_ms=statistics.median(figures.inter_token_ms.mean or 0.0 for figures in served),
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    cells = [
        {
            "Case": row.case,
            "Through Triton, tokens/s": f"{row.served:.0f}",
            "In process, tokens/s": f"{row.in_process:.0f}",
            "Ratio": f"{row.ratio:.2f}",
            "Lowest … highest": f"{row.ratio_lowest:.2f} … {row.ratio_highest:.2f}",
            "Target": f"≥ {row.target:.2f}",
            "Pairs": str(row.pairs),
            "TTFT, ms": f"{row.time_to_first_token_ms:.0f}",
            "ITL, ms": f"{row.inter_token_ms:.2f}",
        }
        for row in rows
    ]
    lines = [list(cells[0]), ["---"] * len(cells[0]), *(list(each.values()) for each in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run_model(work: Path, case: str, *, pairs: int) -> list[Row]:
    """Build or reuse the engine, start both sides, measure."""
    name, quantize = MODELS[case]
    engine = make_engine(work, name, name="engine" if quantize == "none" else f"engine-{quantize}", quantize=quantize)
    with serving(engine, work / name / "model", work) as endpoint:
        side = ExecutorSide(engine)
        try:
            return measure(case, endpoint, side, vocabulary=SIZES[name]["vocab_size"], pairs=pairs)
        finally:
            side.executor.shutdown()
            del side
            gc.collect()  # the weights of one model at a time


def run(work: Path, *, pairs: int) -> dict[str, Any]:
    """Measure all models."""
    rows = [row for case in MODELS for row in run_model(work, case, pairs=pairs)]
    return {"cpus": os.cpu_count(), "rows": rows}


def main() -> None:
    """Parse, measure, print the table, and write it as JSON."""
    arguments = benchmark_parser("serving", __doc__).parse_args()
    report = run(arguments.work.absolute(), pairs=arguments.pairs)
    print(table(report["rows"]))
    figures = [Figure(case=row.case, value=row.ratio, target=row.target) for row in report["rows"]]
    finish(arguments.out or arguments.work, "serving", report, figures)


if __name__ == "__main__":
    main()
