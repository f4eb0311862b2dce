"""Several instances of one model on one machine: a set of ports for each, none of which meets another's."""

from __future__ import annotations

from collections.abc import Callable

from trtserve.errors import UsageError
from trtserve.triton.server import Address

_LARGEST_PORT = 65535


def instance_addresses(first: Address, count: int, is_taken: Callable[[int], bool] = lambda _: False) -> list[Address]:
    """Addresses of `count` instances: the first as given, each further port the next number that nothing here uses.

    8000/8001/8002 is followed by 8003/8004/8005: with the numbers of upstream's recipe (8002 for HTTP of the second
    instance) the metrics port of the first would have to move. `is_taken` tells ports that others use.
    """
    used = set(first.ports.values())
    found = [first]
    for _ in range(count - 1):
        last = found[-1]
        ports = [_next(port, used, is_taken) for port in (last.http_port, last.grpc_port, last.metrics_port)]
        found.append(Address(host=first.host, http_port=ports[0], grpc_port=ports[1], metrics_port=ports[2]))
    return found


def _next(port: int, used: set[int], is_taken: Callable[[int], bool]) -> int:
    wanted = next((n for n in range(port + 1, _LARGEST_PORT + 1) if n not in used and not is_taken(n)), None)
    if wanted is None:
        raise UsageError(f"No port is left above {port} for another instance.", hint="Choose smaller ports.")
    used.add(wanted)
    return wanted
