"""The address of a server, how a client connects to it, and the errors of calls that fail."""

from __future__ import annotations

import hmac
import re
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtserve.errors import RequestError, ServerUnreachableError, UsageError, did_you_mean
from trtserve.specs.server import GRPC_PORT, HTTP_PORT

if TYPE_CHECKING:
    from trtserve.client.transport import SyncClient

CONNECT_TIMEOUT = 10.0  # default seconds for a server's first answer

TOKEN_NAME = "trtserve-key"
SECRET_NAME = "trtserve-inner"  # header that Triton's own HTTP service expects from a gateway, and from nobody else


def require_host(host: str, flag: str) -> None:
    """Raise UsageError for what no resolver could look up."""
    try:
        host.encode("idna")
    except UnicodeError:
        raise UsageError(f"{flag} {host[:200]!r} is no host name.", hint="Give a name or an IP address.") from None


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
    """0: the server speaks HTTP only, as a port for many models does."""
    model: str | None = None
    """The default text model."""
    repository: Path | None = None
    """The folder of the model repository, if it is known."""
    tls: Tls | None = None
    api_key: str | None = field(default=None, repr=False)
    """API key of the server, or None when it needs none."""
    connect_timeout: float = CONNECT_TIMEOUT
    """Seconds for the first answer, which lists or describes models and so needs no long work."""

    def __post_init__(self) -> None:
        require_host(self.host, "--host")

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


Spoken = Literal["HTTP", "gRPC", "TLS"]

_DETECTION_TIMEOUT = 2.0
_PROBE = b"GET /v2/health/live HTTP/1.0\r\n\r\n"
_HTTP = b"HTTP/1."
_TLS = (b"\x15\x03", b"\x16\x03")  # TLS records: an alert, or a handshake, of version 3.x
# HTTP/2 frame header: three bytes of length, then type, flags and stream number.
_FRAME_HEADER = 9
_SETTINGS = 4

_CONNECTION_LOST = re.compile(
    r"failed to connect|connection (refused|reset)|socket closed|http1|dns resolution|errors resolving|handshake",
    re.IGNORECASE,
)
# gRPC's words for a server that answers in another protocol.
_OTHER_PROTOCOL = re.compile(r"socket closed|http1|parsing http", re.IGNORECASE)
_HANDSHAKE_FAILED = re.compile(r"ssl|handshake|certificate", re.IGNORECASE)
_PORTS: dict[Spoken, str] = {"HTTP": "an HTTP port", "gRPC": "a gRPC port", "TLS": "an encrypted port (TLS)"}
# Protocol of the port → what to do after calling it with another protocol.
_INSTEAD: dict[Spoken, str] = {
    "HTTP": f"--url takes the gRPC port, which is {GRPC_PORT} by default; or use --protocol http (query).",
    "gRPC": f"--url takes the HTTP port, which is {HTTP_PORT} by default; or use --protocol grpc (query).",
    "TLS": "Add --ssl (query), and --root-certificates for a certificate that is not publicly signed.",
}
_PREAMBLE = re.compile(
    r"(?:\[request id: [^\]]*\] |in ensemble '[^']*', |Encountered an error when fetching new request: )+"
)
# How errors begin that no request causes. What follows may quote a request, so nothing else of an error counts.
_CANNOT_ANSWER = re.compile(
    r"The executor has stopped working|Stub process '[^']*' is not healthy|(?:Server|[Tt]he server) is stopping|"
    r"Server not ready|GRPC server is shutting down|Request for unknown model|Model '[^']*' is not ready"
)
# The core model's preamble to an error about inputs.
_WRONG_INPUT = re.compile(
    r"^An error occurred when processing the input values(?: for request id \S+)?, the error was '(.*)'$", re.DOTALL
)
_GIVE_KEY = "Give it: --api-key KEY, or TRTSERVE_API_KEY."
_WANTS_KEY = "protocol is restricted, expecting header"  # Triton's words
# Part of the server's error → what to do.
_HINTS = (
    (re.compile("API key of this server"), _GIVE_KEY),
    (
        re.compile(r"Stub process '[^']*' is not healthy"),
        "A process of the server has died or stands still: `trtserve status` says which. Stop and start the server.",
    ),
    (
        re.compile("executor has stopped working"),
        "With --restart on-failure the server starts again by itself; otherwise start it again.",
    ),
    (
        re.compile("exceeds maximum input length", re.IGNORECASE),
        "Shorten the prompt, or build with a larger --max-input-len if the model allows it.",
    ),
    (re.compile("larger than configured max beam width"), "Use fewer beams, or build with a larger --max-beam-width."),
    (re.compile("built with gather_context_logits"), "Build it again with --gather-context-logits."),
    (re.compile("built with gather_generation_logits"), "Build it again with --gather-generation-logits."),
    (re.compile("mMaxLowRank"), "Build the engine again with a larger --max-lora-rank."),
    (re.compile("LoRA task .* not found in cache"), "Send the weights again: --lora-path, or --lora NAME."),
    (
        re.compile("exceeds maximum draft tokens length"),
        "Use fewer draft tokens, or build with a larger --max-draft-len.",
    ),
    (
        re.compile("speculative decoding without draft model"),
        "Make the repository with a draft model: trtserve repo … --draft-engine ENGINE.",
    ),
)


