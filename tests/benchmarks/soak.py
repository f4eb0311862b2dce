"""`make soak`: 64 streams for ten minutes with random cancels on a real Triton; memory and KV blocks must stay flat.

Run as `python -m tests.benchmarks.soak --work FOLDER --minutes 10`. Every stream sends one random request after the
other (model, length, sampling, sequences, stop words) and gives up a third of them at a random moment: by a stop
request with the same id, or, for the share `--grpc-cancels`, by cancelling the call. That can crash the gRPC front end
of Triton 2.51, whatever the model (the server's pull requests 7840 and 8078 came later). The demo model is served with
prefix reuse and a KV cache smaller than the load, so that blocks are reused, evicted and waited for. Memory is what
the server's processes allocated (RssAnon + RssShmem).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.memory import process_bytes
from tests.support.commands import trtserve
from tests.support.servers import running_server
from trtserve.client.endpoint import Endpoint
from trtserve.client.grpc_transport import grpc_client, infer_request, open_channel
from trtserve.client.tensors import ModelDescription, stop_request
from trtserve.server.repositories import find_repository
from trtserve.server.state import Server, log_file
from trtserve.server.triton.tritonserver import kv_blocks
from trtserve.store import Store

STREAMS = 64
CANCELLED = 1 / 3
PERIOD = 5.0
WARM = 60.0
ENDED_WITHIN = 30.0
ANSWER_TIMEOUT = 120.0
KV_TOKENS = 8192
CORE = "tensorrt_llm"
# The last minute may be this far above the second one; a leak of one kilobyte per request would be ten times that.
MOST_GROWTH = 0.02
# Beams, and blocks that are used again.
REUSED = ("--max-beam-width", "2", "--set", "enable_kv_cache_reuse=true")
QUESTIONS = ("What is ML?", "What is machine learning?", "Say it in other words: what is a model?", "Tell me more.")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The server at one moment: seconds since the start, bytes, and KV blocks that are in use."""

    seconds: float
    memory: int
    used_blocks: int


@dataclass(kw_only=True)
class Soak:
    """Counts of a soak; `errors` are unexpected messages, `longest` is in seconds."""

    samples: list[Sample] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    grpc_cancels: float = 0.0
    core: ModelDescription | None = None


@contextmanager
def served(home: Path, *flags: str, **options: Any) -> Iterator[Server]:
    """The demo model as "soak", with 64 requests at once and a KV cache smaller than the load; it must end in order."""
    size = ["--max-batch-size", str(STREAMS), "--max-tokens-in-paged-kv-cache", str(KV_TOKENS)]
    trtserve("import", "demo", *size, "--name", "soak", *flags, home=home)
    path = find_repository("soak", store=Store(home)).path
    with running_server(path, home=home, gracefully=True, **options) as server:
        yield server
    require_orderly_end(home)


def require_orderly_end(home: Path) -> None:
    """Fail when the server named "soak" ended by an exception of C++, or waited in vain for requests."""
    log = log_file("soak", Store(home)).read_text(encoding="utf-8", errors="replace")
    assert "terminate called" not in log
    assert " (version 1) has " not in log  # … 3 in-flight inferences


def described(server: Server) -> list[ModelDescription]:
    """The models that take requests; the core model is the last one."""
    with closing(grpc_client(_endpoint(server), timeout=10)) as client:
        return [client.describe(name) for name in (server.model, "ensemble", CORE)]


def _endpoint(server: Server) -> Endpoint:
    address = server.address
    return Endpoint(host=address.host, http_port=address.http_port, grpc_port=address.grpc_port)


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[Any]:
    """A stub of Triton's gRPC service."""
    from tritonclient.grpc import service_pb2_grpc

    async with open_channel(_endpoint(server)) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


