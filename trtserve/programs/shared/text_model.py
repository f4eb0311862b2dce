"""Base class of the BLS models: they take text, call other models, and serve many requests at once."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from .arrays import Tensors
from .inner_models import InnerModelError, finished_calls, forget_calls
from .parameters import ModelParameters, check_request_type
from .senders import GuardedSender, Turns, error_response, repeat

# Requests served at once, each in a thread that mostly waits for other models; further requests queue.
_MOST_AT_ONCE = 256
_CANCEL_PERIOD = 0.05
_OWN_ERRORS = (ValueError, TypeError, KeyError, UnicodeDecodeError)


class TextModel:
    """Serves each request in its own thread, so that the core model can batch them in flight."""

    one_at_a_time = False
    """Whether the process serves one request at a time; Triton then gives the others to other processes."""

    def prepare(self, config: dict[str, Any], folder: Path, parameters: ModelParameters) -> None:
        """Read the model's settings; `folder` is its version folder. Raises ValueError when it cannot work."""
        raise NotImplementedError

    def answers(self, inputs: Tensors, inner_id: str, cancelled: threading.Event) -> Iterator[Tensors]:
        """Yield the answers of one request as arrays.

        Raises ValueError or InnerModelError with a message for the client.
        """
        raise NotImplementedError

    def stop(self, inner_id: str, inputs: Tensors) -> None:
        """Stop the request `inner_id` in the called models, because the client cancelled it."""
        raise NotImplementedError

    def initialize(self, args: dict[str, str]) -> None:
        """Prepare, and start to watch for cancelled requests."""
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"]).resolve() / args["model_version"]
        parameters = ModelParameters(config, folder.parents[1], pb_utils.Logger.log_warn)
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        try:
            self.prepare(config, folder, parameters)
        except ValueError as error:
            raise pb_utils.TritonModelException(f"The BLS model cannot be loaded: {error}") from error
        self._workers = ThreadPoolExecutor(max_workers=_MOST_AT_ONCE, thread_name_prefix="request")
        self._active: dict[str, tuple[GuardedSender, threading.Event, Tensors]] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._stopped: set[str] = set()
        self._turns = Turns()
        self._watcher = threading.Thread(
            target=repeat,
            args=(self._stopping, _CANCEL_PERIOD, self._watch_cancellation),
            daemon=True,
            name="cancellation",
        )
        self._watcher.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Start each request; its answers go through its response sender."""
        for request in requests:
            sender = GuardedSender(request.get_response_sender())
            try:
                check_request_type(request.parameters())
                inputs = {tensor.name(): _array(tensor) for tensor in request.inputs()}
            except ValueError as error:
                self._fail(sender, str(error))
                continue
            if self.one_at_a_time:
                self._serve(inputs, request.request_id(), sender)
            else:
                self._workers.submit(self._serve, inputs, request.request_id(), sender)

    def _serve(self, inputs: Tensors, client_id: str, sender: GuardedSender) -> None:
        # The core model knows this suffix: a stop request with the client's id reaches this request.
        inner_id = f"{client_id}/bls-{uuid.uuid4()}"
        cancelled = threading.Event()
        with self._lock:
            self._active[inner_id] = sender, cancelled, inputs
        try:
            for answer in self.answers(inputs, inner_id, cancelled):
                tensors = [pb_utils.Tensor(name, value) for name, value in answer.items()]
                sender.send(pb_utils.InferenceResponse(output_tensors=tensors), final=not self._decoupled)
            if self._decoupled:
                sender.send(final=True)
        except InnerModelError as error:
            self._fail(sender, str(error))
        except _OWN_ERRORS as error:
            self._fail(sender, str(error))
        except Exception as error:  # noqa: BLE001 - without an answer the client would wait forever
            self._fail(sender, f"The BLS model failed with {type(error).__name__}: {error}")
        finally:
            with self._lock:
                del self._active[inner_id]

    def _fail(self, sender: GuardedSender, message: str) -> None:
        sender.send(error_response(message), final=True)

    def _watch_cancellation(self) -> None:
        """Pass cancellations by clients on to the called models."""
        with self._lock:
            active = dict(self._active)
        self._stopped &= active.keys()
        finished, asked = finished_calls(), False
        for inner_id, (sender, cancelled, inputs) in self._turns.next(list(active.items())):
            if inner_id in self._stopped:
                continue
            if sender.is_cancelled():
                self._stopped.add(inner_id)
                cancelled.set()
                self.stop(inner_id, inputs)
            elif not sender.ended:
                asked = True  # see forget_calls: Triton has released the calls that finished before
        if asked:
            forget_calls(finished)

    def finalize(self) -> None:
        """Wait for the running requests; Triton unloads a model only after it has answered them."""
        self._stopping.set()
        self._workers.shutdown(wait=True)
        self._watcher.join(timeout=5)
        forget_calls(finished_calls())  # before the interpreter ends and the shared memory is gone


def _array(tensor: Any) -> Any:
    """Return the tensor as an array; a BF16 tensor, which NumPy cannot hold, stays as it is for the core model."""
    try:
        return tensor.as_numpy()
    except pb_utils.TritonModelException:
        return tensor
