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
            help="gRPC port of a further server with the same models, which shares the requests; repeatable.",
            rich_help_panel=_TRITON,
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
            "host", "api_key_file", "tls_certificate", "tls_key", "no_auth", "no_tls", "allow_origin", "max_requests"
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
    from trtserve.gateway.listener import serve
    from trtserve.gateway.settings import GatewaySettings, RequestLimits
    from trtserve.host.ports import ipv4_address, listening_socket
    from trtserve.server.front import require_protected
    from trtserve.server.triton.tritonserver import client_host

    host = ipv4_address(access.host)
    require_protected(access, host)
    triton, grpc_port = split_address(url)
    for each in replica or ():
        split_address(each, "--replica")
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
        limits=RequestLimits(requests=access.max_requests),
    )
    with listening_socket(host, port) as listening:
        scheme = "http" if access.tls_certificate is None else "https"
        print_data(f"{scheme}://{client_host(host)}:{port}/v1")
        say(f"In front of {url}. Stop: Ctrl-C")
        serve(settings, listening)
