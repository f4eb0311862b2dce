"""Thousands of generated requests over every API to the models of a real Triton: no 500, no bug, no hang, flat memory.

`python -m tests.benchmarks.fuzz_models --work FOLDER --requests 10000 --seed 1` serves the demo model, sends bodies to
OpenAI's API, `generate` and `generate_stream`, and tensors over gRPC to each model, and ends with code 1 when an answer
blames the server, takes too long, or when memory or KV blocks are left.
"""

from __future__ import annotations

import asyncio
import random
import struct
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.benchmarks.memory import process_bytes
from tests.benchmarks.soak import connected, served, settled
from tests.support.generated_bodies import NUMBERS, TEXTS, chat_body, completion_body, generate_body
from trtserve.client.endpoint import Endpoint
from trtserve.client.grpc_transport import grpc_client
from trtserve.client.tensors import ModelDescription
from trtserve.process import ProcessId
from trtserve.server.state import Server

IN_FLIGHT = 8
LONGEST = 60.0
"""Seconds after which an answer counts as a hang; the machine may be slow, and others wait before it."""
SHAPES = 1000
"""Requests of many lengths before the others: OpenVINO keeps kernels for each number of tokens in a step, up to a bound
(54 MiB with the demo model) that wrong requests, most of which are short, would reach in hours."""
SETTLED = 0.5
"""Part of the requests after which caches and pools are full."""
GROWTH = 1.1
MODELS = ("preprocessing", "postprocessing", "tensorrt_llm", "tensorrt_llm_bls", "ensemble")
_BLAMES_US = ("is a bug", "Traceback", "log says why", "not healthy", "unexpectedly", "stopped working")
_SIZES = {"INT32": "i", "INT64": "q", "UINT64": "Q", "FP32": "f", "FP16": "e", "BOOL": "?", "UINT32": "I", "UINT8": "B"}
# Inputs of a good request to each of the models.
_GOOD: dict[str, dict[str, Any]] = {
    "preprocessing": {"QUERY": "Hi", "REQUEST_OUTPUT_LEN": 2},
    "postprocessing": {"TOKENS_BATCH": 5, "SEQUENCE_LENGTH": 1},
    "tensorrt_llm": {"input_ids": 5, "input_lengths": 1, "request_output_len": 2},
    "tensorrt_llm_bls": {"text_input": "Hi", "max_tokens": 2},
    "ensemble": {"text_input": "Hi", "max_tokens": 2, "bad_words": "", "stop_words": ""},
}


