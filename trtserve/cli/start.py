"""`trtserve start`: a model repository becomes a running server."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.cli.options import DryRunOption, JsonOption, QuietOption
from trtserve.cli.output import TerminalProgress, print_data, print_json, say
from trtserve.specs import ServerSpec

if TYPE_CHECKING:
    from trtserve.start import Plan, Server


def start(
    name: Annotated[
        str | None, typer.Argument(help="Name of an import or a repository; default: the last import.")
    ] = None,
    triton_arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- TRITON FLAGS]", help="Flags for tritonserver itself.")
    ] = None,
    model_repository: Annotated[
        Path | None, typer.Option("--model-repository", help="Serve this folder instead of an import.", metavar="DIR")
    ] = None,
    server_name: Annotated[
        str | None, typer.Option("--name", help="Name of the server; default: the repository's.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Interface to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option("--http-port", help="Port of the HTTP service.")] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc-port", help="Port of the gRPC service.")] = 8001,
    metrics_port: Annotated[int, typer.Option("--metrics-port", help="Port of the metrics service.")] = 8002,
    auto_ports: Annotated[
        bool, typer.Option("--auto-ports", help="Replace each port that is taken by the next free one.")
    ] = False,
    world_size: Annotated[
        int | None, typer.Option("--world-size", help="Number of ranks; default: what the engine needs.")
    ] = None,
    ready_timeout: Annotated[
        float, typer.Option("--ready-timeout", help="Seconds until all models must be ready.")
    ] = 600.0,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when the server is ready.")] = False,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Serve a model with Triton, in the foreground until Ctrl-C, or with --detach in the background."""
    from trtserve.start import find_repository, plan_server, serve_foreground, start_server, with_free_ports

    imported, extra = _split_arguments(name, triton_arguments or [])
    spec = ServerSpec(
        name=server_name,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        world_size=world_size,
        ready_timeout=ready_timeout,
        extra_arguments=extra,
    )
    spec = with_free_ports(spec) if auto_ports else spec
    repository = find_repository(imported, path=model_repository)
    progress = TerminalProgress(quiet=quiet)
    if dry_run:
        _print_plan(plan_server(repository, spec), json=json)
    elif detach:
        _print_server(start_server(repository, spec, progress=progress), json=json, quiet=quiet, detached=True)
    else:
        serve_foreground(
            repository,
            spec,
            on_ready=lambda server: _print_server(server, json=json, quiet=quiet, detached=False),
            progress=progress,
        )


def _split_arguments(name: str | None, rest: list[str]) -> tuple[str | None, tuple[str, ...]]:
    """`start -- --flag` puts the first flag where a name is expected."""
    if name is not None and name.startswith("-"):
        return None, (name, *rest)
    return name, tuple(rest)


def _print_plan(plan: Plan, *, json: bool) -> None:
    if json:
        print_json("start", {**_described(plan), "command": str(plan.command), "dry_run": True})
        return
    lines = [f"{key}: {value}" for key, value in _described(plan).items()]
    print_data("\n".join([*lines, f"command: {plan.command}"]))


def _described(plan: Plan) -> dict[str, Any]:
    from trtserve.start import transaction_policy

    return {
        "name": plan.name,
        "repository": plan.repository,
        "model": plan.served.model,
        "transaction_policy": transaction_policy(plan.served.streaming),
        "processes": 1,
        "log": plan.log,
    }


def _print_server(server: Server, *, json: bool, quiet: bool, detached: bool) -> None:
    from trtserve.triton.server import client_host

    url = f"http://{client_host(server.host)}:{server.http_port}"
    if json:
        print_json("start", {**asdict(server), "url": url})
    else:
        print_data(url)
    if not quiet:
        _print_hints(server, detached=detached)


def _print_hints(server: Server, *, detached: bool) -> None:
    from trtserve.start import list_servers

    say(f"{server.name} is ready: gRPC {server.host}:{server.grpc_port}, metrics {server.host}:{server.metrics_port}")
    which = f" --server {server.name}" if len(list_servers()) > 1 else ""
    say(f'{"Try" if detached else "Try in a second terminal"}: trtserve query "What is ML?"{which}')
    say(f"Stop: trtserve stop {server.name}" if detached else "Stop: Ctrl-C")