async def drive(server: Server, seconds: float, *, seed: int, grpc_cancels: float) -> Soak:
    """All streams for `seconds`, and a sample of the server every few seconds."""
    models = described(server)
    soak, begin = Soak(grpc_cancels=grpc_cancels, core=models[-1]), time.monotonic()
    async with connected(server) as stub:
        streams = [_stream(stub, models, random.Random(seed + i), begin + seconds, soak) for i in range(STREAMS)]
        sampling = asyncio.create_task(_sample(server, begin, soak))
        await asyncio.gather(*streams)
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling
    await asyncio.sleep(1.0)  # gauges are read by the server ten times per second
    soak.samples.append(_look(server, begin))
    return soak


async def _stream(stub: Any, models: Sequence[ModelDescription], choice: random.Random, end: float, soak: Soak) -> None:
    while time.monotonic() < end:
        begin = time.monotonic()
        soak.ended[await _request(stub, choice.choice(models), choice, soak)] += 1
        soak.longest = max(soak.longest, time.monotonic() - begin)


async def _request(stub: Any, model: ModelDescription, choice: random.Random, soak: Soak) -> str:
    import grpc

    values = _core_values(choice) if model.name == CORE else _values(choice)
    tensors = [model.tensor(name, value) for name, value in values.items() if name in model.inputs]
    number = f"soak-{choice.getrandbits(64):x}"
    left = choice.randrange(0, 40) if choice.random() < CANCELLED else None
    stopped = False
    call = stub.ModelStreamInfer(_once(infer_request(model.name, tensors, request_id=number)), timeout=ANSWER_TIMEOUT)
    try:
        async for response in call:
            if response.error_message:
                soak.errors[f"{model.name}: {response.error_message}"] += 1
                return "failed"
            left = None if left is None else left - 1
            if left is not None and left < 0:
                left = None
                if choice.random() < soak.grpc_cancels:
                    call.cancel()
                    return "cancelled"
                await _stop(stub, number, soak)
                stopped = True
    except grpc.aio.AioRpcError as error:
        soak.errors[f"{model.name}: {error.code()}"] += 1
        return "failed"
    return "stopped" if stopped else "completed"


async def _stop(stub: Any, number: str, soak: Soak) -> None:
    """Stop a request in the engine; its stream then ends."""
    assert soak.core is not None
    request = infer_request(soak.core.name, stop_request(soak.core, number).tensors, request_id=number)
    async for response in stub.ModelStreamInfer(_once(request), timeout=ANSWER_TIMEOUT):
        if response.error_message:
            soak.errors[f"stop: {response.error_message}"] += 1


async def _once(request: Any) -> Any:
    yield request


def _values(choice: random.Random) -> dict[str, list[Any]]:
    """One random request; sampling so hot that answers are long."""
    values: dict[str, list[Any]] = {
        "text_input": [" ".join(choice.choices(QUESTIONS, k=choice.randint(1, 6)))],
        "max_tokens": [choice.randint(1, 120)],
        "stream": [True],
        "seed": [choice.getrandbits(32)],
        "temperature": [choice.choice((0.7, 1.5, 50.0))],
        "top_p": [0.99],
    }
    extra: list[dict[str, list[Any]]] = [
        {},
        {"stop_words": ["the", " model"]},
        {"repetition_penalty": [1.2], "bad_words": ["learning"]},
        {"return_log_probs": [True], "num_return_sequences": [2]},
        {"min_tokens": [10], "frequency_penalty": [0.3]},
    ]
    return {**values, **choice.choice(extra)}


def _core_values(choice: random.Random) -> dict[str, list[Any]]:
    """One random request to the core model, with ids for a prompt."""
    ids = [choice.randrange(3, 256) for _ in range(choice.randint(1, 60))]
    return {
        "input_ids": ids,
        "input_lengths": [len(ids)],
        "request_output_len": [choice.randint(1, 120)],
        "streaming": [choice.random() < 0.8],
        "seed": [choice.getrandbits(32)],
        "temperature": [choice.choice((0.7, 1.5))],
        "runtime_top_p": [0.99],
        "return_log_probs": [choice.random() < 0.3],
    }


