"""Settings of a gateway: where it listens, which Triton it guards, and its limits."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trtserve.client.endpoint import Endpoint, Tls, tls_problem
from trtserve.errors import UsageError
from trtserve.files import read_as, read_text, writing
from trtserve.process import ProcessId

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Bounds that keep one client from taking the server away from the others."""

    connections: int = 4096
    """Open connections."""
    requests: int = 512
    """Requests that run at the same time; further ones are answered with 503."""
    request_seconds: float = 3600.0
    """Longest time that a request may take, its streamed answer included."""
    header_seconds: float = 15.0
    """Longest time from the first byte of a request to the end of its headers."""
    body_seconds: float = 120.0
    """Longest time until the whole body of a request has arrived."""
    stalled_seconds: float = 30.0
    """Longest time that a client may leave its answer unread."""
    idle_seconds: float = 75.0
    """Longest time that a connection stays open without a request."""
    header_bytes: int = 64 * 1024
    body_bytes: int = 64 * MIB
    """Size of a request's body, also after it was decompressed."""
    json_bytes: int = 8 * MIB
    """Size of the JSON part of a body."""
    buffered_bytes: int = 512 * MIB
    """Size of all bodies that are being received, together."""
    chunks: int = 20_000
    """Chunks of a body with `Transfer-Encoding: chunked`."""
    elements: int = 1 << 28
    """Elements of one tensor."""
    strings: int = 1 << 18
    """Strings of one request."""


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """One gateway."""

    name: str
    """Name of the server."""
    host: str
    port: int
    triton_http: str
    """HOST:PORT of Triton's own HTTP service."""
    triton_secret: str | None = field(default=None, repr=False)
    """What that service expects in a header, or None."""
    triton_grpc: str
    replicas: tuple[str, ...] = ()
    """HOST:GRPC_PORT or HOST:GRPC_PORT:HTTP_PORT of further servers with the same models."""
    grpc_front_port: int | None = None
    """Port on which gRPC calls are passed on to the servers, or None."""
    processes: int = 1
    """Processes that share the port."""
    servers_key_file: Path | None = None
    """File with the API key of servers that `start` did not start together with this gateway, or None."""
    servers_tls: Tls | None = None
    """What an encrypted connection to them needs, or None for a plain one."""
    admin_key_file: Path | None = None
    """File with the key of those who may change replicas and adapters, or None: nobody may."""
    metrics: str
    """HOST:PORT of Triton's metrics page."""
    model: str
    """Text model that is asked by default, or "" for the alias."""
    core_models: tuple[str, ...] = ()
    """Models that run an engine: abandoned requests are stopped there."""
    repository: Path | None = None
    """Folder of the model repository."""
    tokenizer: Path | None = None
    """Folder of the model's tokenizer, or None for the one in the repository."""
    own: bool = True
    """Whether `start` started this Triton, which then expects the key and has the certificate."""
    ui: bool = False
    """Whether the page with a conversation is served."""
    start_again: str = ""
    """The command that starts the server again, for people who see the page: without secrets and paths."""
    triton: ProcessId | None = None
    """The process that tritonserver descends from, if it is one of this machine."""
    python_models: tuple[str, ...] = ()
    """Models that run in Python stubs below that process, each as often as it has stubs; empty when nobody knows."""
    run_folder: Path | None = None
    """Where the executors show that they work, or None when nothing watches them."""
    key_file: Path | None = None
    """File with the API key that clients must send, or None."""
    certificate: Path | None = None
    """PEM file with the certificate chain of TLS, or None for a plain connection."""
    private_key: Path | None = None
    """PEM file with the certificate's key."""
    certificate_name: str | None = None
    """A name that the certificate is for, which clients of this machine expect instead of the host's."""
    allow_origins: tuple[str, ...] = ()
    """Sites whose pages may use the server, or * for all."""
    request_log: Path | None = None
    """File that gets a line for each request, or None."""
    request_log_texts: bool = False
    """Whether the lines have prompts and answers."""
    open_apis: tuple[str, ...] = ()
    """Groups of Triton's protocol that are closed by default and open here."""
    image_folder: Path | None = None
    """Folder below which clients may name files of images."""
    image_hosts: tuple[str, ...] = ()
    """Hosts from which images are fetched."""
    limits: RequestLimits = field(default_factory=RequestLimits)

    @property
    def api_key(self) -> str | None:
        """The API key. Raises UsageError when its file cannot be read."""
        return None if self.key_file is None else read_key(self.key_file)

    @property
    def servers_key(self) -> str | None:
        """The API key of servers that something else started. Raises UsageError when its file cannot be read."""
        return None if self.servers_key_file is None else read_key(self.servers_key_file)

    @property
    def endpoint(self) -> Endpoint:
        """The server for clients on this machine: the gateway's HTTP, Triton's gRPC, key and certificate."""
        tls = self.servers_tls
        if self.own and self.certificate is not None:
            tls = Tls(root_certificates=self.certificate, server_name=self.certificate_name)
        host, _, port = self.triton_grpc.rpartition(":")
        return Endpoint(
            host=host,
            http_port=self.port,
            grpc_port=int(port),
            model=self.model or None,
            repository=self.repository,
            tls=tls,
            api_key=self.api_key if self.own else self.servers_key,
        )

    def write(self, path: Path) -> None:
        """Write the settings to a file that only this user can read."""
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_private(path, json.dumps(asdict(self), default=str))

    @classmethod
    def read(cls, path: Path) -> GatewaySettings:
        """Read what `write` wrote."""
        return read_as(path, cls, "the settings of a gateway")


