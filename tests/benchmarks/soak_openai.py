"""`make soak-openai`: 64 streams of the OpenAI API for two minutes, a third given up; no KV block may stay in use.

Run as `python -m tests.benchmarks.soak_openai --work FOLDER --minutes 2`. Every client sends one random request after
the other (chat or completion, streamed or whole, sampling, several sequences, stop strings) and closes the connection
of a third of them at a random moment. Afterwards nothing may run in the engine, and the gateway must still answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.benchmarks.memory import process_bytes
from tests.benchmarks.soak import CANCELLED, KV_TOKENS, QUESTIONS, STREAMS
from tests.support.commands import trtserve
from tests.support.servers import running_server
from trtserve.server.repositories import find_repository
from trtserve.server.state import Server
from trtserve.server.triton.tritonserver import kv_blocks
from trtserve.store import Store

SETTLED_WITHIN = 30.0


@contextmanager
def served(work: Path) -> Iterator[Server]:
    """The demo model behind its gateway, with 64 requests at once and a KV cache smaller than the load."""
    home = work / "soak-openai-home"
    flags = ["--max-batch-size", str(STREAMS), "--max-tokens-in-paged-kv-cache", str(KV_TOKENS)]
    trtserve("import", "demo", *flags, "--name", "soak", home=home)
    with running_server(find_repository("soak", store=Store(home)).path, home=home, gateway=True) as server:
        yield server


async def drive(url: str, seconds: float, *, seed: int) -> Counter[str]:
    """Run all clients for `seconds`; returns how their requests ended."""
    ended: Counter[str] = Counter()
    end = time.monotonic() + seconds
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        await asyncio.gather(*(_client(session, random.Random(seed + i), end, ended) for i in range(STREAMS)))
    return ended


async def _client(session: aiohttp.ClientSession, choice: random.Random, end: float, ended: Counter[str]) -> None:
    while time.monotonic() < end:
        ended[await _request(session, choice)] += 1


async def _request(session: aiohttp.ClientSession, choice: random.Random) -> str:
    path, body = _body(choice)
    patience = choice.uniform(0, 2) if choice.random() < CANCELLED else None
    try:
        status, text = await asyncio.wait_for(_post(session, path, body), patience)
    except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
        return "given up"
    except aiohttp.ClientError as error:
        return f"failed: {type(error).__name__}"
    if status != 200:
        return f"failed: {status} {text[:200]}"
    return f"failed: {text[-300:]}" if '"error"' in text else "completed"


async def _post(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[int, str]:
    async with session.post(path, json=body) as response:
        return response.status, await response.text()


def _body(choice: random.Random) -> tuple[str, dict[str, Any]]:
    question = " ".join(choice.choices(QUESTIONS, k=choice.randint(1, 6)))
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


def settled(server: Server) -> int:
    """Return the KV blocks that are still in use when the engine has had time to end what was given up."""
    deadline = time.monotonic() + SETTLED_WITHIN
    while (used := int(kv_blocks(server.address).get("used", -1))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return used


def main() -> int:
    """Soak and print the figures; the exit code says whether every block came back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder that keeps the model between runs")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    work = arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    with served(work) as server:
        gateway = server.instances[0].gateway
        assert gateway is not None
        ended = asyncio.run(drive(server.url, arguments.minutes * 60, seed=arguments.seed))
        figures = {
            "minutes": arguments.minutes,
            "streams": STREAMS,
            **dict(sorted(ended.items())),
            "gateway_mib": round(process_bytes(gateway.process.pid) / 2**20, 1),
            "used_blocks_at_the_end": settled(server),
        }
    print(json.dumps(figures, indent=2))
    wrong = [name for name in ended if name.startswith("failed")]
    if figures["used_blocks_at_the_end"]:
        wrong.append(f"{figures['used_blocks_at_the_end']} KV blocks are in use after the last request")
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
