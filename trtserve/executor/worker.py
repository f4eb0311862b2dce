"""The executor's loop: take new requests, plan a step, run it, hand out what is due; asleep when there is nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from trtserve.executor.admission import admit
from trtserve.executor.batch import Batch
from trtserve.executor.configs import ExecutorConfig
from trtserve.executor.enums import ContextChunkingPolicy, FinishReason
from trtserve.executor.kv_cache import KvCache
from trtserve.executor.limits import Limits
from trtserve.executor.mailbox import Mailbox
from trtserve.executor.model import Model
from trtserve.executor.recorder import Recorder
from trtserve.executor.requests import Request
from trtserve.executor.results import Response
from trtserve.executor.sampling import UNDEFINED, choose_tokens
from trtserve.executor.scheduler import Plan, Scheduler
from trtserve.executor.sequence import Sequence

logger = logging.getLogger(__name__)


class Worker:
    """Queue, scheduler and model of one executor; `run` is the body of its thread, the rest is called from outside."""

    def __init__(self, model: Model, limits: Limits, config: ExecutorConfig, blocks: int) -> None:
        self.mailbox = Mailbox()
        self.cache = KvCache(
            blocks=blocks,
            tokens_per_block=model.tokens_per_block,
            max_sequences=limits.max_batch_size,
            max_tokens=limits.max_seq_len,
        )
        scheduling = config.scheduler_config
        self.scheduler = Scheduler(
            limits,
            self.cache,
            policy=scheduling.capacity_scheduler_policy,
            chunking=scheduling.context_chunking_policy or ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
        )
        self.recorder = Recorder(self.scheduler, config)
        self._model = model
        self._limits = limits
        self._batch = Batch(limits, self.cache)
        self._max_queue_size = config.max_queue_size or None
        # Requests are checked under the entrance alone, so that a long prompt does not hold up the loop.
        self._entrance = threading.Lock()
        self._wake = threading.Condition()
        self._queue: deque[Sequence] = deque()
        self._cancelled: set[int] = set()
        self._next_id = 1
        self._terminating = False
        self._failure: str | None = None

    def enqueue(self, requests: list[Request]) -> list[int]:
        """Queue `requests`; RuntimeError when the queue cannot take all of them. Refused ones are answered at once."""
        with self._entrance:
            self._require_room(len(requests))
            ids = list(range(self._next_id, self._next_id + len(requests)))
            self._next_id += len(requests)
            self.mailbox.expect({id_: request.client_id for request, id_ in zip(requests, ids, strict=True)})
            checked = [self._admit(request, id_) for request, id_ in zip(requests, ids, strict=True)]
            with self._wake:
                self._queue.extend(each for each in checked if isinstance(each, Sequence))
                self._wake.notify()
            refused = [each for each in checked if isinstance(each, Response)]
            if refused:
                self.mailbox.deliver(refused)
        return ids

    def _require_room(self, count: int) -> None:
        if self._failure is not None:
            raise RuntimeError(self._failure)
        if self._terminating:
            raise RuntimeError("Shutdown called")
        limit = self._max_queue_size
        if limit is not None and len(self._queue) + count > limit:
            raise RuntimeError(f"Maximum queue size of {limit} has been reached, please try again later")

    def _admit(self, request: Request, id_: int) -> Sequence | Response:
        try:
            return admit(request, id_, self._limits)
        except RuntimeError as error:
            return Response(id_, f"Encountered an error when fetching new request: {error}", request.client_id)

    def cancel(self, id_: int) -> None:
        """Ask for the end of a request; a queued one ends when it becomes active, an unknown one is ignored."""
        with self._wake:
            self._cancelled.add(id_)
            self._wake.notify()

    def terminate(self) -> None:
        """Let `run` return when everything that was queued has ended."""
        with self._entrance, self._wake:
            self._terminating = True
            self._wake.notify()

    def run(self) -> None:
        """Work until terminated; however that ends, every request is answered and nobody is left waiting."""
        try:
            while self._collect():
                self._step()
        except BaseException as error:
            logger.critical("The executor has stopped: %r", error, exc_info=error)
            self._die(f"The executor has stopped working: {type(error).__name__}: {error}")
        else:
            self.mailbox.close()

    def _die(self, message: str) -> None:
        """Refuse what comes from now on and answer what is here."""
        with self._entrance:  # no request is half enqueued
            self._failure = message
            self._queue.clear()
            self.mailbox.fail(message)

    def _collect(self) -> bool:
        """Take new requests and cancels, sleeping while there is nothing to do; False when it is time to return."""
        with self._wake:
            while not (self._queue or self.scheduler.running or self.scheduler.pending):
                self._cancelled.clear()  # their requests have ended
                if self._terminating:
                    return False
                self._wake.wait()
            while self._queue and self.scheduler.room > 0:
                sequence = self._queue.popleft()
                self.scheduler.add(sequence)
                self.recorder.became_active(sequence)
            cancelled = self._take_cancelled() if self._cancelled else []
        if cancelled:
            self._end(cancelled, [sequence.cancelled() for sequence in cancelled])
        return True

    def _take_cancelled(self) -> list[Sequence]:
        """Active sequences that somebody cancelled; cancels of queued ones are kept."""
        active = [sequence for sequence in self.scheduler.active if sequence.id in self._cancelled]
        self._cancelled &= {sequence.id for sequence in self._queue}
        return active

    def _step(self) -> None:
        """Run one step of the active sequences; whatever it raises is answered, and the executor goes on."""
        if not (self.scheduler.running or self.scheduler.pending):
            self._record_if_idle()
            return
        try:
            self._forward()
        except Exception as error:  # noqa: BLE001
            self._fail_all(error)

    def _forward(self) -> None:
        begin = time.perf_counter()
        plan = self.scheduler.plan()
        if not plan:
            raise RuntimeError("no active request can be scheduled")
        inputs, sampled = self._batch.fill(plan)
        logits = self._model.forward(**inputs)
        tokens = choose_tokens(
            logits,
            [sequence.sampling for sequence in sampled],
            [len(sequence.generated) for sequence in sampled],
            [sequence.end_id for sequence in sampled],
        )
        _advance(plan)
        self._record(plan, time.perf_counter() - begin)
        self._hand_out(sampled, tokens)

    def _hand_out(self, sampled: list[Sequence], tokens: list[int]) -> None:
        """Append the chosen tokens and deliver what is due, all with one notification."""
        responses, finished = [], []
        for sequence, token in zip(sampled, tokens, strict=True):
            if token == UNDEFINED:
                responses.append(_undefined(sequence))
                finished.append(sequence)
                continue
            reason = sequence.accept(token)
            response = sequence.respond(reason)
            if response is not None:
                responses.append(response)
            if reason is not FinishReason.NOT_FINISHED:
                finished.append(sequence)
        if finished:
            self._end(finished, responses)
            self._record_if_idle()
        elif responses:
            self.mailbox.deliver(responses)

    def _end(self, sequences: list[Sequence], responses: list[Response]) -> None:
        """Take the blocks back first: who reads the last response finds them free."""
        self.scheduler.remove(sequences)
        self.recorder.completed(sequences)
        self.mailbox.deliver(responses)

    def _record(self, plan: Plan, seconds: float) -> None:
        self.recorder.record(plan, seconds=seconds, queue=self._queue)

    def _record_if_idle(self) -> None:
        """Write the closing record when the last request has ended."""
        if not (self.scheduler.running or self.scheduler.pending):
            self._record(Plan(), 0.0)

    def _fail_all(self, error: Exception) -> None:
        """Answer every active request with the error of a step that failed."""
        logger.error("A step failed: %s", error, exc_info=error)
        active = self.scheduler.active
        message = f"Encountered an error in forwardAsync function: {error}"
        self._end(active, [sequence.failed(message) for sequence in active])
        self._record_if_idle()


def _undefined(sequence: Sequence) -> Response:
    """The end of a request for which the model computed no numbers; its neighbours are not concerned."""
    place = f"token {len(sequence.generated) + 1} of the answer"
    logger.error("Request %d: the logits for %s are not finite", sequence.id, place)
    return sequence.failed(f"Encountered an error in forwardAsync function: the logits for {place} are not finite")


def _advance(plan: Plan) -> None:
    """Count the tokens whose keys and values the step has put into the cache."""
    for sequence, size in plan.chunks:
        sequence.computed += size
    for sequence in plan.generations:
        sequence.computed += 1
