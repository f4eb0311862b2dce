"""The ports of a server's instances and of the proxy in front of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from trtserve.errors import UsageError
from trtserve.host.ports import ipv4_address, is_free, next_free
from trtserve.server.triton.tritonserver import Address
from trtserve.specs import ServerSpec

_LARGEST_PORT = 65535


def with_free_ports(spec: ServerSpec) -> ServerSpec:
    """Return the options with each taken port replaced by the next free one, those of further instances included."""
    host, taken = ipv4_address(spec.host), list[int]()
    for port in (spec.http_port, spec.grpc_port, spec.metrics_port):
        taken.append(next_free(host, port, taken=taken))
    proxy = free_pair(host, spec.proxy_port, taken) if spec.instances > 1 else spec.proxy_port
    changed = replace(spec, http_port=taken[0], grpc_port=taken[1], metrics_port=taken[2], proxy_port=proxy)
    return replace(changed, auto_ports=True)


def instance_addresses(first: Address, count: int, is_taken: Callable[[int], bool] = lambda _: False) -> list[Address]:
    """Return the addresses of `count` instances: the first as given, each further port the next unused number.

    8000/8001/8002 is followed by 8003/8004/8005. Upstream's recipe (8002 for HTTP of the second instance) would need
    another metrics port for the first. `is_taken` reports ports that other programs use.
    """
    used = set(first.ports.values())
    found = [first]
    for _ in range(count - 1):
        ports = []
        for previous in (found[-1].http_port, found[-1].grpc_port, found[-1].metrics_port):
            candidates = (port for port in range(previous + 1, _LARGEST_PORT + 1) if port not in used)
            port = next((port for port in candidates if not is_taken(port)), None)
            if port is None:
                raise UsageError(
                    f"No port is left above {previous} for another instance.", hint="Choose smaller ports."
                )
            used.add(port)
            ports.append(port)
        found.append(Address(host=first.host, http_port=ports[0], grpc_port=ports[1], metrics_port=ports[2]))
    return found


def free_pair(host: str, first: int, taken: Collection[int]) -> int:
    """Return the first port from `first` on that is free, as is the next one, with neither in `taken`."""
    for port in range(first, min(first + 100, _LARGEST_PORT)):
        if not {port, port + 1} & set(taken) and is_free(host, port) and is_free(host, port + 1):
            return port
    raise UsageError(f"{host} has no two free neighbouring ports from {first} on.", hint="Choose --proxy-port.")
