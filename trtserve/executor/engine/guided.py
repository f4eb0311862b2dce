"""Guided decoding with llguidance: restrict tokens to a JSON schema, a regular expression or a grammar.

Follows TensorRT-LLM's LLGUIDANCE backend, which uses the same library. Guides written for xgrammar, including its EBNF,
have the same meaning here. A guide that is new is tried in a process of its own first, and only one that keeps within
its bounds there is compiled here, on threads of its own: no other request waits for it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.guide_trial import (
    FIRST_LOOK_SECONDS,
    FIRST_SECONDS,
    GUIDE_SECONDS,
    TOKEN_SECONDS,
    WAITED,
    compiled,
    limit_reason,
    read_tokenizer,
    sentence,
)
from trtserve.executor.engine.limits import GuideTokenizer
from trtserve.executor.engine.requests import GuideSource, GuideType
from trtserve.process import how_it_ended
from trtserve.process.answering import AnsweringProcess
from trtserve.programs.shared.encoding import python

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Floats = npt.NDArray[np.float32]
TokenBits = npt.NDArray[np.uint32]

LONGEST_GUIDE = 128 << 10  # bytes of a guide
CACHED_BYTES = 256 << 20  # bytes of memory of the compiled guides that are kept for further requests, about
LONGEST_QUEUE = 64  # different guides that may be compiled or wait for that

_NOT_SET_UP = (
    "Request is specified with GuidedDecodingParams, but GuidedDecoder is not setup. "
    "Please provide a valid GuidedDecodingConfig to setup GuidedDecoder."
)
_MOST_LATE = 16  # guides that take long and wait for each other
_LEAST_BYTES = 128 << 10  # what a compiled guide takes, at least
_NO_BITS = np.zeros(0, dtype=np.uint8)
_TOO_LONG = f"more than {GUIDE_SECONDS:g} s of CPU time"
_REMEMBERED = 4096  # refused guides
_STACK = 16 << 20  # of the threads that compile: more than in the process that tried the guide
_RUN = """import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from trtserve.executor.engine.guide_trial import main
main()"""

_Key = tuple[GuideType, bytes]


@dataclass(frozen=True)
class CompiledGuide:
    """A guide that can be followed, the reason why not, or neither for a request that will not need it."""

    matcher: LLMatcher | None = None
    error: str | None = None
    size: int = 0  # bytes of memory, about


UNGUIDED = CompiledGuide()

Done = Callable[[CompiledGuide], None]
Wanted = Callable[[], bool]


@dataclass(eq=False)
class _Job:
    source: GuideSource
    waiting: list[tuple[Done, Wanted]] = field(default_factory=list)
    begun: bool = False
    late: bool = False  # whether it takes longer than others may wait for it


class GuideFactory:
    """Compiles guides for the vocabulary of one engine. Thread-safe.

    Compiled guides are kept up to CACHED_BYTES, and of refused ones the reason is remembered.
    """

    def __init__(self, settings: GuideTokenizer | None, vocab_size: int) -> None:
        self._settings = settings
        self._vocab_size = vocab_size
        self._lock = threading.Condition()
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._known: OrderedDict[_Key, CompiledGuide] = OrderedDict()
        self._refused: OrderedDict[_Key, CompiledGuide] = OrderedDict()
        self._bytes = 0
        self._jobs: OrderedDict[_Key, _Job] = OrderedDict()
        self._threads: dict[bool, threading.Thread] = {}
        self._closed = False

    def prepare(self) -> None:
        """Read the tokenizer: one of 128,000 tokens takes seconds, in which no other thread of Python runs.

        Requests with a guide get the reason if it cannot be read.
        """
        if self._settings is not None:
            with suppress(RuntimeError, ImportError):
                self._read_tokenizer()

    def ready(self, source: GuideSource) -> CompiledGuide | None:
        """Return the guide if it is known, or why there can be none. None: it has to be compiled."""
        if self._settings is None:
            return CompiledGuide(error=_NOT_SET_UP)
        if (length := _length(source)) > LONGEST_GUIDE:
            return CompiledGuide(
                error=f"The guide of type {source.kind.name} has {length} bytes; expected {LONGEST_GUIDE} at "
                "most. Make it shorter"
            )
        key = _key(source)
        with self._lock:
            for cache in (self._known, self._refused):
                if key in cache:
                    cache.move_to_end(key)
                    return cache[key]
        return None

    def compile(self, source: GuideSource, done: Done, wanted: Wanted) -> None:
        """Compile a guide that is not `ready`, and call `done` from another thread.

        A guide is skipped when its turn comes and none of those who asked for it wants it any more. Raises RuntimeError
        when too many guides wait.
        """
        key = _key(source)
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                if len(self._jobs) >= LONGEST_QUEUE:
                    raise RuntimeError(
                        f"The queue of guides to compile is full: {LONGEST_QUEUE} are in it. Please try again later"
                    )
                job = self._jobs[key] = _Job(source)
            job.waiting.append((done, wanted))
            self._start_thread(late=False)
            self._lock.notify_all()

    def guide(self, found: CompiledGuide, end_id: int) -> Guide:
        """Return a guide for a sequence that ends with `end_id` (-1: the tokenizer's end token).

        `found` is what `ready` or `compile` gave. Raises RuntimeError with its error.
        """
        if found.matcher is None:
            raise RuntimeError(found.error)
        assert self._tokenizer is not None
        return Guide(found.matcher.deep_copy(), self._tokenizer.eos_tokens, self._vocab_size, end_id)

    def close(self) -> None:
        """End the threads and processes; guides that wait are dropped."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def _start_thread(self, *, late: bool) -> None:
        if late not in self._threads:
            self._threads[late] = _thread(partial(self._work, late=late), "late guides" if late else "guides")

    def _work(self, *, late: bool) -> None:
        """Compile guides one after the other: each for a moment, and in another thread those that take longer."""
        trial: AnsweringProcess | None = None
        while (job := self._next(late=late)) is not None:
            try:
                trial = trial or _trial(self._settings)
                found = self._compile(job.source, trial, GUIDE_SECONDS if late else FIRST_LOOK_SECONDS)
                if found is None and not late:
                    found = self._postpone(job)
                    if found is None:
                        continue
                guide, lasting = found or (CompiledGuide(error=_excess(job.source, _TOO_LONG)), True)
            except BaseException as error:  # noqa: BLE001 - a panic of llguidance must not end the thread
                guide, lasting = CompiledGuide(error=f"The guide could not be compiled: {error}"), False
            for done, _ in self._finish(job.source, guide, lasting=lasting):
                done(guide)
        if trial is not None:
            trial.close()

    def _postpone(self, job: _Job) -> tuple[CompiledGuide, bool] | None:
        """Leave a guide to the thread for those that take long, unless too many wait for it."""
        with self._lock:
            if sum(each.late for each in self._jobs.values()) >= _MOST_LATE:
                error = (
                    f"The queue of guides that take more than {FIRST_LOOK_SECONDS:g} s to compile is full: "
                    f"{_MOST_LATE} are in it. Please try again later"
                )
                return CompiledGuide(error=error), False
            job.late, job.begun = True, False
            self._start_thread(late=True)
            self._lock.notify_all()
        return None

    def _next(self, *, late: bool) -> _Job | None:
        with self._lock:
            while True:
                if self._closed:
                    return None
                for key, job in list(self._jobs.items()):
                    if job.begun or job.late != late:
                        continue
                    if any(wanted() for _, wanted in job.waiting):
                        job.begun = True
                        return job
                    del self._jobs[key]
                self._lock.wait()

    def _finish(self, source: GuideSource, guide: CompiledGuide, *, lasting: bool) -> list[tuple[Done, Wanted]]:
        """Remember a guide if that will be the same next time, and return who waits for it."""
        key = _key(source)
        with self._lock:
            if lasting and guide.matcher is not None:
                self._known[key] = guide
                self._bytes += guide.size
                while self._bytes > CACHED_BYTES:
                    self._bytes -= self._known.popitem(last=False)[1].size
            elif lasting:
                self._refused[key] = guide
                while len(self._refused) > _REMEMBERED:
                    self._refused.popitem(last=False)
            return self._jobs.pop(key).waiting

    def _compile(
        self, source: GuideSource, trial: AnsweringProcess, seconds: float
    ) -> tuple[CompiledGuide, bool] | None:
        """Return the guide, and whether another attempt would give the same; None: it takes more than `seconds`."""
        kind, text = source.kind.name, source.text
        try:
            tokenizer = self._read_tokenizer()
        except RuntimeError as error:
            return CompiledGuide(error=str(error)), False
        try:
            answer = trial.ask({"kind": kind, "guide": text, "seconds": seconds})
        except ChildProcessError as error:
            return CompiledGuide(error=f"The guide could not be compiled: the process that tries it {error}"), False
        if "invalid" in answer:
            return CompiledGuide(error=f"The guide of type {kind} is invalid: {answer['invalid']}"), True
        if "late" in answer or ("starved" in answer and seconds < GUIDE_SECONDS):
            return None
        if "starved" in answer:
            reason = f"not compiled within {WAITED * seconds:g} s, because other processes have the processors"
            return CompiledGuide(error=f"The guide of type {kind} was {reason}. Please try again later"), False
        if "excess" in answer:
            return CompiledGuide(error=_excess(source, answer["excess"])), True
        if "died" in answer:
            reason = f"The guide of type {kind} could not be compiled: the attempt {how_it_ended(answer['died'])}"
            return CompiledGuide(error=reason), False
        matcher = compiled(tokenizer, answer["grammar"])
        return CompiledGuide(matcher, size=max(_LEAST_BYTES, answer["bytes"])), True

    def _read_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                assert self._settings is not None
                self._tokenizer = read_tokenizer(self._settings)
            return self._tokenizer


def _excess(source: GuideSource, needed: str) -> str:
    return f"The guide of type {source.kind.name} takes too much: it needs {needed}. Make it simpler"


def _length(source: GuideSource) -> int:
    """Return the bytes of a guide; of a very long one only its characters."""
    text = source.text
    return len(text) if len(text) > LONGEST_GUIDE else len(text.encode(errors="surrogatepass"))


def _key(source: GuideSource) -> _Key:
    return source.kind, hashlib.sha256((source.text).encode(errors="surrogatepass")).digest()


def _trial(settings: GuideTokenizer | None) -> AnsweringProcess:
    """Return a process that tries guides; it starts with the first."""
    assert settings is not None
    places = [place for place in sys.path if Path(place).is_absolute()]
    argv = (python(), "-c", _RUN, json.dumps(places))
    return AnsweringProcess(argv, lambda: {"tokenizer": asdict(settings)})


def _thread(target: Callable[[], Any], name: str) -> threading.Thread:
    """Start a thread with a stack of _STACK."""
    before = threading.stack_size(_STACK)
    try:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


class Guide:
    """The state of one sequence in its guide; `failure` says why it cannot continue."""

    def __init__(self, matcher: LLMatcher, ends: list[int], vocab_size: int, end_id: int) -> None:
        self.failure: str | None = None
        self.matcher = matcher
        self._vocab_size = vocab_size
        self._ends = [end for end in ends if end < vocab_size]
        self._end_id = end_id
        self._allowed_seconds = FIRST_SECONDS

    def mask(self, row: Floats) -> None:
        """Set the logits f32[V] of tokens that are not `allowed` to −∞."""
        bits = np.unpackbits(self.allowed().view(np.uint8), count=len(row), bitorder="little")
        row[bits == 0] = -np.inf

    def allowed(self) -> TokenBits:
        """Return u32[⌈V / 32⌉] with a bit for each token, the lowest first: 1 if it may come next.

        All are 0 if the guide has failed. Where it may end, `end_id` is allowed. Ids outside the tokenizer's vocabulary
        are never allowed; the bits of ids outside the engine's say nothing.
        """
        words = np.zeros(-(-self._vocab_size // 32), dtype=np.uint32)
        bits = _NO_BITS
        if self.failure is None:
            began = time.thread_time()
            bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
            self._spend(time.thread_time() - began)
            if self.matcher.is_error():
                self._fail(limit_reason(self.matcher.get_error()))
        if self.failure is not None:
            return words
        words.view(np.uint8)[: len(bits)] = bits[: words.nbytes]
        if self._end_id >= 0:
            for end in self._ends:
                words[end // 32] &= ~np.uint32(1 << end % 32)
            words[self._end_id // 32] |= np.uint32(self.matcher.is_accepting() << self._end_id % 32)
        return words

    def accept(self, token: int) -> None:
        """Advance to the state after `token`; `end_id` and tokens after the end of the guide change nothing."""
        if self.failure is not None or token == self._end_id or self.matcher.is_stopped():
            return
        began = time.thread_time()
        taken = self.matcher.try_consume_tokens([token])
        if taken != 1:
            error = self.matcher.get_error()
            self._fail(limit_reason(error) if error else f"token {token} does not fit it")
        self._spend(time.thread_time() - began - TOKEN_SECONDS)

    def fork(self) -> Guide:
        """Return an independent guide in the same state."""
        twin = copy.copy(self)
        twin.matcher = self.matcher.deep_copy()
        return twin

    def _spend(self, seconds: float) -> None:
        """Fail when the tokens took longer than FIRST_SECONDS and TOKEN_SECONDS for each."""
        self._allowed_seconds = min(self._allowed_seconds - seconds, FIRST_SECONDS)
        if self._allowed_seconds < 0:
            self._fail(
                f"it takes too long: more than {TOKEN_SECONDS:g} s of CPU time for a token, and {FIRST_SECONDS:g} s "
                "besides. Make it simpler"
            )

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = f"The guide cannot be followed any further: {sentence(reason)}"
