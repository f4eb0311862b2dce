"""`trtserve stop`: a running server ends without a trace."""

from __future__ import annotations

from typing import Annotated

import typer

from trtserve.cli.options import JsonOption, QuietOption
from trtserve.cli.output import TerminalProgress, print_data, print_json
from trtserve.errors import UsageError


def stop(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of the server; default: the only one.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop every server.")] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Stop a server, and print its name when no process, port or shared memory of it is left."""
    from trtserve.start import recorded_servers, stop_server

    if everything and name is not None:
        raise UsageError(f"Both a name ({name}) and --all were given; give one.")
    names: list[str | None] = [server.name for server in recorded_servers()] if everything else [name]
    progress = TerminalProgress(quiet=quiet)
    stopped = [stop_server(one, progress=progress).name for one in names]
    if json:
        print_json("stop", {"stopped": stopped})
    elif stopped:
        print_data("\n".join(stopped))
    else:
        progress.step("No server is running.")
