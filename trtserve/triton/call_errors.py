"""What the user is told when a call to a Triton server fails."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from trtserve.errors import RequestError, ServerUnreachableError
from trtserve.triton.first_contact import Spoken, spoken_at

_CONNECTION_LOST = re.compile(
    r"failed to connect|connection (refused|reset)|socket closed|http1|dns resolution|errors resolving|handshake",
    re.IGNORECASE,
)
_REQUEST_ID = re.compile(r"^\[request id: [^\]]*\] ")
# What gRPC says of a server that answers, but in another protocol.
_OTHER_PROTOCOL = re.compile(r"socket closed|http1|parsing http", re.IGNORECASE)
_HANDSHAKE_FAILED = re.compile(r"ssl|handshake|certificate", re.IGNORECASE)
_PORTS: dict[Spoken, str] = {"HTTP": "an HTTP port", "gRPC": "a gRPC port", "TLS": "an encrypted port (TLS)"}
# What is asked in the wrong protocol → what to do.
_INSTEAD: dict[Spoken, str] = {
    "HTTP": "Ask over HTTP with --protocol http (query), or give the gRPC port, which is 8001 unless Triton was told "
    "another.",
    "gRPC": "Ask over gRPC with --protocol grpc (query), or give the HTTP port, which is 8000 unless Triton was told "
    "another.",
    "TLS": "Add --ssl (query), and --root-certificates for a certificate that is not publicly signed.",
}
_FETCHING = "Encountered an error when fetching new request: "
# The preprocessing and BLS models' preamble of a wrong input.
_WRONG_INPUT = re.compile(
    r"^An error occurred when processing the input values(?: for request id \S+)?, the error was '(.*)'$", re.DOTALL
)
# What the server refuses a request with → what to do.
_HINTS = (
    (
        re.compile(r"Stub process '[^']*' is not healthy"),
        "A process of the server has died; `trtserve status` names the server: stop it and start it again.",
    ),
    (
        re.compile("exceeds maximum input length", re.IGNORECASE),
        "Shorten the prompt, or build with a larger --max-input-len.",
    ),
    (
        re.compile("larger than configured max beam width"),
        "Ask for fewer beams, or build with a larger --max-beam-width.",
    ),
    (re.compile("built with gather_context_logits"), "Build it again with --gather-context-logits."),
    (re.compile("built with gather_generation_logits"), "Build it again with --gather-generation-logits."),
    (re.compile("mMaxLowRank"), "Build the engine again with a larger --max-lora-rank."),
    (re.compile("LoRA task .* not found in cache"), "Give the weights again: --lora-path, or --lora NAME."),
    (
        re.compile("exceeds maximum draft tokens length"),
        "Propose fewer tokens, or build with a larger --max-draft-len.",
    ),
    (
        re.compile("speculative decoding without draft model"),
        "Give the repository one: trtserve repo … --draft-engine ENGINE.",
    ),
)


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


def silent(where: str, seconds: float) -> ServerUnreachableError:
    """Error for an endpoint whose first answer did not come within `seconds`."""
    return unreachable(
        where,
        f"nothing came back within {seconds:g} s",
        "Another program may listen there, or the server hangs; --connect-timeout gives a slow one more time.",
    )


def other_protocol(where: str, wanted: Spoken) -> ServerUnreachableError | None:
    """Error for a port that answers, but in another protocol than `wanted`; None where it cannot be told."""
    spoken = spoken_at(where)
    if spoken is None or spoken == wanted:
        return None
    return ServerUnreachableError(f"{where} is {_PORTS[spoken]}, and was asked over {wanted}.", hint=_INSTEAD[spoken])


def plain(message: str) -> str:
    """The server's error text without its request id, the models' preambles and the python backend's stack."""
    message = _WRONG_INPUT.sub(r"\1", _REQUEST_ID.sub("", message).removeprefix(_FETCHING))
    if "Traceback (most recent call last)" in message:
        return message.strip().splitlines()[-1].strip()
    return message.split("\n\nAt:\n", maxsplit=1)[0].strip()


def refused(message: str) -> RequestError:
    """Error for a request that the server answered with an error text."""
    hint = next((hint for pattern, hint in _HINTS if pattern.search(message)), None)
    return RequestError(plain(message), hint=hint)


def explain_rpc_error(
    error: Any, where: str, *, tls: bool = False, first: float | None = None
) -> RequestError | ServerUnreachableError:
    """Map a failed call to the error that the user sees; `tls`: it went over an encrypted connection.

    `first` are the seconds that the server had where this was its first answer.
    """
    import grpc

    details = str(error.details() or "")
    if error.code() is grpc.StatusCode.UNAVAILABLE and _CONNECTION_LOST.search(details):
        other = other_protocol(where, "gRPC") if _OTHER_PROTOCOL.search(details) and not tls else None
        return other or unreachable(where, *_lost_connection(details, tls=tls))
    if error.code() is grpc.StatusCode.CANCELLED:
        return RequestCancelledError("The request was cancelled.")
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and first is not None:
        return silent(where, first)
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
