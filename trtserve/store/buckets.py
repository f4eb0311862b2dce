"""A model's folder in an object store: listed, and its files pulled with resume, as `hub` does for the hub."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.errors import CorruptFileError, ModelNotFoundError
from trtserve.store.hub import RemoteFile, Revision
from trtserve.store.remote import open_file_system, reaching

if TYPE_CHECKING:
    from trtserve.progress import Task

_BLOCK = 4 << 20
_MOST_FILES = 10_000
# What object stores call the identity of an object's content; others have its time.
_IDENTITIES = ("ETag", "etag", "md5Hash", "content_md5", "mtime")


def is_url(text: str) -> bool:
    """Return whether a text names a folder of an object store, and not a repository of the hub."""
    return "://" in text


def resolve(url: str) -> Revision:
    """List the files of a folder in an object store; the commit is a hash of their names, sizes and identities.

    Raises ModelNotFoundError for an empty folder, and what `reaching` makes of the store's own errors.
    """
    file_system, path = open_file_system(url)
    with reaching(url):
        found = file_system.find(path, maxdepth=2, detail=True, refresh=True)
    if not found or len(found) > _MOST_FILES:
        raise ModelNotFoundError(
            f"{url} has {'no files' if not found else f'{len(found)} files'}.",
            hint="Name the folder that holds the model's config.json.",
        )
    files = [
        RemoteFile(name=str(name).removeprefix(f"{path}/"), size=int(info["size"]), digest=f"etag:{_identity(info)}")
        for name, info in sorted(found.items())
        if not str(name).endswith("/")
    ]
    listing = "\n".join(f"{file.name} {file.size} {file.digest}" for file in files)
    return Revision(repository=url, commit=hashlib.sha1(listing.encode()).hexdigest(), files=tuple(files))


def pull(revision: Revision, file: RemoteFile, folder: Path, task: Task | None = None) -> Path:
    """Pull one file into `folder`; an earlier part is continued. Raises CorruptFileError if it changed meanwhile."""
    target = folder / file.name
    if target.is_file() and target.stat().st_size == file.size:
        return target
    part = target.with_name(f"{target.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    file_system, path = open_file_system(f"{revision.repository}/{file.name}")
    with reaching(f"{revision.repository}/{file.name}"), part.open("ab") as handle:
        if handle.tell() > file.size:
            handle.truncate(0)
        with file_system.open(path, "rb", block_size=_BLOCK) as source:
            source.seek(handle.tell())
            while (left := file.size - handle.tell()) > 0 and (block := source.read(min(_BLOCK, left))):
                handle.write(block)
                if task is not None:
                    task.advance(len(block))
        now = file_system.info(path, refresh=True)
    if f"etag:{_identity(now)}" != file.digest or part.stat().st_size != file.size:
        part.unlink()
        raise CorruptFileError(
            f"{file.name} of {revision.repository} has changed while it was pulled.", hint="Run the command again."
        )
    part.replace(target)
    return target


def _identity(info: dict[str, Any]) -> str:
    return next((str(info[key]).strip('"') for key in _IDENTITIES if info.get(key)), "")
