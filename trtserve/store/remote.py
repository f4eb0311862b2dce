"""Places that artefacts travel through: an OCI registry, or an OCI image layout in a folder or an object store.

Both hold blobs, named by their SHA-256, and manifests, named by a tag: the OCI image and distribution specifications
1.1. `skopeo` and `oras` can copy between them. A Hugging Face folder in an object store is pulled as `hub` does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit

from trtserve.errors import (
    AccessDeniedError,
    ArtifactError,
    CorruptFileError,
    MissingDependencyError,
    ModelNotFoundError,
    NetworkError,
    TrtserveError,
    UsageError,
)
from trtserve.files import file_error, parse_json, read_json_object, writing_error
from trtserve.host.machine import install_command
from trtserve.host.ports import is_here, web_opener, within
from trtserve.store.hub import RemoteFile, Revision

if TYPE_CHECKING:
    from trtserve.progress import Task

T = TypeVar("T")

REGISTRY = "oci://"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
LARGEST_MANIFEST = 4 << 20  # bytes of a manifest; registries refuse larger ones
_TAG_NAME = "org.opencontainers.image.ref.name"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_NAME = re.compile(r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*")
# Others of fsspec open connections of their own, or run what a URL names.
_SCHEMES = ("s3", "s3a", "gs", "gcs", "file")
_PLACES = "Give oci://…, s3://…, gs://… or a folder."
_BLOCK, _LARGEST = 4 << 20, 1 << 60
_LONGEST_WAIT = 2.0  # seconds before the last attempt
_SECONDS = 60.0  # without a byte
_LONGEST_ANSWER = 60.0  # seconds, without the files
_LONGEST_READ = 300.0  # seconds for a block of a file


@dataclass(frozen=True)
class Blob:
    """Bytes by their digest (`sha256:…`) and size."""

    digest: str
    size: int

    def __post_init__(self) -> None:
        """Check a digest that a stranger may have written: it becomes a part of a path."""
        if not _DIGEST.fullmatch(str(self.digest)):
            raise CorruptFileError(f"{str(self.digest)[:100]!r} is not a SHA-256 digest.", hint="Push it again.")
        if type(self.size) is not int or not 0 <= self.size < _LARGEST:
            raise CorruptFileError(f"{str(self.size)[:100]!r} is not the size of a blob.", hint="Push it again.")


class Shelf(Protocol):
    """Where blobs and manifests are."""

    def manifest(self, reference: str) -> bytes:
        """Return the manifest with this tag or digest. Raises ModelNotFoundError."""

    def has(self, blob: Blob) -> bool:
        """Return whether the blob is there as a whole."""

    def send(self, blob: Blob, content: Callable[[], Iterator[bytes]]) -> None:
        """Store a blob; `content` is asked again when a connection breaks."""

    def receive(self, blob: Blob) -> Iterator[bytes]:
        """Yield at most `blob.size` bytes; the caller compares the digest."""

    def publish(self, reference: str, manifest: bytes) -> None:
        """Store a manifest under a tag, in place of another one."""


def parse_target(text: str) -> tuple[Shelf, str]:
    """Return the place and the tag or digest that `oci://HOST/NAME[:TAG]`, `s3://…[:TAG]` or a folder means.

    Raises UsageError for a text that is none of these, MissingDependencyError without the package for a scheme.
    """
    head, slash, last = text.rpartition("/")
    last, at, reference = last.partition("@") if "@sha256:" in last else last.partition(":")
    if at and not (_DIGEST if at == "@" else _TAG).fullmatch(reference):
        raise UsageError(f"{reference[:200]!r} in {text[:200]} is neither a tag nor a digest.", hint="NAME:v1, say")
    reference = reference or "latest"
    if not text.startswith(REGISTRY):
        return _layout(f"{head}{slash}{last}"), reference
    host, _, name = f"{head}{slash}{last}".removeprefix(REGISTRY).partition("/")
    if not host or not _NAME.fullmatch(name):
        raise UsageError(
            f"{text[:200]} does not name a repository of a registry.", hint="Expected oci://HOST[:PORT]/NAME[:TAG]."
        )
    return Registry(host, name), reference


def open_file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL or a folder, and the path there.

    Raises MissingDependencyError when the package for its scheme is not installed, UsageError for an unknown scheme.
    """
    import fsspec

    scheme, separator, _ = url.partition("://")
    if separator and scheme not in _SCHEMES:
        raise UsageError(f"{url[:200]}: {scheme[:50]}:// is not a place for models.", hint=_PLACES)
    try:
        file_system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingDependencyError(f"{url}: {error}.", hint=install_command("cloud")) from None
    except ValueError as error:
        raise UsageError(f"{url}: {error}.", hint=_PLACES) from None
    return file_system, path