class RequestCancelledError(RequestError):
    """`Client.cancel` ended the request."""


class UnavailableError(RequestError):
    """The server cannot answer at the moment, whatever it is asked; a copy of it may."""


class _Understood(AbstractContextManager[None]):
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)):
            raise UnavailableError(
                f"The server's answer is not of Triton's protocol ({type(error).__name__}: {str(error)[:200]}).",
                hint="Check that Triton listens at this address, and nothing that changes its answers.",
            ) from error


_UNDERSTOOD = _Understood()


def understood() -> AbstractContextManager[None]:
    """Let an answer that Triton's protocol does not have end with UnavailableError: the request is not at fault.

    Every token of a stream passes here, which is why it is no generator.
    """
    return _UNDERSTOOD


def unknown_model(name: str, where: str, available: Sequence[str]) -> RequestError:
    """Return the error for a model that the server does not have; NVIDIA's names are listed where it has no other."""
    from trtserve.client.tensors import STANDARD_MODELS

    known = sorted({*available}.difference(STANDARD_MODELS) or available)
    hint = f"{did_you_mean(name, available)} Models there: {', '.join(known) or 'none'}."
    return RequestError(f"The server at {where} has no model {name!r}.", hint=hint.lstrip())


def unreachable(where: str, reason: str, hint: str = "") -> ServerUnreachableError:
    """Return the error for an endpoint that does not answer; `hint` comes before the general one."""
    from trtserve.host.ports import is_here, proxied

    host = where.rpartition(":")[0]
    here = is_here(host)
    general = (
        "`trtserve status` lists the running servers, `trtserve start` starts one. --url takes the gRPC port, with "
        "--protocol http the HTTP port."
    )
    if not here:
        general = f"Check the address, and that a server runs on {host} and can be reached from here."
    if not here and (variable := proxied(host)):
        proxy = f"{variable} is set: gRPC goes through that proxy unless no_proxy has {host}, HTTP never does."
        hint = f"{hint} {proxy}".strip()
    return ServerUnreachableError(
        f"No Triton server answers at {where}: {reason}.", hint=f"{hint} {general}" if hint else general
    )


def silent(where: str, seconds: float) -> ServerUnreachableError:
    """Return the error for an endpoint whose first answer did not arrive within `seconds`."""
    if seconds < CONNECT_TIMEOUT:
        return ServerUnreachableError(
            f"No Triton server answers at {where}: no answer within {seconds:g} s.",
            hint="--timeout or --connect-timeout allows no more; raise it.",
        )
    return unreachable(
        where,
        f"no answer within {seconds:g} s",
        "Another program may listen there, or the server hangs. Give a slow server more time with --connect-timeout.",
    )


