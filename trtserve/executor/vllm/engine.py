"""vLLM's engine in a child process, with the interface of the executor's own loop."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import sysconfig
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from trtserve.executor.engine.limits import EngineLimits, EngineOptions, resolve_limits
from trtserve.executor.engine.outputs import Mailbox
from trtserve.executor.engine.recorder import DraftCounts, IterationRecord, RequestsRecord
from trtserve.executor.engine.requests import BlockUse, FinishReason, GenerationRequest, RequestOutput
from trtserve.executor.loaders import read_engine_config
from trtserve.executor.vllm.adapter import Adapters, OpenRequest, VllmOutput, vllm_request
from trtserve.executor.vllm.arguments import (
    ADAPTER_FOLDER,
    ADAPTERS_FILE,
    LEADER,
    MODEL_FOLDER,
    NODES,
    engine_arguments,
    follower_port,
)
from trtserve.executor.vllm.installation import require_installation
from trtserve.process.answering import FramedProcess
from trtserve.programs.shared.run_folder import SOCKETS
from trtserve.programs.shared.run_folder import VARIABLE as RUN_FOLDER

logger = logging.getLogger(__name__)

_SIDE = Path(__file__).with_name("engine_side.py")
# Of this interpreter only: the child has other packages.
_OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME")
_LIBRARIES = "LD_LIBRARY_PATH"
_SOCKETS = "VLLM_RPC_BASE_PATH"
# The engine side says that it is alive every second; vLLM may take this long for a step.
_LONGEST_SILENCE = 20.0
_LONGEST_STEP = 300.0
_LAST_SECONDS = 10.0


def load_model(engine: Path, options: EngineOptions) -> VllmEngine:
    """Start vLLM on the model in the engine's folder; `loaders.MODELS` names this module.

    Raises RuntimeError, with vLLM's own reason, when it does not start.
    """
    config = read_engine_config(engine)
    # A launch in a container, or a user, may name another one than the repository was made with.
    installation = require_installation(recorded=config.trtserve.vllm_python)
    own = engine / ADAPTER_FOLDER
    table = own / ADAPTERS_FILE
    folders = json.loads(table.read_text(encoding="utf-8")) if table.is_file() else {}
    adapters = {
        int(task): (f"adapter-{task}", number, str(own / folder))
        for number, (task, folder) in enumerate(folders.items(), 1)
    }
    arguments = engine_arguments(config, options, engine / MODEL_FOLDER, adapters=len(adapters))
    logger.info("Starting vLLM %s: %s", installation.version, json.dumps(arguments))
    place = None
    if (nodes := int(os.environ.get(NODES, "1"))) > 1:
        host, port = os.environ[LEADER], follower_port(config) + 1
        arguments |= {"nnodes": nodes, "node_rank": 0, "master_addr": host, "master_port": port}
        place = (host, port - 1, nodes)
    limits = resolve_limits(config, options)
    return VllmEngine(installation.python, arguments, limits, options, adapters, followers=place)


class VllmProcess(ABC):
    """vLLM in its own interpreter. `run` reads what it says; all other methods are for other threads."""

    progress = 0  # steps that vLLM has made

    def __init__(
        self,
        python: Path,
        arguments: Mapping[str, Any],
        adapters: SequenceOf[tuple[str, int, str]] = (),
        *,
        followers: tuple[str, int, int] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it with the `arguments` of AsyncEngineArgs. Raises RuntimeError with vLLM's reason when it fails."""
        self._lock = threading.Lock()  # of the requests, and of the pipe to the child
        self._open: dict[int, Any] = {}
        self._next_id = 1
        self._terminating = threading.Event()
        self._failure: str | None = None
        self._sockets = socket_folder()
        environment = {**child_environment(), _SOCKETS: str(self._sockets), **(environment or {})}
        self._child = FramedProcess([str(python), str(_SIDE)], environment)
        self._killer = threading.Timer(_LAST_SECONDS, self._child.kill)
        self._killer.daemon = True
        self._child.send([dict(arguments), list(adapters), followers])
        self.facts = self._wait_until_ready()
        self._heard = self._worked = time.monotonic()

    @abstractmethod
    def _answered(self, answers: list[tuple[str, int, Any]]) -> None:
        """Take `output` and `refused` of the engine side, as (kind, number, content); see `engine_side.py`."""

    def _stepped(self, statistics: Mapping[str, Any]) -> None:  # noqa: B027 - not every one needs them
        """Take the statistics of a step."""

    def _ended(self) -> None:  # noqa: B027 - `terminate` has waited for the requests
        """Close what gives answers: the process has ended as it was asked to."""

    @abstractmethod
    def _failed(self, message: str) -> None:
        """Give each open request an error; the caller holds the lock."""

    def _wait_until_ready(self) -> dict[str, Any]:
        reason = ""
        while not reason and (messages := self._child.read()) is not None:
            for kind, *content in messages:
                if kind == "ready":
                    facts: dict[str, Any] = content[0]
                    return facts
                if kind == "dead":
                    reason = content[0]
        reason = reason or f"its process has ended with code {self._child.wait()}"
        self._child.kill()
        self._close_child()
        raise RuntimeError(f"vLLM does not start: {reason}")

    def run(self) -> None:
        """Deliver answers until terminated. When vLLM is dead, every open request gets an error response."""
        while self._failure is None and (messages := self._child.read()) is not None:
            self._heard = time.monotonic()
            for kind, *content in messages:
                if kind == "stats":
                    self._worked, self.progress = self._heard, self.progress + 1
                    self._stepped(content[0])
                elif kind == "dead":
                    self._failure = content[0]
            self._answered([(*each,) for each in messages if each[0] in ("output", "refused")])
        if self._terminating.is_set():
            self._ended()
            if self._child.wait() is None:
                self._child.kill()
        else:
            reason = self._failure or f"vLLM's process has ended with code {self._child.wait()}"
            self._fail(f"The executor has stopped working: {reason}")
        self._killer.cancel()
        self._close_child()

    def _close_child(self) -> None:
        self._child.close()
        shutil.rmtree(self._sockets, ignore_errors=True)

    @property
    def failure(self) -> str | None:
        """Why vLLM has stopped working, or None."""
        return self._failure

    def hang(self) -> str | None:
        """Return why vLLM will not answer any more, or None. Its processes are ended then."""
        now, reason = time.monotonic(), None
        if self._terminating.is_set() or self._failure is not None:
            return None
        if now - self._heard > _LONGEST_SILENCE:
            reason = f"vLLM's process has said nothing for {now - self._heard:.0f} s"
        elif self._open and now - self._worked > _LONGEST_STEP:
            reason = f"vLLM has requests, and has made no step for {now - self._worked:.0f} s"
        if reason is not None:
            self._child.kill()
        return reason

    def terminate(self) -> None:
        """Let `run` return when all requests have ended."""
        self._terminating.set()
        while self._open and self._failure is None and self._child.runs():
            time.sleep(0.01)
        self._child.finish()
        self._killer.start()

    def _submit(self, number: int, request: Any, asked: Mapping[str, Any]) -> None:
        """Hand a request to vLLM; the caller holds the lock."""
        if not self._open:
            self._worked = time.monotonic()
        self._open[number] = request
        self._child.send(["submit", number, asked])

    def _fail(self, message: str) -> None:
        logger.critical("%s", message)
        with self._lock:
            self._failure = message
            self._failed(message)
            self._open.clear()
        self._child.kill()


