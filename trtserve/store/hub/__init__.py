"""Files of one pinned revision of the Hugging Face hub: listed, pulled with resume, verified."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.errors import ArtifactError, CorruptFileError, NetworkError, UnsupportedModelError
from trtserve.files import LARGEST_TEXT, is_below
from trtserve.host.machine import format_bytes
from trtserve.store import link_or_copy
from trtserve.store.hub import calls
from trtserve.store.hub.calls import endpoint as endpoint
from trtserve.store.hub.calls import explained, offline, transport_error

if TYPE_CHECKING:
    from trtserve.progress import Task

# Attempts without a new byte before a pull gives up; in each attempt the client retries five times.
_FRUITLESS_ATTEMPTS = 2
_BLOCK = 1 << 20
_LARGEST_FILE = 50_000_000_000  # MAX_HTTP_DOWNLOAD_SIZE of the client: larger files are served over Xet only


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One file of a revision.

    Raises ArtifactError for a name that leads out of the folder that the file is put into, whoever gave it.
    """

    name: str
    size: int  # bytes
    digest: str  # `sha256:…` (LFS) or `git:…` (SHA-1 of the git blob)

    def __post_init__(self) -> None:
        """Check the name: it is joined to folders that are written."""
        if not is_below(self.name):
            raise ArtifactError(
                f"{str(self.name)[:200]!r} is not the name of a file of a model: it leads out of the model's folder.",
                hint="Remove the model that lists it and import it again.",
            )


@dataclass(frozen=True, kw_only=True)
class Revision:
    """One commit of a repository on the hub, or the content of a folder in an object store, and its files."""

    repository: str  # `org/name`, or the URL of the folder
    commit: str
    files: tuple[RemoteFile, ...]


def is_offline() -> bool:
    """Return whether $HF_HUB_OFFLINE forbids the network, now or when the client was loaded."""
    from huggingface_hub import constants

    now = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    return now or bool(constants.HF_HUB_OFFLINE)


@explained
def resolve(repository: str, revision: str | None, *, token: str | None = None) -> Revision:
    """Pin `revision` (branch, tag, commit; None: the default branch) to a commit and list its files.

    Raises ModelNotFoundError, AccessDeniedError or NetworkError when the hub does not answer, and NetworkError for an
    answer that no hub gives (see `calls`): its commit and its names become paths on this machine.
    """
    from huggingface_hub import HfApi

    if is_offline():
        raise offline(repository)
    api = HfApi(endpoint=endpoint(), token=token)
    info = calls.asked(
        repository, lambda: api.model_info(repository, revision=revision, files_metadata=True, timeout=30)
    )
    calls.repository_id(repository, info.id)
    commit = calls.commit(repository, info.sha)
    listed = calls.siblings(repository, info.siblings)
    for sibling in listed:
        calls.file_name(repository, sibling.rfilename)
    return Revision(
        repository=repository,
        commit=commit,
        files=tuple(_remote_file(repository, commit, sibling, token) for sibling in listed),
    )


def require_token(token: str) -> None:
    """Raise AccessDeniedError for a token that the hub does not accept, NetworkError when the hub is unreachable."""

    @explained
    def check(subject: str, *, token: str) -> None:
        from huggingface_hub import HfApi

        calls.asked(subject, lambda: HfApi(endpoint=endpoint()).whoami(token=token))

    check("this account", token=token)


def _remote_file(repository: str, commit: str, sibling: Any, token: str | None) -> RemoteFile:
    name, size, scheme, digest = sibling.rfilename, sibling.size, "git", sibling.blob_id
    if sibling.lfs is not None:
        size, scheme, digest = sibling.lfs.size, "sha256", sibling.lfs.sha256
    elif size is None or not digest:
        return _file_by_header(repository, commit, name, token)
    return RemoteFile(
        name=name, size=calls.size(repository, name, size), digest=calls.digest(repository, name, scheme, digest)
    )


