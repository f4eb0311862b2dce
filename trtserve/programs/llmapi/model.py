"""Triton model `llmapi` of TensorRT-LLM's LLM API: text in and out, without an engine on disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from ..shared.engine_model import EngineModel
from ..shared.run_folder import STOPPED
from ..shared.senders import FIRST, NEXT, FetchedAnswers, FetchedSender, GuardedSender, error_response, wanted_answers
from .engine import LlmEngine, LlmRequest, choose_gpus, output_arrays, read_request, read_settings

_CANCEL_PERIOD_MS = 100
_CANCELLED = "Request cancelled by client"


@dataclass(eq=False)
class _Running:
    request_id: str
    sender: GuardedSender | FetchedSender
    streaming: bool
    result: Any = None
    cancelled: bool = False


class TritonPythonModel(EngineModel):
    """Runs each request in the event loop of the LLM."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Change nothing: config.pbtxt has the batch size and the streaming of model.yaml already."""
        return auto_complete_model_config

    def load(self, args: dict[str, str], config: dict[str, Any]) -> float | None:
        """Load the model that model.yaml names; ranks other than 0 only work for rank 0."""
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._outputs = {output["name"] for output in config["output"]}
        self._running: set[_Running] = set()
        self._pieces = 0
        self._fetched = FetchedAnswers()
        self._lock = threading.Lock()
        groups = config.get("parameters", {}).get("gpu_device_ids", {}).get("string_value", "")
        instances = int((config.get("instance_group") or [{}])[0].get("count", 1))
        settings = read_settings(Path(args["model_repository"], args["model_version"]))
        gpus = choose_gpus(groups, instances, args["model_instance_name"])
        self._engine = LlmEngine(settings, Path(args["model_repository"]).resolve().parent, gpus=gpus)
        if not self._engine.leads:
            return None
        period: float = (settings.get("triton_config") or {}).get("cancellation_check_period_ms", _CANCEL_PERIOD_MS)
        return period / 1000

    def submit(self, request: Any, sender: GuardedSender) -> None:
        """Start a request, hand out its next answer, or stop the one that it names."""
        request_id, answers = request.request_id(), wanted_answers(request.parameters())
        if answers == NEXT:
            self._fetched.fetch(request_id, sender)
            return
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        stop = inputs.pop("stop", None)
        if stop is not None and stop.any():
            self._stop(request_id, sender)
            return
        parsed = read_request(inputs, decoupled=self._decoupled)
        to: GuardedSender | FetchedSender = self._fetched.sender(request_id, sender) if answers == FIRST else sender
        if isinstance(to, FetchedSender):
            self._fetched.add(request_id, to)
        running = _Running(request_id, to, parsed.streaming)
        with self._lock:
            self._running.add(running)
        asyncio.run_coroutine_threadsafe(self._serve(parsed, running), self._engine.loop)

    async def _serve(self, request: LlmRequest, running: _Running) -> None:
        try:
            running.result = self._engine.start(request)
            if running.cancelled:  # before it was started
                running.result.abort()
            output = None
            async for output in running.result:
                self._pieces += 1
                if request.streaming and not running.cancelled and not output.finished:
                    self._send(running, output, request, final=False)
            self._end(running, output, request)
        except Exception as error:  # noqa: BLE001 - without an answer the client would wait forever
            running.sender.send(error_response(f"{self.problem}: {error}"), final=True)
        finally:
            with self._lock:
                self._running.discard(running)

    def _end(self, running: _Running, output: Any, request: LlmRequest) -> None:
        if running.cancelled:
            error = pb_utils.TritonError(_CANCELLED, pb_utils.TritonError.CANCELLED)
            running.sender.send(pb_utils.InferenceResponse(output_tensors=[], error=error), final=True)
        elif output is None:
            running.sender.send(error_response("The model returned no output."), final=True)
        else:
            self._send(running, output, request, final=True)

    def _send(self, running: _Running, output: Any, request: LlmRequest, *, final: bool) -> None:
        arrays = output_arrays(output, request.wanted)
        tensors = [pb_utils.Tensor(name, array) for name, array in arrays.items() if name in self._outputs]
        running.sender.send(pb_utils.InferenceResponse(output_tensors=tensors), final=final)

    def _stop(self, request_id: str, sender: GuardedSender) -> None:
        if not request_id:
            raise ValueError("A request id must be provided for request cancellation")
        with self._lock:
            # The BLS model adds a suffix to the client's id.
            found = [
                running
                for running in self._running
                if running.request_id == request_id or running.request_id.startswith(f"{request_id}/bls-")
            ]
        for running in found:
            self.cancel(running)
        error = pb_utils.TritonError(_CANCELLED, pb_utils.TritonError.CANCELLED)
        sender.send(pb_utils.InferenceResponse(output_tensors=[], error=error), final=True)

    def opened(self) -> Sequence[Any]:
        """Return the requests that are not cancelled."""
        with self._lock:
            return [running for running in self._running if not running.cancelled]

    def cancel(self, request: Any) -> None:
        """Abort a request."""
        request.cancelled = True
        if request.result is not None:
            self._engine.loop.call_soon_threadsafe(request.result.abort)

    def progress(self) -> int:
        """Return how many pieces of answers have come, and the turns of the event loop while no streamed one is open.

        The LLM does not tell its steps, and without a stream nothing of it is seen until an answer ends.
        """
        turns = self._engine.turn()
        streams = any(running.streaming for running in self.opened())
        return self._pieces + (0 if streams else turns)

    def failure(self) -> str | None:
        """Return why the LLM is dead."""
        return None if self._engine.healthy() else f"{STOPPED}: TensorRT-LLM says that its LLM has ended"

    def close(self) -> None:
        """Cancel open requests, then stop the model."""
        for running in self.opened():
            self.cancel(running)
        self._engine.close()
