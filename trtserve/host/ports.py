"""This machine's network: free TCP ports, the process that holds a taken one, and proxies of the environment."""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from contextlib import ExitStack
from contextvars import copy_context
from itertools import islice
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, TypeVar

from trtserve.errors import MachineError, PortInUseError, UsageError
from trtserve.process import ProcessId, describe, listeners

if TYPE_CHECKING:
    import urllib.request

T = TypeVar("T")

_KERNEL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_DRAWN = 10000  # above the ports of well-known services and of this product's servers (8000 and up)


def ipv4_address(host: str) -> str:
    """Return the IPv4 address of `host`, a name or an address. Raises UsageError when it has none.

    Triton 2.51 accepts neither names (its HTTP service never answers) nor IPv6 (its gRPC service cannot bind).
    """
    try:
        # getaddrinfo reads an empty name as localhost.
        found = socket.getaddrinfo(host or ".", 0, socket.AF_INET, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else "not a host name"
        raise UsageError(
            f"Triton cannot listen on {host}: {reason}. It needs an IPv4 address.",
            hint="Give an IPv4 address of this machine, or its name: --host 127.0.0.1, or 0.0.0.0 for all interfaces.",
        ) from error
    return str(found[0][4][0])


def taken_meanwhile(other: str) -> str:
    """Return the hint for a port that was free before the server started; `other` says what to choose."""
    return f"Another program took the port in the meantime: start again with --auto-ports, or choose {other}."


def is_free(host: str, port: int) -> bool:
    """Return whether a server can listen on `port` of `host` now; connections in TIME_WAIT do not matter.

    Raises UsageError for an address of another machine, or a port that only root may use.
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


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `port` of `host`. Raises PortInUseError when another program does."""
    listening = _socket(host)
    try:
        listening.bind((host, port))
        listening.listen()
    except OSError as error:
        listening.close()
        held = f" by {holder}" if (holder := owner(port)[1]) else ""
        raise PortInUseError(
            f"Socket '{host}:{port}' cannot be opened: {error.strerror}{held}.", hint="Choose another port."
        ) from error
    return listening


def free_ports(host: str, count: int) -> list[int]:
    """Return `count` different ports that are free now, drawn from below the kernel's own range.

    A port of that range may become another program's, or one end of a connection, before its server has started. When
    no port is left below the range, the kernel chooses.
    """
    below = _drawn_from()
    drawn = SystemRandom().sample(below, min(len(below), count + 100))
    found = list(islice((port for port in drawn if is_free(host, port)), count))
    if len(found) == count:
        return found
    with ExitStack() as held:
        sockets = [held.enter_context(_socket(host)) for _ in range(count)]
        for probe in sockets:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in sockets]


def _drawn_from() -> range:
    """Return the ports below those that the kernel uses for outgoing connections (ip(7), ip_local_port_range)."""
    try:
        return range(_FIRST_DRAWN, int(_KERNEL_RANGE.read_text(encoding="ascii").split()[0]))
    except (OSError, ValueError, IndexError):
        return range(0)


def next_free(host: str, first: int, *, taken: Collection[int]) -> int:
    """Return the first free port from `first` on, skipping `taken`. Raises MachineError when a hundred are in use."""
    for port in range(first, min(first + 100, 65536)):
        if port not in taken and is_free(host, port):
            return port
    raise MachineError(f"No port of {host} from {first} to {first + 99} is free.", hint="Name free ports yourself.")


def owner(port: int) -> tuple[ProcessId | None, str]:
    """Return the process that listens on `port`, with a description; (None, "") when the kernel does not show it."""
    identity = next(iter(listeners(port)), None)
    return (None, "") if identity is None else (identity, f"process {identity.pid} ({describe(identity)})")


def _socket(host: str) -> socket.socket:
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return probe


_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
LOOPBACK = "localhost,127.0.0.1,::1"  # what `no_proxy` needs, so that other programs reach a server of this machine


def is_here(host: str) -> bool:
    """Return whether `host`, a name or an address, is this machine. No name is looked up: behind a proxy that can take
    long."""
    name = host.strip("[]").lower().rstrip(".")
    if name in ("", "localhost", socket.gethostname().lower()) or name.endswith(".localhost"):
        return True
    try:
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        address = socket.getaddrinfo(name, 0, family, socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0][4]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except (OSError, UnicodeError):  # a name, an address of another machine, or neither
        return False
    return True


def proxy_variables() -> dict[str, str]:
    """Return the variables that name a proxy, in any case, with their values but for passwords."""
    return {
        name: re.sub(r"//[^/@]*@", "//…@", value)
        for name, value in os.environ.items()
        if name.lower() in _VARIABLES and value.strip()
    }


def proxied(host: str) -> str:
    """Return the first variable that sends other programs' connections to `host` through a proxy, else ''."""
    variables = sorted(proxy_variables())
    if not variables:
        return ""
    from urllib.request import proxy_bypass

    return "" if proxy_bypass(host) else variables[0]


def web_opener(*, direct: bool = False) -> urllib.request.OpenerDirector:
    """Return what opens URLs of http and https only, and follows redirects to them; `direct` without a proxy.

    That of `urlopen` also reads files of this machine: a server that names the next URL could ask for them.
    """
    from urllib import request

    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler({} if direct else None),
        request.UnknownHandler(),
        request.HTTPHandler(),
        request.HTTPSHandler(),
        request.HTTPDefaultErrorHandler(),
        request.HTTPRedirectHandler(),
        request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def within(seconds: float | None, call: Callable[[], T], *, begun: Callable[[], bool] = lambda: False) -> T:
    """Return what `call` returns. Raises TimeoutError when it takes longer; None: it may take any time.

    So may one that has `begun` to give its result by then.

    A socket's own time limit begins again with every byte. A call that is late goes on in its thread, which does not
    keep the program from ending.
    """
    if seconds is None:
        return call()
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            done.set_exception(error)

    context = copy_context()
    threading.Thread(target=context.run, args=(run,), daemon=True).start()
    wait([done], seconds)
    if not done.done() and not begun():
        raise TimeoutError(f"no whole answer within {seconds:g} s")
    return done.result()
