"""The address of a server, and how a client connects to it."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trtserve.errors import UsageError
from trtserve.specs.server import GRPC_PORT, HTTP_PORT

if TYPE_CHECKING:
    from trtserve.client.transport import SyncClient

CONNECT_TIMEOUT = 10.0
"""Default seconds for a server's first answer."""

TOKEN_NAME = "trtserve-key"
SECRET_NAME = "trtserve-inner"
"""Header that Triton's own HTTP service expects from a gateway, and from nobody else."""


def grpc_token(api_key: str) -> str:
    """Return what gRPC clients send instead of the API key, which must not appear in tritonserver's command line."""
    return hmac.new(api_key.encode(), b"trtserve grpc", "sha256").hexdigest()


def grpc_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of gRPC calls to a server with this API key."""
    return () if api_key is None else ((f"triton-grpc-protocol-{TOKEN_NAME}", grpc_token(api_key)),)


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The PEM files of an encrypted connection."""

    root_certificates: Path | None = None
    """Trusted roots; None: the system's."""
    private_key: Path | None = None
    certificate_chain: Path | None = None
    server_name: str | None = None
    """Name in the server's certificate; None: that of the host."""

    def __post_init__(self) -> None:
        if (self.private_key is None) != (self.certificate_chain is None):
            raise UsageError("--private-key and --certificate-chain must be given together.")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The address of a server and how to connect to it."""

    host: str = "127.0.0.1"
    http_port: int = HTTP_PORT
    grpc_port: int = GRPC_PORT
    model: str | None = None
    """The default text model."""
    repository: Path | None = None
    """The folder of the model repository, if it is known."""
    tls: Tls | None = None
    api_key: str | None = field(default=None, repr=False)
    """API key of the server, or None when it needs none."""
    connect_timeout: float = CONNECT_TIMEOUT
    """Seconds for the first answer, which lists or describes models and so needs no long work."""

    @property
    def grpc(self) -> str:
        """Address of the gRPC service, `host:port`."""
        return f"{self.host}:{self.grpc_port}"

    @property
    def http_headers(self) -> dict[str, str]:
        """Headers of HTTP requests, which carry the API key."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    @property
    def grpc_metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of gRPC calls, which carries what the API key stands for there."""
        return grpc_metadata(self.api_key)

    @property
    def http(self) -> str:
        """Address of the HTTP service, `host:port`."""
        return f"{self.host}:{self.http_port}"

    @property
    def in_process(self) -> SyncClient | None:
        """The client of an executor in this process, or None when there is a server."""
        return None
