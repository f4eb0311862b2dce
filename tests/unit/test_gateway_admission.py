"""Which requests are let in and stopped, and what the gateway asks of Triton."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.support.gateways import HOST, settings_of
from tests.support.http_pages import sending
from trtserve.bench.traffic import read_trace
from trtserve.client.endpoint import Endpoint
from trtserve.errors import UsageError
from trtserve.gateway import asgi
from trtserve.gateway.admission import Access, Exchange, Gate
from trtserve.gateway.app import HANG_UP, Gateway
from trtserve.gateway.asgi import MOST_PARTS, MOST_VALUES, Message, Receive, RefusedError, Scope, Send, require_few
from trtserve.gateway.openai.answering import Measures
from trtserve.gateway.openai.router import openai_router
from trtserve.gateway.openai.served import Backend
from trtserve.gateway.request_log import RequestLog
from trtserve.gateway.settings import RequestLimits, write_private
from trtserve.gateway.triton import TritonHealth, TritonHttp, _model, find_target
from trtserve.process import ProcessId
from trtserve.specs import ServerSpec

_NOBODY = Backend(Endpoint())
_NO_KEY = "Send the API key of this server in the header Authorization: Bearer KEY."


@pytest.mark.parametrize("path", [str(getattr(each, "path", "")) for each in openai_router(_NOBODY, Measures()).routes])
def test_every_path_of_an_api_needs_the_key_and_says_so_in_its_form(path: str, tmp_path: Path) -> None:
    write_private(tmp_path / "key", "k" * 16)
    settings = settings_of(key_file=tmp_path / "key")
    client = TestClient(Gateway(settings), base_url="http://localhost")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
        answer = client.post(path, json={}, headers=headers)
        assert answer.status_code == 401
        content = answer.json()
        if path.startswith("/v1/messages"):
            assert (content["type"], content["error"]["type"]) == ("error", "authentication_error")
            assert content["error"]["message"] == _NO_KEY
        elif path.startswith("/api/"):
            assert isinstance(content["error"], str)
        else:
            found = (content["error"]["type"], content["error"]["code"], content["error"]["message"])
            assert found == ("authentication_error", "invalid_api_key", _NO_KEY)


def test_an_error_that_nobody_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last event of a stream waits for its client too, and the server that stops waits for the event."""
    settings = settings_of(limits=RequestLimits(stalled_seconds=0.1))

    async def fail(_scope: Scope, _receive: Receive, send: Send, _exchange: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        raise RefusedError(503, "the model has ended")

    async def run() -> None:
        gateway = Gateway(settings)
        monkeypatch.setattr(gateway, "_serve", fail)
        running, hung_up = list[int](), asyncio.Event()

        async def receive() -> Message:
            raise AssertionError("nothing is read")

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                running.append(gateway.gate.running)
                await hung_up.wait()

        scope = {"type": "http", "method": "GET", "path": "/v2", "headers": [], "extensions": {HANG_UP: hung_up.set}}
        sweeping = asyncio.create_task(gateway.gate.sweep())
        await asyncio.wait_for(gateway(scope, receive, send), 60)
        sweeping.cancel()
        assert running == [1]
        assert gateway.gate.running == 0

    asyncio.run(run())


def test_the_memory_of_large_bodies_is_given_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, given, reserved = Gate(RequestLimits()), threading.Event(), list[int]()

    def give() -> None:
        reserved.append(gate._reserved)
        given.set()

    async def run() -> None:
        sweeping = asyncio.create_task(gate.sweep())
        with gate.memory() as reserve:
            reserve(64 << 20)
        await asyncio.to_thread(given.wait, 60)
        sweeping.cancel()

    monkeypatch.setattr("trtserve.gateway.admission.give_memory_back", give)
    asyncio.run(run())
    assert reserved == [0]


def test_a_triton_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtserve.gateway.triton._ANSWER_SECONDS", 0.1)
    monkeypatch.setattr("trtserve.gateway.triton._READY_SECONDS", 0.1)

    async def ask(address: str) -> None:
        triton = TritonHttp(address, address)
        try:
            assert not await triton.is_ready()
            with pytest.raises(RefusedError, match="does not answer"):
                await triton.model("demo")
        finally:
            await triton.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        asyncio.run(asyncio.wait_for(ask(f"127.0.0.1:{listening.getsockname()[1]}"), timeout=60))


_HEAD = b"HTTP/1.1 200 OK\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"garbage\r\n\r\n", "Bad status line"),
        (_HEAD + b"Content-Length: 5\r\n\r\n<html", "with a JSON object"),
        (_HEAD + b"Content-Length: 200000\r\n\r\n" + b"[" * 200_000, "with a JSON object"),
        (_HEAD + b"Content-Length: 2\r\n\r\n[]", "with a JSON object"),
        (_HEAD + b"Content-Length: 210009\r\n\r\n" + b'{"a":[' + b"[]," * 70_000 + b"0]}", "with a JSON object"),
        (_HEAD + b"Content-Length: 2\r\n\r\n{}", "as no Triton does"),
        (_HEAD + b"Content-Length: 28\r\n\r\n" + b'{"name": "m", "input": [1]}\n', "as no Triton does"),
        (_HEAD + b"\r\n" + b"x" * (2 << 20), "has more than 1 MiB"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/x\r\nContent-Length: 0\r\n\r\n", "with status 302"),
        (b"HTTP/1.1 101 Other\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", "with status 101"),
        (_CONTINUE + _HEAD + b"Content-Length: 2\r\n\r\n[]", "with a JSON object"),
        (_CONTINUE * 10_000 + _HEAD + b"Content-Length: 2\r\n\r\n[]", "more than 16 interim answers"),
        (b"HTTP/1.1 999 No\r\nContent-Length: 2\r\n\r\n{}", "with status 999"),
    ],
)
def test_a_triton_that_talks_nonsense_is_unavailable(
    answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtserve.gateway.triton._LARGEST_ANSWER", 1 << 20)

    async def ask(address: str) -> None:
        triton = TritonHttp(address, address)
        try:
            with pytest.raises(RefusedError, match=reason) as caught:
                await triton.model("demo")
            assert caught.value.status == 503
            assert len(caught.value.text) < 400
        finally:
            await triton.close()

    with sending(lambda _: iter([answer])) as (port, _):
        asyncio.run(asyncio.wait_for(ask(f"127.0.0.1:{port}"), timeout=60))


@pytest.mark.parametrize("length", [b"many", b"9" * 18, b"9" * 5000, b"-1", b"50"])
def test_an_answer_with_a_false_length_of_its_json_is_unavailable(length: bytes) -> None:
    """The gateway gave the request an id, and reads the JSON to take it out again."""
    config = b'{"name": "demo", "input": [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}]}'
    lie = _HEAD + b"Inference-Header-Content-Length: " + length + b"\r\nContent-Length: 2\r\n\r\n{}"

    def answer(path: str) -> Iterator[bytes]:
        yield _HEAD + b"Content-Length: %d\r\n\r\n" % len(config) + config if path.endswith("/config") else lie

    body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Hi"]}]}
    with (
        sending(answer) as (port, _),
        TestClient(Gateway(settings_of(triton_http=f"127.0.0.1:{port}")), base_url="http://127.0.0.1") as client,
    ):
        found = client.post("/v2/models/demo/infer", json=body)
    assert found.status_code == 503, found.text


def test_the_health_page_of_nvidias_front_end_needs_no_key_either(tmp_path: Path) -> None:
    write_private(tmp_path / "key", "k" * 16)
    with TestClient(Gateway(settings_of(key_file=tmp_path / "key")), base_url="http://127.0.0.1") as client:
        here, there = client.get("/health"), client.get("/health/ready")
    assert (there.status_code, there.json()) == (here.status_code, here.json())
    assert there.status_code == 503  # there is no Triton
    assert "Triton" in there.json()["error"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completion", "Did you mean /v1/chat/completions?"),
        ("/v1/message", "Did you mean /v1/messages?"),
        ("/api/chats", "Did you mean /api/chat?"),
        ("/v1/secret", "POST /v1/secret."),
    ],
)
def test_a_misspelt_path_is_answered_with_the_one_that_was_meant(path: str, meant: str) -> None:
    with TestClient(Gateway(settings_of()), base_url="http://localhost") as client:
        answer = client.post(path, json={})
    assert answer.status_code == 404
    assert f'{meant}"' in answer.text


