"""The folders that names mean in the options of a repository."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from trtserve.artifacts import (
    Adapter,
    Engine,
    Model,
    looks_like,
)
from trtserve.errors import TrtserveError
from trtserve.progress import SILENT, Progress
from trtserve.specs import RepositorySpec
from trtserve.store import Store


def find_adapters(spec: RepositorySpec, store: Store) -> dict[str, Path]:
    """Return name → folder of the adapters; `--lora poet=poet` may name one that `trtserve lora` made."""
    # After `trtserve lora ./poet`, `--lora poet=poet` means the converted adapter and not the PEFT folder.
    return {
        name: (
            folder.absolute()
            if folder.is_dir() and (looks_like(Adapter, folder) or str(folder) not in store.by_name(Adapter))
            else store.find(Adapter, str(folder)).path
        )
        for name, folder in spec.lora.items()
    }


def find_draft(text: str | None, store: Store, progress: Progress = SILENT) -> tuple[Engine | None, Path | None]:
    """Return the draft engine and, for an imported model, the folder of its tokenizer."""
    if text is None:
        return None, None
    engine = store.find(Engine, text, progress=progress)
    with suppress(TrtserveError):
        if not Path(text).is_dir():
            return engine, store.find(Model, text).path
    return engine, None
