"""A strict stand-in for TensorRT-LLM's executor: signatures as compiled, a language of numbers that go on counting.

An answer to the ids … n is n + 1, n + 2, …, modulo the vocabulary of the tests' tiny model. The release is that of the
variable TRTSERVE_STAND_IN_RELEASE. An engine of several ranks wants that many processes; all but the first take no
requests, and their `shutdown` blocks until the first one's, of which they learn in the folder
TRTSERVE_STAND_IN_MEETING.
"""

from __future__ import annotations

import datetime
import enum
import json
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from tensorrt_llm.bindings.signatures import TABLES, Signature, order

__version__ = os.environ.get("TRTSERVE_STAND_IN_RELEASE", "1.2.0")
_RELEASE = ".".join(__version__.split(".")[:2])
_SECONDS_PER_TOKEN = 0.002
_SECONDS_FOR_LEADER = 60.0


ModelType = enum.Enum("ModelType", ("DECODER_ONLY", "ENCODER_ONLY", "ENCODER_DECODER"))
BatchingType = enum.Enum("BatchingType", ("STATIC", "INFLIGHT"))
CapacitySchedulerPolicy = enum.Enum("CapacitySchedulerPolicy", ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT"))
CommunicationMode = enum.Enum("CommunicationMode", ("LEADER", "ORCHESTRATOR"))
CommunicationType = enum.Enum("CommunicationType", ("MPI",))
FinishReason = enum.Enum("FinishReason", ("NOT_FINISHED", "END_ID", "STOP_WORDS", "LENGTH", "TIMED_OUT", "CANCELLED"))
_BACKENDS = ("XGRAMMAR", "LLGUIDANCE") if order(_RELEASE) >= (1, 0) else ("XGRAMMAR",)
GuidedDecodingBackend = enum.Enum("GuidedDecodingBackend", _BACKENDS)  # type: ignore[misc]
GuideType = enum.Enum("GuideType", ("JSON", "JSON_SCHEMA", "REGEX", "EBNF_GRAMMAR"))


class DecodingMode:
    """One of the modes, made by its name."""

    def __init__(self, mode: str) -> None:
        self.mode = mode


for _mode in ("Auto", "TopK", "TopP", "TopKTopP", "BeamSearch", "Medusa", "Lookahead", "ExplicitDraftTokens", "Eagle"):
    if _mode not in ("ExplicitDraftTokens", "Eagle") or order(_RELEASE) >= (0, 15):
        setattr(DecodingMode, _mode, staticmethod(lambda mode=_mode: DecodingMode(mode)))


class _Bound:
    """An object with the parameters of its class; what is set later is checked too."""

    _signature: ClassVar[Signature]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.__dict__.update(self._signature.bind(arguments, keywords))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        self._signature.check(name, value)
        self.__dict__[name] = value


_CLASSES: dict[str, Any] = {name: type(name, (_Bound,), {"_signature": Signature(name, _RELEASE)}) for name in TABLES}
_CLASSES["KvCacheRetentionConfig"].TokenRangeRetentionConfig = _CLASSES["TokenRangeRetentionConfig"]
_CLASSES["GuidedDecodingConfig"].GuidedDecodingBackend = GuidedDecodingBackend
_CLASSES["GuidedDecodingParams"].GuideType = GuideType
_SINCE = {"GuidedDecodingConfig": "0.16", "GuidedDecodingParams": "0.16", "KvCacheRetentionConfig": "0.15"}
_SINCE |= {"EagleConfig": "0.15", "MropeConfig": "0.16"}
globals().update({name: each for name, each in _CLASSES.items() if order(_RELEASE) >= order(_SINCE.get(name, "0.12"))})


class Executor:
    """Serves requests one token at a time, in a thread."""

    def __init__(self, model_path: Any, model_type: Any, executor_config: Any) -> None:
        if not isinstance(model_path, (str, Path)) or model_type is not ModelType.DECODER_ONLY:
            raise TypeError("Executor(): incompatible constructor arguments")
        if not isinstance(executor_config, _CLASSES["ExecutorConfig"]):
            raise TypeError("Executor(): executor_config")
        config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
        self._vocab_size = config["pretrained_config"]["vocab_size"]
        if (executor_config.max_beam_width or 1) > config["build_config"]["max_beam_width"]:
            raise RuntimeError("max_beam_width above the engine's")
        self._rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
        present = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
        needed = config["pretrained_config"]["mapping"]["world_size"]
        if needed != present:
            raise RuntimeError(f"the engine has {needed} ranks, and MPI {present}")
        self._work: dict[int, Any] = {}
        self._ready: deque[Any] = deque()
        self._changed = threading.Condition()
        self._next, self._closed = 1, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def can_enqueue_requests(self) -> bool:
        """The first process leads."""
        return self._rank == 0

    def enqueue_requests(self, requests: Sequence[Any]) -> list[int]:
        """Ids in order."""
        if not self.can_enqueue_requests():
            raise RuntimeError("only the leader takes requests")
        if not isinstance(requests, list) or not all(isinstance(each, _CLASSES["Request"]) for each in requests):
            raise TypeError("enqueue_requests(): incompatible function arguments")
        with self._changed:
            ids = list(range(self._next, self._next + len(requests)))
            self._next += len(requests)
            for number, request in zip(ids, requests, strict=True):
                self._work[number] = SimpleNamespace(request=request, made=[], cancelled=False)
            return ids

    def await_responses(self, timeout: Any = None) -> list[Any]:
        """Everything that is ready, once something is."""
        if not isinstance(timeout, datetime.timedelta):
            raise TypeError("await_responses(): incompatible function arguments")
        with self._changed:
            if self._closed:
                raise RuntimeError("Shutdown called")
            self._changed.wait_for(lambda: self._ready or self._closed, timeout.total_seconds())
            found = list(self._ready)
            self._ready.clear()
            return found

    def cancel_request(self, id: int) -> None:  # noqa: A002
        """End it at the next token."""
        with self._changed:
            if id in self._work:
                self._work[id].cancelled = True

    def get_latest_iteration_stats(self) -> list[Any]:
        """None: no iteration is counted."""
        return []

    def shutdown(self) -> None:
        """End the thread; without the lead, when the leader has ended."""
        meeting = os.environ.get("TRTSERVE_STAND_IN_MEETING")
        if self._rank:
            _wait_for(Path(str(meeting)) / "leader", Path(str(meeting)) / f"rank{self._rank}")
        elif meeting:
            (Path(meeting) / "leader").write_text("has ended")
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            time.sleep(_SECONDS_PER_TOKEN)
            with self._changed:
                for number, work in list(self._work.items()):
                    self._step(number, work)
                if self._ready:
                    self._changed.notify_all()

    def _step(self, number: int, work: Any) -> None:
        request, made = work.request, work.made
        limit = request.max_new_tokens if order(_RELEASE) < (0, 13) else request.max_tokens
        last = made[-1] if made else request.input_token_ids[-1]
        if not work.cancelled:
            made.append((last + 1) % self._vocab_size)
        final = work.cancelled or len(made) >= limit
        if final:
            del self._work[number]
        elif not request.streaming:
            return
        tokens = ([] if work.cancelled else made[-1:]) if request.streaming else self._whole(request, made)
        reason = (
            FinishReason.CANCELLED if work.cancelled else FinishReason.LENGTH if final else FinishReason.NOT_FINISHED
        )
        self._ready.append(_response(number, tokens, reason, final=final))

    def _whole(self, request: Any, made: list[int]) -> list[int]:
        excluded = bool(request.output_config and request.output_config.exclude_input_from_output)
        return made if excluded else request.input_token_ids + made


def _wait_for(leader: Path, own: Path) -> None:
    own.write_text("waits")
    deadline = time.monotonic() + _SECONDS_FOR_LEADER
    while not leader.exists():
        if time.monotonic() > deadline:
            raise RuntimeError("the leader has not ended")
        time.sleep(0.01)
    own.write_text("ended after its leader")


def _response(number: int, tokens: list[int], reason: Any, *, final: bool) -> Any:
    result = SimpleNamespace(
        is_final=final,
        output_token_ids=[list(tokens)],
        cum_log_probs=None,
        log_probs=None,
        context_logits=None,
        generation_logits=None,
    )
    if order(_RELEASE) >= (0, 13):
        result.finish_reasons = [reason]
    if order(_RELEASE) >= (0, 14):
        result.sequence_index, result.is_sequence_final = 0, final
    if order(_RELEASE) >= (0, 16):
        result.request_perf_metrics = None
    return SimpleNamespace(request_id=number, result=result, has_error=lambda: False)
