"""`trtserve remove`: remove imported models and their artefacts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from trtserve.cli.options import DryRunOption, JsonOption, imports
from trtserve.cli.output import (
    print_data,
    print_json,
    say,
    with_bytes,
)
from trtserve.errors import UsageError


def remove(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Names, as `trtserve list` shows them.", autocompletion=imports),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Remove everything in the store, unfinished downloads included; logs only if no server runs."
        ),
    ] = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Remove imported models and their artefacts; artefacts that other names use stay.

    Examples:
        trtserve remove llama-2-7b --dry-run
        trtserve remove --all
    """
    from trtserve.host.machine import format_bytes
    from trtserve.pipeline import inventory

    if bool(names) == everything:
        raise UsageError("Name what to remove, or give --all (not both).", hint="trtserve list shows the names.")
    removal = inventory.plan_removal(names or (), everything=everything)
    if not dry_run:
        inventory.remove(removal)
    if json:
        print_json("remove", with_bytes(asdict(removal)) | {"removed": not dry_run})
        return
    for folder in removal.folders:
        print_data(str(folder))
    for folder in removal.kept:
        say(f"kept, because another name uses it or it is outside the store: {folder}")
    say(f"{format_bytes(removal.size)} {'would be freed' if dry_run else 'freed'}")