@contextmanager
def reaching(what: str) -> Iterator[None]:
    """Turn what the clients of object stores raise into errors that name `what`."""
    try:
        yield
    except TrtserveError:
        raise
    except FileNotFoundError:
        raise ModelNotFoundError(f"{what} does not exist.", hint="Check its spelling.") from None
    except Exception as error:  # each package has classes of its own
        if isinstance(error, OSError) and "://" not in what and (local := writing_error(error, Path(what))):
            raise local from error
        if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
            hint = "Log in as its own tools need it (AWS_PROFILE, gcloud auth, …)."
            raise AccessDeniedError(f"Access to {what} is denied: {error}.", hint=hint) from error
        refused = file_error(error, Path(what)) if isinstance(error, OSError) else None  # a folder, or the own disk
        if refused is None:
            refused = NetworkError(f"{what} cannot be reached: {type(error).__name__}: {error}.", hint="Try again.")
        raise refused from error


def _layout(text: str) -> Layout:
    scheme, colon, path = text.partition(":")
    if colon and scheme in (*_SCHEMES, REGISTRY.removesuffix("://")) and not path.startswith("//"):
        raise UsageError(f"{text[:200]} lacks a slash.", hint=f"Did you mean {scheme}://{path.lstrip('/')}?")
    if "://" not in text:
        text = str(Path(text).expanduser().absolute())
    file_system, path = open_file_system(text)
    return Layout(text, file_system, path.rstrip("/"))


@dataclass
class Layout:
    """An OCI image layout in a folder or an object store."""

    text: str
    file_system: Any
    path: str

    def manifest(self, reference: str) -> bytes:
        """Return the manifest with this tag or digest."""
        for entry in self._entries():
            if reference in (entry.get("digest"), _tag(entry)):
                blob = Blob(str(entry.get("digest")), entry.get("size", -1))
                return b"".join(self.receive(Blob(blob.digest, min(blob.size, LARGEST_MANIFEST))))
        if tags := [str(_tag(entry))[:200] for entry in self._entries()[:20]]:
            raise ModelNotFoundError(f"{self.text} has nothing under {reference}.", hint=f"There: {', '.join(tags)}")
        raise ModelNotFoundError(
            f"{self.text} holds nothing that `trtserve push` has stored.",
            hint="Check its spelling. A model of the hub or in a folder is imported: trtserve import MODEL",
        )

    def has(self, blob: Blob) -> bool:
        with reaching(self.text):
            try:
                return int(_bounded(lambda: self.file_system.info(self._file(blob)))["size"]) == blob.size
            except FileNotFoundError:
                return False

    def send(self, blob: Blob, content: Callable[[], Iterator[bytes]]) -> None:
        """Write a file, which appears when it is complete."""
        self._write(self._file(blob), content())

    def receive(self, blob: Blob) -> Iterator[bytes]:
        with reaching(self.text), self._opened(self._file(blob)) as handle:
            left = blob.size
            while left and (block := _read(handle, min(_BLOCK, left))):
                left -= len(block)
                yield block

    def publish(self, reference: str, manifest: bytes) -> None:
        """Write the manifest, then the index that names it; not for two processes at once."""
        blob = Blob(f"sha256:{hashlib.sha256(manifest).hexdigest()}", len(manifest))
        self.send(blob, lambda: iter([manifest]))
        others = [entry for entry in self._entries() if _tag(entry) != reference]
        entry = {"mediaType": MANIFEST_TYPE, **vars(blob), "annotations": {_TAG_NAME: reference}}
        index = {"schemaVersion": 2, "manifests": [*others, entry]}
        self._write(f"{self.path}/oci-layout", iter([b'{"imageLayoutVersion": "1.0.0"}']))
        self._write(f"{self.path}/index.json", iter([json.dumps(index, indent=1).encode()]))

    def _write(self, path: str, content: Iterator[bytes]) -> None:
        with reaching(self.text):
            self.file_system.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self.file_system.transaction, self.file_system.open(path, "wb") as handle:
                for block in content:
                    handle.write(block)

    def _opened(self, path: str) -> Any:
        """Open a file. In a stranger's folder a pipe would never end, and a link could lead anywhere."""
        if _bounded(lambda: self.file_system.info(path))["type"] != "file":
            raise CorruptFileError(f"{path} is a link, a pipe or a device, not a file.", hint="Push it again.")
        return _bounded(lambda: self.file_system.open(path, "rb"))

    def _file(self, blob: Blob) -> str:
        return f"{self.path}/blobs/{blob.digest.replace(':', '/')}"

    def _entries(self) -> list[dict[str, Any]]:
        """Return the manifests that the index lists."""
        with reaching(self.text):
            try:
                with self._opened(f"{self.path}/index.json") as handle:
                    found = _object(_read(handle, LARGEST_MANIFEST), self.text).get("manifests", [])
            except FileNotFoundError:
                return []
        if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
            raise CorruptFileError(f"{self.text}/index.json lists no manifests.", hint="Push to another place.")
        return found