def other_protocol(where: str, wanted: Spoken) -> ServerUnreachableError | None:
    """Return the error for a port that speaks another protocol than `wanted`, or None when that is unknown."""
    spoken = spoken_at(where)
    if spoken is None or spoken == wanted:
        return None
    return ServerUnreachableError(f"{where} is {_PORTS[spoken]}, but was called over {wanted}.", hint=_INSTEAD[spoken])


def _without_preamble(message: str) -> str:
    found = _PREAMBLE.match(message)
    return _WRONG_INPUT.sub(r"\1", message[found.end() :] if found else message)


def plain(message: str) -> str:
    """Strip the request id, the models' preambles and the Python backend's stack from an error text."""
    message = _without_preamble(message)
    if "Traceback (most recent call last)" in message:
        return message.strip().splitlines()[-1].strip()
    return message.split("\n\nAt:\n", maxsplit=1)[0].strip()


def refused(message: str) -> RequestError:
    """Return the error for a request that the server answered with an error text."""
    hint = next((hint for pattern, hint in _HINTS if pattern.search(message)), None)
    kind = UnavailableError if _CANNOT_ANSWER.match(_without_preamble(message)) else RequestError
    return kind(plain(message), hint=hint)


def tls_problem(error: OSError) -> str:
    """Return why files of keys and certificates cannot be used, without the names of OpenSSL's parts."""
    text = re.sub(r"^\[.*?\] | \(_ssl\.c:\d+\)$", "", error.strerror or str(error))
    return "one of them is not a PEM file, or its key has a password" if text == "PEM lib" else text


def explain_rpc_error(
    error: Any, where: str, *, tls: bool = False, first: float | None = None
) -> RequestError | ServerUnreachableError:
    """Return the error that the user sees for a failed gRPC call.

    `tls`: the connection was encrypted. `first`: the seconds allowed, if this was the server's first answer.
    """
    import grpc

    details = str(error.details() or "")
    if error.code() is grpc.StatusCode.UNAVAILABLE and _CONNECTION_LOST.search(details):
        other = other_protocol(where, "gRPC") if _OTHER_PROTOCOL.search(details) and not tls else None
        return other or unreachable(where, *_lost_connection(details, tls=tls))
    if _WANTS_KEY in details:
        return RequestError(f"{where} answers only those who send its API key.", hint=_GIVE_KEY)
    if error.code() is grpc.StatusCode.CANCELLED:
        return RequestCancelledError("The request was cancelled.")
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and first is not None:
        return silent(where, first)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestError(f"No answer from {where} within the time allowed.", hint="Raise it with --timeout.")
    return refused(details or f"The call failed with {error.code().name}.")


def _lost_connection(details: str, *, tls: bool) -> tuple[str, str]:
    """Return why there is no connection, and what to do."""
    reason = details.rsplit(": ", 1)[-1].rstrip("]")
    if _HANDSHAKE_FAILED.search(details):
        hint = "Name the roots that signed this server's certificate with --root-certificates."
        return "its certificate is not trusted, or the port is not encrypted", hint
    if not _OTHER_PROTOCOL.search(details):
        return reason, ""
    if tls:
        return reason, "The server may require a client certificate: --private-key and --certificate-chain."
    return (
        reason,
        "If that is the HTTP port, use --protocol http (query) or give the gRPC port; a TLS port needs --ssl.",
    )


def spoken_at(where: str) -> Spoken | None:
    """Return the protocol of the port `host:port`, or None when it cannot be recognised within two seconds.

    An HTTP/2 server starts with its settings whatever it receives (RFC 9113, section 3.4); a TLS server answers plain
    bytes with an alert (RFC 8446, section 6).
    """
    host, _, port = where.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_DETECTION_TIMEOUT) as connection:
            connection.sendall(_PROBE)
            return _recognised_protocol(connection.recv(_FRAME_HEADER))
    except (OSError, ValueError):
        return None


def _recognised_protocol(first: bytes) -> Spoken | None:
    if first.startswith(_HTTP):
        return "HTTP"
    if first.startswith(_TLS):
        return "TLS"
    settings = len(first) == _FRAME_HEADER and first[3] == _SETTINGS and not any(first[5:])
    return "gRPC" if settings else None