SITE = {"origin": "https://app.example"}
KEY = {"authorization": "Bearer " + "k" * 16}


@pytest.mark.parametrize("allowed", [("https://app.example", "http://localhost:3000"), ("*",)])
def test_pages_of_a_site_that_is_allowed(tmp_path: Path, allowed: tuple[str, ...]) -> None:
    key = tmp_path / "key"
    write_private(key, "k" * 16)
    settings = settings_of(key_file=key, allow_origins=allowed)
    client = TestClient(Gateway(settings), base_url="http://127.0.0.1")
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
    before = client.options("/v1/chat/completions", headers={**SITE, **asked})
    assert before.status_code == 200
    assert "x-stainless-os" in before.headers["access-control-allow-headers"]
    answers = [before, client.get("/version", headers={**SITE, **KEY}), client.get("/version", headers=SITE)]
    assert [answer.status_code for answer in answers] == [200, 200, 401]
    origin = "*" if allowed == ("*",) else SITE["origin"]
    assert {answer.headers["access-control-allow-origin"] for answer in answers} == {origin}
    assert not any("access-control-allow-credentials" in answer.headers for answer in answers)
    other = client.get("/version", headers={"origin": "https://other.example", **KEY})
    assert other.status_code == (200 if allowed == ("*",) else 403)


