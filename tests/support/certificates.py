"""Certificates for TLS between programs on this machine, made anew for every run."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """Files in PEM: the authority, and chain and key of a server on the loopback and of a client."""

    root: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Removed when the tests end."""
    return tempfile.TemporaryDirectory(prefix="certificates-")


@functools.cache
def certificates() -> Certificates:
    """The certificates of this run."""
    folder = Path(_folder().name)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "root.pem"))
    for name, identity in (("server", "localhost"), ("client", "client.localhost")):
        leaf = authority.issue_cert(identity, "127.0.0.1")
        leaf.private_key_pem.write_to_path(str(folder / f"{name}.key"))
        for index, blob in enumerate(leaf.cert_chain_pems):
            blob.write_to_path(str(folder / f"{name}.pem"), append=index > 0)
    return Certificates(
        root=folder / "root.pem",
        server=folder / "server.pem",
        server_key=folder / "server.key",
        client=folder / "client.pem",
        client_key=folder / "client.key",
    )