def _bounded(call: Callable[[], T]) -> T:
    """Return an answer of an object store, or of a registry."""
    return within(_LONGEST_ANSWER, call)


def _read(handle: Any, size: int) -> bytes:
    """Read at most `size` bytes. The clients of object stores would wait for as long as single bytes come."""
    return within(_LONGEST_READ, lambda: bytes(handle.read(size)))


def _tag(entry: dict[str, Any]) -> object:
    annotations = entry.get("annotations")
    return annotations.get(_TAG_NAME) if isinstance(annotations, dict) else None


@dataclass
class Registry:
    """A repository of an OCI registry, over HTTPS; over HTTP on this machine."""

    host: str
    name: str
    _authorization: str = field(default="", repr=False)

    @property
    def text(self) -> str:
        """The target as users write it."""
        return f"{REGISTRY}{self.host}/{self.name}"

    @property
    def _scheme(self) -> str:
        return "http" if is_here(urlsplit(f"//{self.host}").hostname or "") else "https"

    def manifest(self, reference: str) -> bytes:
        """Return the manifest with this tag or digest."""

        def read() -> bytes:
            with self._call("GET", f"manifests/{reference}", headers={"Accept": MANIFEST_TYPE}) as answer:
                return bytes(answer.read(LARGEST_MANIFEST))

        return self._again(read)

    def has(self, blob: Blob) -> bool:
        try:
            self._again(lambda: self._call("HEAD", f"blobs/{blob.digest}").close())
        except ModelNotFoundError:
            return False
        return True

    def send(self, blob: Blob, content: Callable[[], Iterator[bytes]]) -> None:
        """Upload a blob in one piece."""
        self._again(lambda: self._send(blob, content), bounded=False)

    def _send(self, blob: Blob, content: Callable[[], Iterator[bytes]]) -> None:
        with self._call("POST", "blobs/uploads/", headers={"Content-Length": "0"}) as answer:
            place = urljoin(answer.url, answer.headers["Location"] or "")
        place += ("&" if "?" in place else "?") + urlencode({"digest": blob.digest})
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size)}
        self._call("PUT", place, headers=headers, data=content() if blob.size else b"").close()

    def receive(self, blob: Blob) -> Iterator[bytes]:
        with reaching(self.text), self._again(lambda: self._call("GET", f"blobs/{blob.digest}")) as answer:
            left, awaited, latest = blob.size, blob.size - _BLOCK, time.monotonic() + _LONGEST_READ
            while left and (piece := answer.read1(min(_BLOCK, left))):  # a socket's limit begins again with every byte
                if left <= awaited:
                    awaited, latest = left - _BLOCK, time.monotonic() + _LONGEST_READ
                elif time.monotonic() > latest:
                    raise TimeoutError(f"no {_BLOCK >> 20} MiB within {_LONGEST_READ:g} s")
                left -= len(piece)
                yield piece

    def publish(self, reference: str, manifest: bytes) -> None:
        headers = {"Content-Type": MANIFEST_TYPE, "Content-Length": str(len(manifest))}
        self._again(lambda: self._call("PUT", f"manifests/{reference}", headers=headers, data=manifest).close())

    def _again(self, call: Callable[[], T], *, bounded: bool = True) -> T:
        """Run `call` again after a broken connection or a failure of the registry. Uploads may take any time."""
        wait = 0.5
        while True:
            try:
                with reaching(self.text):
                    return within(_LONGEST_ANSWER if bounded else None, call)
            except NetworkError:
                if wait > _LONGEST_WAIT:
                    raise
            time.sleep(wait)
            wait *= 2

    def _call(
        self, method: str, path: str, *, headers: dict[str, str] | None = None, data: Any = None, login: bool = True
    ) -> Any:
        base = f"{self._scheme}://{self.host}/v2/{self.name}/"
        try:
            return self._open(method, urljoin(base, path), headers, data)
        except urllib.error.HTTPError as error:
            with error as refused:
                status, challenge = refused.code, refused.headers.get("WWW-Authenticate", "")
                said = refused.read(500).decode(errors="replace").strip()
        if status == HTTPStatus.UNAUTHORIZED and login and not isinstance(data, Iterator):
            self._authorization = self._authorized(challenge)
            return self._call(method, path, headers=headers, data=data, login=False)
        if status == HTTPStatus.NOT_FOUND:
            raise ModelNotFoundError(f"{self.text} has no {path}.", hint="Check the name and the tag.")
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise AccessDeniedError(f"Access to {self.text} is denied: {said}", hint=f"docker login {self.host}")
        if status < HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.TOO_MANY_REQUESTS:
            raise TrtserveError(f"{self.text} refused {method} {path} with {status}: {said}")
        raise NetworkError(f"{self.text} failed at {method} {path} with {status}: {said}", hint="Try again later.")

    def _open(self, method: str, url: str, headers: dict[str, str] | None, data: Any) -> Any:
        request = urllib.request.Request(url, data=data, headers=headers or {}, method=method)
        parts = urlsplit(url)
        # Not sent on to the storage that a registry redirects to.
        if self._authorization and (parts.scheme, parts.netloc) == (self._scheme, self.host):
            request.add_unredirected_header("Authorization", self._authorization)
        return web_opener(direct=is_here(parts.hostname or "")).open(request, timeout=_SECONDS)

    def _authorized(self, challenge: str) -> str:
        """Return the Authorization that answers a challenge, with the login that docker keeps for the host."""
        login = _docker_login(self.host)
        kind, _, rest = challenge.partition(" ")
        values = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        if kind.lower() != "bearer":
            return f"Basic {login}"
        realm = values.get("realm", "")
        if urlsplit(realm).scheme != "https" and not is_here(urlsplit(realm).hostname or ""):
            raise AccessDeniedError(f"{self.host} asks for a login at {realm[:200]!r}.", hint="It is not encrypted.")
        query = urlencode({key: values[key] for key in ("service", "scope") if key in values})
        request = urllib.request.Request(f"{realm}?{query}")
        if login:
            request.add_unredirected_header("Authorization", f"Basic {login}")
        try:
            with web_opener().open(request, timeout=_SECONDS) as answer:
                content = _object(answer.read(LARGEST_MANIFEST), realm)
        except urllib.error.HTTPError as refused:
            refused.close()
            raise AccessDeniedError(f"{realm} refuses the login: {refused}", hint=f"docker login {self.host}") from None
        token = str(content.get("token") or content.get("access_token"))
        if not (token.isascii() and token.isprintable()):
            raise AccessDeniedError(f"{realm} answered with a token that no header can carry.", hint="Check it.")
        return f"Bearer {token}"


