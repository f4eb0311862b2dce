"""`trtserve stop`: stop a server."""

from __future__ import annotations

from typing import Annotated

import typer

from trtserve.cli.options import JsonOption, QuietOption, ServerArgument
from trtserve.cli.output import TerminalProgress, print_data, print_json
from trtserve.errors import UsageError


def stop(
    name: ServerArgument = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Stop every server.")] = False,
    drain: Annotated[
        float,
        typer.Option(
            "--drain",
            metavar="SECONDS",
            min=0,
            help="Refuse new requests, and wait this long for running ones to end.",
        ),
    ] = 0.0,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Stop a server and print its name once no process, port or shared memory of it is left.

    Examples:
        trtserve stop
        trtserve stop demo --drain 30
        trtserve stop --all
    """
    from trtserve.server.shutdown import stop_server
    from trtserve.server.state import recorded_servers

    if everything and name is not None:
        raise UsageError(f"Both a name ({name}) and --all were given; give one.")
    names: list[str | None] = [server.name for server in recorded_servers()] if everything else [name]
    progress = TerminalProgress(quiet=quiet)
    stopped = [stop_server(one, drain=drain, progress=progress).name for one in names]
    if json:
        print_json("stop", {"stopped": stopped})
    elif stopped:
        print_data("\n".join(stopped))
    else:
        progress.step("No server is running.")
