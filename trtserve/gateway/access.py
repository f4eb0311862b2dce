"""Who may send requests: the API key, and the browser's own protection against pages of other sites."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from trtserve.gateway.refusals import RefusedError

_OPEN_PATHS: Final = ("/", "/health", "/v2/health/live", "/v2/health/ready")
"""Load balancers ask these without a key, and browsers ask for the page; they reveal nothing."""


class Access:
    """The rules of one door."""

    def __init__(self, key: str | None, *, loopback: bool) -> None:
        """`loopback` says that only this machine can connect, so that other names in Host are a page's trick."""
        self._key = None if key is None else key.encode()
        self._loopback = loopback

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        """Raise RefusedError for a request that is not allowed."""
        host = headers.get("host", "")
        if self._loopback and not _is_local(host):
            raise RefusedError(
                421, f"the Host {host[:200]!r} is not this machine, and the server listens on loopback only"
            )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise RefusedError(403, "pages of other sites may not use this server")
        if self._key is not None and path not in _OPEN_PATHS and not self._has_key(headers):
            text = "send the API key of this server: Authorization: Bearer KEY"
            raise RefusedError(401, text, headers={"www-authenticate": "Bearer"})

    def _has_key(self, headers: Mapping[str, str]) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        return self._key is not None and hmac.compare_digest(given.encode("latin-1"), self._key)


def _is_local(host: str) -> bool:
    """Return whether a Host header names this machine; HTTP/1.0 clients send none."""
    try:
        name = (urlsplit(f"//{host}").hostname or "") if host else "localhost"
    except ValueError:  # an open bracket
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