class VllmEngine(VllmProcess):
    """The executor's requests, which vLLM works on."""

    _open: dict[int, OpenRequest]

    def __init__(
        self,
        python: Path,
        arguments: Mapping[str, Any],
        limits: EngineLimits,
        options: EngineOptions,
        adapters: Adapters,
        *,
        followers: tuple[str, int, int] | None = None,
    ) -> None:
        self.mailbox = Mailbox()
        self._adapters = adapters
        self._guides = options.guides is not None
        self._joins = arguments.get("stream_interval", 1) > 1
        self._max_queue_size = options.max_queue_size
        self._deadlines: dict[int, float] = {}
        super().__init__(python, arguments, [*adapters.values()], followers=followers)
        facts = self.facts
        self.limits = replace(
            limits,
            max_seq_len=facts["max_model_len"],
            vocab_size=facts["vocab_size"],
            max_batch_size=facts["max_num_seqs"],
            max_num_tokens=facts["max_num_batched_tokens"],
            chunked=True,
        )
        self._tokens_per_block: int = facts["tokens_per_block"]
        self._hidden_size: int = facts["hidden_size"]
        self.kv_cache_tokens: int = facts["blocks"] * self._tokens_per_block
        self.recorder = VllmRecorder(options, blocks=facts["blocks"], tokens_per_block=self._tokens_per_block)
        logger.info(
            "vLLM %s is ready: a KV cache of %d tokens, sequences of at most %d",
            facts["version"],
            self.kv_cache_tokens,
            self.limits.max_seq_len,
        )

    def _stepped(self, statistics: Mapping[str, Any]) -> None:
        self.recorder.record(statistics)

    def _answered(self, answers: list[tuple[str, int, Any]]) -> None:
        made: list[RequestOutput] = []
        with self._lock:
            for kind, number, content in answers:
                if (opened := self._open.get(number)) is None:  # it was cancelled
                    continue
                if kind == "refused":
                    self._close(number, in_vllm=False)
                    made.append(_error(number, opened.request, content))
                    continue
                news = msgspec.convert(content, VllmOutput)
                made += opened.outputs(news)
                if opened.ended:
                    self._close(number, in_vllm=not news.finished)
        if made:
            self.mailbox.deliver(made)
        if self._deadlines:
            now = time.monotonic()
            self._end_early([number for number, end in self._deadlines.items() if end <= now], FinishReason.TIMED_OUT)

    def _ended(self) -> None:
        self.mailbox.close()

    def _failed(self, message: str) -> None:
        self.mailbox.fail(message)

    def _close(self, number: int, *, in_vllm: bool) -> None:
        """Forget a request; the caller holds the lock."""
        del self._open[number]
        self._deadlines.pop(number, None)
        if in_vllm:
            self._child.send(["cancel", number])
        if not self._open:
            self.recorder.became_idle()

    def enqueue(self, requests: list[GenerationRequest]) -> list[int]:
        """Hand `requests` to vLLM.

        Raises RuntimeError when the queue cannot take all. Requests that vLLM cannot serve get an error response.
        """
        refused: list[RequestOutput] = []
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            if self._terminating.is_set():
                raise RuntimeError("Shutdown called")
            self._require_room(requests)
            ids = list(range(self._next_id, self._next_id + len(requests)))
            self._next_id += len(requests)
            self.mailbox.expect({number: each.client_id for number, each in zip(ids, requests, strict=True)})
            for number, request in zip(ids, requests, strict=True):
                try:
                    asked = vllm_request(
                        request, self.limits, self._adapters, hidden_size=self._hidden_size, guides=self._guides
                    )
                except RuntimeError as error:
                    refused.append(_error(number, request, str(error)))
                    continue
                if request.time_limit is not None:
                    self._deadlines[number] = time.monotonic() + request.time_limit
                opened = OpenRequest(
                    number,
                    request,
                    asked["sampling"]["max_tokens"],
                    tokens_per_block=self._tokens_per_block,
                    joins=self._joins,
                )
                self._submit(number, opened, asked)
        if refused:
            self.mailbox.deliver(refused)
        return ids

    def _require_room(self, requests: list[GenerationRequest]) -> None:
        limit = self._max_queue_size
        if limit is None:
            return
        sequences = sum(each.request.num_sequences for each in self._open.values())
        waiting = max(0, sequences - self.limits.max_batch_size)
        if waiting + sum(each.num_sequences for each in requests) > limit:
            raise RuntimeError(f"Maximum queue size of {limit} has been reached, please try again later")

    def cancel(self, id_: int) -> None:
        """Cancel a request; unknown ids are ignored."""
        self._end_early([id_], FinishReason.CANCELLED)

    def _end_early(self, numbers: list[int], reason: FinishReason) -> None:
        made: list[RequestOutput] = []
        with self._lock:
            for number in numbers:
                if (opened := self._open.get(number)) is not None:
                    made += opened.end(reason)
                    self._close(number, in_vllm=True)
        if made:
            self.mailbox.deliver(made)


