"""Shared files: file system errors, links, locks, and JSON files that are replaced atomically."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import resource
import shlex
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

from trtserve.errors import ArtifactError, DiskSpaceError, LockedError, MachineError, TrtserveError, UsageError

T = TypeVar("T")

LARGEST_TEXT = 64 << 20
"""Bytes of a text file that is read as a whole: the largest known tokenizer has 34 MB, the largest index 14 MB."""
LARGEST_YAML = 1 << 20
"""Bytes of a file in YAML: PyYAML takes seconds for each."""
LARGEST_DATA = 2 << 30
"""Bytes of a file of data that is read as a whole: prompts, traces, the requests of a benchmark."""
# Of a JSON file of settings. Parsed, it can take 30 times its size.
_LARGEST_JSON = 16 << 20
SENTENCE_TRANSFORMERS = "modules.json"
"""File of a Hugging Face model that says how sentence-transformers makes vectors of its states; vLLM reads it too."""
SUBFOLDERS = ("additional_chat_templates/*.jinja", "[0-9]_*/config.json", "[0-9]_*/model.safetensors")
"""Files in folders of a Hugging Face model: chat templates, and the modules of sentence-transformers."""
_CONTROL = re.compile(r"[\0-\x1f\x7f]")  # which no file of a model has, and terminals obey
_DIGITS = re.compile("[0-9]{1,18}")
_BLOCK = 64 << 10
# `abandoned` holds a lock for a moment, which is no reason to give up.
_TRIES, _PAUSE = 5, 0.01
_LONGEST_NAME, _LONGEST_PATH = 256, 4000
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_TAKEN = frozenset({errno.ENOTDIR, errno.EISDIR, errno.EEXIST})
_NO_PLACE = _TAKEN | {errno.ENOENT}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn file system errors in the block into DiskSpaceError, ArtifactError or UsageError for `path`."""
    try:
        yield
    except OSError as error:
        explained = writing_error(error, path)
        if explained is None:
            raise
        raise explained from error


def writing_error(error: OSError, path: Path) -> TrtserveError | None:
    """Return the error that explains why `path` cannot be made or removed, or None for any other OSError."""
    if error.errno not in _NO_PLACE:
        return file_error(error, path, "written")
    target = Path(os.path.realpath(path))
    around = next(folder for folder in target.parents if os.path.lexists(folder))
    hint = "Choose another place."
    if not around.is_dir():
        reason = f"{around} is not a folder"
    elif around != target.parent:
        reason = f"the folder {target.parent} does not exist"
        hint = f"Make it (mkdir -p {shlex.quote(str(target.parent))}), or choose another place."
    elif error.errno in _TAKEN and os.path.lexists(target):
        reason = "it is a folder" if target.is_dir() else "it is a file, not a folder"
    else:
        return _refused(error, path, "written")
    return UsageError(f"{path} cannot be written: {reason}.", hint=hint)


