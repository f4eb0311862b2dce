"""The options that say which server is meant, shared by the commands that send requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtserve.errors import UsageError

if TYPE_CHECKING:
    from trtserve.triton.client import Endpoint

ServerOption = Annotated[
    str | None, typer.Option("--server", metavar="NAME", help="Which running server; default: the only one.")
]
HostOption = Annotated[str | None, typer.Option("--host", help="Ask this host instead of a server started here.")]
HttpPortOption = Annotated[int | None, typer.Option("--http-port", help="HTTP port of that host (8000).")]
GrpcPortOption = Annotated[int | None, typer.Option("--grpc-port", help="gRPC port of that host (8001).")]
UrlOption = Annotated[
    str | None, typer.Option("--url", metavar="HOST:PORT", help="The same as --host and the port of the protocol.")
]


def find_endpoint(
    *,
    server: str | None,
    host: str | None,
    http_port: int | None,
    grpc_port: int | None,
    url: str | None,
    protocol: Literal["grpc", "http"] = "grpc",
) -> Endpoint:
    """The endpoint that the options name: an explicit address, else a server recorded by `start`."""
    explicit = host is not None or http_port is not None or grpc_port is not None or url is not None
    if explicit and server is not None:
        raise UsageError("--server names a recorded server; it cannot be combined with an address.")
    if not explicit:
        return _recorded(server)
    if url is not None:
        if host is not None or http_port is not None or grpc_port is not None:
            raise UsageError("--url holds host and port; leave --host, --http-port and --grpc-port out.")
        host, port = _split(url)
        http_port, grpc_port = (port, None) if protocol == "http" else (None, port)
    return _explicit(host, http_port, grpc_port)


def _explicit(host: str | None, http_port: int | None, grpc_port: int | None) -> Endpoint:
    from trtserve.triton.client import Endpoint

    return Endpoint(host=host or "127.0.0.1", http_port=http_port or 8000, grpc_port=grpc_port or 8001)


def _recorded(name: str | None) -> Endpoint:
    from trtserve.servers import find_server
    from trtserve.triton.client import Endpoint

    server = find_server(name)
    return Endpoint(
        host=server.host,
        http_port=server.http_port,
        grpc_port=server.grpc_port,
        model=server.model,
        repository=server.repository,
    )


def _split(url: str) -> tuple[str, int]:
    host, _, port = url.rpartition(":")
    if not host or not port.isdigit() or "/" in url:
        raise UsageError(f"--url is {url!r}; expected HOST:PORT, such as localhost:8001.")
    return host, int(port)
