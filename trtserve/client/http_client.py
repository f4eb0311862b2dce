"""A client of Triton over HTTP: generate and generate_stream for decoupled models, infer for the others.

Sources: Triton's docs/protocol/extension_generate.md and extension_binary_data.md. The infer endpoint does not serve
decoupled models; generate takes flat values only. Errors may arrive with status 200 once a reply has begun.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote

from trtserve.client.call_errors import (
    RequestCancelledError,
    other_protocol,
    refused,
    silent,
    unknown_model,
    unreachable,
)
from trtserve.client.endpoint import Endpoint, Tls
from trtserve.client.tensors import (
    ModelDescription,
    Reply,
    Tensor,
    decoded,
    generate_shape,
    text_array,
)
from trtserve.errors import RequestError, UsageError
from trtserve.files import parse_json

_EVENT = "data:"
_JSON_LENGTH = "Inference-Header-Content-Length"
# Keys in the answer of generate that are neither outputs nor parameters of the response.
_ENVELOPE = ("id", "model_name", "model_version")


def generate_body(tensors: Sequence[Tensor], *, request_id: str, model: ModelDescription) -> dict[str, Any]:
    """Return the JSON body for generate and generate_stream: scalars for single values, flat lists for several.

    Raises UsageError for a tensor that the endpoint would give another shape.
    """
    for tensor in tensors:
        _require_flat(tensor, model)
    values = {tensor.name: tensor.flat() for tensor in tensors}
    body: dict[str, Any] = {name: value[0] if len(value) == 1 else value for name, value in values.items()}
    return {**body, "id": request_id}


def _require_flat(tensor: Tensor, model: ModelDescription) -> None:
    declared = model.inputs[tensor.name].dims
    dims = (-1, *declared) if model.max_batch_size > 0 else declared
    if generate_shape(dims, len(tensor.flat())) != tensor.shape:
        raise UsageError(
            f"The input {tensor.name!r} with shape {list(tensor.shape)} cannot be sent over HTTP to {model.name!r}:"
            " its generate endpoint takes flat values only.",
            hint="Use --protocol grpc.",
        )


def infer_body(tensors: Sequence[Tensor], *, request_id: str, outputs: Sequence[str] = ()) -> tuple[bytes, int]:
    """Return the body of an infer request with binary tensors, and the length of its JSON part."""
    contents = [tensor.raw() for tensor in tensors]
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
            "parameters": {"binary_data_size": len(content)},
        }
        for tensor, content in zip(tensors, contents, strict=True)
    ]
    head: dict[str, Any] = {"id": request_id, "inputs": inputs, "parameters": {"binary_data_output": True}}
    if outputs:
        head["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    encoded = json.dumps(head).encode()
    return b"".join([encoded, *contents]), len(encoded)


class HttpClient:
    """Blocking client over HTTP or HTTPS, with one connection per call, so that closing it ends exactly one request."""

    def __init__(self, endpoint: Endpoint, *, timeout: float) -> None:
        self._endpoint = endpoint
        self._where = endpoint.http
        self._timeout = timeout
        self._first = min(timeout, endpoint.connect_timeout)
        self._tls = None if endpoint.tls is None else tls_context(endpoint.tls)
        self._cancelled = False
        self._request: http.client.HTTPConnection | None = None

    def describe(self, model: str) -> ModelDescription:
        status, text = self._call("GET", f"{_place(model)}/config")
        if status == http.client.NOT_FOUND or (status >= http.client.BAD_REQUEST and "unknown model" in text):
            raise unknown_model(model, self._where, self.model_names())
        return ModelDescription.from_config(_checked(status, text))

    def model_names(self) -> list[str]:
        status, text = self._call("POST", "/v2/repository/index", {"ready": True})
        return [entry["name"] for entry in _checked(status, text)]

    def infer(
        self,
        model: ModelDescription,
        tensors: Sequence[Tensor],
        *,
        request_id: str,
        stream: bool,
        outputs: Sequence[str] = (),
    ) -> Iterator[Reply]:
        if not model.decoupled:
            body, length = infer_body(tensors, request_id=request_id, outputs=outputs)
            with self._response("POST", f"{_place(model.name)}/infer", body, {_JSON_LENGTH: str(length)}) as answer:
                yield _infer_reply(answer, answer.read())
            return
        if outputs:
            raise UsageError("--requested-outputs needs --protocol grpc: the HTTP generate endpoint sends all outputs.")
        yield from self._generated(model, tensors, request_id=request_id, stream=stream)

    def _generated(
        self, model: ModelDescription, tensors: Sequence[Tensor], *, request_id: str, stream: bool
    ) -> Iterator[Reply]:
        verb = "generate_stream" if stream else "generate"
        body = json.dumps(generate_body(tensors, request_id=request_id, model=model)).encode()
        # The socket's timeout limits one read, and a stream has many.
        deadline = time.monotonic() + self._timeout
        with self._response("POST", f"{_place(model.name)}/{verb}", body) as response:
            if verb == "generate":
                yield _reply(_checked(response.status, _text(response.read())), model)
                return
            for line in _lines(response):
                if time.monotonic() > deadline:
                    raise TimeoutError
                text = _text(line).strip()
                if text:
                    yield _reply(_checked(response.status, text.removeprefix(_EVENT)), model)

    def cancel(self) -> None:
        self._cancelled = True
        connection = None if self._request is None else self._request.sock
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Do nothing: no connection stays open between calls."""

    def _call(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        content = json.dumps(body).encode() if body is not None else None
        with self._response(method, path, content, first=True) as response:
            return response.status, _text(response.read())

    @contextmanager
    def _response(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        first: bool = False,
    ) -> Iterator[http.client.HTTPResponse]:
        host, port, timeout = self._endpoint.host, self._endpoint.http_port, self._first if first else self._timeout
        if self._tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=timeout)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=self._tls)
        self._request = connection
        try:
            with self._explained(first=first):
                connection.request(method, path, body, {**self._endpoint.http_headers, **(headers or {})})
                if self._cancelled:
                    raise RequestCancelledError("The request was cancelled.")
                yield connection.getresponse()
        finally:
            connection.close()

    @contextmanager
    def _explained(self, *, first: bool) -> Iterator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            if self._cancelled:
                raise RequestCancelledError("The request was cancelled.") from error
            raise self._explanation(error, first=first) from error

    def _explanation(self, error: Exception, *, first: bool) -> Exception:
        if isinstance(error, TimeoutError) and first:
            return silent(self._where, self._first)
        if isinstance(error, TimeoutError):
            message = f"No answer from {self._where} within {self._timeout:g} s."
            return RequestError(message, hint="Raise it with --timeout.")
        if isinstance(error, http.client.IncompleteRead):
            return unreachable(self._where, "the connection ended in the middle of the answer")
        # An encrypted port ends the connection, or answers with bytes that are not HTTP.
        if self._tls is None and isinstance(error, (http.client.BadStatusLine, ConnectionError)):
            return other_protocol(self._where, "HTTP") or self._lost(error)
        return self._lost(error)

    def _lost(self, error: Exception) -> Exception:
        """Return the error for a connection that failed, or ended before the answer."""
        if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
            hint = "If that is the gRPC port, use --protocol grpc (query) or give the HTTP port."
            return unreachable(self._where, "the port does not speak HTTP", hint=hint)
        hint = ""
        if isinstance(error, ssl.SSLCertVerificationError):
            hint = "Name the roots that signed this server's certificate with --root-certificates."
        elif isinstance(error, ssl.SSLError):
            hint = "Try without --ssl: Triton itself has no encryption over HTTP."
        reason = getattr(error, "verify_message", "") or str(error) or type(error).__name__
        return unreachable(self._where, reason, hint=hint)


