"""Run background work of a model periodically."""

from __future__ import annotations

import threading
from collections.abc import Callable

import triton_python_backend_utils as pb_utils


def repeat(stopping: threading.Event, period: float, action: Callable[[], None]) -> None:
    """Run `action` every `period` seconds until `stopping` is set; log an action that fails and go on."""
    while not stopping.wait(period):
        try:
            action()
        except Exception as error:  # noqa: BLE001, PERF203 - one failure must not end the thread
            pb_utils.Logger.log_error(f"{action.__name__} failed with {type(error).__name__}: {error}")
