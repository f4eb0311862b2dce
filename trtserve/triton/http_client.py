"""How to talk to a Triton server over HTTP: the generate extension, with server-sent events for streams.

Source: Triton's docs/protocol/extension_generate.md. Errors may arrive with status 200 once a reply has begun.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trtserve.errors import RequestError
from trtserve.triton.client import (
    Endpoint,
    ModelDescription,
    Reply,
    Tensor,
    refused,
    unknown_model,
    unreachable,
)

_EVENT = "data:"


def generate_body(tensors: Sequence[Tensor], *, request_id: str) -> dict[str, Any]:
    """JSON body of generate and generate_stream: scalars for single values, flat lists for several."""
    values = {tensor.name: list(tensor.values) for tensor in tensors}
    body: dict[str, Any] = {name: value[0] if len(value) == 1 else value for name, value in values.items()}
    return {**body, "id": request_id}


class HttpClient:
    """Blocking client over HTTP; one connection per call, so that closing it reaches exactly one request."""

    def __init__(self, endpoint: Endpoint, *, timeout: float) -> None:
        self._endpoint = endpoint
        self._where = endpoint.http
        self._timeout = timeout

    def describe(self, model: str) -> ModelDescription:
        status, text = self._call("GET", f"/v2/models/{model}/config")
        if status == http.client.NOT_FOUND or (status >= http.client.BAD_REQUEST and "unknown model" in text):
            raise unknown_model(model, self._where, self.model_names())
        return ModelDescription.from_config(_checked(status, text))

    def model_names(self) -> list[str]:
        status, text = self._call("POST", "/v2/repository/index", {"ready": True})
        return [entry["name"] for entry in _checked(status, text)]

    def infer(
        self, model: ModelDescription, tensors: Sequence[Tensor], *, request_id: str, stream: bool
    ) -> Iterator[Reply]:
        verb = "generate_stream" if stream and model.decoupled else "generate"
        body = generate_body(tensors, request_id=request_id)
        # The socket's own timeout bounds one read, and a stream has many.
        deadline = time.monotonic() + self._timeout
        with self._response("POST", f"/v2/models/{model.name}/{verb}", body) as response:
            if verb == "generate":
                yield _reply(_checked(response.status, response.read().decode()))
                return
            for line in _lines(response):
                if time.monotonic() > deadline:
                    raise TimeoutError
                text = line.decode().strip()
                if text:
                    yield _reply(_checked(response.status, text.removeprefix(_EVENT)))

    def close(self) -> None:
        """Nothing stays open between calls."""

    def _call(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        with self._response(method, path, body) as response:
            return response.status, response.read().decode()

    @contextmanager
    def _response(self, method: str, path: str, body: object = None) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._endpoint.host, self._endpoint.http_port, timeout=self._timeout)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None)
            yield connection.getresponse()
        except TimeoutError as error:
            message = f"No answer from {self._where} within {self._timeout:g} s."
            raise RequestError(message, hint="Raise the bound with --timeout.") from error
        except http.client.IncompleteRead as error:
            raise unreachable(self._where, "the connection ended in the middle of the answer") from error
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(self._where, str(error) or type(error).__name__) from error
        finally:
            connection.close()


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Lines as they come; IncompleteRead when the connection ends before the answer does.

    Iterating over the response itself takes a lost connection for the end (its `peek` swallows the error).
    """
    pending = b""
    while received := response.read1(1 << 16):
        *lines, pending = (pending + received).split(b"\n")
        yield from lines
    yield pending


def _checked(status: int, text: str) -> Any:
    """The parsed body; RequestError with the server's text when it reports one, whatever the status."""
    try:
        content = json.loads(text.strip().removeprefix(_EVENT))
    except json.JSONDecodeError:
        raise RequestError(f"The server answered with status {status} and no JSON: {text[:200]!r}.") from None
    if isinstance(content, Mapping) and "error" in content:
        raise refused(str(content["error"]))
    if status >= http.client.BAD_REQUEST:
        raise RequestError(f"The server answered with status {status}: {text[:200]}.")
    return content


def _reply(content: Mapping[str, Any]) -> Reply:
    return {name: value if isinstance(value, list) else [value] for name, value in content.items()}
