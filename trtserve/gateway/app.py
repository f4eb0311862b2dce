"""The application: access and limits in front of every path, Triton's protocol below /v2, FastAPI for the rest."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Annotated, Literal

from fastapi import Body, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from trtserve._version import __version__
from trtserve.errors import UsageError
from trtserve.gateway.admission import ADMIN_PATHS, OPEN_PATHS, Access, Exchange, Gate
from trtserve.gateway.asgi import (
    Message,
    Receive,
    RefusedError,
    Scope,
    Send,
    headers_of,
    receive_body,
    replayed,
    send_answer,
    without_memory,
)
from trtserve.gateway.openai.answering import Measures, engine_page
from trtserve.gateway.openai.errors import asks_model, error_content, error_event
from trtserve.gateway.openai.images import ImageSources
from trtserve.gateway.openai.router import openai_router
from trtserve.gateway.openai.served import Backend
from trtserve.gateway.page import page_router
from trtserve.gateway.relay import Relay
from trtserve.gateway.replicas import ReplicaAddress, Replicas, SharedState, addresses_of
from trtserve.gateway.request_log import RequestLog
from trtserve.gateway.settings import GatewaySettings, read_key
from trtserve.gateway.triton import TritonHealth, TritonHttp, TritonPath
from trtserve.repository.profiles import POSTPROCESSING, PREPROCESSING

HANG_UP = "trtserve.hang_up"
"""ASGI extension of our listener: a function that closes the connection without waiting for the client."""
LET_IN = "trtserve.let_in"
"""Another one: a function that keeps the connection when others need room, because its client may use the server."""

_LOG = logging.getLogger(__name__)
_READY = TritonPath(operation="ready", path="/v2/health/ready", model=None)
_GRPC_GRACE = 1.0
_STREAMS = (b"text/event-stream", b"application/x-ndjson")
# Sent before the whole body was read: what is left of it must not be taken for the next request.
_BEFORE_BODY = (401, 408, 413, 421)


@dataclass(frozen=True, kw_only=True)
class GatewayParts:
    """What the routes of a gateway share."""

    settings: GatewaySettings
    triton: TritonHttp
    gate: Gate
    health: TritonHealth


class Entrance(ABC):
    """An ASGI application that lets requests in: access, limits, the request log, and errors in every API's form."""

    def __init__(self, settings: GatewaySettings, gate: Gate) -> None:
        self.settings, self.gate = settings, gate
        origins, loopback = settings.allow_origins, ip_address(settings.host).is_loopback
        admin_key = None if settings.admin_key_file is None else read_key(settings.admin_key_file)
        self.access = Access(settings.api_key, loopback=loopback, origins=origins, admin_key=admin_key)
        self._entry: Callable[[Scope, Receive, Send], Awaitable[None]] = self._answer
        if origins:  # never with credentials: a page must send the key itself
            self._entry = CORSMiddleware(
                self._answer,
                allow_origins=origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                expose_headers=("x-request-id", "retry-after"),
            )
        log = settings.request_log
        self._log = None if log is None else RequestLog(log, texts=settings.request_log_texts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the start and the end of the server."""
        await self._entry(scope, receive, send)

    @abstractmethod
    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the messages of the server's start and end."""

    @abstractmethod
    async def _serve(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        """Answer a request that was let in. Raises RefusedError."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None
        exchange = Exchange(task=task, hang_up=scope.get("extensions", {}).get(HANG_UP))
        answer = _Answer(exchange, send, scope["path"])
        with ExitStack() as stack:
            if self._log is not None:
                stack.callback(lambda: self._log.add(scope, exchange, answer.status) if self._log else None)
            stack.enter_context(self.gate.watch(exchange))
            try:
                self.access.check(scope["path"], headers_of(scope))
                if scope["path"] not in OPEN_PATHS:
                    scope.get("extensions", {}).get(LET_IN, lambda: None)()
                    if scope["path"].startswith(ADMIN_PATHS):
                        self.access.require_admin(headers_of(scope))
                    stack.enter_context(self.gate.enter(exchange))
                await self._serve(scope, receive, answer, exchange)
            except RefusedError as refusal:
                await answer.refuse(refusal)
            except asyncio.CancelledError:
                if exchange.refusal is not None:  # otherwise the client has gone
                    await answer.refuse(exchange.refusal)
            except Exception as error:  # noqa: BLE001 - a defect here must not look like one of Triton's
                if (known := without_memory(error)) is None:
                    _LOG.exception("%s %s failed", scope["method"], scope["path"])
                await answer.refuse(known or RefusedError(500, "the request failed; the gateway's log says why"))


class Gateway(Entrance):
    """The ASGI application of one gateway."""

    def __init__(self, settings: GatewaySettings, shared: SharedState | None = None, process: int = 0) -> None:
        """`shared` is what all processes of this gateway have, and `process` the number of this one."""
        super().__init__(settings, Gate(settings.limits, None if shared is None else shared.requests, process))
        self._triton = TritonHttp(settings.triton_http, settings.metrics, settings.triton_secret)
        if settings.triton_secret is None:
            self._triton = self._server(settings.triton_http)
        self._replicas = Replicas(
            settings.endpoint,
            addresses_of(settings.replicas),
            timeout=settings.limits.request_seconds,
            http=self._server_at,
            shared=shared,
            process=process,
        )
        self._json_limits = replace(settings.limits, body_bytes=settings.limits.json_bytes)
        several = shared is not None and shared.processes > 1
        self._shared_folder = shared.folder if shared is not None and several else None
        self._relay: Relay
        self._health: TritonHealth
        self._measures = Measures()
        # OpenAI's routes ask the core model, or the text model, which asks the others.
        self._needed = (settings.model, *settings.core_models, PREPROCESSING, POSTPROCESSING)
        self._routes = FastAPI(
            title="trtserve", version=__version__, lifespan=self._running, docs_url=None, redoc_url=None
        )
        self._add_routes()

    def _server(self, address: str) -> TritonHttp:
        """Return the HTTP service of a server, which has the key and the certificate of all."""
        settings = self.settings
        return TritonHttp(address, settings.metrics, key=settings.servers_key, tls=settings.servers_tls)

    def _server_at(self, address: ReplicaAddress) -> TritonHttp | None:
        if address.name == self.settings.triton_grpc:
            return self._triton
        return None if address.http_port is None else self._server(f"{address.host}:{address.http_port}")

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._routes(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        path = scope["path"]
        scope["state"] = {**scope.get("state", {}), "exchange": exchange, "send": send}
        if path == "/v2" or path.startswith("/v2/"):
            await self._relay(scope, receive, send)
            return
        if path in OPEN_PATHS:
            await self._routes(scope, replayed(b"", receive), send)
            return
        if asks_model(path):
            exchange.needs = self._needed
            self._health.require(exchange.needs)
        with self.gate.memory() as reserve:
            exchange.reserve = reserve
            body = await receive_body(headers_of(scope), receive, self._json_limits, reserve)
            if self._log is not None and self._log.texts:
                exchange.log["request"] = self._log.body(body)
            await self._routes(scope, replayed(body, receive), send)

    @asynccontextmanager
    async def _running(self, app: FastAPI) -> AsyncIterator[None]:
        """Keep the connections to Triton, and the watch over it, while the server runs."""
        settings = self.settings
        triton = self._triton
        health = TritonHealth(
            triton,
            self.gate,
            settings.triton,
            settings.run_folder,
            python_models=settings.python_models,
            replicas=self._replicas,
        )
        self._health = health
        self._relay = Relay(settings, self._replicas, self.gate, health, self._measures)
        app.state.parts = GatewayParts(settings=settings, triton=triton, gate=self.gate, health=health)
        serving = None
        if settings.grpc_front_port is not None:
            from trtserve.gateway.grpc_front import serve_grpc

            serving = await serve_grpc(settings, self._replicas, self.gate)
        watches = [asyncio.create_task(each) for each in (self.gate.sweep(), health.watch(), health.show_life())]
        try:
            yield
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            if serving is not None:
                await serving.stop(_GRPC_GRACE)
            await triton.close()

    def _add_routes(self) -> None:
        """Add the routes that are not Triton's."""
        routes = self._routes
        routes.add_exception_handler(RequestValidationError, _refuse_invalid)

        @routes.exception_handler(RefusedError)
        async def refuse(_request: object, refusal: RefusedError) -> Response:
            return JSONResponse({"error": refusal.text}, refusal.status, refusal.headers)

        @routes.exception_handler(HTTPException)
        async def no_route(request: Request, error: HTTPException) -> Response:
            """Say which paths there are, or which method a path has."""
            path, allowed = request.url.path, (error.headers or {}).get("Allow")
            text = f"{path} is not served here: OpenAI's API is at /v1, Triton's at /v2, the health at /health."
            text = f"{path} takes {allowed}, not {request.method}." if allowed else text
            known = error.status_code in (404, 405)
            content = error_content(path, error.status_code, text if known else str(error.detail))
            return JSONResponse(content, error.status_code, error.headers)

        @routes.get("/health/ready")  # of NVIDIA's OpenAI front end
        @routes.get("/health")
        async def health() -> Response:
            """Return 200 when every model can answer, else 503 with the reason."""
            reason = await routes.state.parts.health.problem(_READY)
            return JSONResponse({"status": "ready"} if reason is None else {"error": reason}, 503 if reason else 200)

        @routes.get("/version")
        async def version() -> dict[str, str]:
            return {"version": __version__}

        @routes.get("/metrics")
        async def metrics() -> Response:
            """Return the page of Triton's metrics port, and the times of streams that the gateway measures.

            Only the first server's port is known: the page has the gateway's part alone while another one answers.
            """
            page = await self._triton.metrics() if self._replicas.first.http is self._triton else b""
            ours = self._measures.page(backend.adapters) + engine_page(page) + self._replicas.page()
            return Response(page + ours, media_type="text/plain; version=0.0.4")

        @routes.get("/replicas")
        async def replicas() -> JSONResponse:
            self._replicas.apply()  # another process may have changed them
            return JSONResponse({"replicas": self._replicas.listed()})

        @routes.post("/replicas/{action}")
        async def change_replicas(
            action: Literal["add", "remove", "drain", "resume"], address: Annotated[str, Body(embed=True)]
        ) -> JSONResponse:
            try:
                await asyncio.to_thread(self._replicas.change, action, address)
            except UsageError as error:
                raise RefusedError(400, error.message) from error
            self._replicas.apply()
            return JSONResponse({"replicas": self._replicas.listed()})

        settings = self.settings
        endpoint = settings.endpoint
        backend = Backend(
            endpoint,
            tokenizer=settings.tokenizer,
            timeout=settings.limits.request_seconds,
            replicas=self._replicas,
            images=ImageSources(folder=settings.image_folder, hosts=settings.image_hosts),
        )
        require = self._require_model if settings.own else None
        routes.include_router(openai_router(backend, self._measures, require=require, folder=self._shared_folder))
        if settings.ui:
            routes.include_router(page_router(settings.start_again))
        else:
            routes.get("/", include_in_schema=False)(_say_where)

    async def _require_model(self, request: Request, model: str) -> None:
        """Record which models a request needs: it is refused if a process of theirs has died, and ended if one dies."""
        parts: GatewayParts = self._routes.state.parts
        needs = (await parts.triton.model(model)).needs
        request.state.exchange.needs = needs
        parts.health.require(needs)


async def _say_where() -> Response:
    """Tell a person who opens the address in a browser what is here."""
    return PlainTextResponse(
        "This is a model server. OpenAI's API is at /v1, its health at /health.\n"
        "For a chat in the browser, start it with --ui: trtserve start --ui\n"
    )


class _Answer:
    """The answer to one request on its way to the client."""

    def __init__(self, exchange: Exchange, send: Send, path: str) -> None:
        self._exchange = exchange
        self._send = send
        self._path = path
        self._begun = False
        self._events = False
        self.status: int | None = None
        """Status of the answer that has begun."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begun, self.status = True, message["status"]
            self._events = any(
                name.lower() == b"content-type" and value.startswith(_STREAMS) for name, value in message["headers"]
            )
        self._exchange.sending_since = time.monotonic()
        await self._send(message)
        self._exchange.sending_since = None

    async def refuse(self, refusal: RefusedError) -> None:
        """Send an error in the form that the client expects: as a status, or as the last event of a stream.

        An answer that has begun in another form is cut off, so that the client does not take it for complete.
        """
        self._exchange.refusal = refusal  # it is being ended already
        headers = {**refusal.headers, "connection": "close"} if refusal.status in _BEFORE_BODY else refusal.headers
        content = error_content(self._path, refusal.status, refusal.text)
        if not self._begun:
            await send_answer(self, refusal.status, content, headers)
        elif self._events:
            event = error_event(self._path, refusal.status, refusal.text)
            await self({"type": "http.response.body", "body": event})
        elif self._exchange.hang_up is not None:
            self._exchange.hang_up()


async def _refuse_invalid(request: Request, error: Exception) -> Response:
    """Name the part that is wrong. FastAPI's own answer repeats it, and fails for numbers that JSON does not have."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    text = f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg']}"
    return JSONResponse(error_content(request.url.path, 400, text), 400)