@pytest.mark.parametrize("texts", [False, True])
def test_the_request_log_has_texts_only_when_asked(tmp_path: Path, texts: bool) -> None:
    log = tmp_path / "requests.jsonl"
    settings = settings_of(request_log=log, request_log_texts=texts)
    client = TestClient(Gateway(settings), base_url="http://127.0.0.1")
    with client:
        assert client.get("/version").status_code == 200
        assert client.post("/v1/nothing", json={"prompt": "a secret"}).status_code == 404
        assert client.get("/version", headers={"host": "elsewhere"}).status_code == 421
        client.post("/v1/nothing", content=b'{"no number": [NaN, 1e999]}')
    found = [json.loads(line, parse_constant=pytest.fail) for line in log.read_text().splitlines()]
    assert found.pop().get("request") == ({"no number": ["NaN", "Infinity"]} if texts else None)
    assert [(each["path"], each["status"]) for each in found] == [
        ("/version", 200),
        ("/v1/nothing", 404),
        ("/version", 421),
    ]
    assert found[1].get("request") == ({"prompt": "a secret"} if texts else None)
    assert "elsewhere" in found[2]["refused"]
    assert log.stat().st_mode & 0o077 == 0
    log.rename(tmp_path / "older")
    TestClient(Gateway(settings), base_url="http://127.0.0.1").get("/", headers={"host": "elsewhere"})
    assert len(log.read_text().splitlines()) == 1  # begun again
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):
        Gateway(replace(settings, request_log=tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="cannot be written: No such device"):  # nobody reads it
        Gateway(replace(settings, request_log=tmp_path / "pipe"))
    with pytest.raises(UsageError, match="/dev/null is not a file"):
        Gateway(replace(settings, request_log=Path("/dev/null")))


def test_the_requests_of_all_processes_of_a_gateway_count() -> None:
    counts = np.array([0, 2], np.int32)
    gate = Gate(RequestLimits(requests=3), counts)
    first, second = (Exchange(task=cast(Any, None)) for _ in range(2))
    with gate.enter(first):
        assert counts.tolist() == [1, 2]
        with pytest.raises(RefusedError, match="3 requests are running"), gate.enter(second):
            pass
        counts[1] = 0
        with gate.enter(second):
            assert gate.running == 2
    assert counts.tolist() == [0, 0]


@pytest.mark.parametrize(("ids", "same"), [(("a", "a"), True), (("a", "b"), False), (("", ""), False)])
def test_only_an_id_that_both_have_stops_two_requests(ids: tuple[str, str], same: bool) -> None:
    gate = Gate(RequestLimits())
    first, second = (Exchange(task=cast(Any, None), request_id=each) for each in ids)
    with gate.enter(first), gate.enter(second):
        assert gate.has_other(first) is same
    with gate.enter(first):
        assert not gate.has_other(first)


def test_the_request_log_is_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RequestLog(tmp_path / "requests.jsonl", texts=False)
    scope = {"method": "POST", "path": "/v1/chat/completions"}
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    for age, tokens in ((9.0, 30), (8.5, 0), (4.0, 50)):  # the second one was refused; all end now
        exchange = Exchange(task=cast(Any, None), hang_up=None)
        exchange.started = now - age
        exchange.log.update({"prompt_tokens": tokens, "completion_tokens": 7} if tokens else {})
        log.add(scope, exchange, 200 if tokens else 429)
    found = read_trace(tmp_path / "requests.jsonl")
    assert [(each.input_len, each.output_len) for each in found] == [(30, 7), (50, 7)]
    assert found[1].seconds == pytest.approx(5.0)


def test_a_line_of_the_request_log_that_was_cut_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, scope = RequestLog(tmp_path / "requests.jsonl", texts=False), {"method": "POST", "path": "/v1/completions"}
    write = os.write
    for cut in (10, None, None):  # the disk is full, then no more
        monkeypatch.setattr(os, "write", lambda handle, line, cut=cut: write(handle, line[:cut]))
        log.add(scope, Exchange(task=cast(Any, None), hang_up=None), 200)
    _, *others = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in others] == [200, 200]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")], ids=["memory", "threads"])