def main() -> int:
    """Send the requests, and report what came of them."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with served(asked.work / "fuzz-home", gateway=True) as server:
        fuzz = _Fuzz(server, asked.requests, asked.seed)
        asyncio.run(fuzz.run())
        used = settled(server)
    wrong = [*fuzz.wrong, *([f"{used} KV blocks are in use after the last request"] if used else [])]
    longest, kind, seed = fuzz.longest
    sys.stdout.write(f"{asked.requests} requests in {fuzz.seconds:.0f} s\n")
    sys.stdout.write(f"the longest {longest:.1f} s: {kind} <- {fuzz.body(seed)[:1500]}\n")
    for kind, count in sorted(fuzz.ended.items()):
        sys.stdout.write(f"  {kind}: {count}\n")
    for name, sizes in fuzz.memory.items():
        sys.stdout.write(f"MiB of {name}: {' '.join(map(str, sizes))}\n")
    sys.stderr.write("".join(f"{each}\n" for each in wrong))
    return 1 if wrong else 0


class _Fuzz:
    def __init__(self, server: Server, count: int, seed: int) -> None:
        self._server, self._count, self._chance = server, count, random.Random(seed)
        self._sent = 0
        self._memory: dict[int, list[int]] = {}
        self.ended: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.longest, self.seconds = (0.0, "", 0), 0.0
        """Seconds, kind and seed of the longest request."""
        self.memory: dict[str, list[int]] = {}
        """MiB of each process at every tenth of the requests."""

    async def run(self) -> None:
        """Send all requests, several at a time."""
        address, began = self._server.address, time.monotonic()
        endpoint = Endpoint(host=address.host, http_port=address.http_port, grpc_port=address.grpc_port)
        with closing(grpc_client(endpoint, timeout=10)) as client:
            self._models = [await asyncio.to_thread(client.describe, name) for name in MODELS]
        timeout = aiohttp.ClientTimeout(total=LONGEST)
        async with aiohttp.ClientSession(self._server.url, timeout=timeout) as session, connected(self._server) as stub:
            await asyncio.gather(*(self._fill_caches(session, each) for each in range(IN_FLIGHT)))
            await asyncio.gather(*(self._send(session, stub) for _ in range(IN_FLIGHT)))
        self.seconds = time.monotonic() - began
        self._measure()
        for pid, sizes in self._memory.items():
            name = " ".join(psutil.Process(pid).cmdline())[-60:]
            self.memory[name] = [round(size / 2**20) for size in sizes]
            if sizes[-1] > GROWTH * sizes[int(SETTLED * len(sizes))]:
                self.wrong.append(f"the memory of {name} grew in the second half")

    async def _fill_caches(self, session: aiohttp.ClientSession, seed: int) -> None:
        """Send one client's part of the requests of many lengths, one after the other."""
        chance, name = random.Random(seed), self._server.model or "soak"
        for _ in range(SHAPES // IN_FLIGHT):
            length = chance.randint(1, 16) if chance.random() < 0.5 else chance.randint(1, 300)
            body = {"model": name, "prompt": [5] * length, "max_tokens": 2}
            async with session.post("/v1/completions", json=body) as answer:
                answer.raise_for_status()

    async def _send(self, session: aiohttp.ClientSession, stub: Any) -> None:
        while self._sent < self._count and len(self.wrong) < 20:
            self._sent += 1
            if self._sent % max(1, self._count // 10) == 0:
                self._measure()
            seed = self._chance.randrange(2**63)
            chance, began = random.Random(seed), time.monotonic()
            kind, send = chance.choice((("http", self._http), ("http", self._http), ("grpc", self._grpc)))
            try:
                kind, text = await (send(session, chance) if kind == "http" else send(stub, chance))
            except (TimeoutError, asyncio.TimeoutError):
                kind, text = f"{kind} hang", f"no answer within {LONGEST:g} s"
            except (aiohttp.ClientError, OSError) as error:
                kind, text = f"{kind} lost", f"{type(error).__name__}: {error}"
            self.ended[kind] += 1
            self.longest = max(self.longest, (time.monotonic() - began, kind, seed))
            if kind.endswith((" 500", " hang", " lost")) or any(each in text for each in _BLAMES_US):
                self.wrong.append(f"seed {seed}: {kind}: {text[:600]} <- {self.body(seed)[:1500]}")

    def _measure(self) -> None:
        for each in self._processes():
            self._memory.setdefault(each.pid, []).append(process_bytes(each.pid))

    def _processes(self) -> list[ProcessId]:
        return [*self._server.roots, *(stub for instance in self._server.instances for stub in instance.stubs)]

    def body(self, seed: int) -> str:
        """Make a request again, for the report."""
        chance = random.Random(seed)
        kind = chance.choice(("http", "http", "grpc"))
        return repr(self._http_body(chance)) if kind == "http" else repr(self._tensors(chance))

    def _http_body(self, chance: random.Random) -> tuple[str, bytes]:
        model = self._server.model or "soak"
        verb = chance.choice(("generate", "generate_stream"))
        asked = chance.choice(("completions", "chat/completions", verb))
        if asked == verb:
            return f"/v2/models/{chance.choice((model, 'ensemble'))}/{verb}", generate_body(chance)
        make = completion_body if asked == "completions" else chat_body
        return f"/v1/{asked}", make(model, chance)

    async def _http(self, session: aiohttp.ClientSession, chance: random.Random) -> tuple[str, str]:
        path, body = self._http_body(chance)
        async with session.post(path, data=body, headers={"Content-Type": "application/json"}) as answer:
            return f"{path} {answer.status}", (await answer.read()).decode("utf-8", "replace")

    async def _grpc(self, stub: Any, chance: random.Random) -> tuple[str, str]:
        from grpc import RpcError

        model, message = self._tensors(chance)
        try:
            if not model.decoupled:
                await stub.ModelInfer(message, timeout=LONGEST)
                return f"{model.name} ok", ""
            async for answer in stub.ModelStreamInfer(iter([message]), timeout=LONGEST):
                if answer.error_message:
                    return f"{model.name} refused", answer.error_message
        except RpcError as error:
            name = error.code().name
            ended = {"DEADLINE_EXCEEDED": "hang", "UNAVAILABLE": "lost", "UNKNOWN": "500"}.get(name, "refused")
            return f"{model.name} {ended}", f"{name}: {error.details()}"
        return f"{model.name} ok", ""

    def _tensors(self, chance: random.Random) -> tuple[ModelDescription, Any]:
        """Return a model and the message of a request to it: good inputs, some others, and some of them changed."""
        from tritonclient.grpc import service_pb2

        model = chance.choice(self._models)
        good = _GOOD[model.name]
        others = chance.sample(sorted(model.inputs), min(len(model.inputs), chance.randrange(4)))
        share = chance.choice((0, 0.05, 0.3))
        message = service_pb2.ModelInferRequest(model_name=model.name, id=chance.choice(("", "1", "\u00e9", "x" * 50)))
        for name in dict.fromkeys([*good, *others]):
            if chance.random() < share / 4:
                continue
            described = model.inputs[name]
            size = chance.choice((0, 1, 2, 3, 50)) if chance.random() < share else 1
            shape = [abs(each) if each > 0 else size for each in described.dims]
            shape = [1, *shape] if model.max_batch_size else shape
            if chance.random() < share / 2:
                shape = chance.choice(([], [1], [1, 1, 1, 1], [2, *shape], [0]))
            count = 1
            for each in shape:
                count *= each
            value = good.get(name, chance.choice((0, 1, 2, -1)))
            message.inputs.add(name=name, datatype=described.datatype, shape=shape)
            message.raw_input_contents.append(
                b"".join(_element(described.datatype, value, chance, share) for _ in range(min(count, 4096)))
            )
        return model, message


def _element(datatype: str, value: Any, chance: random.Random, share: float) -> bytes:
    """Return one value of a tensor as Triton reads it."""
    wrong = chance.random() < share
    if datatype == "BYTES":
        text = chance.choice(TEXTS) if wrong else str(value)
        content = chance.choice((text.encode("utf-8", "surrogatepass"), b"\xff\xfe\x00")) if wrong else text.encode()
        return struct.pack("<I", len(content)) + content
    if wrong:
        value = chance.choice(NUMBERS) if not datatype.startswith("FP") else chance.choice((*NUMBERS, float("nan")))
    pack: Callable[[Any], bytes] = struct.Struct(f"<{_SIZES.get(datatype, 'i')}").pack
    try:
        return pack(value if datatype.startswith("FP") or datatype == "BOOL" else int(value))
    except (struct.error, OverflowError, ValueError):
        return pack(False if datatype == "BOOL" else 0)


if __name__ == "__main__":
    sys.exit(main())
