"""A response sender that may be asked for cancellation while another thread answers."""

from __future__ import annotations

import threading
from typing import Any

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class GuardedSender:
    """Keeps `is_cancelled` away from the final response.

    The final response frees the server's side of the sender. Triton 2.51 does not guard that: asking for cancellation
    at the same time or later is a segmentation fault of the whole server.
    """

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self.ended = False
        """Whether the final response was sent, or is being sent."""

    def send(self, response: Any = None, *, final: bool) -> None:
        """Send a response, or nothing but the final flag."""
        arguments = () if response is None else (response,)
        # Triton drops tensors that were not requested without Python's lock (GIL); they must not be the last to go.
        kept = [] if response is None else response.output_tensors()  # noqa: F841
        if not final:
            self._sender.send(*arguments)
            return
        with self._lock:
            self.ended = True
            self._sender.send(*arguments, flags=FINAL)

    def is_cancelled(self) -> bool:
        """Whether the client gave up; False once the final response was sent. Costs a round trip to the server."""
        with self._lock:
            return not self.ended and bool(self._sender.is_cancelled())
