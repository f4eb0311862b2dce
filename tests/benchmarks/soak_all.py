"""`make soak-all`: 80 % of what the server can do for 30 minutes, through every entry; no error, and nothing grows.

Run as `python -m tests.benchmarks.soak_all --work FOLDER --minutes 30`. The demo model is served behind its gateway,
with prefix reuse, beams and a KV cache smaller than the load. First 64 clients that wait for their answers measure the
capacity. Then 256 of them make the server take the memory of the longest queue that the soak allows, or a burst would
look like a leak. Then requests arrive at random moments (a Poisson process) at 80 % of the capacity: Triton's gRPC,
the gateway's `generate` and `generate_stream`, the OpenAI API and the page, with all features, and a third given up. A
request that arrives while 256 run is not sent but counted: a shared machine may become slower than when measured.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil

from tests.benchmarks import soak as grpc_soak
from tests.benchmarks.memory import process_bytes
from tests.benchmarks.soak import REUSED, STREAMS, end, parsed, served, settled, soak_parser
from trtserve.server.state import Server

SHARE = 0.8
MOST_RUNNING = 256
MEASURED_FOR = 30.0
PERIOD = 5.0
SETTLED = 180.0  # seconds until every process has answered 1,000 requests
MOST_GROWTH = 0.02
TIMEOUT = aiohttp.ClientTimeout(total=120)
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"stop_words": "the"},
    {"beam_width": 2},
    {"repetition_penalty": 1.2, "bad_words": "learning"},
    {"return_log_probs": True},
    {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-z ]{1,40}"},
)

Send = Callable[[random.Random], Awaitable[str]]


@dataclass(kw_only=True)
class Run:
    """How requests of each entry ended and how long they took; how many ran and the bytes of processes over time."""

    ended: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)
    seconds: list[tuple[float, float]] = field(default_factory=list)
    running: set[asyncio.Task[None]] = field(default_factory=set)
    at_once: list[tuple[float, int]] = field(default_factory=list)
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)


async def drive(server: Server, seconds: float, *, seed: int) -> tuple[float, Run]:
    """Return the capacity in requests/s, and what came of 80 % of it for `seconds`."""
    choice, models = random.Random(seed), grpc_soak.described(server)
    state = grpc_soak.Soak(core=models[-1])
    async with (
        grpc_soak.connected(server) as stub,
        aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0), timeout=TIMEOUT) as session,
    ):

        async def by_grpc(chance: random.Random) -> str:
            outcome = await grpc_soak._request(stub, chance.choice(models), chance, state)
            return outcome if outcome != "failed" else f"failed: {dict(state.errors)}"

        entries: dict[str, Send] = {
            "gRPC": by_grpc,
            "HTTP": lambda chance: _generate(session, chance, server.model),
            "OpenAI": lambda chance: _posted(session, chance, *_openai_body(chance)),
            "page": lambda chance: _page(session),
        }
        capacity = await _answered_per_second(entries, choice, clients=STREAMS)
        await _answered_per_second(entries, choice, clients=MOST_RUNNING)
        run, begin = Run(), time.monotonic()
        sampling = asyncio.create_task(_sample(server, begin, run))
        await _arrive(entries, choice, SHARE * capacity, begin + seconds, run)
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling
    return capacity, run


def _drawn(entries: dict[str, Send], choice: random.Random) -> tuple[str, Send]:
    (name,) = choice.choices(list(entries), weights=(3, 3, 3, 1))
    return name, entries[name]


async def _answered_per_second(entries: dict[str, Send], choice: random.Random, *, clients: int) -> float:
    """Requests/s of clients that send the next request when they have the answer."""
    ended, end = 0, time.monotonic() + MEASURED_FOR

    async def client(chance: random.Random) -> None:
        nonlocal ended
        while time.monotonic() < end:
            _, send = _drawn(entries, chance)
            await send(chance)
            ended += time.monotonic() < end

    await asyncio.gather(*(client(random.Random(choice.random())) for _ in range(clients)))
    return ended / MEASURED_FOR


async def _arrive(entries: dict[str, Send], choice: random.Random, rate: float, end: float, run: Run) -> None:
    start = due = time.monotonic()
    while (due := due + choice.expovariate(rate)) < end:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        name, send = _drawn(entries, choice)
        if len(run.running) >= MOST_RUNNING:
            run.ended[f"{name} not sent"] += 1
            continue
        task = asyncio.create_task(_timed(name, send, random.Random(choice.random()), start, run))
        run.running.add(task)
        task.add_done_callback(run.running.discard)
    await asyncio.gather(*run.running)


async def _timed(name: str, send: Send, chance: random.Random, start: float, run: Run) -> None:
    begin = time.monotonic()
    outcome = await send(chance)
    run.ended[f"{name} {outcome}"] += 1
    took = time.monotonic() - begin
    if outcome == "completed":
        run.seconds.append((begin - start, took))
        run.longest[name] = max(took, run.longest.get(name, 0.0))


async def _generate(session: aiohttp.ClientSession, chance: random.Random, bls: str) -> str:
    """A request through the gateway, as curl sends it."""
    stream = chance.random() < 0.5
    feature = chance.choice(FEATURES)
    body = {
        "text_input": " ".join(chance.choices(grpc_soak.QUESTIONS, k=chance.randint(1, 6))),
        "max_tokens": chance.randint(1, 120),
        "seed": chance.getrandbits(31),
        "temperature": chance.choice((0.7, 1.5)),
        "stream": stream and "beam_width" not in feature,
        **feature,
    }
    verb = "generate_stream" if stream else "generate"
    path = f"/v2/models/{chance.choice((bls, 'ensemble'))}/{verb}"
    return await _posted(session, chance, path, body)


async def _posted(session: aiohttp.ClientSession, choice: random.Random, path: str, body: dict[str, Any]) -> str:
    """Send a request, of which a third are given up at a random moment, and return how it ended."""
    patience = choice.uniform(0, 2) if choice.random() < grpc_soak.CANCELLED else None

    async def answer() -> tuple[int, str]:
        async with session.post(path, json=body) as response:
            return response.status, await response.text()

    try:
        status, text = await asyncio.wait_for(answer(), patience)
    except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
        return "given up" if patience is not None else "failed: no answer"
    except aiohttp.ClientError as error:
        return f"failed: {type(error).__name__}"
    return "completed" if status == 200 and '"error"' not in text else f"failed: {status} {text[-300:]} {body}"


def _openai_body(choice: random.Random) -> tuple[str, dict[str, Any]]:
    question = " ".join(choice.choices(grpc_soak.QUESTIONS, k=choice.randint(1, 6)))
    body: dict[str, Any] = {
        "model": "soak",
        "max_tokens": choice.randint(1, 120),
        "stream": choice.random() < 0.8,
        "temperature": choice.choice((0, 0.7, 1.5)),
        **choice.choice(({}, {"stop": ["the", " model"]}, {"n": 2}, {"logprobs": True}, {"ignore_eos": True})),
    }
    if choice.random() < 0.5:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": question}]}
    if "logprobs" in body:
        body["logprobs"] = 0
    return "/v1/completions", {**body, "prompt": question}


async def _page(session: aiohttp.ClientSession) -> str:
    for path in ("/", "/health", "/metrics", "/v1/models"):
        async with session.get(path) as response:
            if response.status != 200:
                return f"failed: {path} {response.status}"
            await response.read()
    return "completed"


async def _sample(server: Server, begin: float, run: Run) -> None:
    (instance,) = server.instances
    assert instance.gateway is not None
    triton = psutil.Process(instance.process.pid)
    processes = {"tritonserver": triton.pid, "gateway": instance.gateway.process.pid}
    processes |= {f"stub {each.cmdline()[-2]}": each.pid for each in triton.children()}
    while True:
        await asyncio.sleep(PERIOD)
        run.at_once.append((time.monotonic() - begin, len(run.running)))
        for name, pid in processes.items():
            run.memory.setdefault(name, []).append((time.monotonic() - begin, process_bytes(pid)))


def judge(run: Run, used_blocks: int) -> tuple[dict[str, Any], list[str]]:
    """Return the figures, and their problems."""
    total = {name: _ends(samples) for name, samples in run.memory.items()}
    before, after = (sum(each[i] for each in total.values()) for i in (0, 1))
    growth = after / before - 1
    last = max(moment for moment, _ in run.seconds)
    thirds = (0.0, last / 3), (last * 2 / 3, last)
    figures = {
        **dict(sorted(run.ended.items())),
        "most_at_once": max(count for _, count in run.at_once),
        "memory_mib": {name: [round(each / 2**20, 1) for each in ends] for name, ends in total.items()},
        "growth": growth,
        "median_s_first_and_last_third": [
            statistics.median(took for moment, took in run.seconds if first <= moment <= end) for first, end in thirds
        ],
        "longest_s": run.longest,
        "used_blocks_at_the_end": used_blocks,
    }
    wrong = [f"{count} × {name}" for name, count in run.ended.items() if " failed" in name]
    if growth > MOST_GROWTH:
        wrong.append(f"memory grew by {growth:.1%} from minute {SETTLED / 60:.0f} to the end")
    if used_blocks:
        wrong.append(f"{used_blocks} KV blocks are in use after the last request")
    return figures, wrong


def _ends(samples: list[tuple[float, int]]) -> tuple[float, float]:
    """Medians of a minute after everything is warm, and of the last minute."""
    last = samples[-1][0]
    return (
        statistics.median(each for moment, each in samples if SETTLED <= moment < SETTLED + 60),
        statistics.median(each for moment, each in samples if moment > last - 60),
    )


def main() -> int:
    """Soak and print the figures; the exit code says whether nothing failed and nothing grew."""
    arguments = parsed(soak_parser(__doc__, minutes=30), least=SETTLED / 60 + 2)
    with served(arguments.work / "soak-all-home", *REUSED, gateway=True, ui=True) as server:
        capacity, run = asyncio.run(drive(server, arguments.minutes * 60, seed=arguments.seed))
        figures, wrong = judge(run, settled(server))
    figures = {"minutes": arguments.minutes, "capacity_per_s": capacity, **figures}
    file = arguments.work / "soak-all.json"
    file.write_text(json.dumps({**figures, "samples": run.memory, "at_once": run.at_once}) + "\n", encoding="utf-8")
    return end(figures, wrong)


if __name__ == "__main__":
    sys.exit(main())
