"""Files of many requests: OpenAI's batch format, and answers that are written as they come and not asked for again."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from trtserve.client.endpoint import Endpoint, unreachable
from trtserve.client.http_transport import ConnectTimeoutError, HttpAnswer, HttpPool, http_request, tls_context
from trtserve.errors import UsageError
from trtserve.files import is_unicode, parse_json, writing

_MOST_REQUESTS = 1_000_000
_LONGEST_LINE = 8 << 20  # bytes; a gateway takes no larger body
_LINES_OF_JSON = (".jsonl", ".ndjson")
_HINT = (
    "Each line is a request in OpenAI's batch format. Prompts, one per line, are in a file with another name, such as "
    "prompts.txt."
)
_URL = re.compile(r"/v1/[a-z_/]{1,100}")
_AT_ONCE = 16
_BUSY = (429, 503)
_PASSING = (401, 403, 408, 429)  # with all from 500 on: what another key, or the same server later, may answer
_BEGINNINGS = (b'{"id": "batch_req_', b'{"prompt": ')  # of lines that are answers
_PAUSES = (0.5, 1, 2, 4, 8, 16)  # seconds before a busy or silent server is asked again
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """One line of a batch file."""

    custom_id: str
    url: str
    at: int  # where the line begins, in bytes: bodies are read when they are sent


def is_batch(path: Path) -> bool:
    """Return whether a regular file is named as lines of JSON, or its first line is a request of a batch."""
    if not path.is_file():
        return False
    if path.suffix.lower() in _LINES_OF_JSON:
        return True
    with suppress(OSError, ValueError, UsageError), path.open("rb") as file:
        first = next(_lines(file, path), (0, 0, b""))[2]
        found = parse_json(first)
        return isinstance(found, dict) and "custom_id" in found
    return False


def read_batch(path: Path) -> list[BatchRequest]:
    """Return the requests of a file. Raises UsageError with the number of the first line that is none."""
    found: dict[str, BatchRequest] = {}
    with path.open("rb") as file:
        for number, at, line in _lines(file, path):
            request, where = _request(line, f"{path}, line {number}"), f"--input-file: {path}, line {number}"
            custom_id, url = request.get("custom_id"), request.get("url")
            if not isinstance(custom_id, str) or custom_id in found:
                raise UsageError(f"{where} needs a custom_id, a text that no other line has.", hint=_HINT)
            if not isinstance(url, str) or not _URL.fullmatch(url) or request.get("method", "POST") != "POST":
                raise UsageError(f"{where} is not a POST to a url below /v1, such as /v1/chat/completions.")
            if not isinstance(request.get("body"), dict) or request["body"].get("stream"):
                raise UsageError(f"{where} needs a body, an object without stream: answers are written as a whole.")
            if len(found) == _MOST_REQUESTS:
                raise UsageError(f"--input-file: {path} has more than {_MOST_REQUESTS} requests.", hint="Split it.")
            found[custom_id] = BatchRequest(custom_id=custom_id, url=url, at=at)
    if not found:
        raise UsageError(f"--input-file: {path} holds no request.", hint=_HINT)
    return list(found.values())


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield the number, the place and the content of each line that is not empty."""
    number = at = 0
    while line := file.readline(_LONGEST_LINE + 1):
        number += 1
        if len(line) > _LONGEST_LINE:
            raise UsageError(f"--input-file: {path}, line {number} has more than {_LONGEST_LINE >> 20} MiB.")
        if line.strip():
            yield number, at, line
        at += len(line)


def _request(line: bytes, where: str) -> Line:
    try:
        found = parse_json(line)
    except ValueError as error:
        raise UsageError(f"--input-file: {where} is not JSON: {error}.", hint=_HINT) from None
    if not isinstance(found, dict):
        raise UsageError(f"--input-file: {where} is not a JSON object.", hint=_HINT)
    return found


