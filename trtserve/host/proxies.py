"""The proxies that the environment names, which no connection to this machine may take."""

from __future__ import annotations

import os
import re
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import urllib.request

_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
LOOPBACK = "localhost,127.0.0.1,::1"
"""What `no_proxy` needs, so that other programs reach a server of this machine."""


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
    except OSError:  # a name, or an address of another machine
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


def direct_opener() -> urllib.request.OpenerDirector:
    """Return what opens URLs without a proxy, as the clients of requests do over HTTP."""
    from urllib.request import ProxyHandler, build_opener

    return build_opener(ProxyHandler({}))
