"""Shell completion of imported models, running servers, files and folders.

Each function takes the typed part of a word and returns candidates; Typer filters them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def models(incomplete: str) -> list[str]:
    """Return the names of imported models and of artefacts in the store; folders for a word that begins a path."""
    from trtserve.artifacts import (
        Adapter,
        Checkpoint,
        Engine,
        Model,
        ModelRepository,
    )
    from trtserve.store import Store

    if _is_path(incomplete):
        return paths(incomplete)
    store = Store()
    kinds = (Model, Checkpoint, Engine, ModelRepository, Adapter)
    return sorted(
        {record.name for record in store.recorded()} | {name for kind in kinds for name in store.by_name(kind)}
    )


def sources(incomplete: str) -> list[str]:
    """Return what can be imported: demo, aliases, folders for a word that begins a path, and names of the store."""
    from trtserve.store.sources import ALIASES, DEMO

    return paths(incomplete) if _is_path(incomplete) else sorted({DEMO, *ALIASES, *models(incomplete)})


def imports(incomplete: str) -> list[str]:
    """Return the names of imports."""
    from trtserve.store import Store

    return sorted(record.name for record in Store().recorded())


def servers(incomplete: str) -> list[str]:
    """Return the names of recorded servers."""
    from trtserve.server.state import recorded_servers
    from trtserve.store import Store

    return sorted(server.name for server in recorded_servers(Store()))


def gpus(incomplete: str) -> list[str]:
    """Return the names of GPUs that `plan --gpu` knows."""
    from trtserve.pipeline.planner.gpus import GPUS

    return sorted(GPUS)


def paths(incomplete: str) -> list[str]:
    """Return the files and folders that the word may be completed to; folders end with a slash."""
    return sorted(_paths(incomplete))


def _is_path(text: str) -> bool:
    return text.startswith((".", "~", "/")) or "/" in text


def _paths(incomplete: str) -> Iterator[str]:
    head, slash, start = incomplete.rpartition("/")
    folder = Path(head + slash or ".").expanduser()
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name.startswith(start) and (start.startswith(".") or not path.name.startswith(".")):
            yield f"{head}{slash}{path.name}{'/' if path.is_dir() else ''}"
