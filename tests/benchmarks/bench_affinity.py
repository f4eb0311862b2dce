"""Conversations through a gateway in front of two real servers: what their caches find, and the first token's wait.

Each server has two processors of its own, and the gateways, with the client, have the others. The choice of the
gateway is compared with that of `least_conn` and of turns (round robin): a gateway for each server, among which the
client chooses so. Prompts are random token ids of which each turn repeats those of the turn before and adds some.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from tests.benchmarks.engines import SIZES, make_engine, make_repository
from tests.benchmarks.frame import Row, benchmark_parser, finish, table
from tests.support.gateways import HOST, running_gateway
from tests.support.servers import running_server
from trtserve.server.state import Server

MODEL = "llama-bytes"
REPLICAS = 2
TURNS, FIRST, MORE, ANSWER = 5, 192, 96, 16
"""Of a conversation: turns, tokens of the first prompt, of what each turn adds, and of an answer."""
BLOCK = 32
LETTER = 70
"""The only token of answers, one with a text."""
THINKING = 0.3
KV_TOKENS = 200_000
"""Holds all conversations of a round on each server."""


@dataclass(kw_only=True)
class Round:
    """What one way to choose gave."""

    waits: list[float] = field(default_factory=list)
    """Seconds to the first token of each request."""
    prompts: int = 0
    possible: int = 0
    """Tokens that a cache of one server for all would have, in whole blocks."""
    cached: int = 0
    shares: tuple[float, ...] = ()
    """Prompt tokens of each server ÷ their mean."""


def counters(server: Server) -> tuple[float, float]:
    """Return the tokens of prompts that came from the cache, and all tokens of prompts."""
    with urlopen(f"http://{HOST}:{server.address.metrics_port}/metrics", timeout=30) as page:
        samples = [each for family in text_string_to_metric_families(page.read().decode()) for each in family.samples]
    blocks = sum(each.value for each in samples if each.labels.get("kv_cache_block_type") == "reused")
    prompts = sum(each.value for each in samples if each.labels.get("token_type") == "prompt")
    return blocks * BLOCK, prompts


async def ask(session: aiohttp.ClientSession, port: int, ids: list[int]) -> float:
    """Ask for an answer, and return the seconds to its first piece."""
    body: dict[str, Any] = {"model": "served", "prompt": ids, "max_tokens": ANSWER, "stream": True, "ignore_eos": True}
    body["logit_bias"] = {str(LETTER): 100}
    began, first = time.perf_counter(), 0.0
    async with session.post(f"http://{HOST}:{port}/v1/completions", json=body) as answer:
        text = b""
        async for line in answer.content:
            if not first and line.startswith(b"data: "):
                first = time.perf_counter() - began
            text = line if line.strip() else text
        assert answer.status == 200, text
        assert text.strip() == b"data: [DONE]", text
    return first


async def converse(ports: list[int], pick: Callable[[list[int]], int], count: int, users: int, seed: int) -> Round:
    """Let `users` hold `count` conversations; `pick` gets the requests in flight on each port."""
    found, flying, numbers = Round(), [0] * len(ports), itertools.count()
    random = np.random.default_rng(seed)
    vocabulary = SIZES[MODEL]["vocab_size"]
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300)
    ) as session:

        async def user() -> None:
            while next(numbers) < count:
                ids: list[int] = []
                for turn in range(TURNS):
                    found.possible += len(ids) // BLOCK * BLOCK
                    ids = ids + random.integers(3, vocabulary, size=MORE if turn else FIRST).tolist()
                    found.prompts += len(ids)
                    place = pick(flying)
                    flying[place] += 1
                    found.waits.append(await ask(session, ports[place], ids))
                    flying[place] -= 1
                    await asyncio.sleep(random.exponential(THINKING))

        await asyncio.gather(*(user() for _ in range(users)))
    return found


def main() -> None:
    """Measure in turns, print the table and write affinity.json."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--conversations", type=int, default=200, help="of each round")
    parser.add_argument("--users", type=int, default=8, help="at the same time")
    arguments = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    apart = [f"{cpus[2 * each]},{cpus[2 * each + 1]}" for each in range(REPLICAS)] if len(cpus) > 4 else [None, None]
    engine = make_engine(arguments.work, MODEL, name="affinity", max_batch_size=16)
    model = arguments.work / MODEL / "model"
    settings: dict[str, Any] = {
        "max_tokens_in_paged_kv_cache": KV_TOKENS,
        "enable_kv_cache_reuse": True,
        "name": "served",
    }
    repository = make_repository(engine, model, engine.with_name("affinity-repository"), **settings)
    turns = itertools.count()
    rounds: dict[str, list[Round]] = {"affinity": [], "least_conn": [], "round robin": []}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                running_server(
                    repository,
                    home=arguments.work / f"home{number}",
                    name=f"served{number}",
                    cpus=own,
                    ready_timeout=300,
                )
            )
            for number, own in enumerate(apart)
        ]
        if len(cpus) > 4:
            os.sched_setaffinity(0, cpus[2 * REPLICAS :])
        addresses = [each.address for each in servers]

        def gateway(first: int, *others: int) -> int:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            options: dict[str, Any] = {"own": False, "model": "", "tokenizer": model}
            options |= {"replicas": tuple(f"{HOST}:{addresses[each].grpc_port}" for each in others)}
            own = addresses[first]
            return stack.enter_context(running_gateway(folder, own.http_port, grpc_port=own.grpc_port, **options)).port

        both, single = [gateway(0, 1)], [gateway(0), gateway(1)]
        for number in range(arguments.pairs + 1):
            for name, found in rounds.items():
                before = [counters(each) for each in servers]
                pick = {
                    "affinity": lambda flying: 0,
                    "least_conn": lambda flying: flying.index(min(flying)),
                    "round robin": lambda flying: next(turns) % REPLICAS,
                }[name]
                ports, count = both if name == "affinity" else single, arguments.conversations if number else 8
                seed = 1000 * number + len(name)
                result = asyncio.run(converse(ports, pick, count, arguments.users, seed))
                grown = np.array([counters(each) for each in servers]) - np.array(before)
                result.cached = int(grown[:, 0].sum())
                result.shares = tuple((grown[:, 1] / grown[:, 1].mean()).round(3).tolist())
                p50, p99 = np.quantile(result.waits, (0.5, 0.99)) * 1000
                part = result.cached / result.possible
                print(f"{name}: {part:.3f} of what one cache finds, p50 {p50:.1f}, p99 {p99:.1f} ms, {result.shares}")
                if number:
                    found.append(result)
    rows = report(rounds, arguments.pairs)
    print(table(rows, measured="affinity", base="other"))
    kept = {name: [json.loads(json.dumps(vars(each))) for each in found] for name, found in rounds.items()}
    finish(arguments, "affinity", rows, rounds=kept, processors=apart)


def report(rounds: dict[str, list[Round]], pairs: int) -> list[Row]:
    """Return the rows of all rounds together."""

    def p99(name: str) -> float:
        return float(np.quantile(np.concatenate([each.waits for each in rounds[name]]), 0.99))

    def part(name: str) -> float:
        return sum(each.cached for each in rounds[name]) / sum(each.possible for each in rounds[name])

    ours = rounds["affinity"]
    rows = [Row(case=f"found ÷ what one cache finds, {name}", value=part(name), pairs=pairs) for name in rounds]
    rows[0] = Row(case=rows[0].case, value=rows[0].value, target=0.9, pairs=pairs)
    rows += [
        Row(
            case=f"p99 of the first token ÷ {name}",
            value=p99("affinity") / p99(name),
            target=0.6 if name == "least_conn" else None,
            at_most=True,
            measured=p99("affinity"),
            base=p99(name),
            pairs=pairs,
        )
        for name in ("least_conn", "round robin")
    ]
    most = max(max(each.shares) for each in ours)
    return [*rows, Row(case="prompt tokens of a server ÷ the mean, highest", value=most, target=1.3, at_most=True)]


if __name__ == "__main__":
    main()
