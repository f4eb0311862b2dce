"""`trtserve gateway` and `replicas`: OpenAI's API in front of Triton servers that something else started."""

from __future__ import annotations

import http.client
import json as json_module
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.cli.endpoint import split_address
from trtserve.cli.options import Fields, JsonOption, ServerArgument
from trtserve.cli.output import TerminalProgress, print_data, print_json, print_table, say
from trtserve.errors import RequestError, ServerUnreachableError, UsageError
from trtserve.specs import ServerSpec
from trtserve.specs.options import Spec, option
from trtserve.specs.server import GRPC_PORT, HTTP_PORT, METRICS_PORT

if TYPE_CHECKING:
    from trtserve.client.endpoint import Tls
    from trtserve.gateway.settings import GatewaySettings

GATEWAY_PORT = 9000
_TRITON = "The Triton server"
_KNOCK = 1.0  # seconds


@dataclass(frozen=True, kw_only=True)
class GatewayOptions(Spec):
    """Where a gateway listens, and the servers that it is in front of."""

    url: str = option(
        f"localhost:{GRPC_PORT}", "--url", "-u", metavar="HOST:PORT", help="gRPC port of the Triton server."
    )
    port: int = option(GATEWAY_PORT, metavar="PORT", help="Port to listen on.", minimum=1, maximum=65535)
    tokenizer: Path | None = option(
        None,
        metavar="DIR",
        help="Folder of the model's tokenizer; without it the text models are asked, and chat does not work.",
    )
    repository: Path | None = option(
        None,
        metavar="DIR",
        help="The server's model repository, if it is on this machine: it has the tokenizer and the adapters.",
    )
    ui: bool = option(False, help="Serve a page with a conversation and the server's figures.")
    model: str | None = option(
        None, metavar="MODEL", help="Text model of a server with several.", unset="the alias", panel=_TRITON
    )
    replica: tuple[str, ...] = option(
        (),
        metavar="HOST:PORT",
        help="gRPC port of a further server with the same models, which shares the requests; repeatable. "
        "HOST:PORT:HTTP_PORT also shares requests of Triton's protocol.",
        panel=_TRITON,
    )
    servers_key_file: Path | None = option(
        None, metavar="FILE", help="API key of the servers, if `trtserve start` runs them with one.", panel=_TRITON
    )
    servers_certificates: Path | None = option(
        None,
        metavar="FILE",
        help="Encrypt the connections to the servers, and trust these roots (PEM).",
        panel=_TRITON,
    )
    admin_key_file: Path | None = option(
        None,
        metavar="FILE",
        help="Key of those who may change replicas and adapters while it runs; without it nobody may. A started "
        "server has one of its own: servers/NAME.gateway/1.admin-key in its store.",
    )
    http_port: int = option(
        HTTP_PORT,
        metavar="PORT",
        help="Its HTTP port; the gateway listens on --port.",
        minimum=1,
        maximum=65535,
        panel=_TRITON,
    )
    metrics_port: int = option(
        METRICS_PORT, metavar="PORT", help="Its metrics port.", minimum=1, maximum=65535, panel=_TRITON
    )


_ACCESS = Fields(
    "host",
    "api_key_file",
    "tls_certificate",
    "tls_key",
    "no_auth",
    "no_tls",
    "allow_origin",
    "image_folder",
    "image_host",
    "max_requests",
    "gateway_processes",
    "request_log",
    "request_log_texts",
)


def gateway(*, front: GatewayOptions, access: Annotated[ServerSpec, _ACCESS]) -> None:
    """Serve OpenAI's API in front of any Triton server with these models, NVIDIA's own included, until Ctrl-C.

    `trtserve start` does the same for its own servers.

    Examples:
        trtserve gateway --url gpu-server:8001 --tokenizer ./Llama-3.1-8B-Instruct
        trtserve gateway --repository /models/triton --port 8080 --ui
        trtserve gateway --url gpu-1:8001 --replica gpu-2:8001 --tokenizer ./Llama
    """
    from trtserve.gateway.processes import serve
    from trtserve.host.ports import ipv4_address, listening_socket
    from trtserve.server.front import require_protected
    from trtserve.server.triton.tritonserver import client_host

    host = ipv4_address(access.host)
    require_protected(access, host)
    settings = _settings(host, front, access)
    with listening_socket(host, front.port) as listening:
        scheme = "http" if access.tls_certificate is None else "https"
        print_data(f"{scheme}://{client_host(host)}:{front.port}/v1")
        say(f"In front of {front.url}. Stop: Ctrl-C")
        _warn_of_silence(front)
        if code := serve(settings, listening):
            raise typer.Exit(code)


