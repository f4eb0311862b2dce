"""Triton's HTTP protocol: paths, groups that are closed by default, the connection, and whether its models answer.

Source: Triton's docs/protocol. Anything else that a client asks for below /v2 is refused without asking Triton.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import quote, unquote

from aiohttp import (
    ClientConnectionError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    StreamReader,
    TCPConnector,
)
from pydantic_core import from_json, to_json
from yarl import URL

from trtserve.client.endpoint import SECRET_NAME, Tls
from trtserve.client.http_transport import JSON_LENGTH, generate_body, infer_body, model_path, tls_context
from trtserve.client.metrics import read_heartbeats
from trtserve.client.tensors import ModelDescription, stop_request
from trtserve.gateway.admission import Gate
from trtserve.gateway.asgi import RefusedError, aside, looking_again, require_few
from trtserve.gateway.standstill import GatewayBeat, Hangs, python_stubs, tritonservers
from trtserve.process import ProcessId
from trtserve.process.halts import Halts
from trtserve.repository.profiles import CORE, POSTPROCESSING, PREPROCESSING

if TYPE_CHECKING:
    from aiohttp.connector import Connection
    from aiohttp.http import RawResponseMessage

    from trtserve.gateway.replicas import Replicas

Group = Literal["shared-memory", "trace", "logging", "model-control"]
GROUPS: Final[tuple[Group, ...]] = ("shared-memory", "trace", "logging", "model-control")
"""Operations that change or reveal more than a client of a model needs."""
_MODEL = r"/v2/models/(?P<model>[^/]{1,1024})"
_VERSION = r"(?:/versions/\d{1,18})?"
_REGION = r"(?:/region/[^/]{1,1024})?"
_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 10.0
# A load balancer must hear of a server that stands still within five seconds.
_READY_SECONDS = 4.0
# How long a model's description is believed: with --model-control-mode=explicit it can be loaded anew.
_DESCRIPTION_SECONDS = 30.0
# Triton closes no idle connection within this time.
_IDLE_SECONDS = 15.0
# Triton leads nowhere else and changes no protocol.
_STATUSES = frozenset((*range(200, 300), *range(400, 600)))
_LARGEST_ANSWER = 16 << 20  # about models, and of the metrics page
_LONGEST_REASON = 300
_MOST_INTERIM = 16  # answers before the answer; Triton sends at most one


@dataclass(frozen=True, kw_only=True)
class Route:
    """One kind of path."""

    pattern: re.Pattern[str]
    methods: tuple[str, ...]
    operation: str
    """`infer`, `generate` and `generate_stream` run a model, `live` and `ready` ask for health."""
    group: Group | None = None


def _route(operation: str, pattern: str, *methods: str, group: Group | None = None) -> Route:
    return Route(pattern=re.compile(pattern), methods=methods, operation=operation, group=group)


_ROUTES: Final = (
    _route("infer", _MODEL + _VERSION + "/infer", "POST"),
    _route("generate", _MODEL + _VERSION + "/generate", "POST"),
    _route("generate_stream", _MODEL + _VERSION + "/generate_stream", "POST"),
    _route("live", "/v2/health/live", "GET", "HEAD"),
    _route("ready", "/v2/health/ready", "GET", "HEAD"),
    _route("ready", _MODEL + _VERSION + "/ready", "GET", "HEAD"),
    _route("metadata", "/v2/?", "GET"),
    _route("metadata", _MODEL + _VERSION, "GET"),
    _route("metadata", _MODEL + _VERSION + "/(?:config|stats)", "GET"),
    _route("metadata", "/v2/models/stats", "GET"),
    _route("index", "/v2/repository/index", "POST"),
    _route("control", "/v2/repository/models/(?P<model>[^/]{1,1024})/(?:load|unload)", "POST", group="model-control"),
    _route("control", f"/v2/(?:system|cuda)sharedmemory{_REGION}/status", "GET", group="shared-memory"),
    _route("control", f"/v2/(?:system|cuda)sharedmemory{_REGION}/(?:un)?register", "POST", group="shared-memory"),
    _route("control", f"(?:{_MODEL}|/v2)/trace/setting", "GET", "POST", group="trace"),
    _route("control", "/v2/logging", "GET", "POST", group="logging"),
)


@dataclass(frozen=True, kw_only=True)
class TritonPath:
    """What a request asks for."""

    operation: str
    path: str
    """The path as it was sent, for Triton."""
    model: str | None

    @property
    def runs_model(self) -> bool:
        """Whether a model runs."""
        return self.operation in ("infer", "generate", "generate_stream")


def find_target(method: str, path: str, *, open_groups: tuple[str, ...] = ()) -> TritonPath:
    """Return what a request asks for. Raises RefusedError for paths, methods and groups that are not served."""
    for route in _ROUTES:
        found = route.pattern.fullmatch(path)
        if found is None:
            continue
        if route.group is not None and route.group not in open_groups:
            raise RefusedError(403, f"{route.group} is closed on this server: start it with --open-api {route.group}")
        if method not in route.methods:
            allowed = ", ".join(route.methods)
            raise RefusedError(405, f"{path} expects {allowed}", headers={"allow": allowed})
        model = found.groupdict().get("model")
        return TritonPath(operation=route.operation, path=path, model=None if model is None else unquote(model))
    raise RefusedError(404, "not a path of Triton's HTTP protocol")


@dataclass(frozen=True, kw_only=True)
class TritonModel:
    """What the gateway has to know of a model."""

    description: ModelDescription
    needs: tuple[str, ...]
    """The model itself, and those that an ensemble or a BLS model calls."""
    closing_ends: bool
    """Whether Triton 2.51 ends a request whose connection is closed: only what a decoupled model streams itself."""

    @property
    def datatypes(self) -> dict[str, str]:
        """Input → datatype."""
        return {name: tensor.datatype for name, tensor in self.description.inputs.items()}


class SilentError(RefusedError):
    """Triton did not answer, or not to the end."""

    def __init__(self, text: str) -> None:
        super().__init__(503, text)


class _Answer(ClientResponse):
    """An answer with few interim ones (100 Continue) before it; the client itself reads any number."""

    async def start(self, connection: Connection) -> ClientResponse:
        """Wait for the status and the headers. Raises ClientError at the limit."""
        protocol, left = connection.protocol, _MOST_INTERIM
        assert protocol is not None
        read = protocol.read

        async def read_few() -> tuple[RawResponseMessage, StreamReader]:
            nonlocal left
            if left < 0:
                raise ClientConnectionError(f"it sends more than {_MOST_INTERIM} interim answers")
            left -= 1
            return await read()

        protocol.read = read_few  # type: ignore[method-assign]
        try:
            return await super().start(connection)
        finally:
            del protocol.read


class TritonHttp:
    """Triton's HTTP service, over connections that are kept."""

    def __init__(
        self, address: str, metrics: str, secret: str | None = None, *, key: str | None = None, tls: Tls | None = None
    ) -> None:
        """`key` and `tls` are those of a gateway in front of Triton, which `address` is then."""
        self._address = address
        self._scheme, self._tls = "http" if tls is None else "https", None if tls is None else tls_context(tls)
        self._headers = {} if secret is None else {SECRET_NAME: secret}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._metrics = metrics
        self._models: dict[str, tuple[float, TritonModel]] = {}

    @cached_property
    def _session(self) -> ClientSession:
        """The connections, which belong to the event loop that asks for them first."""
        # Neither a proxy of the environment nor cookies have a place between a gateway and its servers.
        return ClientSession(
            connector=TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
            cookie_jar=DummyCookieJar(),
            response_class=_Answer,
            auto_decompress=False,
            headers=self._headers,
            trust_env=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self) -> None:
        """Close all connections. The next request opens new ones."""
        session: ClientSession | None = self.__dict__.pop("_session", None)
        if session is not None:
            await session.close()

    @asynccontextmanager
    async def send(
        self,
        method: str,
        path: str,
        content: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        seconds: float | None = None,
        metrics: bool = False,
    ) -> AsyncIterator[ClientResponse]:
        """Send a request, to the metrics port if it is for `metrics`, and yield the answer; leaving early ends it.

        Raises RefusedError without an answer, or without the whole of it within `seconds`.
        """
        timeout = ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        place = f"http://{self._metrics}" if metrics else f"{self._scheme}://{self._address}"
        try:
            async with self._session.request(
                method,
                URL(f"{place}{path}", encoded=True),
                data=content,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
                ssl=True if self._tls is None else self._tls,
            ) as response:
                if response.status not in _STATUSES:
                    raise SilentError(f"Triton answers with status {response.status}")
                yield response
        except (ClientError, EOFError, OSError, TimeoutError, asyncio.TimeoutError) as error:
            reason = str(error).partition("\n")[0][:_LONGEST_REASON] or type(error).__name__
            raise SilentError(f"Triton does not answer: {reason}") from error

    async def is_ready(self, path: str = "/v2/health/ready") -> bool:
        """Return whether Triton answers a health page with 200."""
        try:
            async with self.send("GET", path, seconds=_READY_SECONDS) as response:
                return response.status == 200
        except RefusedError:
            return False

    async def metrics(self) -> bytes:
        """Return the metrics page. Raises RefusedError without an answer."""
        async with self.send("GET", "/metrics", seconds=_ANSWER_SECONDS, metrics=True) as response:
            return await read_answer(response, _LARGEST_ANSWER)

    async def config(self, path: str) -> Any:
        """Return a model's configuration. Raises RefusedError as `model` does."""
        async with self.send("GET", path, seconds=_ANSWER_SECONDS) as response:
            content = await read_answer(response, _LARGEST_ANSWER)

        def read() -> Any:
            require_few(content)
            return from_json(content)

        try:
            config = await aside(read, content)
        except (ValueError, RefusedError):
            config = None
        if not isinstance(config, dict):
            raise SilentError(f"Triton does not answer {path} with a JSON object")
        if response.status != 200:
            raise RefusedError(response.status, str(config.get("error", "the model is unknown")))
        return config

    async def model(self, name: str) -> TritonModel:
        """Return a model's description. Raises RefusedError with Triton's answer for a model that it does not serve."""
        known = self._models.get(name)
        if known is not None and time.monotonic() - known[0] < _DESCRIPTION_SECONDS:
            return known[1]
        config = await self.config(f"{model_path(name)}/config")
        try:
            found = _model(config)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise SilentError(f"Triton describes {name[:200]} as no Triton does: {str(error)[:200]}") from error
        self._models[name] = (time.monotonic(), found)
        return found

    def forget_models(self) -> None:
        """Ask anew for the descriptions of models, which may have been loaded again."""
        self._models.clear()

    async def stop(self, request_id: str, core: str) -> None:
        """Ask a core model to stop the requests with this id, which does nothing when they have ended."""
        model = (await self.model(core)).description
        if "stop" not in model.inputs:
            return
        tensors = stop_request(model, request_id).tensors
        if model.decoupled:
            verb, headers = "generate_stream", {"Content-Type": "application/json"}
            body = to_json(generate_body(tensors, request_id=request_id, model=model))
        else:
            verb, (body, length) = "infer", infer_body(tensors, request_id=request_id)
            headers = {JSON_LENGTH: str(length)}
        path = f"{model_path(core)}/{verb}"
        async with self.send("POST", path, body, headers, seconds=_ANSWER_SECONDS) as response:
            await read_answer(response, _LARGEST_ANSWER)


