"""`trtserve gateway`: OpenAI's API in front of a Triton server that something else started."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtserve.cli.endpoint import split_address
from trtserve.cli.options import Fields, paths
from trtserve.cli.output import print_data, say
from trtserve.errors import UsageError
from trtserve.specs import ServerSpec
from trtserve.specs.server import GRPC_PORT, HTTP_PORT, METRICS_PORT

GATEWAY_PORT = 9000
_TRITON = "The Triton server"


def gateway(
    *,
    url: Annotated[str, typer.Option("--url", "-u", metavar="HOST:PORT", help="gRPC port of the Triton server.")] = (
        f"localhost:{GRPC_PORT}"
    ),
    port: Annotated[int, typer.Option("--port", metavar="PORT", help="Port to listen on.", min=1)] = GATEWAY_PORT,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="DIR",
            help="Folder of the model's tokenizer; without it the text models are asked, and chat does not work.",
            autocompletion=paths,
        ),
    ] = None,
    repository: Annotated[
        Path | None,
        typer.Option(
            "--repository",
            metavar="DIR",
            help="The server's model repository, if it is on this machine: it has the tokenizer and the adapters.",
            autocompletion=paths,
        ),
    ] = None,
    ui: Annotated[
        bool, typer.Option("--ui", help="Serve a page with a conversation and the server's figures.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Text model of a server with several.",
            show_default="the alias",
            rich_help_panel=_TRITON,
        ),
    ] = None,
    replica: Annotated[
        list[str] | None,
        typer.Option(
            "--replica",
            metavar="HOST:PORT",
            help="gRPC port of a further server with the same models, which shares the requests; repeatable. "
            "HOST:PORT:HTTP_PORT also shares requests of Triton's protocol.",
            rich_help_panel=_TRITON,
        ),
    ] = None,
    servers_key_file: Annotated[
        Path | None,
        typer.Option(
            "--servers-key-file",
            metavar="FILE",
            help="API key of the servers, if `trtserve start` runs them with one.",
            autocompletion=paths,
            rich_help_panel=_TRITON,
        ),
    ] = None,
    servers_certificates: Annotated[
        Path | None,
        typer.Option(
            "--servers-certificates",
            metavar="FILE",
            help="Encrypt the connections to the servers, and trust these roots (PEM).",
            autocompletion=paths,
            rich_help_panel=_TRITON,
        ),
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            "--admin-key-file",
            metavar="FILE",
            help="Key of those who may change replicas and adapters while it runs; without it nobody may. A started "
            "server has one of its own: servers/NAME.gateway/1.admin-key in its store.",
            autocompletion=paths,
        ),
    ] = None,
    http_port: Annotated[
        int, typer.Option("--http-port", metavar="PORT", help="Its HTTP port.", min=1, rich_help_panel=_TRITON)
    ] = HTTP_PORT,
    metrics_port: Annotated[
        int, typer.Option("--metrics-port", metavar="PORT", help="Its metrics port.", min=1, rich_help_panel=_TRITON)
    ] = METRICS_PORT,
    access: Annotated[
        ServerSpec,
        Fields(
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
        ),
    ],
) -> None:
    """Serve OpenAI's API in front of any Triton server with these models, NVIDIA's own included, until Ctrl-C.

    `trtserve start` does the same for its own servers.

    Examples:
        trtserve gateway --url gpu-server:8001 --tokenizer ./Llama-3.1-8B-Instruct
        trtserve gateway --repository /models/triton --port 8080 --ui
        trtserve gateway --url gpu-1:8001 --replica gpu-2:8001 --tokenizer ./Llama
    """
    from trtserve.client.endpoint import Tls
    from trtserve.client.http_transport import tls_context
    from trtserve.gateway.processes import serve
    from trtserve.gateway.replicas import addresses_of
    from trtserve.gateway.settings import GatewaySettings, RequestLimits, read_key
    from trtserve.host.ports import ipv4_address, listening_socket
    from trtserve.server.front import require_protected
    from trtserve.server.triton.tritonserver import client_host

    host = ipv4_address(access.host)
    require_protected(access, host)
    triton, grpc_port = split_address(url)
    addresses_of(replica or ())
    tls = None if servers_certificates is None else Tls(root_certificates=servers_certificates)
    if tls is not None:
        tls_context(tls)  # files that cannot be used are refused now
    for key_file in (servers_key_file, admin_key_file):
        if key_file is not None:
            read_key(key_file)
    for flag, folder in (("--tokenizer", tokenizer), ("--repository", repository)):
        if folder is not None and not folder.is_dir():
            raise UsageError(f"{flag} is {folder}, which is not a folder on this machine.")
    settings = GatewaySettings(
        name="gateway",
        host=host,
        port=port,
        triton_http=f"{triton}:{http_port}",
        triton_grpc=f"{triton}:{grpc_port}",
        replicas=tuple(replica or ()),
        metrics=f"{triton}:{metrics_port}",
        model=model or "",
        repository=repository,
        tokenizer=tokenizer,
        own=False,
        ui=ui,
        key_file=access.api_key_file,
        certificate=access.tls_certificate,
        private_key=access.tls_key,
        allow_origins=access.allow_origin,
        processes=access.gateway_processes,
        request_log=access.request_log,
        request_log_texts=access.request_log_texts,
        servers_key_file=servers_key_file,
        servers_tls=tls,
        admin_key_file=admin_key_file,
        image_folder=access.image_folder,
        image_hosts=access.image_host,
        limits=RequestLimits(requests=access.max_requests),
    )
    with listening_socket(host, port) as listening:
        scheme = "http" if access.tls_certificate is None else "https"
        print_data(f"{scheme}://{client_host(host)}:{port}/v1")
        say(f"In front of {url}. Stop: Ctrl-C")
        if code := serve(settings, listening):
            raise typer.Exit(code)
