"""What the user is told when a call to a Triton server fails."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from trtserve.errors import RequestError, ServerUnreachableError

_CONNECTION_LOST = re.compile(
    r"failed to connect|connection (refused|reset)|socket closed|http1|dns resolution|errors resolving|handshake",
    re.IGNORECASE,
)
_REQUEST_ID = re.compile(r"^\[request id: [^\]]*\] ")
# What gRPC says of a server that answers, but in another protocol.
_OTHER_PROTOCOL = re.compile(r"socket closed|http1|parsing http", re.IGNORECASE)
_HANDSHAKE_FAILED = re.compile(r"ssl|handshake|certificate", re.IGNORECASE)
_FETCHING = "Encountered an error when fetching new request: "
_TOO_LONG = re.compile(r"exceeds maximum input length", re.IGNORECASE)
_STUB_DEAD = re.compile(r"Stub process '[^']*' is not healthy")


class RequestCancelledError(RequestError):
    """The request was ended by `Client.cancel`."""


def unknown_model(name: str, where: str, available: Sequence[str]) -> RequestError:
    """Error for a model that the server does not have."""
    return RequestError(
        f"The server at {where} has no model {name!r}.", hint=f"Models there: {', '.join(sorted(available)) or 'none'}."
    )


def unreachable(where: str, reason: str, hint: str = "") -> ServerUnreachableError:
    """Error for an endpoint that does not answer; `hint` goes before the general one."""
    general = "`trtserve status` lists the running servers, `trtserve start` starts one."
    return ServerUnreachableError(
        f"No Triton server answers at {where}: {reason}.", hint=f"{hint} {general}" if hint else general
    )


def plain(message: str) -> str:
    """The server's error text without its request id, the executor's preamble and the python backend's stack."""
    message = _REQUEST_ID.sub("", message).removeprefix(_FETCHING)
    if "Traceback (most recent call last)" in message:
        return message.strip().splitlines()[-1].strip()
    return message.split("\n\nAt:\n", maxsplit=1)[0].strip()


def refused(message: str) -> RequestError:
    """Error for a request that the server answered with an error text."""
    hint = None
    if _STUB_DEAD.search(message):
        hint = "A process of the server has died; `trtserve status` names the server: stop it and start it again."
    elif _TOO_LONG.search(message):
        hint = "Shorten the prompt, or build with a larger --max-input-len."
    return RequestError(plain(message), hint=hint)


def explain_rpc_error(error: Any, where: str, *, tls: bool = False) -> RequestError | ServerUnreachableError:
    """Map a failed call to the error that the user sees; `tls`: it went over an encrypted connection."""
    import grpc

    details = str(error.details() or "")
    if error.code() is grpc.StatusCode.UNAVAILABLE and _CONNECTION_LOST.search(details):
        return unreachable(where, *_lost_connection(details, tls=tls))
    if error.code() is grpc.StatusCode.CANCELLED:
        return RequestCancelledError("The request was cancelled.")
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestError(f"No answer from {where} within the time allowed.", hint="Raise it with --timeout.")
    return refused(details or f"The call failed with {error.code().name}.")


def _lost_connection(details: str, *, tls: bool) -> tuple[str, str]:
    """Why there is no connection, and what to do."""
    reason = details.rsplit(": ", 1)[-1].rstrip("]")
    if _HANDSHAKE_FAILED.search(details):
        hint = "--root-certificates names the roots that this server's certificate is signed with."
        return "its certificate is not trusted, or the port is not encrypted", hint
    if not _OTHER_PROTOCOL.search(details):
        return reason, ""
    if tls:
        return reason, "A server may want this client's certificate: --private-key and --certificate-chain."
    return (
        reason,
        "If that is the HTTP port, use --protocol http (query) or give the gRPC port; a TLS port needs --ssl.",
    )
