"""Files of a revision on their way from the hub: gathered in one folder, by one process at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trtserve import hub
from trtserve.errors import LockedError
from trtserve.files import locked
from trtserve.progress import SILENT, Progress
from trtserve.store import Store


@contextmanager
def download_folder(store: Store, revision: hub.Revision, progress: Progress = SILENT) -> Iterator[Path]:
    """The folder where files of a revision gather, for this process alone; another one's end is waited for."""
    folder = store.download(revision.repository, revision.commit)
    lock = store.lock_of(folder)
    with ExitStack() as held:
        try:
            held.enter_context(locked(lock, wait=False))
        except LockedError:
            progress.step(f"Waiting for another process that pulls {revision.repository}")
            held.enter_context(locked(lock))
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
