"""`trtserve list`: list imported models."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trtserve.cli.options import JsonOption
from trtserve.cli.output import (
    print_json,
    print_table,
    say,
    with_bytes,
)

if TYPE_CHECKING:
    from trtserve.pipeline.inventory import Entry


def list_models(
    json: JsonOption = False,
) -> None:
    """List imported models: source, size on disk, engine precision, repository, running server.

    Examples:
        trtserve list
        trtserve list --json
    """
    from trtserve.host.machine import format_bytes
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


def _server(entry: Entry) -> str:
    return f"{entry.server} (another build)" if entry.other_build else entry.server or "-"


def _place(repository: str) -> str:
    # A terminal shows only the name of a folder in the store; a pipe gets the full path.
    from trtserve.artifacts import ModelRepository
    from trtserve.store import Store

    path = Path(repository)
    in_store = path.parent == Store().folder(ModelRepository)
    return path.name if repository and in_store and sys.stdout.isatty() else repository or "-"
