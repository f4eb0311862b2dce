"""`trtserve replicas`: the copies behind a gateway, shown and changed while it runs."""

from __future__ import annotations

import http.client
import json as json_module
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from trtserve.cli.endpoint import split_address
from trtserve.cli.options import JsonOption, ServerArgument, paths
from trtserve.cli.output import print_json, print_table, say
from trtserve.errors import RequestError, ServerUnreachableError, UsageError

_COLUMNS = ("replica", "state", "running requests", "tokens to do")
_SECONDS = 10.0
_POLL = 0.5


def replicas(
    name: ServerArgument = None,
    *,
    add: Annotated[
        str | None,
        typer.Option("--add", metavar="HOST:PORT", help="Send requests to one more copy, HOST:PORT or HOST:PORT:HTTP."),
    ] = None,
    drain: Annotated[
        str | None,
        typer.Option("--drain", metavar="HOST:PORT", help="Send no new requests to it, and wait for those that run."),
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="HOST:PORT", help="Send requests to a drained one again.")
    ] = None,
    remove: Annotated[
        str | None,
        typer.Option("--remove", metavar="HOST:PORT", help="Remove it from the gateway; its running requests finish."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="HOST:PORT", help="A gateway that `trtserve gateway` runs, instead of NAME."),
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option("--admin-key-file", metavar="FILE", help="Its admin key, for --url.", autocompletion=paths),
    ] = None,
    root_certificates: Annotated[
        Path | None,
        typer.Option(
            "--root-certificates",
            metavar="FILE",
            help="Encrypt the connection to --url, and trust these roots.",
            autocompletion=paths,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show the copies of a server behind its gateway; add, drain, resume or remove one while it runs.

    PORT is that of gRPC. Changes are forgotten when the gateway starts again. A copy that is added gets the servers'
    API key with every request: add only servers that you trust.

    Examples:
        trtserve replicas demo
        trtserve replicas demo --drain 127.0.0.1:8004
        trtserve replicas --url gateway:9000 --admin-key-file FILE --add gpu-3:8001
    """
    given = {"add": add, "drain": drain, "resume": resume, "remove": remove}
    changes = [(action, address) for action, address in given.items() if address is not None]
    if len(changes) > 1:
        raise UsageError("Change one replica at a time.", hint="Run the command once for each change.")
    front = _of_address(url, admin_key_file, root_certificates) if url else _of_server(name)
    for action, address in changes:
        front.ask("POST", f"/replicas/{action}", {"address": address})
    found = front.ask("GET", "/replicas")
    while drain is not None and (running := _running(found, drain)):
        say(f"{drain} has {running} requests left. Ctrl-C leaves it drained.")
        time.sleep(_POLL)
        found = front.ask("GET", "/replicas")
    if json:
        print_json("replicas", found)
    else:
        rows = [(each["address"], each["state"], each["running"], each["tokens"]) for each in found]
        print_table(_COLUMNS, rows)


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


def _of_server(name: str | None) -> _Front:
    from trtserve.client.http_transport import tls_context
    from trtserve.gateway.settings import GatewaySettings, read_key
    from trtserve.server.discovery import find_server
    from trtserve.server.triton.tritonserver import client_host

    server = find_server(name, hint="Name one of them: trtserve replicas NAME")
    if server.gateway is None:
        raise UsageError(f"{server.name} was started with --raw-http: it has no gateway.")
    settings = GatewaySettings.read(server.gateway.settings)
    if settings.admin_key_file is None:
        raise UsageError(f"{server.name} was started by an earlier version, which could not change replicas.")
    host, port = client_host(settings.host), settings.port
    tls = settings.endpoint.tls
    if tls is None:
        return _Front(http.client.HTTPConnection(host, port, timeout=_SECONDS), read_key(settings.admin_key_file))
    connection = http.client.HTTPSConnection(host, port, timeout=_SECONDS, context=tls_context(tls))
    return _Front(connection, read_key(settings.admin_key_file))


def _of_address(url: str, admin_key_file: Path | None, root_certificates: Path | None) -> _Front:
    from trtserve.client.endpoint import Tls
    from trtserve.client.http_transport import tls_context
    from trtserve.gateway.settings import read_key

    if admin_key_file is None:
        raise UsageError("--url needs --admin-key-file: the file that `trtserve gateway` was started with.")
    host, port = split_address(url)
    key = read_key(admin_key_file)
    if root_certificates is None:
        return _Front(http.client.HTTPConnection(host, port, timeout=_SECONDS), key)
    context = tls_context(Tls(root_certificates=root_certificates))
    return _Front(http.client.HTTPSConnection(host, port, timeout=_SECONDS, context=context), key)
