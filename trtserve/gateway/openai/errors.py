"""Errors in the shape that OpenAI's clients expect, with the status that decides which exception they raise."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic_core import from_json, to_json
from starlette.exceptions import HTTPException

from trtserve.client.endpoint import UnavailableError
from trtserve.errors import ServerUnreachableError, TrtserveError
from trtserve.gateway.asgi import SMALL, RefusedError, require_few, without_memory
from trtserve.gateway.openai.other_keys import reason_against

_LOG = logging.getLogger(__name__)
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "service_unavailable",
}
MESSAGES = "/v1/messages"
"""Where Anthropic's API is; its errors have a shape of their own."""
OLLAMA = "/api/"
"""Where Ollama's API is; its errors are a text, and its streams are lines."""
TOKENS = ("/tokenize", "/detokenize")
"""Paths of vLLM outside /v1."""
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TOO_LONG = "context_length_exceeded"
# How the engine's error begins → status and code; what follows may quote the request.
# Whatever else the engine refuses is the request's fault.
_ENGINE_ERRORS: tuple[tuple[re.Pattern[str], int, str | None], ...] = (
    (re.compile("Encountered an error in forwardAsync function: the step failed"), 500, None),
    (re.compile("(?:Maximum|Exceeds maximum) queue size|The queue of guides"), 429, "queue_full"),
    (re.compile(".*exceeds maximum input length", re.IGNORECASE), 400, _TOO_LONG),
)


def error_type(status: int) -> str:
    """Return OpenAI's name for errors with this status."""
    return _TYPES.get(status, "invalid_request_error")


def asks_model(path: str) -> bool:
    """Return whether a path belongs to one of the APIs of language models."""
    return path.startswith(("/v1/", OLLAMA)) or path in TOKENS


Validate = Callable[..., tuple[Any, Sequence[Any] | None]]


def error_content(path: str, status: int, text: str) -> object:
    """Return the JSON of an error as the clients of a path expect it."""
    if path.startswith(MESSAGES):
        return {
            "type": "error",
            "error": {"type": _MESSAGES_TYPES.get(status, "invalid_request_error"), "message": text},
        }
    if path.startswith("/v1/") or path in TOKENS:
        code = "invalid_api_key" if status == 401 else None
        return {"error": {"message": text, "type": error_type(status), "param": None, "code": code}}
    return {"error": text}


def error_event(path: str, status: int, text: str) -> bytes:
    """Return the event of an error within a stream."""
    content = to_json(error_content(path, status, text))
    if path.startswith(OLLAMA):
        return content + b"\n"
    name = b"event: error\n" if path.startswith((MESSAGES, "/v1/responses")) else b""
    return name + b"data: " + content + b"\n\n"


class ApiError(Exception):
    """An error that the client gets as OpenAI's JSON."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        message = message.encode("utf-8", "backslashreplace").decode()  # files may have half a character
        super().__init__(message)
        self.message = message
        self.status = status
        self.headers: dict[str, str] = {}
        self.body = {
            "error": {
                "message": message,
                "type": error_type(status),
                "param": param,
                "code": code,
            }
        }

    def response(self, path: str = "") -> Response:
        """Return the HTTP response, in the shape of the path's API."""
        headers = self.headers | ({"Retry-After": "1"} if self.status in (429, 503) else {})
        text, code = self.message, self.body["error"]["code"]
        if path.startswith(MESSAGES) and code == _TOO_LONG:
            text = f"prompt is too long: {text}"  # Anthropic's words, which Claude Code knows
        own = path.startswith((MESSAGES, OLLAMA))
        body = error_content(path, self.status, text) if own else self.body
        return JSONResponse(body, status_code=self.status, headers=headers)


@contextmanager
def naming(fields: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the fields that the client sent: field of a chat → the one that became it."""
    try:
        yield
    except ApiError as error:
        content = error.body["error"]
        first, dot, rest = (content["param"] or "").partition(".")
        if first not in fields:
            raise
        param = f"{fields[first]}{dot}{rest}"
        message = error.message.replace(f"'{content['param']}'", f"'{param}'", 1)
        raise ApiError(message, status=error.status, param=param, code=content["code"]) from error


class MethodNotAllowedError(ApiError):
    """A path was asked with another method than it has."""

    def __init__(self, message: str, methods: Sequence[str]) -> None:
        super().__init__(message, status=405, code="method_not_allowed")
        self.headers["Allow"] = ", ".join(methods)


def api_error(error: TrtserveError) -> ApiError:
    """Return what the client sees of an error from the engine or from preparing its request."""
    if isinstance(error, (ServerUnreachableError, UnavailableError)):
        return ApiError(error.message, status=503)
    for pattern, status, code in _ENGINE_ERRORS:
        if pattern.match(error.message):
            return ApiError(error.message, status=status, code=code)
    return ApiError(error.message)


class OpenAIRoute(APIRoute):
    """A route whose errors have OpenAI's shape, whatever application it is part of."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler."""
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                if self.body_field is not None:
                    _take_as_json(request)
                    await _prepare(request, self.body_field.validate)
                return await handler(request)
            except Exception as error:  # noqa: BLE001 - clients read only their API's JSON
                return self._explained(error, request).response(request.url.path)

        return answer

    def _explained(self, error: Exception, request: Request) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, RequestValidationError):
            return validation_error(error.errors(), error.body)
        if isinstance(error, HTTPException):  # FastAPI cannot read the body
            if not isinstance(error.__cause__, RefusedError):
                return ApiError("The body is not valid JSON.", status=error.status_code)
            error = error.__cause__
        error = without_memory(error) or error
        if isinstance(error, RefusedError):
            return ApiError(error.text, status=error.status)
        if isinstance(error, TrtserveError):
            return api_error(error)
        _LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return ApiError("The request failed; the gateway's log says why.", status=500)


