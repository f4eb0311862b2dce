"""Loading and unloading models within a budget, with models that are only pretended."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.gateways import settings_of
from tests.support.lies import VALUES, lie
from tests.support.virtual_time import run_in_virtual_time
from trtserve.errors import ServerStartError
from trtserve.gateway import keeping, many
from trtserve.gateway.asgi import RefusedError
from trtserve.gateway.keeping import ModelKeeper, OneModel
from trtserve.gateway.many import ManyModels
from trtserve.gateway.triton import SilentError, TritonHttp


class Pretended:
    """A model that takes a moment to load, and notes what happens to it."""

    http = TritonHttp("127.0.0.1:1", "")

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes, self.lives = name, notes, True

    def alive(self) -> bool:
        return self.lives

    async def stop(self) -> None:
        self.notes.append(f"-{self.name}")


class Models:
    """Models a, b and c of 4, 4 and 6 bytes, of which 10 may be loaded."""

    def __init__(self, **more: Any) -> None:
        self.notes: list[str] = []
        self.broken: set[str] = set()
        models = [
            self._model(name, memory, name in more.get("exclusive", ""))
            for name, memory in (("a", 4), ("b", 4), ("c", 6), ("huge", 11))
        ]
        self.keeper = ModelKeeper(models, budget=10, idle=more.get("idle", 0.0))

    def _model(self, name: str, memory: int, exclusive: bool) -> OneModel:
        async def load() -> Pretended:
            self.notes.append(f"+{name}")
            await asyncio.sleep(0.01)
            if name in self.broken:
                raise ServerStartError("It is broken.")
            return Pretended(name, self.notes)

        return OneModel(name=name, memory=memory, load=load, exclusive=exclusive)

    async def ask(self, name: str, during: Callable[[], Coroutine[Any, Any, object]] | None = None) -> None:
        async with self.keeper.use(self.keeper.models[name]) as running:
            assert running.alive()
            if during is not None:
                await during()


def test_first_requests_that_come_together_load_a_model_once() -> None:
    async def together() -> None:
        models = Models()
        await asyncio.gather(*(models.ask("a") for _ in range(20)))
        assert models.notes == ["+a"]

    run_in_virtual_time(together())


def test_what_was_used_least_recently_makes_room() -> None:
    async def three() -> None:
        models = Models()
        for name in ("a", "b", "a", "c"):
            await asyncio.sleep(1)
            await models.ask(name)
        assert models.notes == ["+a", "+b", "-b", "+c"]

    run_in_virtual_time(three())


def test_a_model_with_requests_leaves_after_them_however_many_more_come() -> None:
    async def busy() -> None:
        models, done = Models(), asyncio.Event()
        first = asyncio.create_task(models.ask("c", done.wait))
        await asyncio.sleep(0.05)
        other = asyncio.create_task(models.ask("b", lambda: asyncio.sleep(0)))
        blocked = asyncio.create_task(models.ask("a", lambda: asyncio.sleep(0)))
        await asyncio.sleep(0.05)
        late = asyncio.create_task(models.ask("c"))  # waits until a had its turn
        await asyncio.sleep(0.05)
        assert models.notes == ["+c", "+b", "-b", "+a"], "c has requests, b has none"
        again = asyncio.create_task(models.ask("huge"))
        done.set()
        with pytest.raises(RefusedError, match="huge needs 11 bytes of memory"):
            await again
        await asyncio.gather(first, other, blocked, late)

    run_in_virtual_time(busy())


def test_no_request_is_lost_when_two_models_that_exclude_each_other_are_asked_in_turn() -> None:
    async def in_turn() -> None:
        models = Models(exclusive="ab")
        pause = lambda: asyncio.sleep(0.002)  # noqa: E731 - read once
        await asyncio.gather(*(models.ask("ab"[number % 2], pause) for number in range(40)))
        loaded = 0
        for note in models.notes:
            loaded += 1 if note[0] == "+" else -1
            assert loaded <= 1

    run_in_virtual_time(in_turn())


def test_a_busy_model_is_not_waited_for_endlessly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_ROOM_SECONDS", 0.1)

    async def endless() -> None:
        models, done = Models(), asyncio.Event()
        first = asyncio.create_task(models.ask("c", done.wait))
        second = asyncio.create_task(models.ask("a", done.wait))
        await asyncio.sleep(0.05)
        with pytest.raises(RefusedError, match="there is no room for b: a, c are answering") as refusal:
            await models.ask("b")
        assert refusal.value.status == 503
        await models.ask("a")  # nobody waits for its end any more
        done.set()
        await asyncio.gather(first, second)

    run_in_virtual_time(endless())


def test_a_model_that_cannot_be_loaded_says_why_and_is_not_tried_at_once_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> None:
        models = Models()
        models.broken.add("a")
        for _ in range(3):
            with pytest.raises(RefusedError, match=r"the model a could not be loaded: It is broken\.") as refusal:
                await models.ask("a")
            assert refusal.value.status == 503
        assert models.notes == ["+a"]
        assert models.keeper.models["a"].state == "unloaded"
        models.broken.clear()
        monkeypatch.setattr(keeping, "_FAILED_SECONDS", 0.0)
        await models.ask("a")

    run_in_virtual_time(broken())


@pytest.mark.parametrize(
    ("error", "why"),
    [(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"), (OSError("no pipe"), "no pipe")],
    ids=str,
)
def test_a_model_whose_start_the_machine_refuses_says_why(error: OSError, why: str) -> None:
    async def full() -> None:
        models = Models()

        async def load() -> Any:
            models.notes.append("+a")
            raise error

        models.keeper.models["a"].load = load
        for _ in range(2):
            with pytest.raises(RefusedError, match=f"the model a could not be loaded: {why}$"):
                await models.ask("a")
        assert models.notes == ["+a"]

    run_in_virtual_time(full())


def test_idle_models_are_unloaded_and_those_that_ended_are_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_SWEEP", 0.01)

    async def idle() -> None:
        models = Models(idle=0.1)
        sweep = asyncio.create_task(models.keeper.sweep())
        await models.ask("a", lambda: asyncio.sleep(0.3))  # longer than a model may be idle
        assert models.notes == ["+a"]
        await asyncio.sleep(0.3)
        assert models.notes == ["+a", "-a"]
        await models.ask("a")
        running = models.keeper.models["a"].running
        assert isinstance(running, Pretended)
        running.lives = False
        await models.ask("a")
        assert models.notes[2:] == ["+a", "-a", "+a"]
        sweep.cancel()
        await models.keeper.close()
        assert models.notes[-1] == "-a"

    run_in_virtual_time(idle())


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/v1/chat/completions", 400, "GET /v1/chat/completions has no body: send JSON that names a model"),
        ("POST", "/v1/models", 405, "/v1/models takes GET or HEAD, not POST"),
        ("GET", "/v1/nothing/ready", 404, "/v1/nothing/ready is not a path of this server"),
    ],
)
def test_a_wrong_path_or_method_gets_an_error_in_the_form_of_the_api(
    tmp_path: Path, method: str, path: str, status: int, words: str
) -> None:
    settings = settings_of(model="", run_folder=tmp_path)
    with TestClient(ManyModels(settings, Models().keeper), base_url="http://127.0.0.1") as client:
        answer = client.request(method, path)
        unnamed = client.post("/api/show", json={"model": ":latest"})
    assert (unnamed.status_code, unnamed.json()["error"]) == (400, "you must provide a model parameter")
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, words)
    assert ("allow" in answer.headers) == (status == 405)


def test_no_body_of_a_stranger_is_a_fault(tmp_path: Path) -> None:
    chance, good = random.Random(27), json.dumps({"model": "none", "messages": [{"role": "user", "content": "Hi"}]})
    paths = (
        "/v1/chat/completions",
        "/v1/embeddings",
        "/api/chat",
        "/api/show",
        "/v1/messages",
        "/v2/models/none/infer",
    )
    bodies = [lie(good, chance).encode("utf-8", "surrogatepass") for _ in range(150)]
    bodies += [json.dumps({"model": value}).encode() for value in VALUES]
    settings = settings_of(model="", run_folder=tmp_path)
    with TestClient(ManyModels(settings, Models().keeper), base_url="http://127.0.0.1") as client:
        found = {client.post(chance.choice(paths), content=body).status_code for body in bodies}
    assert found <= {400, 404, 503}, found


@pytest.mark.parametrize("answering", ["ab", "b", ""])
def test_a_stored_response_is_asked_for_where_a_model_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answering: str
) -> None:
    """Nothing is loaded for it: c has ended by itself, and a does not answer in two of the cases."""
    models, asked = Models(), list[str]()

    async def ask(http: Any, _scope: object, _body: bytes, send: Any, *, passes: Callable[[int], bool]) -> bool:
        asked.append(http)
        if http not in answering:
            raise SilentError("silent")
        if http == "b":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        return passes(200 if http == "b" else 404)

    monkeypatch.setattr(many, "_ask", ask)
    monkeypatch.setattr(keeping, "_SWEEP", 60.0)
    for name in "abc":
        running: Any = Pretended(name, models.notes)
        running.http, running.lives = name, name != "c"
        models.keeper.models[name].state, models.keeper.models[name].running = "loaded", running
    with TestClient(ManyModels(settings_of(run_folder=tmp_path), models.keeper), base_url="http://127.0.0.1") as client:
        found = client.get("/v1/responses/resp_1")
        assert models.notes == []
    assert (asked, found.status_code) == (["a", "b"], 200 if answering else 404)
