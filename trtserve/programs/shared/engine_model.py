"""Base class of the models whose texts an engine makes: vLLM's of NVIDIA's backend, and TensorRT-LLM's LLM API."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from .run_folder import Heartbeat
from .senders import GuardedSender, Turns, error_response, repeat

_BEAT = 0.5
# Requests are answered, and the supervisor has read why, before the process of a dead engine ends.
_LAST_WORDS = 2.0
_LONGEST_BEAT = 5.0


class EngineModel:
    """Hands requests to the engine, cancels those whose clients have gone, and ends with the engine."""

    problem = "Error generating request"  # how the answer to a request that cannot be served begins

    def load(self, args: dict[str, str], config: dict[str, Any]) -> float | None:
        """Load the engine. Return seconds between looks for clients that have gone, or None when it takes no requests.

        Whatever is raised ends the loading of the model.
        """
        raise NotImplementedError

    def submit(self, request: Any, sender: GuardedSender) -> None:
        """Start a request. Raises ValueError, TypeError or RuntimeError with a message for the client."""
        raise NotImplementedError

    def opened(self) -> Sequence[Any]:
        """Return the open requests, which have a `sender`."""
        raise NotImplementedError

    def cancel(self, request: Any) -> None:
        """Cancel a request."""
        raise NotImplementedError

    def progress(self) -> int:
        """Return a number that grows while the engine works."""
        raise NotImplementedError

    def failure(self) -> str | None:
        """Return why the engine will answer nothing any more, or None."""
        raise NotImplementedError

    def close(self) -> None:
        """End the engine."""
        raise NotImplementedError

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine, and start to watch it."""
        self._stopping, self._turns = threading.Event(), Turns()
        self._heartbeat = Heartbeat(args["model_name"])
        try:
            period = self.load(args, json.loads(args["model_config"]))
        except Exception as error:
            raise pb_utils.TritonModelException(f"The model cannot be loaded: {error}") from error
        actions = [] if period is None else [(period, self._cancel_gone), (_BEAT, self._beat)]
        self._watches = [threading.Thread(target=repeat, args=(self._stopping, *each), daemon=True) for each in actions]
        for watch in self._watches:
            watch.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Start each request; one that fails does not affect the others."""
        for request in requests:
            sender = GuardedSender(request.get_response_sender())
            try:
                self.submit(request, sender)
            except (ValueError, TypeError, RuntimeError) as error:
                sender.send(error_response(f"{self.problem}: {error}"), final=True)

    def _cancel_gone(self) -> None:
        for request in self._turns.next(self.opened()):
            if request.sender.is_cancelled():
                self.cancel(request)

    def _beat(self) -> None:
        """Show that the engine works. When it does not, say why and end this process, as the core model does."""
        failure = self.failure()
        self._heartbeat.beat(open_requests=len(self.opened()), progress=self.progress(), failure=failure)
        if failure is not None and not self._stopping.wait(_LAST_WORDS):
            pb_utils.Logger.log_error(f"The process of the model ends: {failure}")
            os._exit(1)

    def finalize(self) -> None:
        """End the engine."""
        self._stopping.set()
        for watch in self._watches:  # a last beat would write the heartbeat again
            watch.join(_LONGEST_BEAT)
        self.close()
        self._heartbeat.close()
