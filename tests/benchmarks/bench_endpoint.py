"""The cost of OpenAI's API beside gRPC on the core model, and the first word on the page, all with eight streams.

Run as `python -m tests.benchmarks.bench_endpoint --work FOLDER --out FOLDER`. One server with the demo model and its
gateway; both sides ask for the same tokens, in alternating pairs. Costs are differences of the time until eight streams
have ended, per token or per request, as clients of the two protocols see them. For the page a headless Chromium
presses Enter while eight streams run without a pause; gRPC sends the same prompt in the same load.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.benchmarks.results import Figure, benchmark_parser, finish
from tests.support.commands import trtserve
from tests.support.model_server import ModelServer, Tensors
from tests.support.release_client import NEWEST
from tests.support.servers import running_server
from tests.support.waiting import wait_until
from trtserve.client.tokenizer import TokenizerFiles
from trtserve.process import find_sbin_program
from trtserve.server.repositories import find_repository
from trtserve.server.state import Server
from trtserve.store import Store

STREAMS = 8
NEW = 200
"""Tokens of each answer where tokens are measured."""
ENDLESS = 1500
"""Tokens of an answer that runs beside the measurement; then comes the next one."""
PROMPT = "What is machine learning?"
TARGETS = {"token": 0.15, "request": 3.0, "page": 50.0}
_FIRST_WORD = """
    new Promise(resolve => {
        const log = document.querySelector('#log'), box = document.querySelector('#question');
        let begin;
        const seen = new MutationObserver(() => {
            if ([...document.querySelectorAll('.assistant p')].at(-1)?.textContent) {
                seen.disconnect();
                resolve(performance.now() - begin);
            }
        });
        seen.observe(log, {childList: true, subtree: true, characterData: true});
        box.addEventListener('keydown', () => { begin = performance.now(); }, {capture: true, once: true});
        window.listening = true;
    })
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians over the pairs in milliseconds; `added` pair by pair."""

    case: str
    pairs: int
    endpoint_ms: float
    grpc_ms: float
    added_ms: float
    added_lowest: float
    added_highest: float
    target_ms: float


class Sides:
    """The two ways to the same model of one server."""

    def __init__(self, server: Server, tokenizer: Path) -> None:
        self.url = server.url
        self._address = server.instances[0].address
        self.grpc = ModelServer(self._address)
        self._ids = TokenizerFiles(tokenizer).encode(PROMPT, special=True)

    def tensors(self, count: int) -> Tensors:
        """Return a greedy request for exactly this many tokens."""
        return NEWEST.core(self._ids, count, streaming=True, end_id=-1, exclude_input_in_output=True)

    def over_grpc(self, count: int) -> None:
        """Read a whole answer of the core model."""
        with self.grpc.stream() as stream:
            stream.all("tensorrt_llm", self.tensors(count), outputs=("output_ids", "sequence_length"))

    def over_http(self, count: int) -> None:
        """Read a whole stream of the endpoint."""
        body = {"model": "demo", "prompt": self._ids, "max_tokens": count, "stream": True, "ignore_eos": True}
        with closing(http.client.HTTPConnection(self._address.host, self._address.http_port, timeout=60)) as connection:
            connection.request(
                "POST", "/v1/completions", json.dumps({**body, "temperature": 0}), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse().read()
        assert answer.endswith(b"data: [DONE]\n\n"), answer[-300:]

    def first_over_grpc(self) -> float:
        """Return milliseconds until the first response."""
        with self.grpc.stream() as stream:
            begin = time.perf_counter()
            stream.send("tensorrt_llm", self.tensors(8))
            stream.next()
            return 1000 * (time.perf_counter() - begin)

    @contextmanager
    def load(self) -> Iterator[None]:
        """Keep eight streams running."""
        ending = threading.Event()

        def ask() -> None:
            while not ending.is_set():
                with self.grpc.stream() as stream:
                    stream.send("tensorrt_llm", self.tensors(ENDLESS))
                    final = False
                    while not final and not ending.is_set():
                        _, final, _ = stream.next()

        with ThreadPoolExecutor(STREAMS) as pool:
            running = [pool.submit(ask) for _ in range(STREAMS)]
            time.sleep(2)
            try:
                yield
            finally:
                ending.set()
            for each in running:
                each.result()


def eight(one: Callable[[int], None], count: int) -> float:
    """Return the milliseconds until eight equal requests at once have ended."""
    with ThreadPoolExecutor(STREAMS) as pool:
        begin = time.perf_counter()
        list(pool.map(one, [count] * STREAMS))
        return 1000 * (time.perf_counter() - begin)


def row(
    case: str, endpoint: Callable[[], float], grpc: Callable[[], float], *, pairs: int, parts: int, target: float
) -> Row:
    """Alternate both; whoever begins changes from pair to pair, and the first pair warms both."""
    found: dict[Callable[[], float], list[float]] = {endpoint: [], grpc: []}
    for number in range(pairs + 1):
        for side in (endpoint, grpc) if number % 2 else (grpc, endpoint):
            value = side() / parts
            if number:
                found[side].append(value)
    added = np.array(found[endpoint]) - np.array(found[grpc])
    return Row(
        case=case,
        pairs=pairs,
        endpoint_ms=statistics.median(found[endpoint]),
        grpc_ms=statistics.median(found[grpc]),
        added_ms=float(np.median(added)),
        added_lowest=float(added.min()),
        added_highest=float(added.max()),
        target_ms=target,
    )


@contextmanager
def page(url: str) -> Iterator[Callable[[], float]]:
    """Open the page in Chromium; yields what returns the milliseconds from Enter to the first word."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_sbin_program("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        tab = browser.new_page()

        def first_word() -> float:
            tab.goto(url)
            wait_until(lambda: tab.evaluate("document.querySelector('#model').value === 'demo'"))
            tab.evaluate("document.querySelector('#max_tokens').value = '8'")
            tab.keyboard.type(PROMPT)
            tab.evaluate(f"window.first = {_FIRST_WORD}; undefined")
            tab.keyboard.press("Enter")
            return float(tab.evaluate("window.first"))

        yield first_word
        browser.close()