def _file_by_header(repository: str, commit: str, name: str, token: str | None) -> RemoteFile:
    """Return size and hash from a HEAD request, for mirrors that list names only."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repository, name, revision=commit, endpoint=endpoint())
    metadata = calls.asked(repository, lambda: get_hf_file_metadata(url, token=token))
    if metadata.size is None or not calls.COMMIT.fullmatch(metadata.etag or ""):
        raise NetworkError(
            f"{endpoint()} gives neither size nor hash of {name} in {repository}.",
            hint="Check that HF_ENDPOINT is the address of a hub or of a complete mirror.",
        )
    return RemoteFile(
        name=name,
        size=calls.size(repository, name, metadata.size),
        digest=calls.digest(repository, name, "git" if len(metadata.etag or "") == 40 else "sha256", metadata.etag),
    )


@explained
def pull(
    revision: Revision, file: RemoteFile, folder: Path, *, token: str | None = None, task: Task | None = None
) -> Path:
    """Pull one file into `folder` and verify it; an earlier part is continued, `task` advances by bytes.

    The part is kept when the connection is lost (NetworkError), and removed when its content is wrong
    (CorruptFileError).
    """
    target = folder / file.name
    if target.is_file() and target.stat().st_size == file.size:
        return target
    part = target.with_name(target.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.touch()  # an empty file has nothing to pull
    _download(revision, file, part, token, task)
    verify(part, file)
    part.replace(target)
    return target


@explained
def pull_beginning(revision: Revision, file: RemoteFile, folder: Path, *, token: str | None = None) -> Path:
    """Return a file that begins as `file` does, for up to 64 MiB: the part that `pull` continues and then verifies."""
    target = folder / file.name
    if target.is_file() and target.stat().st_size == file.size:
        return target
    part = target.with_name(target.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    _download(revision, file, part, token, None, enough=LARGEST_TEXT)
    return part


def take(cached: Path, file: RemoteFile, folder: Path) -> Path:
    """Link or copy one file from another tool's cache into `folder` and verify it.

    Raises CorruptFileError when its content is wrong; a killed process leaves no file of that name.
    """
    target = folder / file.name
    # Not a `.part`, to which a pull would append: the bytes of a link belong to the other tool.
    unverified = target.with_name(f"{target.name}.unverified")
    unverified.unlink(missing_ok=True)
    link_or_copy(cached.resolve(), unverified)
    verify(unverified, file)
    unverified.replace(target)
    return target


@explained
def tensor_table(revision: Revision, file: RemoteFile) -> dict[str, dict[str, Any]]:
    """Read the header of a safetensors file by range request: dtype, shape and data_offsets of each tensor."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import SafetensorsParsingError

    if is_offline():
        raise offline(revision.repository)
    api = HfApi(endpoint=endpoint())
    try:
        found = calls.asked(
            revision.repository,
            lambda: api.parse_safetensors_file_metadata(revision.repository, file.name, revision=revision.commit),
        )
    except SafetensorsParsingError as error:
        raise CorruptFileError(f"{file.name} of {revision.repository} has no valid header: {error}.") from error
    return {name: asdict(tensor) for name, tensor in found.tensors.items()}


def require_pullable(repository: str, files: Iterable[RemoteFile]) -> None:
    """Raise UnsupportedModelError for a file above the hub's own limit for plain HTTP."""
    for file in files:
        if file.size > _LARGEST_FILE:
            raise UnsupportedModelError(
                f"{file.name} of {repository} has {format_bytes(file.size)}; the hub serves files up to 50 "
                f"GB over HTTP.",
                hint="Look for a revision with smaller shards, or pull it with `hf download` and give the folder.",
            )


def pulled_bytes(file: RemoteFile, folder: Path) -> int:
    """Return how many bytes of `file` are in `folder` already, complete or as a part."""
    for path in (folder / file.name, folder / (file.name + ".part")):
        if path.is_file():
            return min(path.stat().st_size, file.size)
    return 0


def _download(
    revision: Revision, file: RemoteFile, part: Path, token: str | None, task: Task | None, *, enough: int | None = None
) -> None:
    fruitless = 0
    while (before := _size(part)) != file.size:
        if before > file.size:
            part.unlink()
            continue
        if enough is not None and before >= enough:
            return
        failure = _append(revision, file, part, token, task, enough)
        fruitless = 0 if _size(part) > before else fruitless + 1
        if fruitless > _FRUITLESS_ATTEMPTS:
            reason = f" ({type(failure).__name__}: {failure})" if failure is not None else ""
            raise NetworkError(
                f"The pull of {file.name} from {revision.repository} stopped after {_size(part)} of {file.size} "
                f"bytes{reason}.",
                hint="Pulled bytes are kept: run the command again to continue from there.",
            )


