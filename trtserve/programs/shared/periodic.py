"""Run background work of a model periodically."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import triton_python_backend_utils as pb_utils

_Request = TypeVar("_Request")
_PARTS = 4


class Turns:
    """Chooses the open requests that are asked now whether their clients have gone: a quarter, or up to two.

    A question is a round trip to the server, and many of them in a row keep it from sending tokens.
    """

    def __init__(self) -> None:
        self._turn = 0

    def next(self, requests: Sequence[_Request]) -> Sequence[_Request]:
        """Return the next quarter."""
        self._turn += 1
        return requests[self._turn % _PARTS :: _PARTS] if len(requests) > 2 else requests


def repeat(stopping: threading.Event, period: float, action: Callable[[], None]) -> None:
    """Run `action` every `period` seconds until `stopping` is set; log an action that fails and go on."""
    while not stopping.wait(period):
        try:
            action()
        except Exception as error:  # noqa: BLE001, PERF203 - one failure must not end the thread
            pb_utils.Logger.log_error(f"{action.__name__} failed with {type(error).__name__}: {error}")
