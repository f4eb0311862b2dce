"""Triton (streams of `tensorrt_llm`) compared with the in-process executor: same engine, prompts, 8 streams.

The models are random Llamas, one of 135 M parameters, as in bench_executor, and one of 1.1 B with int8 weights. A rate
is all new tokens ÷ the time from the first send to the last end, so that prefill, scheduling, transport and the
client's own work are inside on both sides. The client shares the machine: its gRPC is that of the package grpcio, its
HTTP reads events from a plain socket.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from tests.benchmarks.bench_executor import KV_TOKENS, WAIT, ExecutorSide, ended
from tests.benchmarks.engines import SIZES, make_engine, make_repository
from tests.benchmarks.frame import Row, benchmark_parser, compare, finish, table
from trtserve.bench.records import TrafficRequest
from trtserve.bench.statistics import Statistics, compute
from trtserve.bench.transport import LoadTarget, ProtocolName
from trtserve.bench.worker import Load, run_load
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


@contextmanager
def serving(engine: Path, model: Path, work: Path) -> Iterator[Endpoint]:
    """A Triton server for the engine of `model`, with the settings of the in-process side."""
    from tests.support.servers import running_server

    out = engine.with_name(f"{engine.name}-repository")
    repository = make_repository(engine, model, out, name="served", max_tokens_in_paged_kv_cache=KV_TOKENS)
    with running_server(repository, home=work / "home") as server:
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

    requests = [api.Request(prompt, NEW, streaming=True) for prompt in prompts]
    begin = time.perf_counter()
    tokens = sum(len(response.result.output_token_ids[0]) for response in side.responses(requests))
    assert tokens == STREAMS * NEW
    return tokens / (time.perf_counter() - begin)


def measure(case: str, endpoint: Endpoint, side: ExecutorSide, *, vocabulary: int, pairs: int) -> Iterator[Row]:
    """Compare each protocol with the executor; also prints its times to first token and between tokens."""
    random = np.random.default_rng(0)
    with closing(grpc_client(endpoint, timeout=10)) as client:
        model = client.describe(CORE_MODEL)

    def prompts() -> list[list[int]]:
        """New ones for each measurement: the server reuses the blocks of those that it has seen."""
        found: list[list[int]] = random.integers(3, vocabulary, size=(STREAMS, PROMPT)).tolist()
        return found

    for protocol, words in PROTOCOLS.items():
        served: list[Statistics] = []

        def rate(_: int, protocol: ProtocolName = protocol, served: list[Statistics] = served) -> float:
            served.append(measure_served(protocol, endpoint, model, prompts()))
            return served[-1].output_tokens_per_second

        yield compare(
            f"{case}, {words}", rate, lambda _: measure_in_process(side, prompts()), pairs=pairs, target=TARGET
        )
        first, between = (
            statistics.median(getattr(each, name).mean or 0.0 for each in served[1:])
            for name in ("time_to_first_token_ms", "inter_token_ms")
        )
        print(f"{case}, {words}: TTFT {first:.0f} ms, ITL {between:.2f} ms")


def main() -> None:
    arguments = benchmark_parser(__doc__).parse_args()
    rows: list[Row] = []
    for case, (name, quantize) in MODELS.items():
        engine, model = make_engine(arguments.work, name, quantize=quantize), arguments.work / name / "model"
        with serving(engine, model, arguments.work) as endpoint, ended(ExecutorSide(engine)) as side:
            vocabulary = SIZES[name]["vocab_size"]
            rows += measure(case, endpoint, side, vocabulary=vocabulary, pairs=arguments.pairs)
    print(table(rows, measured="Through Triton, tokens/s", base="In process, tokens/s"))
    finish(arguments, "serving", rows)


if __name__ == "__main__":
    main()
