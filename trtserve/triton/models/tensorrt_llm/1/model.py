"""Triton model `tensorrt_llm`: drives an executor with the interface of `tensorrt_llm.bindings.executor`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from core_guides import guided_decoding_config
from core_metrics import MetricsReporter
from core_pending import Pending, PendingTable, client_id, error_response, response
from core_pulls import FIRST, NEXT, FetchedAnswers, FetchedSender, wanted_answers
from core_request import RequestFactory
from core_response import Wanted, generated_tokens, output_arrays, response_parameters, zero_filled
from core_row import Inputs
from core_settings import executor_config
from executor_module import load_executor_module
from guarded_sender import GuardedSender
from model_parameters import ModelParameters, check_request_type
from numpy.typing import NDArray
from parameter_classes import check_classes
from periodic import repeat

# How long the awaiting thread sleeps at most before it looks whether the model is being unloaded. It wakes up for
# every response at once, so this is no polling period.
_AWAIT = timedelta(seconds=0.5)
_NEEDED_OUTPUTS = ("output_ids", "sequence_length")


class TritonPythonModel:
    """Maps Triton requests to executor requests and sends each response from one thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine and start the threads; on ranks that only work for the leader, serve until it ends."""
        config = json.loads(args["model_config"])
        repository = Path(args["model_repository"]).resolve().parent
        parameters = ModelParameters(config, repository, pb_utils.Logger.log_warn)
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._outputs = {output["name"]: output["data_type"] for output in config["output"]}
        self._pending = PendingTable()
        self._fetched = FetchedAnswers()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        try:
            self._load(parameters, config)
        except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
            raise pb_utils.TritonModelException(f"The core model cannot be loaded: {error}") from error
        if not self._executor.can_enqueue_requests():
            self._executor.shutdown()
            return
        self._start_threads(args, parameters)

    def _load(self, parameters: ModelParameters, config: dict[str, Any]) -> None:
        self._module = load_executor_module(parameters.text("executor"), parameters.text("executor_release"))
        engine = parameters.path("gpt_model_path")
        if engine is None or not engine.is_dir():
            raise ValueError(f"Parameter gpt_model_path is {str(engine)!r}; expected the folder of an engine.")
        parameters = check_classes(parameters, Path(__file__).parent, pb_utils.Logger.log_info)
        settings = executor_config(self._module, parameters, config)
        if (guides := guided_decoding_config(self._module, parameters)) is not None:
            settings.guided_decoding_config = guides
        api = self._module.api
        self._factory = RequestFactory(
            self._module,
            decoupled=self._decoupled,
            exclude_input=bool(parameters.switch("exclude_input_in_output")),
        )
        self._executor = api.Executor(engine, api.ModelType.DECODER_ONLY, settings)

    def _start_threads(self, args: dict[str, str], parameters: ModelParameters) -> None:
        static = (parameters.text("gpt_model_type") or "").lower() == "v1"
        self._metrics = MetricsReporter(
            args["model_name"], args["model_version"], static=static, warn=pb_utils.Logger.log_warn
        )
        cancel_period = parameters.integer("cancellation_check_period_ms") or 100
        stats_period = parameters.integer("stats_check_period_ms") or 100
        self._metrics.report(self._executor.get_latest_iteration_stats())
        for target, arguments in (
            (self._await_responses, ()),
            (repeat, (self._stopping, cancel_period / 1000, self._watch_cancellation)),
            (repeat, (self._stopping, stats_period / 1000, self._watch_statistics)),
        ):
            thread = threading.Thread(target=target, args=arguments, daemon=True)
            thread.start()
            self._threads.append(thread)

    def execute(self, requests: Sequence[Any]) -> None:
        """Hand each request to the executor; the awaiting thread answers. One that fails does not touch the others."""
        if not self._executor.can_enqueue_requests():
            return
        for request in requests:
            sender = GuardedSender(request.get_response_sender())
            try:
                self._submit(request, sender)
            except (ValueError, TypeError, RuntimeError, OverflowError, AttributeError) as error:
                number = client_id(request.request_id())
                named = f" for request id {number}" if number else ""
                message = f"An error occurred when processing the input values{named}, the error was '{error}'"
                sender.send(error_response(message), final=True)

    def _submit(self, request: Any, sender: GuardedSender) -> None:
        answers = wanted_answers(request.parameters())
        if answers == NEXT:
            self._fetched.fetch(request.request_id(), sender)
            return
        inputs = {tensor.name(): self._array(tensor) for tensor in request.inputs()}
        if bool(np.any(inputs.get("stop", False))):
            self._stop(request.request_id(), sender)
            return
        check_request_type(request.parameters())
        missing = [name for name in _NEEDED_OUTPUTS if name not in request.requested_output_names()]
        if missing:
            raise ValueError(f"{' and '.join(missing)} must be among the requested outputs.")
        executor_requests = self._factory.requests(inputs)
        rows = self._wanted(inputs, executor_requests)
        number = request.request_id()
        to: GuardedSender | FetchedSender = self._fetched.sender(number, sender) if answers == FIRST else sender
        pending = Pending(number, to, decoupled=self._decoupled)
        with self._pending.lock:  # a response that is ready before the ids are known waits here
            ids = self._executor.enqueue_requests(executor_requests)
            if isinstance(to, FetchedSender):
                self._fetched.add(number, to)
            pending.open_rows.update(zip(ids, rows, strict=True))
            stopped = self._pending.add(pending)
        self._metrics.add_tokens(prompt=sum(row.prompt_length for row in rows))
        if stopped:
            self._cancel(ids)

    def _array(self, tensor: Any) -> NDArray[Any]:
        try:
            array: NDArray[Any] = tensor.as_numpy()
        except pb_utils.TritonModelException:  # NumPy has no bfloat16
            return self._module.bfloat16_array(tensor.to_dlpack())
        return array

    def _wanted(self, inputs: Inputs, executor_requests: list[Any]) -> list[Wanted]:
        rows = []
        numbered = int(np.max(inputs.get("num_return_sequences", 0))) > (1 if self._module.since("0.16") else 0)
        logits = np.float16 if self._outputs.get("context_logits") == "TYPE_FP16" else np.float32
        for index, request in enumerate(executor_requests):
            length = len(request.input_token_ids)
            with_prompt = not request.streaming and not request.output_config.exclude_input_from_output
            wanted = Wanted(
                prompt_length=length,
                output_prompt_length=length if with_prompt else 0,
                max_tokens=request.max_tokens if self._module.since("0.13") else request.max_new_tokens,
                repeats=request.streaming and request.sampling_config.beam_width > 1,
                logits=logits,
                finish_reason=bool(np.any(inputs.get("return_finish_reason", False))),
                batch_index=index if len(executor_requests) > 1 else None,
                numbered=numbered,
                count_input=bool(np.any(inputs.get("return_num_input_tokens", False))),
                count_output=bool(np.any(inputs.get("return_num_output_tokens", False))),
            )
            rows.append(wanted)
        return rows

    def _stop(self, request_id: str, sender: GuardedSender) -> None:
        if not request_id:
            raise ValueError("A request id must be provided for request cancellation")
        self._cancel(self._pending.stop(request_id))
        sender.send(None if self._decoupled else response([]), final=True)

    def _cancel(self, executor_ids: Iterable[int]) -> None:
        for executor_id in executor_ids:
            self._executor.cancel_request(executor_id)

    def _await_responses(self) -> None:
        while not self._stopping.is_set():
            try:
                answers = self._executor.await_responses(timeout=_AWAIT)
            except RuntimeError:  # the executor was shut down
                return
            for answer in answers:
                self._forward(answer)

    def _forward(self, answer: Any) -> None:
        pending = self._pending.find(answer.request_id)
        if pending is None:
            return
        wanted = pending.open_rows[answer.request_id]
        failed = answer.has_error()
        final = failed or answer.result.is_final
        if final:
            self._pending.close(answer.request_id)
        try:
            if failed:
                pending.fail(answer.error_msg)
            else:
                self._send_result(pending, wanted, answer, final=final)
        except Exception as error:  # noqa: BLE001 - whatever one request hits must not end the thread of all
            pb_utils.Logger.log_error(f"A response of request {pending.request_id!r} could not be sent: {error}")

    def _send_result(self, pending: Pending, wanted: Wanted, answer: Any, *, final: bool) -> None:
        result = answer.result
        outputs = output_arrays(self._module, result, wanted)
        if not self._module.since("0.14"):
            outputs = zero_filled(outputs, wanted)
        outputs = {name: value for name, value in outputs.items() if name in self._outputs}
        sequence = answer.request_id, getattr(result, "sequence_index", 0)  # before 0.14 there is one
        tokens = generated_tokens(result, wanted)
        self._metrics.add_tokens(generated=pending.count(*sequence, tokens, repeated=wanted.repeats))
        pending.send(outputs, parameters=response_parameters(result, wanted, pending.generated[sequence]))
        if final:
            self._metrics.observe_request(wanted.prompt_length, pending.total(answer.request_id))

    def _watch_cancellation(self) -> None:
        """Cancel in the executor what clients gave up (gRPC cancel, HTTP disconnect)."""
        for pending in self._pending.all():
            if pending.sender.is_cancelled():
                self._cancel(list(pending.open_rows))

    def _watch_statistics(self) -> None:
        self._metrics.report(self._executor.get_latest_iteration_stats())

    def finalize(self) -> None:
        """End open requests, then the threads, then the executor."""
        self._stopping.set()
        for pending in self._pending.all():
            self._cancel(list(pending.open_rows))
        for thread in self._threads:
            thread.join(timeout=5)
        if self._threads:
            self._executor.shutdown()
            self._metrics.close()