def _warn_of_silence(front: GatewayOptions) -> None:
    """Warn if nothing listens where the Triton server should: it may start later, or the address is wrong."""
    host, port = split_address(front.url)
    try:
        socket.create_connection((host.strip("[]"), port), timeout=_KNOCK).close()
    except OSError as error:
        TerminalProgress().warn(
            f"Nothing answers at {front.url} yet ({error.strerror or error}): requests get 503 until a Triton server "
            "does. --url is its gRPC port."
        )


def _settings(host: str, front: GatewayOptions, access: ServerSpec) -> GatewaySettings:
    """Return the settings. Raises UsageError for addresses, keys, certificates and folders that cannot be used."""
    from trtserve.client.endpoint import Tls
    from trtserve.client.http_transport import tls_context
    from trtserve.gateway.replicas import addresses_of
    from trtserve.gateway.settings import GatewaySettings, RequestLimits, read_key

    triton, grpc_port = split_address(front.url)
    addresses_of(front.replica)
    tls = None if front.servers_certificates is None else Tls(root_certificates=front.servers_certificates)
    if tls is not None:
        tls_context(tls)
    for key_file in (front.servers_key_file, front.admin_key_file):
        if key_file is not None:
            read_key(key_file)
    for flag, folder in (("--tokenizer", front.tokenizer), ("--repository", front.repository)):
        if folder is not None and not folder.is_dir():
            raise UsageError(f"{flag} is {folder}, which is not a folder on this machine.")
    return GatewaySettings(
        name="gateway",
        host=host,
        port=front.port,
        triton_http=f"{triton}:{front.http_port}",
        triton_grpc=f"{triton}:{grpc_port}",
        replicas=front.replica,
        metrics=f"{triton}:{front.metrics_port}",
        model=front.model or "",
        repository=front.repository,
        tokenizer=front.tokenizer,
        own=False,
        ui=front.ui,
        key_file=access.api_key_file,
        certificate=access.tls_certificate,
        private_key=access.tls_key,
        allow_origins=access.allow_origin,
        processes=access.gateway_processes,
        request_log=access.request_log,
        request_log_texts=access.request_log_texts,
        servers_key_file=front.servers_key_file,
        servers_tls=tls,
        admin_key_file=front.admin_key_file,
        image_folder=access.image_folder,
        image_hosts=access.image_host,
        limits=RequestLimits(requests=access.max_requests),
    )


_CHANGES = ("add", "drain", "resume", "remove")
_SECONDS = 10.0
_POLL = 0.5


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions(Spec):
    """One change of the replicas, and the gateway that makes it."""

    add: str | None = option(
        None,
        metavar="HOST:PORT",
        help="Send requests to one more running server of the same models, HOST:PORT or HOST:PORT:HTTP.",
    )
    drain: str | None = option(
        None, metavar="HOST:PORT", help="Send no new requests to it, and wait for those that run."
    )
    resume: str | None = option(None, metavar="HOST:PORT", help="Send requests to a drained one again.")
    remove: str | None = option(
        None, metavar="HOST:PORT", help="Remove it from the gateway; its running requests finish."
    )
    url: str | None = option(None, metavar="HOST:PORT", help="A gateway that `trtserve gateway` runs, instead of NAME.")
    admin_key_file: Path | None = option(None, metavar="FILE", help="Its admin key, for --url.")
    root_certificates: Path | None = option(
        None, metavar="FILE", help="Encrypt the connection to --url, and trust these roots."
    )