async def read_answer(response: ClientResponse, most: int) -> bytes:
    """Return a whole answer. Raises SilentError for one of more than `most` bytes, which is not read further."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > most:
            raise SilentError(f"Triton's answer has more than {most >> 20} MiB")
    return bytes(body)


def _model(config: Mapping[str, Any]) -> TritonModel:
    description = ModelDescription.from_config(config)
    scheduling = config.get("ensemble_scheduling") or {}
    steps = tuple(step["model_name"] for step in scheduling.get("step", ()))
    # A BLS model names the models that it calls, or has the parameters empty: then it calls those of the usual names.
    called = {name: value for name, value in description.parameters.items() if name.endswith("_model_name")}
    if called:
        usual = {f"{name}_model_name": name for name in (PREPROCESSING, CORE, POSTPROCESSING)}
        called = {**usual, **{name: value for name, value in called.items() if value}}
    others = steps or tuple(called.values())
    closing_ends = description.decoupled and not steps
    return TritonModel(description=description, needs=(description.name, *others), closing_ends=closing_ends)


_LOG = logging.getLogger(__name__)
_INTERVAL = 0.5
# Seconds until a process that a signal has stopped counts as one that does not work, and one that hangs.
_HALTED = 1.0
_HUNG = 2.0


class TritonHealth:
    """The state of one Triton server and its processes, looked at every half second."""

    def __init__(
        self,
        triton: TritonHttp,
        gate: Gate,
        process: ProcessId | None,
        run_folder: Path | None = None,
        *,
        python_models: Iterable[str] = (),
        replicas: Replicas | None = None,
    ) -> None:
        self._triton = triton
        self._python_models = Counter(python_models)
        self._replicas = replicas
        self._gate = gate
        self._process = process
        self._run_folder = run_folder
        self._stubs: dict[ProcessId, str] = {}
        self._servers: set[ProcessId] = set()
        self._halts = Halts(_HALTED)
        self._hangs = Hangs(_HUNG)
        self._lost: dict[str, str] = {}
        self._ailing: dict[str, str] = {}
        self._halted: str | None = None

    async def problem(self, target: TritonPath) -> str | None:
        """Return why the server, or a model, does not live or is not ready; None when it is.

        Raises RefusedError for a model, or a version of it, that Triton does not know.
        """
        if self._process is not None and not self._process.alive():
            return "tritonserver has ended"
        if self._halted is not None:
            return self._halted
        if target.operation == "ready":
            if self._gate.draining:
                return "the server is stopping"
            needed = {*self._lost, *self._ailing} if target.model is None else await self._needed(target.model)
            if (reason := self._reason(needed)) is not None:
                return reason
        if self._replicas is not None and self._replicas.several and target.model is None:
            return self._replicas.problem()
        return await self._asked(target)

    @property
    def _answering(self) -> TritonHttp:
        """A Triton that answers, if there are several."""
        return (None if self._replicas is None else self._replicas.first.http) or self._triton

    async def _asked(self, target: TritonPath) -> str | None:
        """Return what Triton itself says."""
        triton = self._answering
        if await triton.is_ready(target.path):
            return None
        if target.model is not None:
            try:
                await triton.config(f"{target.path.removesuffix('/ready')}/config")
            except RefusedError as error:
                if error.status == 404:
                    raise
        return "Triton is not ready" if target.operation == "ready" else "Triton does not answer"

    def require(self, needed: Iterable[str]) -> None:
        """Raise RefusedError when a process of one of these models has ended or stands still."""
        if (reason := self._halted or self._reason(needed)) is not None:
            raise _unavailable(reason)

    async def watch(self) -> None:
        """Look for processes that have ended or stand still, until cancelled.

        Requests that need them are ended with an error.
        """
        if self._process is None:
            return
        expected: Counter[str] | None = None
        while True:
            await asyncio.sleep(_INTERVAL)
            with looking_again():
                if not self._servers:
                    if not await self._triton.is_ready():
                        continue
                    self._servers = {self._process, *await asyncio.to_thread(tritonservers, self._process)}
                await self._listen(self._process)
                if expected is None or self._lost or not all(stub.alive() for stub in self._stubs):
                    self._stubs = await asyncio.to_thread(python_stubs, self._process)
                    present = Counter(self._stubs.values())
                    if expected is None:
                        expected = self._python_models or present
                    await self._note([model for model, count in expected.items() if present[model] < count])

    async def show_life(self) -> None:
        """Show the supervisor that the event loop turns, until cancelled."""
        if self._run_folder is None:
            return
        gateway = GatewayBeat(self._run_folder)
        while True:
            with looking_again():
                gateway.beat()
            await asyncio.sleep(_INTERVAL)

    async def _listen(self, root: ProcessId) -> None:
        """Look who has stopped working although its process lives; the requests that need it are ended."""
        beats = [] if self._run_folder is None else read_heartbeats(self._run_folder)
        hung = await asyncio.to_thread(self._hangs.among, beats, root)
        ailing = {model: f"{model}: its executor {why}" for model, why in hung.items()}
        ailing |= {each.model: f"{each.model}: {each.ailment}" for each in beats if each.ailment}
        halted = self._halts.lasting([*self._servers, *self._stubs])
        ailing |= {
            model: f"{model}: its process {stub.pid} has been stopped by a signal"
            for stub, model in self._stubs.items()
            if stub in halted
        }
        servers = [
            f"tritonserver (pid {each.pid}) has been stopped by a signal" for each in halted if each in self._servers
        ]
        for name in ailing.keys() - self._ailing.keys():
            _LOG.error(ailing[name])
            self._gate.end_all(_unavailable(ailing[name]), needing=name)
        self._ailing, self._halted = ailing, next(iter(servers), None)

    async def _note(self, lacking: Iterable[str]) -> None:
        """Remember the models that lack processes. One that was unloaded lacks nothing: Triton says so itself."""
        lost = [name for name in lacking if await self._triton.is_ready(f"/v2/models/{quote(name, safe='')}/ready")]
        new = [name for name in lost if name not in self._lost]
        self._lost = {name: f"a process of the model {name} has ended; start the server again" for name in lost}
        for name in new:
            _LOG.error(self._lost[name])
            self._gate.end_all(_unavailable(self._lost[name]), needing=name)

    def _reason(self, needed: Iterable[str]) -> str | None:
        known = self._ailing | self._lost
        return next((known[name] for name in needed if name in known), None)

    async def _needed(self, model: str) -> Iterable[str]:
        try:
            return (await self._answering.model(model)).needs
        except RefusedError:
            return (model,)  # Triton itself says what is wrong with it


def _unavailable(reason: str) -> RefusedError:
    return RefusedError(503, reason, headers={"retry-after": "1"})
