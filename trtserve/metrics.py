"""What a running server counts: once, or again and again with the rates between two readings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from trtserve.errors import ServerDiedError, ServerUnreachableError
from trtserve.servers import Server, find_server, last_words, recorded_server
from trtserve.store import Store
from trtserve.triton.first_contact import spoken_at
from trtserve.triton.metrics import GENERAL, TOKENS, CoreMetrics, ModelMetrics, core_metrics, model_metrics, parse
from trtserve.triton.server import Address, client_host, metrics_page

# Counters of the metrics page whose growth per second is shown, by the name of the rate.
_RATES = {
    "generated_tokens": (TOKENS, "generated"),
    "prompt_tokens": (TOKENS, "prompt"),
    "iterations": (GENERAL, "iteration_counter"),
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where metrics come from: a port, and the server behind it where `store` has a record of one."""

    name: str
    address: Address
    server: Server | None = None
    store: Store = field(default_factory=Store)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One look at a server's metrics.

    `seconds` is a monotonic time, `text` the page as the server wrote it. `rates` maps core model → name → growth per
    second since the reading before; a rate is missing when there is none, the counter is absent or was set back.
    """

    seconds: float
    text: str
    core: tuple[CoreMetrics, ...]
    models: tuple[ModelMetrics, ...]
    rates: dict[str, dict[str, float]] = field(default_factory=dict)


def find_source(name: str | None = None, *, store: Store | None = None) -> Source:
    """The running server `name`, or the only one; ServerNotFoundError or ServerAmbiguousError as `find_server`."""
    store = store or Store()
    server = find_server(name, store=store, hint="Name one of them: trtserve metrics NAME")
    return Source(name=server.name, address=server.address, server=server, store=store)


def remote_source(host: str, port: int) -> Source:
    """The metrics port of any Triton."""
    address = Address(host=host, http_port=0, grpc_port=0, metrics_port=port)
    return Source(name=f"{host}:{port}", address=address)


def read_metrics(source: Source) -> Reading:
    """Read once; ServerDiedError when the server has ended, ServerUnreachableError when its metrics port is silent."""
    text = metrics_page(source.address)
    if text is None:
        raise _silent(source)
    samples = parse(text)
    return Reading(
        seconds=time.monotonic(),
        text=text,
        core=tuple(core_metrics(samples)),
        models=tuple(model_metrics(samples)),
    )


def watch_metrics(
    source: Source, *, interval: float, count: int | None = None, pause: Callable[[float], None]
) -> Iterator[Reading]:
    """Read every `interval` seconds, `count` times or for ever; raises what `read_metrics` raises.

    `pause` waits for that time between two readings.
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
    """Growth per second of the counters of each core model between two readings."""
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


def _is_stopped(server: Server, store: Store) -> bool:
    """True when somebody stops it, or did; a server that died keeps its record."""
    recorded = recorded_server(server.name, store)
    return recorded is None or recorded.phase == "stopping"


def _silent(source: Source) -> ServerDiedError | ServerUnreachableError:
    server = source.server
    if server is not None and _is_stopped(server, source.store):
        return ServerDiedError(f"The server {server.name} was stopped.", hint="Start it again: trtserve start --detach")
    if server is not None and not server.identity.alive():
        return ServerDiedError(
            f"The server {server.name} has ended. Its last lines:\n{last_words(server.log)}",
            hint="`trtserve status` shows which servers run.",
            log=server.log,
        )
    port = source.address.metrics_port
    # Ports of recorded servers are known to be theirs.
    spoken = spoken_at(f"{client_host(source.address.host)}:{port}") if server is None else None
    if spoken is not None:
        found = "It answers over HTTP, but has no page /metrics" if spoken == "HTTP" else f"It is a {spoken} port"
        return ServerUnreachableError(
            f"{source.name} is not the metrics port of a Triton server. {found}.",
            hint="Give --url HOST:PORT with the metrics port, which is 8002 unless Triton was told another.",
        )
    return ServerUnreachableError(
        f"{source.name} does not answer on its metrics port {port}.",
        hint="It may be starting or be run with --allow-metrics=false, or this is another port: `trtserve status`.",
    )