def replicas(name: ServerArgument = None, *, change: ReplicaOptions, json: JsonOption = False) -> None:
    """Show the copies of a server behind its gateway; add, drain, resume or remove one while it runs.

    A copy is a Triton server of the same models that runs already. PORT is that of gRPC. Changes are forgotten when
    the gateway starts again. An added copy gets the servers' API key with every request: add only servers that you
    trust.

    Examples:
        trtserve replicas demo
        trtserve replicas demo --drain 127.0.0.1:8004
        trtserve replicas --url gateway:9000 --admin-key-file FILE --add gpu-3:8001
    """
    changes = [(action, address) for action in _CHANGES if (address := getattr(change, action)) is not None]
    if len(changes) > 1:
        raise UsageError("Change one copy at a time.", hint="Run the command once for each change.")
    front = _front(name, change)
    for action, address in changes:
        front.ask("POST", f"/replicas/{action}", {"address": address})
    found = front.ask("GET", "/replicas")
    while change.drain is not None and (running := _running(found, change.drain)):
        say(f"{change.drain} has {running} requests left. Ctrl-C leaves it drained.")
        time.sleep(_POLL)
        found = front.ask("GET", "/replicas")
    if json:
        print_json("replicas", found)
    else:
        rows = [(each["address"], each["state"], each["running"], each["tokens"]) for each in found]
        print_table(("replica", "state", "running requests", "tokens to do"), rows)


def _running(found: list[dict[str, Any]], address: str) -> int:
    from trtserve.gateway.replicas import ReplicaAddress

    name = ReplicaAddress.parse(address, "--drain").name
    return next((int(each["running"]) for each in found if each["address"] == name), 0)


class _Front:
    """The gateway that is asked."""

    def __init__(self, connection: http.client.HTTPConnection, key: str) -> None:
        self._connection, self._key = connection, key

    def ask(self, method: str, path: str, body: object = None) -> list[dict[str, Any]]:
        """Return the replicas after a request. Raises RequestError or ServerUnreachableError."""
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        try:
            self._connection.request(method, path, None if body is None else json_module.dumps(body), headers)
            answer = self._connection.getresponse()
            content = json_module.loads(answer.read(1 << 24))
            if answer.status == http.HTTPStatus.OK:
                listed: list[dict[str, Any]] = content["replicas"]
                return listed
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            where = f"{self._connection.host}:{self._connection.port}"
            raise ServerUnreachableError(
                f"No gateway answers at {where}: {error}.", hint="`trtserve status` lists the running servers."
            ) from error
        raise RequestError(f"The gateway refuses it: {str(content.get('error', content)).removesuffix('.')}.")


def _front(name: str | None, asked: ReplicaOptions) -> _Front:
    """Connect to the gateway of the server `name`, or to the one at --url."""
    from trtserve.client.endpoint import Tls
    from trtserve.client.http_transport import tls_context
    from trtserve.gateway.settings import read_key

    if asked.url is None:
        host, port, tls, key_file = _of_server(name)
    elif asked.admin_key_file is None:
        raise UsageError("--url needs --admin-key-file: the file that `trtserve gateway` was started with.")
    else:
        host, port = split_address(asked.url)
        roots, key_file = asked.root_certificates, asked.admin_key_file
        tls = None if roots is None else Tls(root_certificates=roots)
    key = read_key(key_file)
    if tls is None:
        return _Front(http.client.HTTPConnection(host, port, timeout=_SECONDS), key)
    return _Front(http.client.HTTPSConnection(host, port, timeout=_SECONDS, context=tls_context(tls)), key)


def _of_server(name: str | None) -> tuple[str, int, Tls | None, Path]:
    """Return the address, the certificates and the admin key of a server's gateway."""
    from trtserve.gateway.settings import GatewaySettings
    from trtserve.server.discovery import find_server
    from trtserve.server.triton.tritonserver import client_host

    server = find_server(name, hint="Name one of them: trtserve replicas NAME")
    if server.gateway is None:
        raise UsageError(f"{server.name} was started with --raw-http: it has no gateway.")
    settings = GatewaySettings.read(server.gateway.settings)
    if settings.admin_key_file is None:
        raise UsageError(f"{server.name} was started by an earlier version, which could not change replicas.")
    return client_host(settings.host), settings.port, settings.endpoint.tls, settings.admin_key_file
