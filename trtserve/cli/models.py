"""`trtserve models`, `list`, `remove` and `prune`: the models that have a short name, and those that were imported."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtserve.cli.options import DryRunOption, JsonOption, imports
from trtserve.cli.output import count, print_data, print_json, print_table, say, with_bytes
from trtserve.errors import UsageError
from trtserve.host.machine import format_bytes

if TYPE_CHECKING:
    from trtserve.pipeline.inventory import Removal, StoredName


def models(json: JsonOption = False) -> None:
    """List the short names that import and plan understand: size, licence, and what fits this machine.

    Any other model of the hub is named org/name; `trtserve plan org/name` says whether it fits.

    Examples:
        trtserve models
        trtserve models --json
    """
    from trtserve.pipeline.catalogue import list_known

    found = list(list_known())
    if json:
        print_json("models", [asdict(each) for each in found])
        return
    rows = [
        (
            each.alias,
            each.repository,
            count(each.parameters),
            format_bytes(each.source_bytes),
            f"{each.licence}, gated" if each.gated else each.licence,
            each.fits or "unknown",
        )
        for each in found
    ]
    print_table(("alias", "hub id", "parameters", "download", "licence", "fits here"), rows)
    say("int8 and int4: with --quantize int8 or int4. Gated: accept the licence on the hub, then `hf auth login`.")
    ungated = next((each.alias for each in found if not each.gated and each.fits == "yes"), None)
    if ungated is not None:
        say(f"Next: trtserve import {ungated}")


def list_models(json: JsonOption = False) -> None:
    """List imported models: source, size on disk, engine precision, repository, running server.

    Examples:
        trtserve list
        trtserve list --json
    """
    from trtserve.pipeline.inventory import list_imported

    entries = list_imported()
    if json:
        print_json("list", [with_bytes(asdict(entry)) for entry in entries])
        return
    if not entries:
        say("Nothing has been imported yet. Try: trtserve import demo")
        return
    columns = ("name", "source", "size", "engine", "repository", "server")
    rows = [
        (e.name, e.source, format_bytes(e.size), e.precision or "-", _place(e.repository), _server(e)) for e in entries
    ]
    print_table(columns, rows)


def _server(entry: StoredName) -> str:
    return f"{entry.server} (another build)" if entry.other_build else entry.server or "-"


def _place(repository: str) -> str:
    # A terminal shows only the name of a folder in the store; a pipe gets the full path.
    from trtserve.artifacts import ModelRepository
    from trtserve.store import Store

    path = Path(repository)
    in_store = path.parent == Store().folder(ModelRepository)
    return path.name if repository and in_store and sys.stdout.isatty() else repository or "-"


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
    from trtserve.pipeline import inventory

    if bool(names) == everything:
        raise UsageError("Name what to remove, or give --all (not both).", hint="trtserve list shows the names.")
    removal = inventory.plan_removal(names or (), everything=everything)
    if not dry_run:
        inventory.remove(removal)
    _print_removal("remove", removal, dry_run=dry_run, json=json)


def prune(dry_run: DryRunOption = False, json: JsonOption = False) -> None:
    """Remove what no name reaches: older builds, and what interrupted commands left, unfinished downloads included.

    What `trtserve list` shows with its newest build stays, and so does what a server runs.

    Examples:
        trtserve prune --dry-run
        trtserve prune
    """
    from trtserve.pipeline import inventory

    removal = inventory.plan_prune()
    if not dry_run:
        inventory.remove(removal)
    _print_removal("prune", removal, dry_run=dry_run, json=json)


def _print_removal(command: str, removal: Removal, *, dry_run: bool, json: bool) -> None:
    if json:
        print_json(command, with_bytes(asdict(removal)) | {"removed": not dry_run})
        return
    for folder in removal.folders:
        print_data(str(folder))
    for folder in removal.kept:
        say(f"kept, because another name uses it or it is outside the store: {folder}")
    say(f"{format_bytes(removal.size)} {'would be freed' if dry_run else 'freed'}")