def child_environment() -> dict[str, str]:
    """Return the environment without what leads to this interpreter's packages and libraries; a driver's stay.

    vLLM reports its use to its makers unless VLLM_NO_USAGE_STATS is 1; here it does so only if that is 0.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
    own = sysconfig.get_config_var("LIBDIR")
    folders = [
        each
        for each in kept.pop(_LIBRARIES, "").split(":")
        if each and each != own and (sys.prefix == "/usr" or not Path(each).is_relative_to(sys.prefix))
    ]
    return {"VLLM_NO_USAGE_STATS": "1", **kept, **({_LIBRARIES: ":".join(folders)} if folders else {})}


def socket_folder() -> Path:
    """Make the folder of vLLM's sockets, whose paths have at most 107 bytes; the server's run folder has a link to it.

    vLLM itself leaves its sockets where they are.
    """
    folder = Path(tempfile.mkdtemp(prefix=SOCKETS))
    if (run := os.environ.get(RUN_FOLDER)) is not None:
        with suppress(OSError):  # the server is being stopped
            Path(run, folder.name).symlink_to(folder)
    return folder


def _error(number: int, request: GenerationRequest, reason: str) -> RequestOutput:
    text = f"Encountered an error when fetching new request: {reason}"
    return RequestOutput(request_id=number, client_id=request.client_id, error=text)


# Fields of IterationRecord that the engine side counts too.
_COUNTS = ["active", "queued", "completed", "contexts", "context_tokens", "generations", "generated_tokens", "paused"]


class VllmRecorder:
    """The records of vLLM's iterations in a bounded buffer until they are fetched."""

    def __init__(self, options: EngineOptions, *, blocks: int, tokens_per_block: int) -> None:
        self._records: deque[IterationRecord] = deque(maxlen=options.iteration_records)
        self._use = BlockUse()
        self._at = time.monotonic()  # of the last record
        self._last = self._idle = IterationRecord(
            number=0,
            time=time.time(),
            blocks=blocks,
            free_blocks=blocks,
            tokens_per_block=tokens_per_block,
            use=self._use,
        )
        self._records.append(self._idle)

    def record(self, given: Mapping[str, Any]) -> None:
        """Record an iteration from the engine side's statistics. vLLM counts reuse in tokens, without allocations."""
        size, before, self._at = self._idle.tokens_per_block, self._at, time.monotonic()
        reused, queried = given["reused"] // size, -(-given["queried"] // size)
        self._use = BlockUse(
            total=self._use.total + queried,
            new=self._use.new + queried - reused,
            reused=self._use.reused + reused,
            missed=self._use.missed + queried - reused,
        )
        drafts = given["drafts"]
        record = replace(
            self._idle,
            number=self._last.number + 1,
            time=time.time(),
            seconds=self._at - before if self._last.active else 0.0,
            started=given["contexts"],
            **{name: given[name] for name in _COUNTS},
            right_guesses=drafts[1] if drafts else 0,
            free_blocks=round((1 - given["usage"]) * self._idle.blocks),
            use=self._use,
            drafts=DraftCounts(*drafts) if drafts else None,
        )
        self._last = record
        self._records.append(record)

    def became_idle(self) -> None:
        """Write the closing record when the last request has ended: vLLM makes none for a cancelled one."""
        self._last = replace(self._idle, number=self._last.number + 1, time=time.time(), use=self._use)
        self._records.append(self._last)

    def drain_iterations(self) -> list[IterationRecord]:
        """Return all iteration records since the last call."""
        return [self._records.popleft() for _ in range(len(self._records))]

    def drain_requests(self) -> list[RequestsRecord]:
        """Return none: vLLM does not say which requests an iteration had."""
        return []