_LARGEST_KEY_FILE = 1 << 20


def read_key(path: Path) -> str:
    """Return the API key in a file: its first line. Raises UsageError when there is none, or others can read it."""
    try:
        if path.stat().st_mode & 0o077:
            raise UsageError(f"The key file {path} can be read by other users.", hint=f"Protect it: chmod 600 {path}")
        lines = read_text(path, UsageError, limit=_LARGEST_KEY_FILE).splitlines()
    except OSError as error:
        raise UsageError(
            f"The key file {path} cannot be read: {error.strerror}.", hint="Give a file whose first line is the key."
        ) from error
    if not lines or not lines[0].strip():
        raise UsageError(f"The key file {path} is empty.", hint="Its first line must be the key.")
    return require_key(lines[0].strip())


def require_key(key: str) -> str:
    """Return the key. Raises UsageError for one that HTTP headers cannot carry, or that is easily guessed."""
    if not key.isascii() or not key.isprintable() or " " in key or len(key) < 16:
        raise UsageError(
            "The API key must have at least 16 printable ASCII characters, without spaces.",
            hint="Make one: python3 -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return key


def write_private(path: Path, text: str) -> None:
    """Replace a file by one that only this user can read."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


def certificate_name(certificate: Path, private_key: Path) -> str:
    """Return a name that a certificate is for. Raises UsageError when it cannot be used with this key."""
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(certificate, private_key)
        client = ssl.create_default_context(cafile=certificate)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is trusted, whoever signed it
        found = _presented(server, client)
    except OSError as error:
        reason = getattr(error, "verify_message", "") or tls_problem(error)
        raise UsageError(
            f"The certificate {certificate} cannot be used with the key {private_key}: {reason}.",
            hint="Give PEM files that belong together: --tls-certificate and --tls-key.",
        ) from error
    names = found.get("subjectAltName", ())
    if not names:
        raise UsageError(f"The certificate {certificate} has no subjectAltName, which clients compare with the host.")
    return str(names[0][1])


def _presented(server: ssl.SSLContext, client: ssl.SSLContext) -> Mapping[str, Any]:
    """Return the certificate that a server presents to a client, from a handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(8):
        for side in sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return sides[0].getpeercert() or {}
