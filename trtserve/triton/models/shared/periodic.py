"""What a model's threads do again and again beside its requests."""

from __future__ import annotations

import threading
from collections.abc import Callable

import triton_python_backend_utils as pb_utils


def repeat(stopping: threading.Event, period: float, action: Callable[[], None]) -> None:
    """Run `action` every `period` seconds until `stopping` is set; one that fails is told and tried again."""
    while not stopping.wait(period):
        try:
            action()
        except Exception as error:  # noqa: BLE001, PERF203 - the thread must outlive what one round hits
            pb_utils.Logger.log_error(f"{action.__name__} failed with {type(error).__name__}: {error}")
