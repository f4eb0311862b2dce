"""Find the server that a command talks to, and connect to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trtserve.cli.options import servers
from trtserve.cli.output import TerminalProgress
from trtserve.client.endpoint import CONNECT_TIMEOUT, require_host
from trtserve.errors import UsageError
from trtserve.specs.options import Spec, option
from trtserve.specs.server import GRPC_PORT, HTTP_PORT

if TYPE_CHECKING:
    from trtserve.client.endpoint import Endpoint, Tls
    from trtserve.server.state import Server

CONNECTION = "Server and connection"


@dataclass(frozen=True, kw_only=True)
class Connection(Spec):
    """A server started here or the address of another one, and how to connect to it."""

    server: str | None = option(
        None, metavar="NAME", help="Running server to ask.", unset="the only one", completes=servers, common=True
    )
    host: str | None = option(
        None, metavar="HOST", help="Ask this host instead of a server started here.", panel=CONNECTION
    )
    http_port: int | None = option(
        None,
        metavar="PORT",
        help="HTTP port of that host.",
        minimum=1,
        maximum=65535,
        unset=str(HTTP_PORT),
        panel=CONNECTION,
    )
    grpc_port: int | None = option(
        None,
        metavar="PORT",
        help="gRPC port of that host.",
        minimum=1,
        maximum=65535,
        unset=str(GRPC_PORT),
        panel=CONNECTION,
    )
    url: str | None = option(
        None,
        "--url",
        "-u",
        metavar="HOST:PORT",
        help="Host and port of the protocol in one word.",
        panel=CONNECTION,
    )
    connect_timeout: float | None = option(
        None,
        metavar="SECONDS",
        help="Longest wait for the first answer.",
        unset=f"{CONNECT_TIMEOUT:g}, or what loading a model takes",
        above=0,
        panel=CONNECTION,
    )
    api_key: str | None = option(
        None,
        metavar="KEY",
        help="API key of that host; a server that was started here needs none.",
        variable="TRTSERVE_API_KEY",
        panel=CONNECTION,
    )
    ssl: bool = option(False, "--ssl", "-s", help="Encrypt the connection (TLS).", panel=CONNECTION)
    root_certificates: Path | None = option(
        None,
        "--root-certificates",
        "-r",
        metavar="FILE",
        help="Root certificates to trust (PEM).",
        unset="the system's",
        panel=CONNECTION,
    )
    private_key: Path | None = option(
        None,
        "--private-key",
        "-p",
        metavar="FILE",
        help="This client's key (PEM), if the server asks for one.",
        panel=CONNECTION,
    )
    certificate_chain: Path | None = option(
        None, "--certificate-chain", "-x", metavar="FILE", help="Certificates of the key (PEM).", panel=CONNECTION
    )

    @property
    def explicit(self) -> bool:
        """True when an address is given instead of the name of a server."""
        return any(each is not None for each in (self.host, self.http_port, self.grpc_port, self.url))

    def tls(self) -> Tls | None:
        """Return the certificates, or None for a plain connection."""
        from trtserve.client.endpoint import Tls

        files = (self.root_certificates, self.private_key, self.certificate_chain)
        if not self.ssl:
            if any(file is not None for file in files):
                raise UsageError("Certificates are of no use on a plain connection: add --ssl.")
            return None
        return Tls(
            root_certificates=self.root_certificates,
            private_key=self.private_key,
            certificate_chain=self.certificate_chain,
        )


_PORTS = ("host", "http_port", "grpc_port")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def find_endpoint(
    connection: Connection, protocol: Literal["grpc", "http"] = "grpc", *, model: str | None = None
) -> Endpoint:
    """Return the address that was given, or that of a server recorded by `start`.

    `model` is what a port for many models is asked for.
    """
    host, http_port, grpc_port = connection.host, connection.http_port, connection.grpc_port
    if connection.explicit and connection.server is not None:
        raise UsageError("--server names a recorded server; it cannot be combined with an address.")
    if connection.url is not None:
        if host is not None or http_port is not None or grpc_port is not None:
            raise UsageError("--url holds host and port; leave --host, --http-port and --grpc-port out.")
        host, port = split_address(connection.url)
        http_port, grpc_port = (port, None) if protocol == "http" else (None, port)
    if protocol == "http" and http_port is None and grpc_port is not None:
        raise UsageError(
            "--grpc-port is given without --http-port, but these requests go over HTTP.", hint="Give --http-port PORT."
        )
    if protocol == "grpc" and grpc_port is None and http_port is not None:
        raise UsageError(
            "--http-port is given without --grpc-port, but the server is asked over gRPC.",
            hint="Give --grpc-port PORT, or ask over HTTP: --protocol http (query).",
        )
    if connection.explicit:
        endpoint = _explicit(host, http_port, grpc_port, protocol, model)
    else:
        endpoint = _recorded(connection.server, model)
    return replace(
        endpoint,
        tls=connection.tls() or endpoint.tls,
        api_key=connection.api_key or endpoint.api_key,
        connect_timeout=connection.connect_timeout or endpoint.connect_timeout,
    )


def _explicit(
    host: str | None,
    http_port: int | None,
    grpc_port: int | None,
    protocol: Literal["grpc", "http"],
    model: str | None,
) -> Endpoint:
    """Return the address, with model and repository if a server that was started here has it."""
    from trtserve.client.endpoint import Endpoint

    endpoint = Endpoint(host=host or "127.0.0.1", http_port=http_port or HTTP_PORT, grpc_port=grpc_port or GRPC_PORT)
    if endpoint.host not in _LOOPBACK:
        return endpoint
    if protocol == "http":
        require_port(endpoint.host, endpoint.http_port, "HTTP")
    else:
        require_port(endpoint.host, endpoint.grpc_port, "gRPC")
    from trtserve.server.discovery import endpoint_of
    from trtserve.server.state import list_servers

    for server in list_servers():
        own, front = server.address, server.endpoint
        speaks_http = protocol == "http" or server.kept is not None
        ports = (own.http_port, front.http_port) if speaks_http else (own.grpc_port, front.grpc_port)
        asked = endpoint.http_port if protocol == "http" else endpoint.grpc_port
        if own.host in _LOOPBACK and asked in ports:
            found = endpoint_of(server, model)
            if server.kept is not None:
                return found
            return replace(found, **{port: getattr(endpoint, port) for port in _PORTS})
    return endpoint


def find_openai_endpoint(url: str, model: str | None) -> Endpoint | None:
    """Return the server that was started here and whose OpenAI API has this address; `model`: see `find_endpoint`."""
    from trtserve.server.discovery import endpoint_of
    from trtserve.server.state import list_servers

    asked = url.partition("//")[2].partition("/")[0]
    for server in list_servers():
        ports = server.address.http_port, server.endpoint.http_port
        if asked in {f"{host}:{port}" for host in _LOOPBACK for port in ports}:
            return endpoint_of(server, model)
    return None


def require_port(host: str, port: int, wanted: Literal["HTTP", "gRPC", "metrics"]) -> None:
    """Raise UsageError when a server that was started here serves something other than `wanted` on this port."""
    from trtserve.server.state import list_servers

    if host not in _LOOPBACK:
        return
    for server in list_servers():
        for ports in _ports_of(server):
            found = next((kind for kind, number in ports.items() if number == port), wanted)
            if found != wanted and ports.get(wanted):  # a port for many models has no others
                address = f"{host}:{ports[wanted]}"
                protocol = {"HTTP": "http", "gRPC": "grpc"}.get(found)
                other = (
                    f"; or ask over {found}: --protocol {protocol} (query)" if protocol and wanted != "metrics" else ""
                )
                raise UsageError(
                    f"{port} is the {found} port of the server {server.name}, whose {wanted} port is {ports[wanted]}.",
                    hint=f"Give --url {address}{other}.",
                )


def _ports_of(server: Server) -> Iterator[dict[str, int]]:
    """Return the ports of each instance of a server and of the proxy before them, by what they serve."""
    for address in (instance.address for instance in server.instances):
        yield {"HTTP": address.http_port, "gRPC": address.grpc_port, "metrics": address.metrics_port}
    if server.proxy is not None:
        yield {"HTTP": server.proxy.http_port, "gRPC": server.proxy.grpc_port}


def _recorded(name: str | None, model: str | None) -> Endpoint:
    """Return the endpoint of a server, or of the port for many models that has `name` among them."""
    from trtserve.server.discovery import endpoint_of, find_server
    from trtserve.server.state import list_servers

    port = next((server for server in list_servers() if name in (server.kept or ())), None)
    server, model = (port, name) if port is not None else (find_server(name), model)
    if server.kept is not None and server.kept.get(model or "") == "unloaded":
        TerminalProgress().step(f"{model} is loaded for this request")
    if server.state == "starting":
        TerminalProgress().warn(f"{server.name} is still starting; `trtserve status` says when it runs.")
    return endpoint_of(server, model)


def split_address(url: str, flag: str = "--url") -> tuple[str, int]:
    """Return host and port of --url, or of another flag. Raises UsageError for anything else."""
    host, _, port = url.rpartition(":")
    if not host or "/" in url or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        bare = url.partition("://")[2].partition("/")[0]
        hint = f"Without what is around it: {flag} {bare}" if ":" in bare else None
        raise UsageError(f"{flag} is {url!r}; expected HOST:PORT, such as localhost:{GRPC_PORT}.", hint=hint)
    require_host(host, flag)
    return host, int(port)
