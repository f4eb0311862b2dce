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
_TLS_FAILED = re.compile(r"ssl|tls|handshake|certificate|authority", re.IGNORECASE)
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


def unreachable(where: str, reason: str, *, hint: str = "") -> ServerUnreachableError:
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


def explain_rpc_error(error: Any, where: str) -> RequestError | ServerUnreachableError:
    """Map a failed call to the error that the user sees."""
    import grpc

    details = str(error.details() or "")
    if error.code() is grpc.StatusCode.UNAVAILABLE and _CONNECTION_LOST.search(details):
        reason = details.rsplit(": ", 1)[-1].rstrip("]")
        return unreachable(where, reason, hint=_connection_hint(details))
    if error.code() is grpc.StatusCode.CANCELLED:
        return RequestCancelledError("The request was cancelled.")
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestError(f"No answer from {where} within the time allowed.", hint="Raise it with --timeout.")
    return refused(details or f"The call failed with {error.code().name}.")


def _connection_hint(details: str) -> str:
    if _TLS_FAILED.search(details):
        return "The certificates do not fit: --root-certificates names the roots that this server's is signed with."
    if _OTHER_PROTOCOL.search(details):
        return "If that is the HTTP port, use --protocol http (query) or give the gRPC port; for a TLS port use --ssl."
    return ""