def file_error(error: OSError, path: Path, verb: str = "read or written") -> TrtserveError | None:
    """Return the error of a full disk, missing permissions, too many open files or an impossible path, else None."""
    if error.errno in _FULL:
        full = "the disk is full"
        if error.errno == errno.EFBIG:
            full = "files of this size are not allowed here (ulimit -f, or the file system's limit)"
        return DiskSpaceError(
            f"{path} cannot be {verb}: {full}.",
            hint="Free some space (`trtserve remove`), or choose another place with --out or TRTSERVE_HOME.",
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        own = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        whose = f"this process may have {own}" if error.errno == errno.EMFILE else "this machine has no more"
        return MachineError(
            f"{path} cannot be opened: too many files are open ({whose}).", hint="Allow more: ulimit -n 4096"
        )
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return UsageError(f"{path} is not a valid path: {error.strerror}.", hint="Choose another place.")
    return _refused(error, path, verb) if error.errno in _FORBIDDEN else None


def _refused(error: OSError, path: Path, verb: str) -> ArtifactError:
    place = Path(error.filename or path)
    where = "" if place == path or place.name.startswith(".") else f" ({place})"  # hidden: a lock, or what is staged
    return ArtifactError(
        f"{path} cannot be {verb}: {error.strerror}{where}.",
        hint="Choose another place (TRTSERVE_HOME for the store), or correct the permissions.",
    )


def is_weights(name: str) -> bool:
    """Return whether a file of this name holds weights: a model's, a checkpoint's or an engine's."""
    return name.endswith((".safetensors", ".gguf", ".bin", ".engine"))


def require_own(path: Path, folder: Path) -> None:
    """Raise UsageError for a link out of `folder`, which would copy a file from elsewhere, such as a secret.

    Weights may be on another disk. A snapshot of huggingface_hub links to the blobs next to it.
    """
    # Path.resolve raises RuntimeError for a loop of links
    target, home = (Path(os.path.realpath(place)) for place in (path, folder))
    allowed = (home, home.parent.parent / "blobs")
    if not is_weights(path.name) and not any(target.is_relative_to(place) for place in allowed):
        raise UsageError(
            f"{path} is a link to {target}, which is outside of {folder}.",
            hint="Copy the file into the folder, if it belongs there.",
        )


def is_below(name: object) -> bool:
    """Return whether `name` is a relative path that leads to a place below the folder that it is joined to."""
    if not isinstance(name, str) or len(name) > _LONGEST_PATH or _CONTROL.search(name) or not is_unicode(name):
        return False
    return all(part not in ("", ".", "..") and len(part) < _LONGEST_NAME for part in name.split("/"))


def is_entry(name: str) -> bool:
    """Return whether `name` is the name of a file or a folder, not a path."""
    return "/" not in name and is_below(name)


def whole_number(text: str) -> int | None:
    """Return the number that one to eighteen ASCII digits write, or None for any other text.

    `str.isdigit` is not such a check: `int` refuses "²", and more than 4,300 digits.
    """
    return int(text) if _DIGITS.fullmatch(text) else None


def child(folder: Path, name: str) -> Path:
    """Return the path of `name` in `folder`. Raises ArtifactError for a name that leads to another place."""
    if not is_entry(name):
        raise ArtifactError(
            f"{name[:200]!r} is not the name of an entry of {folder}; nothing is written or removed there.",
            hint="A record, a manifest or a hub gave a name that leads elsewhere: do not use it.",
        )
    return folder / name


@contextmanager
def locked(path: Path, *, wait: bool = True, shared: bool = False) -> Iterator[int]:
    """Hold the advisory lock file `path` and remove it afterwards; any number of processes can hold a `shared` one.

    Yields its file descriptor: a child that inherits it holds the lock too, until it ends. Raises LockedError when the
    lock is taken, unless `wait`.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _lock_file(path, kind, tries=None if wait else _TRIES)
    with handle:
        try:
            yield handle.fileno()
        finally:
            if not shared or _is_last(handle, path):
                _drop(path)


@contextmanager
def abandoned(path: Path) -> Iterator[bool]:
    """Hold the lock file `path` if no process that is alive holds it, and yield whether that is so.

    Afterwards the file is gone. In a folder that cannot be written nothing counts as abandoned.
    """
    try:
        handle = _lock_file(path, fcntl.LOCK_EX, tries=1)
    except (LockedError, OSError):
        yield False
        return
    with handle:
        try:
            yield True
        finally:
            _drop(path)


def _lock_file(path: Path, kind: int, *, tries: int | None) -> TextIO:
    while True:
        handle = path.open("a+")  # NFS gives shared locks only on files that may be read
        try:
            fcntl.flock(handle, kind | (0 if tries is None else fcntl.LOCK_NB))
            # The previous owner removed its file, and a lock on a removed file protects nothing.
            if _is_open_at(handle, path):
                return handle
        except BlockingIOError:
            handle.close()
            tries = (tries or 1) - 1
            if tries:
                time.sleep(_PAUSE)
                continue
            raise LockedError(
                f"Another trtserve process is working on {path.parent if path.name == '.lock' else path.stem}.",
                hint="Wait for it to end, then try again.",
            ) from None
        handle.close()


def _drop(path: Path) -> None:
    """Remove a lock file, unless only another user may: it does no harm."""
    with suppress(PermissionError):
        path.unlink(missing_ok=True)


def _is_last(handle: TextIO, path: Path) -> bool:
    """Return whether no other process holds a shared lock; then none can take one before the file is gone."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return _is_open_at(handle, path)


def _is_open_at(handle: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except FileNotFoundError:
        return False


def open_file(path: Path, error: type[TrtserveError] = ArtifactError, *, hint: str | None = None) -> io.BufferedReader:
    """Open a regular file for reading. Raises `error` for anything else: a pipe would block, a device never end.

    OSError passes through.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise error(f"{path} is not a regular file, so it is not read.", hint=hint)
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def read_text(
    path: Path,
    error: type[TrtserveError] = ArtifactError,
    *,
    hint: str | None = None,
    limit: int = LARGEST_TEXT,
    pipes: bool = False,
    errors: str = "strict",
) -> str:
    """Return the text in `path`; `error` for a file that cannot be read, is not UTF-8 or has more than `limit` bytes.

    Pipes and devices are read where a user named the file (`pipes`), and refused where another file or a folder did.
    `errors` is that of bytes.decode.
    FileNotFoundError passes through: only the caller knows what a missing file means.
    """
    try:
        with path.open("rb") if pipes else open_file(path, error, hint=hint) as handle:
            size = os.fstat(handle.fileno()).st_size  # 0 for a pipe
            content = bytearray()
            # A read takes the memory of its size, even for a small file.
            while size <= limit and (block := handle.read(_BLOCK)):
                content += block
                size = max(size, len(content))
        if size > limit:
            raise error(f"{path} is larger than {limit >> 20} MiB: it is not read.", hint=hint)
        return content.decode(errors=errors)
    except FileNotFoundError:
        raise
    except OSError as refused:
        raise error(f"{path} cannot be read: {refused.strerror}.", hint=hint) from refused
    except UnicodeDecodeError as damage:
        raise error(f"{path} is not UTF-8 text: {damage.reason} at byte {damage.start}.", hint=hint) from damage


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for anything else, and for lists that are nested too deeply for Python's parser.

    The error names the column, and the line only if there are several: the reader may know a line of a file.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        content = error.doc.rstrip()  # what ends too early ends before its line break
        damage = json.JSONDecodeError(error.msg, content, min(error.pos, len(content)))
        raise damage if "\n" in content else ValueError(f"{error.msg} at column {damage.colno}") from None
    except RecursionError:
        raise ValueError("its lists or objects are nested too deeply") from None
    except ValueError as error:
        if "int_max_str_digits" in str(error):
            raise ValueError("one of its numbers has thousands of digits") from None
        raise


def is_unicode(text: str) -> bool:
    """Return whether a text of a JSON file can be sent: an escape such as \\ud800 alone is half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def optional_json_object(
    path: Path, error: type[TrtserveError] = ArtifactError, *, hint: str | None = None, limit: int = _LARGEST_JSON
) -> dict[str, Any]:
    """Return what `read_json_object` returns, or {} if there is no such file."""
    try:
        return read_json_object(path, error, hint=hint, limit=limit)
    except FileNotFoundError:
        return {}


def read_json_object(
    path: Path, error: type[TrtserveError] = ArtifactError, *, hint: str | None = None, limit: int = _LARGEST_JSON
) -> dict[str, Any]:
    """Return the JSON object in `path`; `error` for a file that holds something else or that `read_text` refuses."""
    text = read_text(path, error, hint=hint, limit=limit)
    try:
        content = parse_json(text)
    except ValueError as damage:
        raise error(f"{path} is not JSON: {damage}.", hint=hint) from damage
    if not isinstance(content, dict):
        raise error(f"{path} is not a JSON object.", hint=hint)
    return content


def read_as(
    path: Path,
    kind: type[T],
    what: str,
    error: type[TrtserveError] = ArtifactError,
    *,
    hint: str | None = None,
    tolerant: bool = False,
) -> T:
    """Return the JSON object in `path` as a dataclass of this kind, which messages call `what`.

    `error` for a file that `read_text` refuses and for another content. Keys that the dataclass lacks are refused, or
    left out if `tolerant`.
    """
    content = read_json_object(path, error, hint=hint)
    return decode_as(content, kind, what, path, error, hint=hint, tolerant=tolerant)


def decode_as(
    content: object,
    kind: type[T],
    what: str,
    source: object,
    error: type[TrtserveError] = ArtifactError,
    *,
    hint: str | None = None,
    tolerant: bool = False,
) -> T:
    """Return parsed JSON from `source` as a value of this kind, as `read_as` does.

    Fields may be dataclasses, paths, tuples, mappings and what JSON has itself.
    """
    import msgspec

    known = {each.name for each in fields(kind)} if is_dataclass(kind) else set()
    if not tolerant and known and isinstance(content, dict) and (unknown := content.keys() - known):
        reason = f"unknown key `{min(unknown)}`"
    else:
        try:
            return msgspec.convert(content, kind, dec_hook=_path)
        except (msgspec.ValidationError, UnicodeEncodeError) as invalid:
            reason = str(invalid)[:1].lower() + str(invalid)[1:]
    reason = reason.replace("object missing required field", "missing key").replace(" - at `$.", " at `")
    raise error(f"{source} cannot be read as {what}: {reason.removesuffix(' - at `$`'):.300}.", hint=hint)


def _path(kind: type[Path], value: object) -> Path:
    del kind
    if not isinstance(value, str):
        raise TypeError(f"Expected `str`, got `{type(value).__name__}`")
    return Path(value)


def make_folder(folder: Path) -> None:
    """Make a folder, unless it is there. Raises TrtserveError as `writing` does."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a hidden file next to `path`, which takes its place in one rename if the block ends well.

    Otherwise, as on a full disk, an older file stays, and no part is left. Of a link, the target is replaced. What is
    no file, such as /dev/stdout, is yielded itself. Another process that replaces the file waits. Raises TrtserveError
    as `writing` does.
    """
    target = Path(os.path.realpath(path))
    staged = target.with_name(f".{target.name}.partial")
    with writing(path):
        if path.exists() and not path.is_file():
            yield path
            return
        if not target.parent.is_dir():  # `locked` would make it
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with locked(target.with_name(f".{target.name}.lock")):
            try:
                yield staged
                staged.replace(target)
            except BaseException:
                with suppress(OSError):  # the error that tells more is already on its way
                    staged.unlink(missing_ok=True)
                raise


def write_whole(path: Path, text: str, *, mode: int | None = None) -> None:
    """Write a file with these permissions as `replacing` does: all of it or nothing."""
    with replacing(path) as staged:
        staged.write_text(text, encoding="utf-8")
        if mode is not None and staged.is_file():  # not of a device
            staged.chmod(mode)


def write_json(path: Path, content: object, *, private: bool = False) -> None:
    """Replace `path` by `content` in one rename; the partial file of a killed process is overwritten.

    Other users cannot read a `private` file.
    """
    make_folder(path.parent)
    with replacing(path) as staged:
        if private:
            staged.touch()
            staged.chmod(0o600)
        staged.write_text(json_text(content), encoding="utf-8")


def json_text(content: object) -> str:
    """Return JSON for people to read, and the line break at its end."""
    return json.dumps(content, indent=2, default=str) + "\n"
