"""One port in front of many models, each with a server and a gateway of its own that is started when it is asked.

Nothing of an API is known here but where it names the model: requests and answers pass unchanged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from functools import partial
from http import HTTPStatus
from operator import attrgetter

from multidict import CIMultiDict
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from trtserve._version import __version__
from trtserve.gateway.admission import ADMIN_PATHS, OPEN_PATHS, Exchange, Gate
from trtserve.gateway.app import Entrance
from trtserve.gateway.asgi import (
    Message,
    Receive,
    RefusedError,
    Scope,
    Send,
    aside,
    headers_of,
    looking_again,
    receive_body,
    replayed,
    require_few,
)
from trtserve.gateway.keeping import ModelKeeper, OneModel
from trtserve.gateway.ollama import tags, without_tag
from trtserve.gateway.openai.answers import Json
from trtserve.gateway.openai.errors import OLLAMA, asks_model, error_content
from trtserve.gateway.relay import NOT_PASSED_ON, end_with_client
from trtserve.gateway.settings import GatewaySettings
from trtserve.gateway.standstill import GatewayBeat
from trtserve.gateway.triton import SilentError, TritonHttp, find_target
from trtserve.programs.shared.run_folder import DRAINING

_BEAT, _STOP_SECONDS = 0.5, 3.0
# Hop by hop, or about the connection to this server: a page's origin has been judged here, and bodies are sent as they
# are inside their encoding.
_KEPT_HERE = frozenset(
    (b"host", b"origin", b"content-length", b"content-encoding", b"expect", b"te", b"trailer", b"upgrade")
) | frozenset(NOT_PASSED_ON)
_PAGES = (
    *OPEN_PATHS,
    "/version",
    "/metrics",
    "/v1/models",
    "/api/version",
    "/api/tags",
    "/api/ps",
    "/v2/repository/index",
)


class _Named(BaseModel):
    """What is read of a body."""

    model: str = ""


class ManyModels(Entrance):
    """The ASGI application in front of the servers of many models."""

    def __init__(self, settings: GatewaySettings, keeper: ModelKeeper) -> None:
        super().__init__(settings, Gate(settings.limits))
        self._keeper, self._created = keeper, int(time.time())
        self._pages = Starlette(
            routes=[
                Route("/", _say_where),
                *(Route(path, _say_ready) for path in OPEN_PATHS if path != "/"),
                Route("/version", _say_version),
                Route("/metrics", self._metrics),
                Route("/api/version", _say_version),
                Route("/api/tags", self._tags),
                Route("/api/ps", self._tags),
                Route("/v1/models", self._listed),
                Route("/v1/models/{name:path}", self._described),
                Route("/v2/repository/index", self._index, methods=["POST"]),
                Route("/v2/models/{name}/ready", self._ready),
            ],
            exception_handlers={RefusedError: _refuse, HTTPException: _refuse_path},
            lifespan=self._running,
        )

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._pages(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        path: str = scope["path"]
        if path in _PAGES or path.startswith("/v1/models/") or path.endswith("/ready"):
            await self._pages(scope, replayed(b"", receive), send)
            return
        if path.startswith(ADMIN_PATHS):
            raise RefusedError(404, "replicas and adapters belong to the server of one model: trtserve start NAME")
        limits = self.settings.limits
        with self.gate.memory() as reserve:
            body = await receive_body(headers_of(scope), receive, limits, reserve)
            model = None if path.startswith("/v1/responses/") else await self._named(scope, body)
            watch = asyncio.create_task(end_with_client(receive, exchange.task))
            try:
                if model is None:
                    await self._find_response(scope, send)
                else:
                    exchange.needs = (model.name,)
                    await self._pass_on(model, scope, body, send)
            finally:
                watch.cancel()

    async def _named(self, scope: Scope, body: bytes) -> OneModel:
        """Return the model that a request names. Raises RefusedError if there is none."""
        path: str = scope["path"]
        if path == "/v2" or path.startswith("/v2/"):
            target = find_target(scope["method"], scope["raw_path"].decode("ascii"))
            if target.model is None:
                raise RefusedError(404, "this port has many models: ask for one of them, /v2/models/NAME")
            return self._model(target.model)
        if not asks_model(path):
            raise RefusedError(404, f"{path[:200]} is not a path of this server")
        if not body:
            raise RefusedError(400, f"{scope['method']} {path[:200]} has no body: send JSON that names a model")
        if len(body) > self.settings.limits.json_bytes:
            raise RefusedError(413, f"the body has more than {self.settings.limits.json_bytes} bytes")
        await aside(partial(require_few, body), body)
        try:
            named = await aside(partial(_Named.model_validate_json, body), body)
        except ValidationError as error:
            raise RefusedError(400, f"the body does not name a model: {error.errors()[0]['msg'][:200]}") from None
        name = without_tag(named.model) if path.startswith(OLLAMA) else named.model
        if not name and len(self._keeper.models) > 1:
            raise RefusedError(400, "you must provide a model parameter")
        return self._model(name or next(iter(self._keeper.models)))

    def _model(self, name: str) -> OneModel:
        """Return the model with this name, or with an adapter of this name."""
        models = self._keeper.models
        found = models.get(name) or next((each for each in models.values() if name in each.adapters()), None)
        if found is None:
            known = ", ".join(sorted(models))
            raise RefusedError(404, f"The model `{name[:200]}` does not exist. This server has: {known}.")
        return found

    async def _pass_on(self, model: OneModel, scope: Scope, body: bytes, send: Send) -> None:
        """Send a request to the server of a model, which is started first if it does not run.

        One that ends before its answer begins, because somebody stopped it, is started again once.
        """
        to_client = _ToClient(send)
        for last in (False, True):
            async with self._keeper.use(model) as running:
                try:
                    await _ask(running.http, scope, body, to_client)
                except SilentError:
                    if last or to_client.begun or running.alive():
                        raise
                else:
                    return

    async def _find_response(self, scope: Scope, send: Send) -> None:
        """Ask the models that are loaded for a stored response: its id does not say whose it is.

        None is loaded for it, as what a model has stored ends with it, and one that does not answer has no say.
        """
        to_client = _ToClient(send)
        for model in filter(attrgetter("ready"), self._keeper.held):
            async with self._keeper.use(model) as running:
                try:
                    if await _ask(
                        running.http, scope, b"", to_client, passes=lambda status: status != HTTPStatus.NOT_FOUND
                    ):
                        return
                except SilentError:
                    if to_client.begun:
                        raise
        raise RefusedError(404, "no model that is loaded has this response")

    @asynccontextmanager
    async def _running(self, _: Starlette) -> AsyncIterator[None]:
        watches = [asyncio.create_task(each) for each in (self.gate.sweep(), self._keeper.sweep(), self._show_life())]
        try:
            yield
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            await self._keeper.close()

    async def _show_life(self) -> None:
        """Show that the event loop turns; when the server is stopped without a drain, end the requests soon."""
        folder = self.settings.run_folder
        assert folder is not None
        beat, left = GatewayBeat(folder), _STOP_SECONDS
        while True:
            with looking_again():
                beat.beat()
            await asyncio.sleep(_BEAT)
            if self.gate.draining and not (folder / DRAINING).exists():
                left -= _BEAT
                for name in self._keeper.models if left < 0 else ():
                    self.gate.end_all(RefusedError(503, "the server is stopping"), needing=name)

    def _entries(self) -> dict[str, Json]:
        """Return the entries of the list of models: each, and its adapters."""
        entries = {}
        for model in self._keeper.models.values():
            for name in (model.name, *model.adapters()):
                entries[name] = {
                    "id": name,
                    "object": "model",
                    "created": self._created,
                    "owned_by": "trtserve",
                    "type": "model",
                    "display_name": name,
                    "created_at": datetime.fromtimestamp(self._created, timezone.utc).isoformat(),
                    "parent": None if name == model.name else model.name,
                    "status": {"value": model.state},
                }
        return entries

    async def _listed(self, _: Request) -> Response:
        entries = list(self._entries().values())
        pages = {"has_more": False, "first_id": entries[0]["id"], "last_id": entries[-1]["id"]}
        return JSONResponse({"object": "list", "data": entries, **pages})

    async def _tags(self, request: Request) -> Response:
        entries = self._entries().values()
        every = request.url.path == "/api/tags"
        return JSONResponse(tags([each for each in entries if every or each["status"]["value"] == "loaded"]))

    async def _described(self, request: Request) -> Response:
        self._model(name := request.path_params["name"])
        return JSONResponse(self._entries()[name])

    async def _index(self, _: Request) -> Response:
        states = {True: "READY", False: "UNAVAILABLE"}
        return JSONResponse(
            [
                {"name": each.name, "state": states[each.state == "loaded"], "reason": each.state}
                for each in self._keeper.models.values()
            ]
        )

    async def _ready(self, request: Request) -> Response:
        model = self._model(request.path_params["name"])
        reason = f"{model.name} is {model.state}; its first request loads it"
        return JSONResponse(
            None if model.state == "loaded" else {"error": reason}, 200 if model.state == "loaded" else 503
        )

    async def _metrics(self, _: Request) -> Response:
        """Return what is known here; each server has a metrics page of its own."""
        lines = ["# TYPE trtserve_memory_budget_bytes gauge", f"trtserve_memory_budget_bytes {self._keeper.budget}"]
        values: dict[str, Callable[[OneModel], int]] = {
            "loaded gauge": lambda model: int(model.state == "loaded"),
            "memory_bytes gauge": lambda model: 0 if model.state == "unloaded" else model.memory,
            "requests gauge": lambda model: model.users,
            "loads_total counter": lambda model: model.loads,
        }
        for kind, value in values.items():
            name = kind.partition(" ")[0]
            lines.append(f"# TYPE trtserve_model_{kind}")
            lines += [
                f'trtserve_model_{name}{{model="{each.name}"}} {value(each)}' for each in self._keeper.models.values()
            ]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


class _ToClient:
    """Sends an answer, and knows whether it has begun."""

    def __init__(self, send: Send) -> None:
        self._send, self.begun = send, False

    async def __call__(self, message: Message) -> None:
        self.begun = True
        await self._send(message)


async def _ask(
    http: TritonHttp,
    scope: Scope,
    body: bytes,
    send: Send,
    *,
    passes: Callable[[int], bool] = lambda _: True,
) -> bool:
    """Send a request to a server and its answer to the client, as it comes, if the status `passes`."""
    query: bytes = scope["query_string"]
    path = (scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
    headers = CIMultiDict(
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"] if name not in _KEPT_HERE
    )
    async with http.send(scope["method"], path, body, headers) as response:
        if not passes(response.status):
            return False
        kept = [(name, value) for name, value in response.raw_headers if name.lower() not in NOT_PASSED_ON]
        if response.content_length is not None:
            kept.append((b"content-length", str(response.content_length).encode()))
        await send({"type": "http.response.start", "status": response.status, "headers": kept})
        async for chunk in response.content.iter_any():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    return True


async def _refuse(request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, RefusedError)
    return JSONResponse(error_content(request.url.path, refusal.status, refusal.text), refusal.status, refusal.headers)


async def _refuse_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, methods = request.url.path, sorted((error.headers or {}).get("Allow", "").split(", "))
    allowed = " or ".join(filter(None, methods))
    text = f"takes {allowed}, not {request.method}" if allowed else "is not a path of this server"
    content = error_content(path, error.status_code, f"{path[:200]} {text}")
    return JSONResponse(content, error.status_code, error.headers)


async def _say_ready(_: Request) -> Response:
    return JSONResponse({"status": "ready"})


async def _say_version(_: Request) -> Response:
    return JSONResponse({"version": __version__})


async def _say_where(_: Request) -> Response:
    return PlainTextResponse(
        "Many models are served here, each loaded at its first request. They are listed at /v1/models.\n"
    )
