"""The options that say which server is meant, shared by the commands that send requests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtserve.cli.output import TerminalProgress
from trtserve.errors import UsageError
from trtserve.triton.first_contact import CONNECT_TIMEOUT

if TYPE_CHECKING:
    from trtserve.servers import Server
    from trtserve.triton.client import Endpoint, Tls

CONNECTION = "Server and connection"

ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server", rich_help_panel=CONNECTION, metavar="NAME", help="Which running server; default: the only one."
    ),
]
HostOption = Annotated[
    str | None,
    typer.Option("--host", rich_help_panel=CONNECTION, help="Ask this host instead of a server started here."),
]
HttpPortOption = Annotated[
    int | None, typer.Option("--http-port", rich_help_panel=CONNECTION, help="HTTP port of that host (8000).")
]
GrpcPortOption = Annotated[
    int | None, typer.Option("--grpc-port", rich_help_panel=CONNECTION, help="gRPC port of that host (8001).")
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        "-u",
        rich_help_panel=CONNECTION,
        metavar="HOST:PORT",
        help="The same as --host and the port of the protocol.",
    ),
]
ConnectTimeoutOption = Annotated[
    float,
    typer.Option("--connect-timeout", rich_help_panel=CONNECTION, help="Seconds that the first answer may take."),
]
SslOption = Annotated[
    bool, typer.Option("--ssl", "-s", rich_help_panel=CONNECTION, help="Encrypt the connection (TLS).")
]
RootCertificatesOption = Annotated[
    Path | None,
    typer.Option(
        "--root-certificates",
        "-r",
        rich_help_panel=CONNECTION,
        metavar="PEM",
        help="Roots to trust; default: the system's.",
    ),
]
PrivateKeyOption = Annotated[
    Path | None,
    typer.Option(
        "--private-key",
        "-p",
        rich_help_panel=CONNECTION,
        metavar="PEM",
        help="This client's key, if the server wants one.",
    ),
]
CertificateChainOption = Annotated[
    Path | None,
    typer.Option(
        "--certificate-chain",
        "-x",
        rich_help_panel=CONNECTION,
        metavar="PEM",
        help="Certificates that belong to the key.",
    ),
]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def find_endpoint(
    *,
    server: str | None,
    host: str | None,
    http_port: int | None,
    grpc_port: int | None,
    url: str | None,
    protocol: Literal["grpc", "http"] = "grpc",
    tls: Tls | None = None,
    connect_timeout: float = CONNECT_TIMEOUT,
) -> Endpoint:
    """The endpoint that the options name: an explicit address, else a server recorded by `start`."""
    if not (math.isfinite(connect_timeout) and connect_timeout > 0):
        raise UsageError(f"--connect-timeout is {connect_timeout:g}; it must be above 0.")
    explicit = host is not None or http_port is not None or grpc_port is not None or url is not None
    if explicit and server is not None:
        raise UsageError("--server names a recorded server; it cannot be combined with an address.")
    if not explicit:
        return replace(_recorded(server), tls=tls, connect_timeout=connect_timeout)
    if url is not None:
        if host is not None or http_port is not None or grpc_port is not None:
            raise UsageError("--url holds host and port; leave --host, --http-port and --grpc-port out.")
        host, port = split_address(url)
        http_port, grpc_port = (port, None) if protocol == "http" else (None, port)
    return replace(_explicit(host, http_port, grpc_port, protocol), tls=tls, connect_timeout=connect_timeout)


def find_tls(
    ssl: bool, root_certificates: Path | None, private_key: Path | None, certificate_chain: Path | None
) -> Tls | None:
    """The certificates that the options name; None for a plain connection."""
    from trtserve.triton.client import Tls

    files = (root_certificates, private_key, certificate_chain)
    if not ssl:
        if any(file is not None for file in files):
            raise UsageError("Certificates are of no use on a plain connection: add --ssl.")
        return None
    return Tls(root_certificates=root_certificates, private_key=private_key, certificate_chain=certificate_chain)


def _explicit(
    host: str | None, http_port: int | None, grpc_port: int | None, protocol: Literal["grpc", "http"]
) -> Endpoint:
    """The address; of a server that was started here, also its repository, so that both ways of naming it are alike."""
    from trtserve.triton.client import Endpoint

    endpoint = Endpoint(host=host or "127.0.0.1", http_port=http_port or 8000, grpc_port=grpc_port or 8001)
    if endpoint.host not in _LOOPBACK:
        return endpoint
    if protocol == "http":
        require_port(endpoint.host, endpoint.http_port, "HTTP")
    else:
        require_port(endpoint.host, endpoint.grpc_port, "gRPC")
    from trtserve.servers import list_servers

    port = "http_port" if protocol == "http" else "grpc_port"
    for server in list_servers():
        asked = getattr(endpoint, port)
        if server.host in _LOOPBACK and asked in (getattr(server, port), getattr(server.endpoint, port)):
            return replace(endpoint, model=server.model, repository=server.repository)
    return endpoint


def require_port(host: str, port: int, wanted: Literal["HTTP", "gRPC", "metrics"]) -> None:
    """UsageError when a server that was started here answers something else than `wanted` on this port."""
    from trtserve.servers import list_servers

    if host not in _LOOPBACK:
        return
    for server in list_servers():
        for ports in _ports_of(server):
            found = next((kind for kind, number in ports.items() if number == port), wanted)
            if found != wanted and wanted in ports:
                raise UsageError(
                    f"{port} is the {found} port of the server {server.name}, whose {wanted} port is {ports[wanted]}.",
                    hint=_other_port(found, wanted, f"{host}:{ports[wanted]}"),
                )


def _ports_of(server: Server) -> Iterator[dict[str, int]]:
    """Ports of every launch of a server, and of the proxy before them, by what they answer."""
    for each in server.instances:
        yield {"HTTP": each.http_port, "gRPC": each.grpc_port, "metrics": each.metrics_port}
    if server.proxy is not None:
        yield {"HTTP": server.proxy.http_port, "gRPC": server.proxy.grpc_port}


def _other_port(found: str, wanted: str, address: str) -> str:
    protocol = {"HTTP": "http", "gRPC": "grpc"}.get(found)
    other = f"; or ask over {found}: --protocol {protocol} (query)" if protocol and wanted != "metrics" else ""
    return f"Give --url {address}{other}."


def _recorded(name: str | None) -> Endpoint:
    from trtserve.servers import find_server
    from trtserve.triton.client import Endpoint

    server = find_server(name)
    if server.phase == "starting":
        TerminalProgress().warn(f"{server.name} is still starting; `trtserve status` says when it runs.")
    return Endpoint(
        host=server.host,
        http_port=server.endpoint.http_port,
        grpc_port=server.endpoint.grpc_port,
        model=server.model,
        repository=server.repository,
    )


def split_address(url: str) -> tuple[str, int]:
    """Host and port of --url; UsageError for anything else."""
    host, _, port = url.rpartition(":")
    if not host or not port.isdigit() or "/" in url:
        raise UsageError(f"--url is {url!r}; expected HOST:PORT, such as localhost:8001.")
    return host, int(port)
