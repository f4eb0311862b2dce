"""Files that several processes share: refusals of the file system explained, locks, JSON read, and replaced at once."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from trtserve.errors import ArtifactError, DiskSpaceError, LockedError, TrtserveError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NO_PLACE = frozenset({errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOENT})


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Explain what the file system refuses while `path` is made or removed: DiskSpaceError or ArtifactError."""
    try:
        yield
    except OSError as error:
        explained = writing_error(error, path)
        if explained is None:
            raise
        raise explained from error


def writing_error(error: OSError, path: Path) -> TrtserveError | None:
    """What it means that `path` cannot be made or removed; None for what is no refusal of the file system."""
    if error.errno in _NO_PLACE:
        return _refused(error, path, "written")
    return file_error(error, path, "written")


def file_error(error: OSError, path: Path, verb: str = "read or written") -> TrtserveError | None:
    """What a full disk or missing permissions mean to the user; None for what is something else."""
    if error.errno in _FULL:
        return DiskSpaceError(
            f"{path} cannot be {verb}: {_full(error)}.",
            hint="Free some space (`trtserve remove`), or choose another place with --out or TRTSERVE_HOME.",
        )
    return _refused(error, path, verb) if error.errno in _FORBIDDEN else None


def _full(error: OSError) -> str:
    limited = "files of this size are not allowed here (ulimit -f, or the file system's limit)"
    return limited if error.errno == errno.EFBIG else "the disk is full"


def _refused(error: OSError, path: Path, verb: str) -> ArtifactError:
    where = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
    return ArtifactError(
        f"{path} cannot be {verb}: {error.strerror}{where}.",
        hint="Choose another place with --out or TRTSERVE_HOME, or correct the permissions.",
    )


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the advisory lock file `path`, which exists no longer than that; LockedError when taken, if not `wait`."""
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _lock_file(path, wait=wait)
    with handle:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _lock_file(path: Path, *, wait: bool) -> TextIO:
    while True:
        handle = path.open("a")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # The owner that was waited for has removed its file: a lock on that file keeps nobody out.
            if _is_open_at(handle, path):
                return handle
        except BlockingIOError:
            handle.close()
            raise LockedError(
                f"Another trtserve process is working on {path.stem}.", hint="Wait for it to end, then try again."
            ) from None
        handle.close()


def _is_open_at(handle: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except FileNotFoundError:
        return False


def read_text(path: Path, error: type[TrtserveError] = ArtifactError, *, hint: str | None = None) -> str:
    """The text in `path`; `error` for a file that cannot be read or is no UTF-8. FileNotFoundError passes through."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except OSError as refused:
        raise error(f"{path} cannot be read: {refused.strerror}.", hint=hint) from refused
    except UnicodeDecodeError as damage:
        raise error(f"{path} is not UTF-8 text: {damage.reason} at byte {damage.start}.", hint=hint) from damage


def read_json_object(
    path: Path, error: type[TrtserveError] = ArtifactError, *, hint: str | None = None
) -> dict[str, Any]:
    """The JSON object in `path`; `error` for a file that cannot be read or holds something else.

    FileNotFoundError passes through: what it means that there is no file, the caller knows.
    """
    text = read_text(path, error, hint=hint)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as damage:
        raise error(f"{path} is not JSON: {damage}.", hint=hint) from damage
    if not isinstance(content, dict):
        raise error(f"{path} is not a JSON object.", hint=hint)
    return content


def write_json(path: Path, content: object) -> None:
    """Replace `path` by `content` in one rename; what a killed process left of its own is taken over."""
    staged = path.with_name(f".{path.name}.partial")
    with writing(path), locked(path.with_name(f".{path.name}.lock")):
        staged.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
        staged.replace(path)