def _append(
    revision: Revision, file: RemoteFile, part: Path, token: str | None, task: Task | None, enough: int | None
) -> Exception | None:
    """Request the rest of `file`; return a lost connection as an error, since the caller sees whether bytes came.

    Stops once the part has `enough` bytes.

    Raises CorruptFileError, and removes the part, once more bytes come than were announced or none are left.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if is_offline():
        raise offline(revision.repository)
    url = hf_hub_url(revision.repository, file.name, revision=revision.commit, endpoint=endpoint())
    try:
        with _CountedFile(part, file.size, task, enough) as handle:
            begin, headers = handle.seek(0, os.SEEK_END), build_hf_headers(token=token)
            get = partial(http_get, url, handle, resume_size=begin, headers=headers, expected_size=file.size)
            calls.downloaded(revision.repository, get)
    except _EnoughError:
        return None
    except _TooLongError as error:
        part.unlink()
        raise CorruptFileError(
            f"{file.name} of {revision.repository} is longer than the {file.size} bytes announced.",
            hint="The pull was stopped there and the part removed. Run the command again; if it repeats, the "
            "repository or the mirror in HF_ENDPOINT is damaged.",
        ) from error
    except HfHubHTTPError as error:
        if error.response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink()
            raise CorruptFileError(
                f"{file.name} of {revision.repository} is shorter than the {file.size} bytes announced.",
                hint="The part was removed. Run the command again; if it repeats, the repository itself is damaged.",
            ) from error
        raise
    except OSError as error:
        if error.errno is not None:
            raise
        return error
    except transport_error() as error:
        return error
    return None


class _TooLongError(Exception):
    """More bytes came than the file may have."""


class _EnoughError(Exception):
    """As many bytes came as were wanted."""


class _CountedFile(io.BufferedRandom):
    """A file of at most `limit` bytes that reports written and truncated bytes to a task."""

    def __init__(self, path: Path, limit: int, task: Task | None, enough: int | None) -> None:
        path.touch()
        super().__init__(io.FileIO(path, "r+"))
        self._limit = limit
        self._enough = enough
        self._task = task

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._limit:
            raise _TooLongError
        count = super().write(data)
        if self._task is not None:
            self._task.advance(count)
        if self._enough is not None and self.tell() >= self._enough:
            raise _EnoughError
        return count

    def truncate(self, size: int | None = None) -> int:
        before = self.seek(0, os.SEEK_END)
        after = super().truncate(size)
        if self._task is not None:
            self._task.advance(after - before)
        self.seek(0, os.SEEK_END)
        return after


def verify(path: Path, file: RemoteFile) -> None:
    """Compare `path` with the announced size and hash; remove it and raise CorruptFileError when they differ."""
    size, digest = path.stat().st_size, digest_of(path, file.digest.partition(":")[0])
    if size == file.size and digest == file.digest:
        return
    path.unlink()
    raise CorruptFileError(
        f"{file.name} has {size} bytes with {digest}; the hub announced {file.size} bytes with {file.digest}.",
        hint="The file was removed; run the command again to pull it once more.",
    )


def digest_of(path: Path, scheme: str) -> str:
    """Return a file's hash: `sha256` of its content, or `git`: SHA-1 after `blob <size>\\0`, as git names blobs."""
    hasher = hashlib.sha256()
    if scheme == "git":
        hasher = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as handle:
        while block := handle.read(_BLOCK):
            hasher.update(block)
    return f"{scheme}:{hasher.hexdigest()}"


def cached_file(revision: Revision, file: RemoteFile) -> Path | None:
    """Return the file in the client's own cache, where other tools may have pulled it."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(revision.repository, file.name, revision=revision.commit)
    return Path(found) if isinstance(found, str) else None


def cached_revision(repository: str, revision: str | None) -> Revision | None:
    """Return the files of a revision in the client's own cache, with the hashes in the names of its blobs."""
    from huggingface_hub import constants, try_to_load_from_cache

    config = try_to_load_from_cache(repository, "config.json", revision=revision or constants.DEFAULT_REVISION)
    if not isinstance(config, str):
        return None
    snapshot = Path(config).parent
    files = []
    for path in sorted(snapshot.rglob("*")):
        if path.is_file():
            blob = path.resolve().name
            named = path.is_symlink() and calls.COMMIT.fullmatch(blob)
            scheme = "git" if len(blob) == 40 else "sha256"
            digest = f"{scheme}:{blob}" if named else digest_of(path, "sha256")
            files.append(RemoteFile(name=str(path.relative_to(snapshot)), size=path.stat().st_size, digest=digest))
    return Revision(repository=repository, commit=snapshot.name, files=tuple(files))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
