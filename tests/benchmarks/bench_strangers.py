"""What strangers take from others: waits beside a hostile request, beside a crowd without the key, memory of one text.

The demo model on a real Triton, with a key. Beside each hostile request (at most 8 MiB) one client asks for a token and
another for the health page, until it is answered or SECONDS have passed; the worst wait of each counts.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from tests.benchmarks.frame import Row, benchmark_parser, finish, table
from tests.benchmarks.memory import anonymous_bytes
from tests.benchmarks.soak import served
from trtserve.client.endpoint import grpc_metadata
from trtserve.gateway.settings import write_private
from trtserve.server.state import Server

SECONDS = 12.0
"""How long others are watched beside a request that takes longer."""
KEY = "a-key-of-the-benchmark"
MIB = 1 << 20
LARGEST = 8 * MIB - 4096
CONNECTIONS, UNFINISHED, ASKED = 5_000, 600, 300

Body = Mapping[str, Any]
_TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}


def _chat(content: object, **more: object) -> Body:
    return {"messages": [{"role": "user", "content": content}], **more}


TEXT = "x" * LARGEST
SPACED = "a " * (LARGEST // 2)
WORDS = [f"w{number}" for number in range(500_000)]
NESTED = "[" * (LARGEST // 2 - 50) + "]" * (LARGEST // 2 - 50)
WIDE = {"type": "object", "properties": {f"p{number}": {"enum": ["a", "b"]} for number in range(5_000)}}
REPEATED = {"type": "array", "items": {"type": "string", "pattern": "(a|b)*" * 500}, "minItems": 10_000}
HTTP: dict[str, tuple[str, Body | str]] = {
    "completions, text": ("/v1/completions", {"prompt": TEXT}),
    "completions, spaces": ("/v1/completions", {"prompt": " " * LARGEST}),
    "completions, prompts": ("/v1/completions", {"prompt": ["a " * 200] * 20_000}),
    "completions, ids": ("/v1/completions", {"prompt": [5] * 2_500_000}),
    "completions, deep JSON": ("/v1/completions", f'{{"model": "soak", "prompt": {NESTED}}}'),
    "completions, n": ("/v1/completions", {"prompt": ["Hi"] * 16, "n": 128}),
    "completions, stop": ("/v1/completions", {"prompt": "Hi", "stop": WORDS}),
    "completions, stop ids": ("/v1/completions", {"prompt": "Hi", "stop_token_ids": list(range(1_000_000))}),
    "completions, bias": ("/v1/completions", {"prompt": "Hi", "logit_bias": {str(n): 1 for n in range(400_000)}}),
    "completions, regex": ("/v1/completions", {"prompt": "Hi", "guided_regex": ".*" * 5000 + "a"}),
    "completions, regex of counts": ("/v1/completions", {"prompt": "Hi", "guided_regex": "((a{1,99}){1,99}){1,99}"}),
    "completions, grammar": ("/v1/completions", {"prompt": "Hi", "guided_grammar": "[" * 50_000 + "::="}),
    "completions, choices": ("/v1/completions", {"prompt": "Hi", "guided_choice": WORDS}),
    "completions, multipleOf": ("/v1/completions", {"prompt": "Hi", "guided_json": {"multipleOf": 10_000_019}}),
    "completions, wide schema": ("/v1/completions", {"prompt": "Hi", "guided_json": WIDE}),
    "completions, patterns": ("/v1/completions", {"prompt": "Hi", "guided_json": REPEATED}),
    "chat, text": ("/v1/chat/completions", _chat(SPACED)),
    "chat, parts": ("/v1/chat/completions", _chat([{"type": "text", "text": "a"}] * 200_000)),
    "chat, messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}] * 200_000}),
    "chat, tools": ("/v1/chat/completions", _chat("Hi", tools=[{"type": "function", "function": _TOOL}] * 60_000)),
    "chat, calls": (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}] * 100_000}]},
    ),
    "chat, template variables": (
        "/v1/chat/completions",
        _chat("Hi", chat_template_kwargs={f"v{number}": [1] for number in range(300_000)}),
    ),
    "chat, image": (
        "/v1/chat/completions",
        _chat([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (LARGEST - 200)}}]),
    ),
    "responses, text": ("/v1/responses", {"input": TEXT}),
    "responses, schema": (
        "/v1/responses",
        {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"multipleOf": 999_983}}}},
    ),
    "responses, items": ("/v1/responses", {"input": [{"role": "user", "content": "Hi"}] * 200_000}),
    "messages, text": ("/v1/messages", {**_chat(SPACED), "max_tokens": 1}),
    "messages, blocks": ("/v1/messages", {**_chat([{"type": "text", "text": "a"}] * 200_000), "max_tokens": 1}),
    "messages, stop": ("/v1/messages", {**_chat("Hi"), "max_tokens": 1, "stop_sequences": WORDS}),
    "tokenize, text": ("/tokenize", {"prompt": TEXT}),
    "tokenize, messages": ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}] * 200_000}),
    "detokenize, ids": ("/detokenize", {"tokens": [5] * 2_500_000}),
    "generate, text": ("/v2/models/soak/generate", {"text_input": SPACED, "max_tokens": 1}),
    "generate, stop words": (
        "/v2/models/soak/generate",
        {"text_input": "Hi", "max_tokens": 1, "stop_words": WORDS[:250_000]},
    ),
    "generate, guide": (
        "/v2/models/soak/generate",
        {
            "text_input": "Hi",
            "max_tokens": 1,
            "guided_decoding_guide_type": "json_schema",
            "guided_decoding_guide": '{"multipleOf": 999983}',
        },
    ),
    "ensemble, text": ("/v2/models/ensemble/generate", {"text_input": TEXT, "max_tokens": 1}),
    "infer, JSON": (
        "/v2/models/tensorrt_llm/infer",
        {"inputs": [{"name": "input_ids", "shape": [1, 2_500_000], "datatype": "INT32", "data": [5] * 2_500_000}]},
    ),
    "load_lora_adapter": ("/v1/load_lora_adapter", {"lora_name": TEXT, "lora_path": "/"}),
}
GRPC: dict[str, tuple[str, Mapping[str, tuple[str, list[Any]]]]] = {
    "gRPC, text to the ensemble": ("ensemble", {"text_input": ("BYTES", [SPACED.encode()])}),
    "gRPC, text to preprocessing": ("preprocessing", {"QUERY": ("BYTES", [SPACED.encode()])}),
    "gRPC, stop words": ("ensemble", {"stop_words": ("BYTES", [word.encode() for word in WORDS])}),
    "gRPC, ids": ("tensorrt_llm", {"input_ids": ("INT32", [5] * 2_000_000), "input_lengths": ("INT32", [2_000_000])}),
    "gRPC, guide": (
        "ensemble",
        {
            "guided_decoding_guide_type": ("BYTES", [b"regex"]),
            "guided_decoding_guide": ("BYTES", [b".*" * 5000 + b"a"]),
        },
    ),
    "gRPC, tokens to postprocessing": (
        "postprocessing",
        {"TOKENS_BATCH": ("INT32", [5] * 2_000_000), "SEQUENCE_LENGTH": ("INT32", [2_000_000])},
    ),
}
_NEEDED: dict[str, Mapping[str, tuple[str, list[Any]]]] = {
    "ensemble": {
        "text_input": ("BYTES", [b"Hi"]),
        "max_tokens": ("INT32", [1]),
        "bad_words": ("BYTES", [b""]),
        "stop_words": ("BYTES", [b""]),
    },
    "preprocessing": {"REQUEST_OUTPUT_LEN": ("INT32", [1])},
    "tensorrt_llm": {"request_output_len": ("INT32", [1])},
}


class Watched:
    """Two clients with the key, one that asks for a token and one for the health page, and their worst waits."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(health,)) for health in (False, True)]
        self.waits: dict[bool, list[float]] = {False: [], True: []}

    def __enter__(self) -> Watched:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for each in self._threads:
            each.join()

    def _ask(self, health: bool) -> None:
        ask = get if health else token
        while not self._stopped.is_set():
            began = time.monotonic()
            status = ask(self._port)
            self.waits[health].append(time.monotonic() - began)
            if status != 200:
                self.waits[health].append(float("inf"))
            time.sleep(0.02)


