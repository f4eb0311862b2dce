"""`trtserve remove`: free the disk that imported models take."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from trtserve.cli.options import DryRunOption, JsonOption
from trtserve.cli.output import print_data, print_json, say
from trtserve.errors import UsageError


def remove(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Names as `trtserve list` shows.")] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Everything in the store, unfinished pulls included, and when no server runs their logs too."
        ),
    ] = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Remove imported models and their artefacts; what other names use stays."""
    from trtserve import inventory
    from trtserve.machine import gibibytes

    if bool(names) == everything:
        raise UsageError("Name what to remove, or give --all (not both).", hint="trtserve list shows the names.")
    removal = inventory.plan_removal(names or (), everything=everything)
    if not dry_run:
        inventory.remove(removal)
    if json:
        print_json("remove", asdict(removal) | {"removed": not dry_run})
        return
    for folder in removal.folders:
        print_data(str(folder))
    for folder in removal.kept:
        say(f"kept, since it is used by another name or lies outside the store: {folder}")
    say(f"{gibibytes(removal.size)} {'would be freed' if dry_run else 'freed'}")
