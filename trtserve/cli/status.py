"""`trtserve status`: which servers run, on which ports, and how."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from trtserve.cli.options import JsonOption
from trtserve.cli.output import TerminalProgress, print_json, print_table
from trtserve.errors import ServerDiedError

if TYPE_CHECKING:
    from trtserve.servers import Server
    from trtserve.status import Status

_COLUMNS = ("name", "state", "model", "http", "grpc", "metrics", "pid", "policy", "engine", "kv cache")


def status(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of a server; default: all.")] = None,
    json: JsonOption = False,
) -> None:
    """Show the servers started from this store; with a name, exit code 35 when that one has failed."""
    from trtserve.servers import chosen_store
    from trtserve.status import server_status

    found = server_status(name)
    progress = TerminalProgress()
    if json:
        print_json("status", [asdict(one) for one in found])
    elif found:
        print_table(_COLUMNS, [_row(one) for one in found])
    else:
        progress.step(f"No server is running. Start one: trtserve start{chosen_store()}")
    for one in found:
        if one.without_meaning:
            progress.step(f"{one.server.name}: without meaning on this runtime: {', '.join(one.without_meaning)}")
        for warning in one.warnings:
            progress.warn(f"{one.server.name}: {warning}")
        if one.condition == "failed":
            _report_failure(one, named=name is not None)


def _report_failure(one: Status, *, named: bool) -> None:
    message = f"{one.server.name}: {one.reason}."
    hint = f"Clean up with `trtserve stop {one.server.name}`, then start it again."
    if named:
        raise ServerDiedError(message, hint=hint, log=one.log)
    TerminalProgress().warn(f"{message} {hint} Log: {one.log}")


def _row(one: Status) -> tuple[object, ...]:
    from trtserve.start import transaction_policy

    server = one.server
    return (
        server.name,
        one.condition,
        server.model,
        f"{server.host}:{_through_proxy(server)}{','.join(str(instance.http_port) for instance in server.instances)}",
        *(
            ",".join(str(getattr(each, key)) for each in server.instances)
            for key in ("grpc_port", "metrics_port", "pid")
        ),
        transaction_policy(server.streaming),
        ", ".join(f"{key.removesuffix('_precision')} {value}" for key, value in one.precision.items()) or "-",
        _kv_text(one) or "-",
    )


def _through_proxy(server: Server) -> str:
    return "" if server.endpoint == server.address else f"{server.endpoint.http_port} → "


def _kv_text(one: Status) -> str:
    """`12 of 96 blocks of 32 tokens`, as far as the gauges tell."""
    blocks = one.kv_blocks
    # The gauges stand at 0 until the core model sets them for the first time.
    if not blocks.get("max"):
        return ""
    size = f" of {blocks['tokens_per']} tokens" if blocks.get("tokens_per") else ""
    return f"{blocks.get('used', 0)} of {blocks['max']} blocks{size}"
