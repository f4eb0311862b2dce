"""Responses that wait to be fetched, and the three ways to wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from trtserve.executor.results import Response


class Mailbox:
    """Responses by request id; a request is open until its last response was fetched. Safe for many threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: dict[int, list[Response]] = {}
        self._open: set[int] = set()
        self._highest = 0
        self._closed = False

    def expect(self, ids: Iterable[int]) -> None:
        """Open `ids`, which count upwards: only their responses are fetched by id."""
        with self._changed:
            for number in ids:
                self._open.add(number)
                self._highest = max(self._highest, number)

    def deliver(self, responses: list[Response]) -> None:
        """Make `responses` ready, waking whoever waits."""
        with self._changed:
            for response in responses:
                self._ready.setdefault(response.request_id, []).append(response)
            self._changed.notify_all()

    def close(self) -> None:
        """Wake every waiter; fetching never blocks again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def count(self, number: int | None) -> int:
        """Responses that are ready: of request `number`, or of all."""
        with self._changed:
            if number is None:
                return sum(map(len, self._ready.values()))
            return len(self._ready.get(number, ()))

    def fetch(self, number: int | None, timeout: float | None) -> list[Response]:
        """What is ready of request `number` (None: of all), waiting up to `timeout` seconds (None: for ever)."""
        with self._changed:
            if number is None:
                self._wait(lambda: bool(self._ready), timeout)
                return [response for each in list(self._ready) for response in self._take(each)]
            if self._has_ended(number):
                return [_already_processed(number)]
            self._wait(lambda: number in self._ready, timeout)
            return self._take(number)

    def fetch_each(self, numbers: list[int], timeout: float | None) -> list[list[Response]]:
        """What is ready of each request, one after another within one time budget."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return [
            self.fetch(number, None if deadline is None else max(0.0, deadline - time.monotonic()))
            for number in numbers
        ]

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> None:
        self._changed.wait_for(lambda: self._closed or ready(), timeout)

    def _has_ended(self, number: int) -> bool:
        """True when the last response was handed out; an id never given is not ended, it is waited for."""
        return number <= self._highest and number not in self._open

    def _take(self, number: int) -> list[Response]:
        responses = self._ready.pop(number, [])
        if responses and (responses[-1].has_error() or responses[-1].result.is_final):
            self._open.discard(number)
        return responses


def _already_processed(number: int) -> Response:
    return Response(number, f"Request id {number} has already been processed and terminated")
