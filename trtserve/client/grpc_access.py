"""How gRPC clients prove that they know a server's API key."""

from __future__ import annotations

import hmac

TOKEN_NAME = "trtserve-key"


def grpc_token(api_key: str) -> str:
    """Return what gRPC clients send instead of the API key, which must not stand in tritonserver's command line."""
    return hmac.new(api_key.encode(), b"trtserve grpc", "sha256").hexdigest()


def grpc_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of gRPC calls to a server with this API key."""
    return () if api_key is None else ((f"triton-grpc-protocol-{TOKEN_NAME}", grpc_token(api_key)),)
