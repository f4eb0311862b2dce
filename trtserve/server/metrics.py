"""Read the counters of a running server, once or at intervals with the rates between two readings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from trtserve.client.call_errors import spoken_at
from trtserve.client.metrics import (
    GENERAL,
    TOKENS,
    CoreMetrics,
    GpuMetrics,
    ModelMetrics,
    core_metrics,
    gpu_metrics,
    model_metrics,
    parse,
)
from trtserve.errors import ServerDiedError, ServerUnreachableError
from trtserve.server.discovery import find_server
from trtserve.server.state import Server, is_stopping
from trtserve.server.triton.server_log import last_lines
from trtserve.server.triton.tritonserver import Address, client_host, metrics_page
from trtserve.specs.server import METRICS_PORT
from trtserve.store import Store

# Name of each rate → the counter of the metrics page whose growth per second it is.
_RATES = {
    "generated_tokens": (TOKENS, "generated"),
    "prompt_tokens": (TOKENS, "prompt"),
    "iterations": (GENERAL, "iteration_counter"),
}


@dataclass(frozen=True, kw_only=True)
class MetricsSource:
    """Where metrics come from."""

    name: str
    address: Address
    server: Server | None = None
    """The server behind the port, if `store` has a record of it."""
    store: Store = field(default_factory=Store)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One reading of a server's metrics."""

    seconds: float
    """Monotonic time of the reading."""
    text: str
    """The metrics page as the server wrote it."""
    core: tuple[CoreMetrics, ...]
    models: tuple[ModelMetrics, ...]
    gpus: tuple[GpuMetrics, ...] = ()
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    """Core model → name → growth per second since the previous reading.

    A rate is missing when there was no previous reading, and when its counter is absent or was reset.
    """


def find_source(name: str | None = None, *, store: Store | None = None) -> MetricsSource:
    """Return the running server `name`, or the only one; ServerNotFoundError or ServerAmbiguousError."""
    store = store or Store()
    server = find_server(name, store=store, hint="Name one of them: trtserve metrics NAME")
    return MetricsSource(name=server.name, address=server.address, server=server, store=store)


def remote_source(host: str, port: int) -> MetricsSource:
    """Return the metrics port of any Triton server."""
    address = Address(host=host, http_port=0, grpc_port=0, metrics_port=port)
    return MetricsSource(name=f"{host}:{port}", address=address)


def read_metrics(source: MetricsSource) -> Reading:
    """Read once.

    Raises ServerDiedError when the server has ended and ServerUnreachableError when the port does not answer.
    """
    text = metrics_page(source.address)
    if text is None:
        raise _no_answer(source)
    samples = parse(text)
    return Reading(
        seconds=time.monotonic(),
        text=text,
        core=tuple(core_metrics(samples)),
        models=tuple(model_metrics(samples)),
        gpus=tuple(gpu_metrics(samples)),
    )


def watch_metrics(
    source: MetricsSource, *, interval: float, count: int | None = None, pause: Callable[[float], None]
) -> Iterator[Reading]:
    """Yield a reading every `interval` seconds, `count` times or for ever; raises what `read_metrics` raises.

    `pause` waits between two readings.
    """
    before: Reading | None = None
    number = 0
    while count is None or number < count:
        if before is not None:
            pause(interval)
        reading = read_metrics(source)
        if before is not None:
            reading.rates.update(rates(before, reading))
        yield reading
        before = reading
        number += 1


def rates(before: Reading, after: Reading) -> dict[str, dict[str, float]]:
    """Return the growth per second of the counters of each core model between two readings."""
    seconds = after.seconds - before.seconds
    earlier = {each.model: each for each in before.core}
    found = {each.model: _growth(earlier[each.model], each) for each in after.core if each.model in earlier}
    return {model: {name: growth / seconds for name, growth in each.items()} for model, each in found.items()}


def _growth(before: CoreMetrics, after: CoreMetrics) -> dict[str, float]:
    grown = {}
    for name, (family, kind) in _RATES.items():
        first, last = before.value(family, kind), after.value(family, kind)
        if first is not None and last is not None and last >= first:
            grown[name] = last - first
    return grown


def _no_answer(source: MetricsSource) -> ServerDiedError | ServerUnreachableError:
    server = source.server
    if server is not None and is_stopping(server, source.store):
        return ServerDiedError(f"The server {server.name} was stopped.", hint="Start it again: trtserve start --detach")
    if server is not None and not server.instances[0].process.alive():
        log = server.instances[0].log
        return ServerDiedError(
            f"The server {server.name} has ended. Its last lines:\n{last_lines(log)}",
            hint="`trtserve status` shows which servers run.",
            log=log,
        )
    port = source.address.metrics_port
    # A recorded server is known to own its port; anything may listen on another one.
    spoken = spoken_at(f"{client_host(source.address.host)}:{port}") if server is None else None
    if spoken is not None:
        found = "It answers over HTTP, but has no page /metrics" if spoken == "HTTP" else f"It is a {spoken} port"
        return ServerUnreachableError(
            f"{source.name} is not the metrics port of a Triton server. {found}.",
            hint=f"Give --url HOST:PORT with the metrics port, {METRICS_PORT} by default.",
        )
    return ServerUnreachableError(
        f"{source.name} does not answer on its metrics port {port}.",
        hint="It may still be starting, have --allow-metrics=false, or use another port: see `trtserve status`.",
    )
