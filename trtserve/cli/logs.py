"""`trtserve logs`: what Triton and the models have written."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from trtserve.cli.options import JsonOption
from trtserve.cli.output import print_data, print_json
from trtserve.errors import UsageError
from trtserve.triton.server_log import tail


def logs(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of the server; default: the only one.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the server ends or Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 100,
    json: JsonOption = False,
) -> None:
    """Print the end of a server's log, also of one that has ended."""
    from trtserve.start import find_log, follow_log

    if json and follow:
        raise UsageError("--json is one document; it cannot be combined with --follow.")
    log = find_log(name)
    position = log.stat().st_size
    last = tail(log, lines)
    if json:
        print_json("logs", {"log": log, "lines": last})
    elif last:
        print_data("\n".join(last))
    if follow:
        for text in follow_log(log, position=position, pause=lambda: time.sleep(0.2)):
            print_data(text)
