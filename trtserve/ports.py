"""Which TCP ports of this machine are free, and who holds one that is not."""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from random import SystemRandom

from trtserve.errors import MachineError, UsageError
from trtserve.process import Identity, describe, listeners

_KERNEL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Above the ports of well-known services and of this product's servers (8000 and up).
_FIRST_DRAWN = 10000


def ipv4_address(host: str) -> str:
    """The IPv4 address of `host`, a name or an address; UsageError when it has none.

    Triton 2.51 takes neither names (its HTTP service never answers) nor IPv6 (its gRPC service cannot bind).
    """
    try:
        # getaddrinfo takes an empty name for localhost.
        found = socket.getaddrinfo(host or ".", 0, socket.AF_INET, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else "no host name"
        raise UsageError(
            f"Triton cannot listen on {host}: {reason}; it takes IPv4 addresses.",
            hint="Give an IPv4 address of this machine, or its name: --host 127.0.0.1, or 0.0.0.0 for all interfaces.",
        ) from error
    return str(found[0][4][0])


def is_free(host: str, port: int) -> bool:
    """True when a server can listen on `port` of `host` now; connections in TIME_WAIT do not matter.

    UsageError for a host that is not this machine's, or a port that is the administrator's.
    """
    with _socket(host) as probe:
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise UsageError(
                f"Nothing can listen on {host}, port {port}: {error.strerror}.",
                hint="Give an address of this machine (--host 127.0.0.1 or 0.0.0.0) and ports above 1023.",
            ) from error
    return True


def free_ports(host: str, count: int) -> list[int]:
    """`count` different ports that are free now, drawn from those that the kernel does not give away itself.

    A port of the kernel's own range may be another program's, or one end of a connection, before its server has come
    up. Where that range leaves nothing, the kernel chooses.
    """
    below = range(_FIRST_DRAWN, _first_of_the_kernel())
    drawn = SystemRandom().sample(below, min(len(below), count + 100))
    found = list(islice((port for port in drawn if is_free(host, port)), count))
    return found if len(found) == count else _given_ports(host, count)


def _first_of_the_kernel() -> int:
    """The lowest port that the kernel takes for outgoing connections (ip(7), ip_local_port_range)."""
    try:
        return int(_KERNEL_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _FIRST_DRAWN


def _given_ports(host: str, count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(_socket(host)) for _ in range(count)]
        for probe in sockets:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in sockets]


def next_free(host: str, first: int, *, taken: Collection[int]) -> int:
    """The first free port from `first` on that is not in `taken`; MachineError when a hundred are in use."""
    for port in range(first, min(first + 100, 65536)):
        if port not in taken and is_free(host, port):
            return port
    raise MachineError(f"No port of {host} from {first} to {first + 99} is free.", hint="Name free ports yourself.")


def owner(port: int) -> tuple[Identity | None, str]:
    """Who listens on `port`, as a process and as words for a message; (None, "") where the kernel does not tell us."""
    identity = next(iter(listeners(port)), None)
    return (None, "") if identity is None else (identity, f"process {identity.pid} ({describe(identity)})")


def _socket(host: str) -> socket.socket:
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return probe