def _take_as_json(request: Request) -> None:
    """Read a body without a type, or with the one of `curl -d`, as JSON: some of Ollama's clients name no type.

    Pages of other sites, which may send such bodies, have been refused by their Origin.
    """
    headers = request.scope["headers"]
    given = next((value for name, value in headers if name == b"content-type"), b"")
    if given.partition(b";")[0] in (b"", b"application/x-www-form-urlencoded"):
        others = [each for each in headers if each[0] != b"content-type"]
        request.scope["headers"] = [*others, (b"content-type", b"application/json")]


async def _prepare(request: Request, validate: Validate) -> None:
    """Check the body of a request. A large one is checked in a thread, and FastAPI gets what comes out.

    Raises ApiError, RefusedError and RequestValidationError.
    """
    body = await request.body()
    if len(body) <= SMALL:
        _readable(body or b"{}")
        return
    await asyncio.to_thread(require_few, body)
    content = await asyncio.to_thread(_readable, body)
    if "json" in request.headers.get("content-type", ""):
        checked, errors = await asyncio.to_thread(validate, content, {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors, body=content)
        request._json = checked  # noqa: SLF001 - where Starlette keeps it


def _readable(body: bytes) -> Any:
    """Return JSON. Raises ApiError for what other code would trip over: nested too deeply, or not Unicode."""
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise ApiError(f"The body is not valid JSON: {str(error)[:200]}.") from None


def validation_error(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Describe the first fault of a body; unknown keys come before wrong values, but behind an unknown type."""
    first = min(errors, key=lambda error: (not _of_type(error), error["type"] != "extra_forbidden"))
    param = _param(first["loc"][1:], body, missing=first["type"] == "missing")  # the first part is "body"
    if first["type"] == "extra_forbidden":
        if (reason := reason_against(param or "")) is not None:
            return ApiError(f"{param} is not supported: {reason}.", param=param, code="unsupported_parameter")
        return ApiError(f"Unrecognized request argument supplied: {param}", param=param, code="unknown_parameter")
    if first["type"] == "json_invalid":
        return ApiError("The body is not valid JSON.")
    if param is None and not isinstance(body, dict):
        if isinstance(body, bytes) and body:  # FastAPI has not parsed it
            return ApiError("The body must be sent with the header Content-Type: application/json.")
        kinds: dict[type, str] = {
            list: "is a JSON list",
            str: "is a JSON text",
            bytes: "is empty",
            type(None): "is empty",
        }
        return ApiError(f"The body {kinds.get(type(body), 'is no JSON object')}; expected a JSON object.")
    if first["type"] == "missing":
        return ApiError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    message = str(first["msg"]).removeprefix("Value error, ").replace(" after validation", "")
    message += f", not {str(first['input'])[:50]!r}" if _of_type(first) else ""
    if param is None:  # values that do not go together
        return ApiError(f"{message}.", code="invalid_value")
    return ApiError(f"Invalid value for '{param}': {message}.", param=param, code="invalid_value")


def _of_type(error: Mapping[str, Any]) -> bool:
    """Return whether an object of a list has an unknown type, so that its other keys are not known either."""
    kind, place = error["type"], error["loc"]
    return kind == "literal_error" and place[-1] == "type" and isinstance(place[-2], int)


def _param(places: Sequence[int | str], body: Any, *, missing: bool) -> str | None:
    """Return the path of a value in the body, without the parts that name the branch of a union."""
    path: list[str] = []
    for place in places:
        if isinstance(body, dict) and isinstance(place, str):
            if place in body or (missing and place is places[-1]):
                path.append(place)
                body = body.get(place)
        elif isinstance(body, list) and isinstance(place, int):
            path.append(str(place))
            body = body[place]
    return ".".join(path) or None
