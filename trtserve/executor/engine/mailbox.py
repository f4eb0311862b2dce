"""Responses that are ready to be fetched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from trtserve.executor.engine.requests import RequestOutput


class Mailbox:
    """Responses by request id; a request is open until its last response was fetched. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: dict[int, list[RequestOutput]] = {}
        self._open: dict[int, int | None] = {}
        self._highest = 0
        self._closed = False
        self._failure: str | None = None

    def expect(self, clients: Mapping[int, int | None]) -> None:
        """Open request ids (ascending), with the client's ids; only their responses can be fetched by id."""
        with self._changed:
            self._open.update(clients)
            self._highest = max(self._highest, *clients, 0)

    def deliver(self, responses: list[RequestOutput]) -> None:
        """Make `responses` ready and wake all waiting threads."""
        with self._changed:
            for response in responses:
                self._ready.setdefault(response.request_id, []).append(response)
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiting threads; fetching never blocks again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, message: str) -> None:
        """Answer every open request with an error; after those, fetching raises RuntimeError.

        Uses the ids known here, because the worker's own lists may be in any state after a failure.
        """
        with self._changed:
            for number, client in self._open.items():
                responses = self._ready.setdefault(number, [])
                if not (responses and _is_last(responses[-1])):
                    responses.append(RequestOutput(request_id=number, client_id=client, error=message))
            self._failure = message
        self.close()

    def count(self, number: int | None) -> int:
        """Return the number of ready responses, of request `number` or of all."""
        with self._changed:
            if number is None:
                return sum(map(len, self._ready.values()))
            return len(self._ready.get(number, ()))

    def fetch(self, number: int | None, timeout: float | None) -> list[RequestOutput]:
        """Return the ready responses of request `number` (None: all), waiting up to `timeout` seconds (None: no limit).

        Raises RuntimeError with the cause when no response can become ready any more.
        """
        with self._changed:
            if number is None:
                self._wait(lambda: bool(self._ready), timeout)
                return [response for each in list(self._ready) for response in self._take(each)]
            if number <= self._highest and number not in self._open:  # its last response was fetched before
                error = f"Request id {number} has already been processed and terminated"
                return [RequestOutput(request_id=number, error=error)]
            self._wait(lambda: number in self._ready, timeout)
            return self._take(number)

    def fetch_each(self, numbers: list[int], timeout: float | None) -> list[list[RequestOutput]]:
        """Return the ready responses of each request; the timeout is for all of them together."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return [
            self.fetch(number, None if deadline is None else max(0.0, deadline - time.monotonic()))
            for number in numbers
        ]

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> None:
        self._changed.wait_for(lambda: self._closed or ready(), timeout)
        if self._failure is not None and not ready():
            raise RuntimeError(self._failure)

    def _take(self, number: int) -> list[RequestOutput]:
        responses = self._ready.pop(number, [])
        if responses and _is_last(responses[-1]):
            del self._open[number]
        return responses


def _is_last(response: RequestOutput) -> bool:
    return response.is_last or response.error is not None