class AnswerFile:
    """A file with a JSON line for each answer. What an earlier run wrote is kept, but for errors that may pass.

    A line that it began is removed too. Answers to a batch may be in any order.
    """

    def __init__(self, path: Path) -> None:
        """Raises UsageError for a file that cannot be written, or holds something else."""
        self._path = path
        self.lines: list[Line] = []
        """What is there already, without the texts of answers."""
        if path.exists() and not path.is_file():
            raise UsageError(f"--output-file: {path} is not a regular file.", hint="Name a file, or leave it out.")
        with writing(path), path.open("a+b") as file:
            whole, passing = file.seek(0), set[int]()
            for number, line in enumerate(file):
                if line.endswith(b"\n"):
                    known = self._known(line)
                    whole += len(line)
                    if _may_pass(known):
                        passing.add(number)
                    else:
                        self.lines.append({name: known.get(name) for name in ("custom_id", "prompt", "input")})
                elif number == 0 and not any(line.startswith(each) or each.startswith(line) for each in _BEGINNINGS):
                    raise self._refused()
            file.truncate(whole)
            if passing:
                _remove(file, passing, path.resolve())
        self._file = path.open("ab")

    def _known(self, line: bytes) -> Line:
        with suppress(ValueError):
            found = parse_json(line)
            if isinstance(found, dict) and _is_answer(found):
                return found
        raise self._refused()

    def _refused(self) -> UsageError:
        return UsageError(
            f"--output-file: {self._path} has lines that are not answers; they are not overwritten.",
            hint="Name another file.",
        )

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with writing(self._path):
            self._file.close()  # writes again what a full disk refused

    def write(self, line: Line) -> None:
        """Add an answer; it is in the file when this returns."""
        with writing(self._path):
            text = json.dumps(line, ensure_ascii=False)
            self._file.write((text if is_unicode(text) else json.dumps(line)).encode() + b"\n")
            self._file.flush()


def _is_answer(line: Line) -> bool:
    if isinstance(line.get("prompt"), int):
        return "input" in line
    return str(line.get("id")).startswith("batch_req_") and "custom_id" in line and "response" in line


def _may_pass(line: Line) -> bool:
    """Return whether an answer is an error that says nothing about its request, which is asked again."""
    if "response" not in line:  # the answer to a prompt
        return False
    response = line["response"]
    status = response.get("status_code") if isinstance(response, dict) else None
    return line.get("error") is not None or not isinstance(status, int) or status in _PASSING or status >= 500


def _remove(file: BinaryIO, numbers: set[int], path: Path) -> None:
    """Replace `path`, which `file` has open, by a file without the lines of these numbers, in one rename."""
    staged = path.with_name(f".{path.name}.partial")
    try:
        with staged.open("wb") as kept:
            file.seek(0)
            kept.writelines(line for number, line in enumerate(file) if number not in numbers)
        shutil.copymode(path, staged)
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


async def send_batch(
    path: Path,
    requests: Sequence[BatchRequest],
    endpoint: Endpoint,
    write: Callable[[Line], None],
    *,
    model: str | None,
    timeout: float,
) -> int:
    """Send the requests, 16 at a time, and hand over each answer as OpenAI's batches have it. Returns the failed ones.

    `model` replaces that of the bodies. A request that the server refuses is an answer too. Raises
    ServerUnreachableError when the server is gone.
    """
    waiting = deque(requests)
    pool = HttpPool(
        endpoint.host,
        endpoint.http_port,
        tls=None if endpoint.tls is None else tls_context(endpoint.tls),
        timeout=timeout,
        connect_timeout=min(timeout, endpoint.connect_timeout),
    )
    failed = 0

    async def work(file: BinaryIO) -> None:
        nonlocal failed
        while waiting:
            request = waiting.popleft()
            file.seek(request.at)
            body = _request(file.readline(_LONGEST_LINE), str(path))["body"]
            content = json.dumps(body if model is None else {**body, "model": model}).encode()
            line = _answer_line(request, await _ask(pool, endpoint, request.url, content))
            failed += line["error"] is not None or line["response"]["status_code"] != 200
            write(line)

    with path.open("rb") as file:
        workers = [asyncio.ensure_future(work(file)) for _ in range(min(_AT_ONCE, len(waiting)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await pool.close()
    return failed


async def _ask(pool: HttpPool, endpoint: Endpoint, url: str, body: bytes) -> HttpAnswer | None:
    """Return the answer, or None when none came in time. Raises ServerUnreachableError."""
    message = http_request(endpoint.http, url, body, endpoint.http_headers)
    for pause in (*_PAUSES, None):
        try:
            answer = await pool.send(message)
        except (OSError, asyncio.TimeoutError) as error:
            if isinstance(error, asyncio.TimeoutError) and not isinstance(error, ConnectTimeoutError):
                return None
            if pause is None:
                raise unreachable(endpoint.http, str(error)) from None
        else:
            if pause is None or answer is None or answer.status not in _BUSY:
                return answer
        await asyncio.sleep(pause)
    return None


def _answer_line(request: BatchRequest, answer: HttpAnswer | None) -> Line:
    line: Line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request.custom_id, "response": None}
    if answer is None:
        return {**line, "error": {"code": "request_timeout", "message": "No answer came within --timeout."}}
    try:
        body = parse_json(answer.body)
    except ValueError:
        return {**line, "error": {"code": "invalid_response", "message": "The answer is not JSON."}}
    request_id = answer.headers.get(b"x-request-id", b"").decode("latin-1")
    return {**line, "response": {"status_code": answer.status, "request_id": request_id, "body": body}, "error": None}