def gateway_seconds(server: Server) -> float:
    """Return the processor time of the gateway so far."""
    gateway = server.instances[0].gateway
    assert gateway is not None
    times = psutil.Process(gateway.process.pid).cpu_times()
    return float(times.user + times.system)


def run(work: Path, *, pairs: int) -> dict[str, Any]:
    """Start the server and measure."""
    home = work / "endpoint-home"
    trtserve("import", "demo", "--max-batch-size", "16", "--name", "demo", home=home)
    repository = find_repository("demo", store=Store(home)).path
    with running_server(repository, home=home, gateway=True, ui=True) as server:
        (tokenizer,) = (Path(record.model) for record in Store(home).recorded() if record.name == "demo")
        sides = Sides(server, tokenizer)
        before = gateway_seconds(server)
        rows = [
            row(
                f"a token, {STREAMS} streams",
                lambda: eight(sides.over_http, NEW),
                lambda: eight(sides.over_grpc, NEW),
                pairs=pairs,
                parts=STREAMS * NEW,
                target=TARGETS["token"],
            )
        ]
        of_gateway = 1000 * (gateway_seconds(server) - before) / (STREAMS * NEW * (pairs + 1))
        rows.append(
            row(
                f"a request for one token, {STREAMS} at once",
                lambda: eight(sides.over_http, 1),
                lambda: eight(sides.over_grpc, 1),
                pairs=pairs * 5,
                parts=STREAMS,
                target=TARGETS["request"],
            )
        )
        if find_sbin_program("chromium") is None:
            print("The page was not measured: there is no chromium on PATH.")
        else:
            with page(server.url) as first_word, sides.load():
                case = f"the first word on the page, {STREAMS} other streams"
                rows.append(
                    row(case, first_word, sides.first_over_grpc, pairs=pairs * 3, parts=1, target=TARGETS["page"])
                )
    return {"cpus": os.cpu_count(), "gateway_ms_per_token": of_gateway, "rows": rows}


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| What | Endpoint, ms | gRPC, ms | Added, ms | Lowest … highest | Target | Pairs |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.case} | {row.endpoint_ms:.3f} | {row.grpc_ms:.3f} | {row.added_ms:.3f} "
        f"| {row.added_lowest:.3f} … {row.added_highest:.3f} | ≤ {row.target_ms:g} | {row.pairs} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Parse, measure, print the table, and write it as JSON."""
    arguments = benchmark_parser("endpoint", __doc__).parse_args()
    report = run(arguments.work.absolute(), pairs=arguments.pairs)
    print(table(report["rows"]))
    print(f"Processor time of the gateway: {report['gateway_ms_per_token']:.3f} ms a token")
    figures = [Figure(case=row.case, value=row.added_ms, target=row.target_ms, at_most=True) for row in report["rows"]]
    finish(arguments.out or arguments.work, "endpoint", report, figures)


if __name__ == "__main__":
    main()