def test_a_request_without_memory_is_asked_to_come_again(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def receive(*_: object) -> bytes:
        raise error

    monkeypatch.setattr("trtserve.gateway.app.receive_body", receive)
    answer = TestClient(Gateway(settings_of()), base_url="http://localhost").post("/other", json={})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json() == {"error": "the gateway has no memory left for this request"}


def test_requests_are_held_to_their_time_after_a_look_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryError

    monkeypatch.setattr("trtserve.gateway.admission._SWEEP", 0.001)
    monkeypatch.setattr("trtserve.gateway.admission.give_memory_back", fail)
    gate = Gate(RequestLimits(request_seconds=0))
    with gate.memory() as reserve:
        reserve(256 << 20)

    async def run() -> None:
        sweeping = asyncio.create_task(gate.sweep())
        exchange = Exchange(task=asyncio.create_task(asyncio.sleep(60)), hang_up=None)
        with gate.watch(exchange), pytest.raises(asyncio.CancelledError):
            await exchange.task
        assert exchange.refusal is not None
        assert exchange.refusal.status == 504
        sweeping.cancel()

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_a_gateway_shows_life_after_a_moment_without_file_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, shown = [OSError(24, "Too many open files")], asyncio.Event()

    def beat(_: object) -> None:
        if failures:
            raise failures.pop()
        shown.set()

    monkeypatch.setattr("trtserve.gateway.triton._INTERVAL", 0.001)
    monkeypatch.setattr("trtserve.gateway.standstill.GatewayBeat.beat", beat)

    async def run() -> None:
        health = TritonHealth(TritonHttp(f"{HOST}:1", f"{HOST}:1"), Gate(RequestLimits()), None, tmp_path)
        living = asyncio.create_task(health.show_life())
        await shown.wait()
        living.cancel()

    asyncio.run(asyncio.wait_for(run(), timeout=60))


@pytest.mark.parametrize(("present", "failures"), [(0, 0), (0, 1), (1, 0)])
def test_a_stub_that_died_before_the_first_look_is_missed(
    present: int, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ProcessId.of(os.getpid())
    assert own is not None
    left = [OSError(24, "Too many open files")] * failures

    async def is_ready(_: TritonHttp, path: str = "") -> bool:
        return True

    def python_stubs(_: ProcessId) -> dict[ProcessId, str]:
        if left:
            raise left.pop()
        return {own: "core"} if present else {}

    monkeypatch.setattr("trtserve.gateway.triton.python_stubs", python_stubs)
    monkeypatch.setattr("trtserve.gateway.triton._INTERVAL", 0.001)
    monkeypatch.setattr(TritonHttp, "is_ready", is_ready)

    async def run() -> None:
        triton, gate = TritonHttp(f"{HOST}:1", f"{HOST}:1"), Gate(RequestLimits())
        health = TritonHealth(triton, gate, own, python_models=["core"] * (present + 1))
        watching = asyncio.create_task(health.watch())
        while (problem := await health.problem(find_target("GET", "/v2/health/ready"))) is None:
            await asyncio.sleep(0.001)
        watching.cancel()
        assert "a process of the model core has ended" in problem

    asyncio.run(asyncio.wait_for(run(), timeout=60))


_MANY = b",1" * (MOST_VALUES + 1)
_NESTED = b"[" * (MOST_PARTS + 1)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[1" + _MANY + b"]", "524288 values"),
        (b'["\\"' + _MANY + b'\\\\", "\\\\"]', ""),
        (b'["' + b"\\n" * (2 << 20) + b'"' + _MANY + b"]", "524288 values"),
        (b'[""' + b'," "' * (MOST_VALUES + 1) + b"]", "524288 values"),
        (b'"' * (4 << 20) + _MANY, "524288 values"),
        (b'["' + _MANY, ""),
        (_NESTED, "65536 objects, lists and keys"),
        (b"{" + b'"k":1,' * MOST_PARTS + b'"k":1}', "65536 objects, lists and keys"),
        (b'{"k":[' + b"{}," * MOST_PARTS + b"{}]}", "65536 objects, lists and keys"),
        (b'{"k":"' + b'\\"{[:,' * (1 << 20) + b'"}', ""),
        (b'{"k":"' + b"{[:,\\\\" * (1 << 20) + b'"' + _NESTED, "65536 objects, lists and keys"),
        (b"[" + b"5," * MOST_VALUES + b"5]", ""),
    ],
    ids=[
        *("numbers", "in a text", "behind escapes", "texts", "quotes", "without an end"),
        *("nested", "keys", "objects", "a text like JSON", "behind a text like JSON", "token ids"),
    ],
)
def test_values_and_parts_are_counted_without_those_in_texts_and_in_little_memory(body: bytes, words: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RefusedError, match=words) if words else nullcontext():
            require_few(body)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_where_a_body_is_cut_for_counting_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({'a"': ["\\", 'b\\"[:{,', "[", [], {"c": 'd\\\\"'}, 1, 2]}).encode()
    for size in range(1, len(body)):
        for limits, words in {(6, 6): "", (5, 6): "values", (6, 5): "objects"}.items():
            monkeypatch.setattr(asgi, "_PIECE", size)
            monkeypatch.setattr(asgi, "MOST_PARTS", limits[1])
            with pytest.raises(RefusedError, match=words) if words else nullcontext():
                require_few(body, limits[0])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"allow_origin": ("app.example",)}, "expected a site such as"),
        ({"allow_origin": ("https://app.example/path",)}, "expected a site such as"),
        ({"allow_origin": ("null",)}, "expected a site such as"),
        ({"image_host": ("https://images.example",)}, "expected a host as URLs name it"),
        ({"image_host": ("a.example", "[::1")}, "expected a host as URLs name it"),
        *(
            ({"trace_to": url}, "expected the URL of an OTLP/HTTP receiver")
            for url in ("http://", "http://[::1", "http://a b/", "http://a:b", "http://a:4318/x,rate=1", "ftp://a")
        ),
        ({"allow_origin": ("*",)}, "Add a key|would let every page"),
        ({"allow_origin": ("https://app.example",), "raw_http": True}, "knows no --allow-origin"),
    ],
)
def test_origins_hosts_and_receivers_that_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ServerSpec(**settings)


@pytest.mark.parametrize(
    ("parameters", "needs"),
    [
        ({}, {"m"}),
        (
            {"tensorrt_llm_model_name": "", "tensorrt_llm_draft_model_name": ""},
            {"m", "preprocessing", "tensorrt_llm", "postprocessing"},
        ),
        (
            {"tensorrt_llm_model_name": "core", "tensorrt_llm_draft_model_name": "draft"},
            {"m", "preprocessing", "core", "draft", "postprocessing"},
        ),
    ],
)
def test_a_bls_model_needs_what_it_calls(parameters: dict[str, str], needs: set[str]) -> None:
    config = {"name": "m", "parameters": {name: {"string_value": value} for name, value in parameters.items()}}
    assert set(_model(config).needs) == needs


def test_the_refusal_of_a_change_says_where_the_admin_key_is() -> None:
    with pytest.raises(RefusedError) as refused:
        Access(None, loopback=True, admin_key="k" * 20).require_admin({"authorization": "Bearer other"})
    assert refused.value.status == 401
    assert refused.value.text.startswith("Send the admin key")
    assert "servers/NAME.gateway/1.admin-key" in refused.value.text
    assert "--admin-key-file" in refused.value.text
