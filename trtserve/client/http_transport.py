"""Triton over HTTP: generate and generate_stream for decoupled models, infer for the others.

Sources: Triton's docs/protocol/extension_generate.md and extension_binary_data.md. The infer endpoint does not serve
decoupled models; generate takes flat values only. Errors may arrive with status 200 once a reply has begun.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from trtserve.client.endpoint import (
    Endpoint,
    Tls,
    other_protocol,
    refused,
    silent,
    tls_problem,
    understood,
    unknown_model,
    unreachable,
)
from trtserve.client.http_pool import ConnectionEndedError, HttpAnswer, HttpPool, NotHttpError, http_request
from trtserve.client.tensors import ModelDescription, ModelRequest, Reply, Tensor, decoded, generate_shape, text_array
from trtserve.client.transport import TransportClient
from trtserve.errors import RequestError, UsageError
from trtserve.files import parse_json

_EVENT = "data:"
_MOST_DESCRIBED = 64 << 20
JSON_LENGTH = "Inference-Header-Content-Length"
# Keys in the answer of generate that are neither outputs nor parameters of the response.
_ENVELOPE = ("id", "model_name", "model_version")


def http_client(endpoint: Endpoint, *, timeout: float) -> TransportClient:
    """Return a client that waits; `timeout` is the limit of an answer in seconds."""
    return TransportClient(lambda: HttpTransport(endpoint, timeout=timeout))


class HttpTransport:
    """Connections to the HTTP port, encrypted or not."""

    def __init__(self, endpoint: Endpoint, *, timeout: float) -> None:
        self._endpoint, self._where = endpoint, endpoint.http
        self._timeout, self._first = timeout, min(timeout, endpoint.connect_timeout)
        self._pool = HttpPool(
            endpoint.host,
            endpoint.http_port,
            tls=None if endpoint.tls is None else tls_context(endpoint.tls),
            timeout=timeout,
            connect_timeout=timeout,
        )

    async def describe(self, model: str) -> ModelDescription:
        status, text = await self._first_answer("GET", f"{model_path(model)}/config")
        if status == HTTPStatus.NOT_FOUND or (status >= HTTPStatus.BAD_REQUEST and "unknown model" in text):
            raise unknown_model(model, self._where, await self.model_names())
        with understood():
            return ModelDescription.from_config(_checked(status, text))

    async def model_names(self) -> list[str]:
        status, text = await self._first_answer("POST", "/v2/repository/index", b'{"ready": true}')
        with understood():
            return [str(entry["name"]) for entry in _checked(status, text)]

    async def _first_answer(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
        message = http_request(self._where, path, body, self._endpoint.http_headers, method=method)
        with self._explained(first=True):
            answer = await asyncio.wait_for(self._pool.send(message, most=_MOST_DESCRIBED), self._first)
        assert answer is not None
        return answer.status, _text(answer.body)

    async def infer(self, request: ModelRequest) -> AsyncGenerator[Reply, None]:
        model, headers = request.model, dict[str, str]()
        if not model.decoupled:
            verb, (body, length) = "infer", infer_body(request.tensors, request_id=request.id, outputs=request.outputs)
            headers = {JSON_LENGTH: str(length)}
        elif request.outputs:
            raise UsageError("--requested-outputs needs --protocol grpc: the HTTP generate endpoint sends all outputs.")
        else:
            verb = "generate_stream" if request.stream else "generate"
            body = json.dumps(generate_body(request.tensors, request_id=request.id, model=model)).encode()
        path = f"{model_path(model.name)}/{verb}"
        message = http_request(self._where, path, body, {**self._endpoint.http_headers, **headers})
        arrived: asyncio.Queue[bytes | None] = asyncio.Queue()

        def on_event(_: int, event: bytes) -> bool:
            arrived.put_nowait(event)
            return False

        sending = asyncio.ensure_future(
            self._pool.send(message, on_event if verb == "generate_stream" else None, timeout=request.timeout)
        )
        sending.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            while (event := await arrived.get()) is not None:
                if event.strip():
                    with understood():
                        reply = _reply(_checked(HTTPStatus.OK, _text(event)), model)
                    yield reply
            with self._explained():
                answer = sending.result()
        finally:
            sending.cancel()
        if answer is None:
            return
        if verb != "infer" and not answer.body.strip():
            return
        with understood():
            reply = (
                _infer_reply(answer) if verb == "infer" else _reply(_checked(answer.status, _text(answer.body)), model)
            )
        yield reply

    @contextmanager
    def _explained(self, *, first: bool = False) -> Iterator[None]:
        try:
            yield
        except asyncio.TimeoutError as error:
            if first:
                raise silent(self._where, self._first) from error
            message = f"No answer from {self._where} within {self._timeout:g} s."
            raise RequestError(message, hint="Raise it with --timeout.") from error
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> Exception:
        """Return the error for a connection that failed, or ended before the answer."""
        if isinstance(error, ConnectionEndedError) and error.begun:
            return unreachable(self._where, str(error))
        # An encrypted port ends the connection, or answers with bytes that are not HTTP.
        if self._endpoint.tls is None and isinstance(error, ConnectionError):
            other = other_protocol(self._where, "HTTP")
            if other is not None:
                return other
        hint, reason = "", getattr(error, "verify_message", "") or str(error) or type(error).__name__
        if isinstance(error, NotHttpError):
            reason = "the port does not speak HTTP"
            hint = "If that is the gRPC port, use --protocol grpc (query) or give the HTTP port."
        elif isinstance(error, ssl.SSLCertVerificationError):
            hint = "Name the roots that signed this server's certificate with --root-certificates."
        elif isinstance(error, ssl.SSLError):
            hint = "Try without --ssl: Triton itself has no encryption over HTTP."
        return unreachable(self._where, reason, hint=hint)

    async def close(self) -> None:
        await self._pool.close()


def generate_body(tensors: Sequence[Tensor], *, request_id: str, model: ModelDescription) -> dict[str, Any]:
    """Return the JSON body for generate and generate_stream: scalars for single values, flat lists for several.

    Raises UsageError for a tensor that the endpoint would give another shape.
    """
    for tensor in tensors:
        declared = model.inputs[tensor.name].dims
        dims = (-1, *declared) if model.max_batch_size > 0 else declared
        if generate_shape(dims, len(tensor.flat())) != tensor.shape:
            raise UsageError(
                f"The input {tensor.name!r} with shape {list(tensor.shape)} cannot be sent over HTTP to {model.name!r}:"
                " its generate endpoint takes flat values only.",
                hint="Use --protocol grpc.",
            )
    values = {tensor.name: tensor.flat() for tensor in tensors}
    body: dict[str, Any] = {name: value[0] if len(value) == 1 else value for name, value in values.items()}
    return {**body, "id": request_id}


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


def model_path(model: str) -> str:
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
        raise UsageError(f"The certificates ({named}) cannot be used: {tls_problem(error)}.") from None
    return context


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
    if status >= HTTPStatus.BAD_REQUEST:
        raise RequestError(f"The server answered with status {status}: {text[:200]}.")
    return content


def _reply(content: Mapping[str, Any], model: ModelDescription) -> Reply:
    """Return the outputs of a generate answer as flat arrays, and its other values as parameters."""
    import numpy as np

    outputs = {}
    for name in content.keys() & model.outputs.keys():
        values = content[name] if isinstance(content[name], list) else [content[name]]
        # Without a type, because generate writes NaN as text.
        if model.outputs[name].datatype == "BYTES":  # JSON can have half a character, as gRPC cannot
            outputs[name] = text_array([str(value).encode(errors="replace").decode() for value in values])
        else:
            outputs[name] = np.asarray(values)
    parameters = {name: content[name] for name in content.keys() - model.outputs.keys() - set(_ENVELOPE)}
    return Reply(outputs=outputs, parameters=parameters)


def _infer_reply(answer: HttpAnswer) -> Reply:
    """Return the outputs of an infer answer, whose binary tensors follow its JSON part in order."""
    length = int(answer.headers.get(JSON_LENGTH.lower().encode(), len(answer.body)))
    head = _checked(answer.status, _text(answer.body[:length]))
    outputs, start = {}, length
    for output in head.get("outputs", ()):
        end = start + int(output["parameters"]["binary_data_size"])
        outputs[output["name"]] = decoded(output["datatype"], output["shape"], answer.body[start:end])
        start = end
    return Reply(outputs=outputs, parameters=head.get("parameters", {}))