def _place(model: str) -> str:
    """Return the path of a model; its name may be any text that a user types."""
    return f"/v2/models/{quote(model, safe='')}"


def _text(content: bytes) -> str:
    """Decode a body; invalid UTF-8 shows as replacement characters."""
    return content.decode("utf-8", errors="replace")


def tls_context(tls: Tls) -> ssl.SSLContext:
    """Return what an encrypted connection trusts and shows. Raises UsageError for files that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=tls.root_certificates)
        if tls.server_name is not None:  # the roots are the server's own certificate, whatever the host is called
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if tls.certificate_chain is not None:
            context.load_cert_chain(tls.certificate_chain, tls.private_key)
    except OSError as error:  # also for files without a certificate
        files = (tls.root_certificates, tls.private_key, tls.certificate_chain)
        named = ", ".join(str(path) for path in files if path is not None)
        raise UsageError(f"The certificates ({named}) cannot be used: {error.strerror or error}.") from None
    return context


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield lines as they arrive; IncompleteRead when the connection ends before the answer does.

    Iterating over the response itself would take a lost connection for the end, because its `peek` hides the error.
    """
    pending = b""
    while received := response.read1(1 << 16):
        *lines, pending = (pending + received).split(b"\n")
        yield from lines
    yield pending


def _checked(status: int, text: str) -> Any:
    """Return the parsed body. Raises RequestError when it reports an error, whatever the status."""
    try:
        content = parse_json(text.strip().removeprefix(_EVENT))
    except ValueError:
        raise RequestError(
            f"The server answered with status {status} and a body that is not JSON: {text[:200]!r}."
        ) from None
    if isinstance(content, Mapping) and "error" in content:
        raise refused(str(content["error"]))
    if status >= http.client.BAD_REQUEST:
        raise RequestError(f"The server answered with status {status}: {text[:200]}.")
    return content


def _reply(content: Mapping[str, Any], model: ModelDescription) -> Reply:
    """Return the outputs of a generate answer as flat arrays, and its other values as parameters."""
    import numpy as np

    outputs = {}
    for name in content.keys() & model.outputs.keys():
        values = content[name] if isinstance(content[name], list) else [content[name]]
        # Without a type, because generate writes NaN as text.
        outputs[name] = text_array(values) if model.outputs[name].datatype == "BYTES" else np.asarray(values)
    parameters = {name: content[name] for name in content.keys() - model.outputs.keys() - set(_ENVELOPE)}
    return Reply(outputs=outputs, parameters=parameters)


def _infer_reply(response: http.client.HTTPResponse, body: bytes) -> Reply:
    """Return the outputs of an infer answer, whose binary tensors follow its JSON part in order."""
    length = int(response.headers.get(_JSON_LENGTH, len(body)))
    head = _checked(response.status, _text(body[:length]))
    outputs, start = {}, length
    for output in head.get("outputs", ()):
        end = start + int(output["parameters"]["binary_data_size"])
        outputs[output["name"]] = decoded(output["datatype"], output["shape"], body[start:end])
        start = end
    return Reply(outputs=outputs, parameters=head.get("parameters", {}))