async def _sample(server: Server, begin: float, soak: Soak) -> None:
    while True:
        await asyncio.sleep(PERIOD)
        soak.samples.append(await asyncio.to_thread(_look, server, begin))


def _look(server: Server, begin: float) -> Sample:
    root = psutil.Process(server.instances[0].process.pid)
    memory = sum(process_bytes(each.pid) for each in (root, *root.children(recursive=True)))
    return Sample(seconds=time.monotonic() - begin, memory=memory, used_blocks=int(kv_blocks(server.address)["used"]))


def judge(soak: Soak) -> tuple[dict[str, Any], list[str]]:
    """Return the figures, and their problems."""
    last = soak.samples[-1].seconds
    before, after = _median_between(soak, WARM, 2 * WARM), _median_between(soak, last - WARM, last)
    growth = after / before - 1
    figures = {
        "minutes": last / 60,
        "streams": STREAMS,
        **{f"requests_{name}": count for name, count in sorted(soak.ended.items())},
        "memory_second_minute": before,
        "memory_last_minute": after,
        "growth": growth,
        "growth_second_half": after / _median_between(soak, last / 2 - WARM / 2, last / 2 + WARM / 2) - 1,
        "most_used_blocks": max(each.used_blocks for each in soak.samples),
        "used_blocks_at_the_end": soak.samples[-1].used_blocks,
        "longest_request_s": soak.longest,
        "errors": dict(soak.errors),
    }
    wrong = [f"unexpected: {count} × {message}" for message, count in soak.errors.items()]
    if growth > MOST_GROWTH:
        wrong.append(f"memory grew by {growth:.1%} from the second minute to the last")
    if soak.samples[-1].used_blocks:
        wrong.append(f"{soak.samples[-1].used_blocks} KV blocks are in use after the last request")
    return figures, wrong


def _median_between(soak: Soak, first: float, last: float) -> float:
    """Median of the memory between two moments, in seconds after the start."""
    return statistics.median(each.memory for each in soak.samples if first <= each.seconds < last)


def settled(server: Server) -> int:
    """Return the KV blocks that are still in use when the engine has had time to end what was given up."""
    deadline = time.monotonic() + ENDED_WITHIN
    while (used := int(kv_blocks(server.address).get("used", -1))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return used


def soak_parser(description: str | None, *, minutes: float) -> argparse.ArgumentParser:
    """Return the options that every soak has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work", type=Path, required=True, help="folder that keeps the model between runs")
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def parsed(parser: argparse.ArgumentParser, *, least: float = 0.0) -> argparse.Namespace:
    """Read the options; a minute near the start is compared with the last one, so there must be `least` minutes."""
    arguments = parser.parse_args()
    if arguments.minutes < least:
        parser.error(f"--minutes must be at least {least:.0f}: a minute near the start is compared with the last one")
    arguments.work = arguments.work.absolute()
    arguments.work.mkdir(parents=True, exist_ok=True)
    return arguments


def end(figures: dict[str, Any], wrong: Sequence[str]) -> int:
    """Print the figures and the problems; the exit code says whether there are none."""
    print(json.dumps(figures, indent=2))
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    return bool(wrong)


def main() -> int:
    """Soak and print the figures; the exit code says whether everything stayed flat."""
    parser = soak_parser(__doc__, minutes=10)
    parser.add_argument("--grpc-cancels", type=float, default=0.0, help="share of the cancels that cancel the call")
    arguments = parsed(parser, least=3)
    seconds, cancels = arguments.minutes * 60, arguments.grpc_cancels
    with served(arguments.work / "soak-home", *REUSED) as server:
        soak = asyncio.run(drive(server, seconds, seed=arguments.seed, grpc_cancels=cancels))
    figures, wrong = judge(soak)
    samples = [asdict(each) for each in soak.samples]
    file = arguments.work / "soak.json"
    file.write_text(json.dumps({**figures, "samples": samples}, indent=2) + "\n", encoding="utf-8")
    return end(figures, wrong)


if __name__ == "__main__":
    sys.exit(main())
