"""Triton model `tensorrt_llm`: runs an executor with the interface of `tensorrt_llm.bindings.executor`."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from ..shared.parameters import ModelParameters, check_classes, check_request_type
from ..shared.run_folder import STOPPED, Heartbeat
from ..shared.senders import (
    FIRST,
    NEXT,
    FetchedAnswers,
    FetchedSender,
    GuardedSender,
    Turns,
    error_response,
    repeat,
    wanted_answers,
)
from .metrics import MetricsReporter
from .pending import Pending, PendingTable, client_id, joined, joined_responses, response
from .request import Inputs, RequestFactory, most_ids, vocabulary_to_wrap
from .response import Wanted, generated_tokens, output_arrays, response_parameters, zero_filled
from .settings import executor_config, guided_decoding_config, load_executor_module, runs_on_gpu

# The longest wait before the awaiting thread checks whether the model is being unloaded. Responses wake it at once, so
# this is not a polling period.
_AWAIT = timedelta(seconds=0.5)
_BEAT = 0.5
# The process of an executor that has stopped ends after this many seconds: its requests are answered by then, and the
# supervisor has read why.
_LAST_WORDS = 2.0
_NEEDED_OUTPUTS = ("output_ids", "sequence_length")


class TritonPythonModel:
    """Turns Triton requests into executor requests, and sends all responses from one thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine and start the threads; worker ranks serve the leader until it ends."""
        # What the executor reports belongs into the server's log, and so do the stacks of its threads when it crashes.
        faulthandler.enable()
        logging.basicConfig(format="%(message)s")
        logging.getLogger("trtserve").setLevel(logging.INFO)
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"]).resolve() / args["model_version"]
        parameters = ModelParameters(config, folder.parents[1], pb_utils.Logger.log_warn)
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._outputs = {output["name"]: output["data_type"] for output in config["output"]}
        # The inputs of a repository for all releases have old and new names. Clients of 0.12 and 0.13 need the index.
        self._always_indexed = {"random_seed", "seed"} <= {each["name"] for each in config["input"]}
        self._pending = PendingTable()
        self._fetched = FetchedAnswers(joined_responses)
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        try:
            self._load(parameters, config, folder)
        except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
            raise pb_utils.TritonModelException(f"The core model cannot be loaded: {error}") from error
        if not self._executor.can_enqueue_requests():
            self._executor.shutdown()
            # A model that is ready would make this rank's server open its ports, which are those of rank 0.
            raise pb_utils.TritonModelException("Rank 0 has ended, and with it the model on this rank.")
        self._start_threads(args, parameters)

    def _load(self, parameters: ModelParameters, config: dict[str, Any], folder: Path) -> None:
        self._module = load_executor_module(parameters.text("executor"), parameters.text("executor_release"))
        engine = parameters.path("gpt_model_path")
        if engine is None or not engine.is_dir():
            raise ValueError(f"Parameter gpt_model_path is {str(engine)!r}; expected the folder of an engine.")
        kept = ("gpu_device_ids",) if runs_on_gpu(engine) else ()
        parameters = check_classes(parameters, folder, pb_utils.Logger.log_info, kept=kept)
        settings = executor_config(self._module, parameters, config)
        if (guides := guided_decoding_config(self._module, parameters)) is not None:
            settings.guided_decoding_config = guides
        api = self._module.api
        self._factory = RequestFactory(
            self._module,
            decoupled=self._decoupled,
            exclude_input=bool(parameters.switch("exclude_input_in_output")),
            vocabulary=vocabulary_to_wrap(parameters, engine),
            longest=most_ids(engine),
        )
        self._executor = api.Executor(engine, api.ModelType.DECODER_ONLY, settings)

    def _start_threads(self, args: dict[str, str], parameters: ModelParameters) -> None:
        static = (parameters.text("gpt_model_type") or "").lower() == "v1"
        self._metrics = MetricsReporter(
            args["model_name"], args["model_version"], static=static, warn=pb_utils.Logger.log_warn
        )
        cancel_period = parameters.integer("cancellation_check_period_ms") or 100
        stats_period = parameters.integer("stats_check_period_ms") or 100
        self._heartbeat = Heartbeat(args["model_name"])
        self._answers = self._steps = 0
        self._turns = Turns()
        self._failure: str | None = None
        self._report_statistics()
        self._beat()
        for target, arguments in (
            (self._await_responses, ()),
            (repeat, (self._stopping, cancel_period / 1000, self._watch_cancellation)),
            (repeat, (self._stopping, stats_period / 1000, self._report_statistics)),
            (repeat, (self._stopping, _BEAT, self._beat)),
        ):
            thread = threading.Thread(target=target, args=arguments, daemon=True)
            thread.start()
            self._threads.append(thread)

    def execute(self, requests: Sequence[Any]) -> None:
        """Hand each request to the executor; one that fails does not affect the others."""
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
            request_id = request.request_id()
            if not request_id:
                raise ValueError("A request id must be provided for request cancellation")
            self._cancel(self._pending.stop(request_id))
            sender.send(None if self._decoupled else response([]), final=True)
            return
        if self._failure is not None:
            raise RuntimeError(self._failure)
        check_request_type(request.parameters())
        missing = [name for name in _NEEDED_OUTPUTS if name not in request.requested_output_names()]
        if missing:
            raise ValueError(f"{' and '.join(missing)} must be among the requested outputs.")
        executor_requests = self._factory.requests(inputs)
        rows = self._wanted(inputs, executor_requests)
        number = request.request_id()
        to: GuardedSender | FetchedSender = self._fetched.sender(number, sender) if answers == FIRST else sender
        pending = Pending(number, to, decoupled=self._decoupled)
        with self._pending.lock:  # a response that comes before the ids are registered waits for this lock
            ids = self._executor.enqueue_requests(executor_requests)
            if isinstance(to, FetchedSender):
                self._fetched.add(number, to)
            pending.open_rows.update(zip(ids, rows, strict=True))
            stopped = self._pending.add(pending)
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
        indexed = len(executor_requests) > 1 or self._always_indexed or not self._module.since("0.14")
        logits = np.float16 if self._outputs.get("context_logits") == "TYPE_FP16" else np.float32
        for index, request in enumerate(executor_requests):
            length = len(request.input_token_ids)
            with_prompt = not request.streaming and not request.output_config.exclude_input_from_output
            wanted = Wanted(
                prompt_length=length,
                output_prompt_length=length if with_prompt else 0,
                max_tokens=request.max_tokens if self._module.since("0.13") else request.max_new_tokens,
                repeats=request.streaming and request.sampling_config.beam_width > 1,
                streamed=request.streaming,
                logits=logits,
                finish_reason=bool(np.any(inputs.get("return_finish_reason", False))),
                batch_index=index if indexed else None,
                numbered=numbered,
                count_input=bool(np.any(inputs.get("return_num_input_tokens", False))),
                count_output=bool(np.any(inputs.get("return_num_output_tokens", False))),
            )
            rows.append(wanted)
        return rows

    def _cancel(self, executor_ids: Iterable[int]) -> None:
        for executor_id in executor_ids:
            self._executor.cancel_request(executor_id)

    def _await_responses(self) -> None:
        while not self._stopping.is_set():
            try:
                answers = self._executor.await_responses(timeout=_AWAIT)
            except RuntimeError as error:  # the executor has shut down, or its thread has failed
                self._end_process(str(error))
                return
            self._answers += sum(not answer.has_error() for answer in answers)
            for answer, earlier in joined(answers):
                self._forward(answer, earlier)

    def _forward(self, answer: Any, earlier: Sequence[int]) -> None:
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
                self._send_result(pending, wanted, answer, earlier, final=final)
        except Exception as error:  # noqa: BLE001 - one failed response must not end the thread that serves all
            pb_utils.Logger.log_error(f"A response of request {pending.request_id!r} could not be sent: {error}")

    def _send_result(
        self, pending: Pending, wanted: Wanted, answer: Any, earlier: Sequence[int], *, final: bool
    ) -> None:
        result = answer.result
        outputs = output_arrays(self._module, result, wanted, earlier)
        if not self._module.since("0.14"):
            outputs = zero_filled(outputs, wanted)
        outputs = {name: value for name, value in outputs.items() if name in self._outputs}
        sequence = answer.request_id, getattr(result, "sequence_index", 0)  # 0.12 and 0.13 have one sequence
        tokens = generated_tokens(result, wanted) + len(earlier)
        new = pending.count(*sequence, tokens, repeated=wanted.repeats)
        # A request that is refused has no result, so its prompt does not count.
        prompt = wanted.prompt_length if pending.begins(answer.request_id) else 0
        self._metrics.add_tokens(prompt=prompt, generated=new)
        if wanted.streamed and new:
            seconds, first = pending.since_last(*sequence)
            self._metrics.observe_tokens(seconds, new, first=first)
        pending.send(outputs, parameters=response_parameters(result, wanted, pending.generated[sequence]))
        if final:
            self._metrics.observe_request(wanted.prompt_length, pending.total(answer.request_id))

    def _watch_cancellation(self) -> None:
        """Cancel the requests whose clients have gone (gRPC cancel, HTTP disconnect)."""
        for pending in self._turns.next(self._pending.all()):
            if pending.sender.is_cancelled():
                self._cancel(list(pending.open_rows))

    def _report_statistics(self) -> None:
        records = self._executor.get_latest_iteration_stats()
        self._steps += sum(map(_made_a_step, records))
        self._metrics.report(records)

    def _beat(self) -> None:
        if self._failure is None and (hang := self._hang()) is not None:
            self._end_process(f"{STOPPED}: {hang}")
            return
        self._heartbeat.beat(
            open_requests=len(self._pending.all()), progress=self._answers + self._steps, failure=self._failure
        )

    def _hang(self) -> str | None:
        """Return why the embedded executor will make no step any more although it does not say so, or None."""
        return self._executor.hang() if hasattr(self._executor, "hang") else None

    def _end_process(self, failure: str) -> None:
        """Show why the executor has stopped, answer what is open, and end this process unless Triton does so first.

        A process whose GPU has failed can do nothing but end. The file of its heartbeats stays, and tells why.
        """
        if self._stopping.is_set():
            return
        self._failure = failure
        self._heartbeat.beat(open_requests=0, progress=self._answers + self._steps, failure=failure)
        for pending in self._pending.all():  # none, unless the executor hangs
            for executor_id in list(pending.open_rows):
                self._pending.close(executor_id)
            pending.fail(failure)
        if self._stopping.wait(_LAST_WORDS):
            return
        pb_utils.Logger.log_error(f"The process of the core model ends: {failure}")
        logging.shutdown()
        os._exit(1)

    def finalize(self) -> None:
        """Cancel open requests, then end the threads and the executor."""
        self._stopping.set()
        for pending in self._pending.all():
            self._cancel(list(pending.open_rows))
        for thread in self._threads:
            thread.join(timeout=5)
        if self._threads:
            if self._hang() is None:
                self._executor.shutdown()
            self._metrics.close()
            self._heartbeat.close()


def _made_a_step(record: Any) -> bool:
    """Return whether an iteration computed something: the record that follows a failed step has no requests."""
    batches = (record.inflight_batching_stats, record.static_batching_stats)
    return any(batch is not None and batch.num_scheduled_requests > 0 for batch in batches)
