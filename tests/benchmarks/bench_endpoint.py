"""The cost of OpenAI's API beside gRPC on the core model, and the first word on the page, all with eight streams.

One server with the demo model and its gateway; both sides ask for the same tokens, in alternating pairs. Costs are
differences of the time until eight streams have ended, per token or per request, as clients of the two protocols see
them. For the page a headless Chromium presses Enter while eight streams run without a pause; gRPC sends the same prompt
in the same load.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.frame import Row, benchmark_parser, compare, finish, table
from tests.support.commands import trtserve
from tests.support.model_server import ModelServer, Tensors
from tests.support.needs import find_program
from tests.support.release_client import NEWEST
from tests.support.servers import running_server
from tests.support.waiting import wait_until
from trtserve.client.tokenizer import TokenizerFiles
from trtserve.server.repositories import find_repository
from trtserve.server.state import Server
from trtserve.store import Store

STREAMS = 8
NEW = 200
"""Tokens of each answer where tokens are measured."""
ENDLESS = 1500
"""Tokens of an answer that runs beside the measurement; then comes the next one."""
PROMPT = "What is machine learning?"
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


@contextmanager
def page(url: str) -> Iterator[Callable[[], float]]:
    """Open the page in Chromium; yields what returns the milliseconds from Enter to the first word."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_program("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"]
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


def measure(work: Path, pairs: int) -> tuple[list[Row], float]:
    """Start the server and measure; also returns the gateway's processor time for a token in ms."""
    home = work / "endpoint-home"
    trtserve("import", "demo", "--max-batch-size", "16", "--name", "demo", home=home)
    repository = find_repository("demo", store=Store(home)).path

    def row(case: str, endpoint: Callable[[], float], grpc: Callable[[], float], *, target: float, pairs: int) -> Row:
        limits: dict[str, Any] = {"difference": True, "target": target, "at_most": True}
        return compare(case, lambda _: endpoint(), lambda _: grpc(), pairs=pairs, **limits)

    with running_server(repository, home=home, gateway=True, ui=True) as server:
        (tokenizer,) = (Path(record.model) for record in Store(home).recorded() if record.name == "demo")
        sides = Sides(server, tokenizer)
        before = gateway_seconds(server)

        def each(one: Callable[[int], None], count: int) -> Callable[[], float]:
            return lambda: eight(one, count) / STREAMS / count

        case = f"a token, {STREAMS} streams"
        rows = [row(case, each(sides.over_http, NEW), each(sides.over_grpc, NEW), target=0.15, pairs=pairs)]
        of_gateway = 1000 * (gateway_seconds(server) - before) / (STREAMS * NEW * (pairs + 1))
        case = f"a request for one token, {STREAMS} at once"
        rows.append(row(case, each(sides.over_http, 1), each(sides.over_grpc, 1), target=3.0, pairs=pairs * 5))
        if find_program("chromium") is None:
            print("The page was not measured: there is no chromium on PATH.")
        else:
            with page(server.url) as first_word, sides.load():
                case = f"the first word on the page, {STREAMS} other streams"
                rows.append(row(case, first_word, sides.first_over_grpc, target=50.0, pairs=pairs * 3))
    return rows, of_gateway


def main() -> None:
    arguments = benchmark_parser(__doc__).parse_args()
    rows, of_gateway = measure(arguments.work, arguments.pairs)
    print(table(rows, measured="Endpoint, ms", base="gRPC, ms", value="Added, ms"))
    print(f"Processor time of the gateway: {of_gateway:.3f} ms a token")
    finish(arguments, "endpoint", rows, gateway_ms_per_token=of_gateway)


if __name__ == "__main__":
    main()
