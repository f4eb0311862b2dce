"""A response sender that one thread may ask for cancellation while another sends."""

from __future__ import annotations

import threading
from typing import Any

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class GuardedSender:
    """Never calls `is_cancelled` during or after the final response.

    The final response frees the server's side of the sender. In Triton 2.51 asking for cancellation at that moment or
    later crashes the whole server.
    """

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self.ended = False
        """Whether the final response was sent or is being sent."""

    def send(self, response: Any = None, *, final: bool) -> None:
        """Send a response; None sends only the final flag."""
        arguments = () if response is None else (response,)
        # Triton frees tensors that were not requested without holding the GIL; this reference makes Python free them.
        kept = [] if response is None else response.output_tensors()  # noqa: F841
        if not final:
            self._sender.send(*arguments)
            return
        with self._lock:
            self.ended = True
            self._sender.send(*arguments, flags=FINAL)

    def is_cancelled(self) -> bool:
        """Return whether the client cancelled; False once the final response was sent.

        Costs a round trip to the server.
        """
        with self._lock:
            return not self.ended and bool(self._sender.is_cancelled())
