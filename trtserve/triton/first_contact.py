"""What answers on a port that gives no answer to what was asked: recognised from the first bytes that it sends."""

from __future__ import annotations

import socket
from typing import Literal

CONNECT_TIMEOUT = 10.0
"""Seconds that a server may take for its first answer, unless the user gives it more or less."""

Spoken = Literal["HTTP", "gRPC", "TLS"]

_LOOK_TIMEOUT = 2.0
_ASKED = b"GET /v2/health/live HTTP/1.0\r\n\r\n"
_HTTP = b"HTTP/1."
# TLS records: an alert, or a handshake, of version 3.x.
_TLS = (b"\x15\x03", b"\x16\x03")
# Header of a frame of HTTP/2: three bytes of length, its type, flags, and the number of the stream.
_FRAME_HEADER = 9
_SETTINGS = 4


def spoken_at(where: str) -> Spoken | None:
    """The protocol of the port `host:port`; None where it cannot be told within a moment.

    A server of HTTP/2 begins with its settings whatever it is sent (RFC 9113, section 3.4), a TLS server answers plain
    bytes with an alert (RFC 8446, section 6).
    """
    host, _, port = where.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_TIMEOUT) as connection:
            connection.sendall(_ASKED)
            return _recognised(connection.recv(_FRAME_HEADER))
    except (OSError, ValueError):
        return None


def _recognised(first: bytes) -> Spoken | None:
    if first.startswith(_HTTP):
        return "HTTP"
    if first.startswith(_TLS):
        return "TLS"
    settings = len(first) == _FRAME_HEADER and first[3] == _SETTINGS and not any(first[5:])
    return "gRPC" if settings else None