def _docker_login(host: str) -> str:
    """Return the base64 of `user:password` that `docker login` stored for a host, or an empty text."""
    from os import environ

    folder = Path(environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    with suppress(FileNotFoundError):
        kept = read_json_object(folder / "config.json").get("auths", {}).get(host, {})
        with suppress(ValueError, AttributeError):
            return base64.b64encode(base64.b64decode(kept.get("auth", ""), validate=True)).decode()
    return ""


def _object(content: bytes, what: str) -> dict[str, Any]:
    try:
        found = parse_json(content)
    except ValueError as error:
        raise CorruptFileError(f"{what} answered with something that is not JSON: {error}.", hint="Check it.") from None
    if not isinstance(found, dict):
        raise CorruptFileError(f"{what} answered with a JSON value that is not an object.", hint="Check it.")
    return found


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
        found = _bounded(lambda: file_system.find(path, maxdepth=2, detail=True, refresh=True))
    if not found or len(found) > _MOST_FILES:
        raise ModelNotFoundError(
            f"{url} has {f'{len(found)} files; at most {_MOST_FILES} are read' if found else 'no files'}.",
            hint="Name the folder that holds the model's config.json.",
        )
    files = []
    for name, info in sorted(found.items()):
        if info["type"] != "file":  # of a file:// URL
            raise ArtifactError(f"{name} is a link, a pipe or a device, not a file.", hint="Give the folder's path.")
        if not str(name).endswith("/"):
            size, digest = int(info["size"]), f"etag:{_identity(info)}"
            files.append(RemoteFile(name=str(name).removeprefix(f"{path}/"), size=size, digest=digest))
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
        with _bounded(lambda: file_system.open(path, "rb", block_size=_BLOCK)) as source:
            source.seek(handle.tell())
            while (left := file.size - handle.tell()) > 0 and (block := _read(source, min(_BLOCK, left))):
                handle.write(block)
                if task is not None:
                    task.advance(len(block))
        now = _bounded(lambda: file_system.info(path, refresh=True))
    if f"etag:{_identity(now)}" != file.digest or part.stat().st_size != file.size:
        part.unlink()
        raise CorruptFileError(
            f"{file.name} of {revision.repository} has changed while it was pulled.", hint="Run the command again."
        )
    part.replace(target)
    return target


def _identity(info: dict[str, Any]) -> str:
    return next((str(info[key]).strip('"') for key in _IDENTITIES if info.get(key)), "")
