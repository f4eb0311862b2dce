"""What both clients share: which server is asked, and what a call's arguments mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trtserve.client.base import CORE_MODEL, Endpoint, Tls
from trtserve.client.options import REQUEST_OPTIONS
from trtserve.client.spec import QuerySpec
from trtserve.errors import UsageError
from trtserve.library.importing import require_known
from trtserve.server.discovery import endpoint_of, find_server
from trtserve.server.state import Server
from trtserve.specs.options import Option, options_of

Prompt = str | Sequence[int]
"""A text, or the token ids of a core model."""
Turns = Sequence[Mapping[str, str]]
"""Earlier turns of a conversation: `role` and `content`."""

_OPTIONS = {name: option for name, option in options_of(QuerySpec).items() if name not in ("stream", "batch", "system")}
_OPTIONS |= REQUEST_OPTIONS


class Asker:
    """A server, and the defaults of all requests to it."""

    def __init__(
        self,
        server: Server | str | None = None,
        *,
        model: str | None = None,
        api_key: str | None = None,
        tls: Tls | None = None,
        timeout: float = 600.0,
    ) -> None:
        """Choose the server; nothing is sent.

        Args:
            server: What `serve` yields, the name of a running server, or `host:port` of the gRPC service of any Triton;
                default: the only server that runs here.
            model: Triton model to ask; default: the name under which the model is served.
            api_key: API key of a server elsewhere; that of a server which this user started is found.
            tls: Certificates of an encrypted connection; those of a server which this user started are found.
            timeout: Longest wait for a whole answer, in seconds.

        Raises:
            ServerNotFoundError, ServerAmbiguousError: no server, or more than one, is meant.
        """
        endpoint = _endpoint(server)
        self._server = replace(endpoint, api_key=api_key or endpoint.api_key, tls=tls or endpoint.tls)
        self._defaults = {"model": model, "timeout": timeout}

    def _spec(
        self, prompt: Prompt, system: str | None, history: Turns, options: dict[str, Any], *, stream: bool = False
    ) -> QuerySpec:
        require_known(options, set(_OPTIONS), "A request")
        asked = {name: _value(_OPTIONS[name], value) for name, value in {**self._defaults, **options}.items()}
        text = isinstance(prompt, str)
        return QuerySpec(
            prompts=(str(prompt),) if text else (),
            token_ids=() if text else (tuple(int(token) for token in prompt),),
            stream=stream,
            system=system,
            history=tuple(history),
            model=asked.pop("model") or (None if text else CORE_MODEL),
            options={name: asked.pop(name) for name in list(asked) if name in REQUEST_OPTIONS},
            **asked,
        )


def _value(option: Option, value: Any) -> Any:
    return option.from_json((value,) if option.container == "tuple" and isinstance(value, str) else value)


def _endpoint(server: Server | str | None) -> Endpoint:
    if isinstance(server, Server):
        return endpoint_of(server)
    if server is None or ":" not in server:
        return endpoint_of(find_server(server))
    host, _, port = server.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise UsageError(f"The server is {server!r}; expected a name, or HOST:PORT of its gRPC service.")
    return Endpoint(host=host, grpc_port=int(port))
