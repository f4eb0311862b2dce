"""`trtserve logs`: print the log of a server."""

from __future__ import annotations

import time
from json import dumps
from typing import Annotated, Literal

import typer

from trtserve.cli.options import JsonOption, ServerArgument, ServerOption, one_name
from trtserve.cli.output import TerminalProgress, print_data, print_json
from trtserve.errors import UsageError, counted
from trtserve.server.triton.server_log import described, is_noise, tail


def logs(
    name: ServerArgument = None,
    *,
    server: ServerOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the server ends or Ctrl-C.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", "--tail", metavar="N", min=0, help="How many of the last lines.")
    ] = 100,
    everything: Annotated[
        bool, typer.Option("--all", help="Also lines that only say that this machine has no GPU.")
    ] = False,
    log_format: Annotated[
        Literal["text", "json"], typer.Option("--log-format", help="json: one JSON object for each line.")
    ] = "text",
    json: JsonOption = False,
) -> None:
    """Print the end of a server's log, also of a server that has ended.

    NAME@2 is the log of a second instance, NAME@proxy that of nginx, NAME@supervisor that of `start --detach`.

    Examples:
        trtserve logs
        trtserve logs demo --follow
    """
    from trtserve.server.discovery import find_log, follow_log

    if json and follow:
        raise UsageError("--json is one document; it cannot be combined with --follow.")
    log = find_log(one_name(name, server))
    position = log.stat().st_size
    last = tail(log, lines)
    noise = 0 if everything else sum(map(is_noise, last))

    def shown(text: str) -> str:
        kept = [line for line in text.splitlines() if everything or not is_noise(line)]
        return "\n".join(dumps(described(line)) if log_format == "json" else line for line in kept)

    if json:
        print_json("logs", {"log": log, "lines": last})
    elif text := shown("\n".join(last)):
        print_data(text)
    if noise and not json:
        TerminalProgress().step(
            f"{counted(noise, 'line')} left out that only say that this machine has no GPU, which the CPU runtime does "
            "not need (--all shows them)."
        )
    if follow:
        for added in follow_log(log, position=position, pause=lambda: time.sleep(0.2)):
            if text := shown(added):
                print_data(text)
