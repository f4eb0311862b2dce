"""`make soak-openai`: 64 streams of the OpenAI API for two minutes, a third given up; no KV block may stay in use.

Run as `python -m tests.benchmarks.soak_openai --work FOLDER --minutes 2`. Every client sends one random request after
the other (chat or completion, streamed or whole, sampling, several sequences, stop strings) and closes the connection
of a third of them at a random moment. Afterwards nothing may run in the engine, and the gateway must still answer.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from typing import Any

import aiohttp

from tests.benchmarks.memory import process_bytes
from tests.benchmarks.soak import CANCELLED, QUESTIONS, STREAMS, end, parsed, served, soak_parser
from trtserve.server.state import Server
from trtserve.server.triton.tritonserver import kv_blocks

SETTLED_WITHIN = 30.0


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
        ended[await request(session, choice)] += 1


async def request(session: aiohttp.ClientSession, choice: random.Random) -> str:
    return await posted(session, choice, *_body(choice))


async def posted(session: aiohttp.ClientSession, choice: random.Random, path: str, body: dict[str, Any]) -> str:
    """Send a request, of which a third are given up at a random moment, and return how it ended."""
    patience = choice.uniform(0, 2) if choice.random() < CANCELLED else None

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
    arguments = parsed(soak_parser(__doc__, minutes=2))
    with served(arguments.work / "soak-openai-home", gateway=True) as server:
        gateway = server.instances[0].gateway
        assert gateway is not None
        ended = asyncio.run(drive(server.url, arguments.minutes * 60, seed=arguments.seed))
        used = settled(server)
        figures = {
            "minutes": arguments.minutes,
            "streams": STREAMS,
            **dict(sorted(ended.items())),
            "gateway_mib": round(process_bytes(gateway.process.pid) / 2**20, 1),
            "used_blocks_at_the_end": used,
        }
    wrong = [name for name in ended if name.startswith("failed")]
    return end(figures, [*wrong, *([f"{used} KV blocks are in use after the last request"] if used else [])])


if __name__ == "__main__":
    sys.exit(main())