def get(port: int) -> int:
    """Ask for the health page."""
    return exchange(port, "GET", "/health", b"")[0]


def token(port: int) -> int:
    """Ask for one token, as a client with the key."""
    return exchange(port, "POST", "/v1/completions", b'{"model": "soak", "prompt": "Hi", "max_tokens": 1}')[0]


def exchange(port: int, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """Send a request on a connection of its own and return status and answer; 0 where the connection was lost."""
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


def by_grpc(server: Server, model: str, tensors: Mapping[str, tuple[str, list[Any]]]) -> str:
    """Send one request to a model and return "200", or the beginning of its error."""
    address = server.address
    client = InferenceServerClient(f"{address.host}:{address.grpc_port}")
    inputs = []
    for name, (datatype, values) in {**_NEEDED.get(model, {}), **tensors}.items():
        array = np.array([values], dtype=object if datatype == "BYTES" else np.int32)
        tensor: Any = InferInput(name, array.shape, datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    ended, found = threading.Event(), ["200"]

    def answered(result: object, error: InferenceServerException | None) -> None:
        if error is not None and not ended.is_set():
            found[0] = str(error)
        ended.set()

    with client:
        client.start_stream(answered, headers=dict(grpc_metadata(KEY)))
        with suppress(InferenceServerException):
            client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        ended.wait(120)
        client.stop_stream(cancel_requests=True)
    return found[0]


def beside(server: Server, case: str, send: Callable[[], str]) -> list[Row]:
    """The worst waits of others while a hostile request runs, and how that was answered (on stderr)."""
    found: list[str] = []
    began = time.monotonic()
    with Watched(server.address.http_port) as others:
        time.sleep(0.1)
        hostile = threading.Thread(target=lambda: found.append(send()))
        hostile.start()
        hostile.join(SECONDS)
        took = time.monotonic() - began
        time.sleep(0.3)
    hostile.join()
    load = os.getloadavg()[0]
    waits = {health: max(values, default=float("inf")) for health, values in others.waits.items()}
    text = " ".join(found[0].split())[:150]
    print(
        f"{case}: others {waits[False]:.2f} s, health {waits[True]:.2f} s, took {took:.1f} s, load {load:.1f}: {text}",
        file=sys.stderr,
        flush=True,
    )
    return [
        Row(case=f"{case}: another client, s", value=waits[False], target=1.0, at_most=True),
        Row(case=f"{case}: health, s", value=waits[True], target=0.2, at_most=True),
    ]


def hostile(server: Server, only: str) -> list[Row]:
    """All hostile requests, one after the other; first the waits beside none."""
    port = server.address.http_port

    def http(path: str, body: Body | str) -> Callable[[], str]:
        named = {} if path.startswith("/v2") else {"model": "soak"}
        content = body.encode() if isinstance(body, str) else json.dumps({**named, **body}).encode()
        assert len(content) <= 8 * MIB, (path, len(content))
        return lambda: "{} {!r}".format(*exchange(port, "POST", path, content))

    def nothing() -> str:
        time.sleep(3)
        return "200"

    cases = {"nothing": nothing}
    cases |= {name: http(path, body) for name, (path, body) in HTTP.items()}
    cases |= {
        name: lambda model=model, tensors=tensors: by_grpc(server, model, tensors)  # type: ignore[misc]
        for name, (model, tensors) in GRPC.items()
    }
    return [row for name, send in cases.items() if only in name for row in beside(server, name, send)]


@contextmanager
def crowd(port: int) -> Iterator[None]:
    """Connections without the key: most say nothing or half a line of a header, others half a body."""
    with ExitStack() as stack:
        for number in range(CONNECTIONS + UNFINISHED):
            client = stack.enter_context(socket.socket())
            client.bind((f"127.0.2.{1 + number % 200}", 0))
            client.settimeout(30)
            with suppress(OSError):
                client.connect(("127.0.0.1", port))
                if number >= CONNECTIONS:
                    path = ("/v1/completions", "/health", "/")[number % 3]
                    client.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{{".encode())
                elif number % 2:
                    client.sendall(b"GET /health HTTP/1.1\r\nHos")
        yield


def waits(port: int) -> float:
    """The 99th percentile, in seconds, of requests one after the other, all of which must be answered."""
    taken = []
    for _ in range(ASKED):
        began = time.monotonic()
        assert token(port) == 200
        taken.append(time.monotonic() - began)
    return statistics.quantiles(taken, n=100)[98]


def beside_crowd(port: int, pairs: int) -> list[Row]:
    """How much longer clients with the key wait beside a crowd without it."""
    found = []
    for number in range(pairs + 1):
        alone = waits(port)
        with crowd(port):
            together = waits(port)
        print(
            f"p99 alone {alone:.4f} s, beside the crowd {together:.4f} s, load {os.getloadavg()[0]:.1f}",
            file=sys.stderr,
        )
        if number:
            found.append((together, alone))
    ratio = statistics.median(together / alone for together, alone in found)
    together, alone = (statistics.median(values) for values in zip(*found, strict=True))
    case = f"p99 beside {CONNECTIONS} connections and {UNFINISHED} unfinished requests ÷ alone"
    return [Row(case=case, value=ratio, target=2.0, at_most=True, measured=together, base=alone, pairs=pairs)]


def memory(server: Server) -> list[Row]:
    """MiB that texts take at most, and that are left 5 s later; a text of each kind is asked before.

    Triton's shared memory with a model does not shrink.
    """
    root, port = psutil.Process(server.instances[0].process.pid), server.address.http_port
    rows = []
    texts = {"8 MiB by HTTP": LARGEST, "60 MiB by gRPC": 60 * MIB}
    for case, size in texts.items():

        def send(size: int, case: str = case) -> None:
            if "gRPC" in case:
                by_grpc(server, "ensemble", {"text_input": ("BYTES", [b"a " * (size // 2)])})
            else:
                body = {"text_input": "a " * (size // 2), "max_tokens": 1, "bad_words": "", "stop_words": ""}
                exchange(port, "POST", "/v2/models/ensemble/generate", json.dumps(body).encode())

        send(1000)
        time.sleep(1)
        before = anonymous_bytes(root.pid)
        thread = threading.Thread(target=send, args=(size,))
        thread.start()
        most = before
        while thread.is_alive():
            most = max(most, anonymous_bytes(root.pid))
            time.sleep(0.02)
        time.sleep(5)
        left = anonymous_bytes(root.pid)
        allowed, kept = 64 + 8 * size / MIB, 64 + 3 * size / MIB
        rows.append(Row(case=f"a text of {case}, MiB", value=(most - before) / MIB, target=allowed, at_most=True))
        rows.append(Row(case="… 5 s later, MiB", value=(left - before) / MIB, target=kept, at_most=True))
    return rows


def main() -> None:
    """Measure, and print one table."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--part", choices=("hostile", "crowd", "memory"), action="append")
    parser.add_argument("--case", default="", help="only hostile requests with this in their name")
    arguments = parser.parse_args()
    key = Path(arguments.work) / "strangers.key"
    write_private(key, KEY)
    parts = arguments.part or ["memory", "crowd", "hostile"]
    rows: list[Row] = []
    with served(arguments.work / "strangers-home", gateway=True, api_key_file=key) as server:
        if "memory" in parts:
            rows += memory(server)
        if "crowd" in parts:
            rows += beside_crowd(server.address.http_port, min(arguments.pairs, 3))
        if "hostile" in parts:
            rows += hostile(server, arguments.case)
    print(table(rows, measured="Beside", base="Alone", value="Figure"))
    finish(arguments, "strangers", rows, load=os.getloadavg()[0])


if __name__ == "__main__":
    main()
