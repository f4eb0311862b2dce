"""From the conversations and texts of clients to token ids, where a slow template or tokenizer holds up nobody else."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

from trtserve.client.tokenizer import TEMPLATE_SECONDS, TokenizerFiles, render, template_process
from trtserve.gateway.openai.errors import ApiError
from trtserve.process.answering import AnsweringProcess

_SHORT = 20_000  # characters of all texts together that are encoded in some milliseconds
_MESSAGE = 100  # characters of a message besides its content, roughly
_SHORT_SECONDS, _LONG_SECONDS = 1.0, 20.0
_SHORT_TEMPLATE_SECONDS = 0.5  # of computing; those of published models take 0.01
_MEMORY = 1 << 30
_KEPT, _LONGEST_KEPT = 4096, 64  # stop strings come again and again
T = TypeVar("T")


class Encoder:
    """Encodes texts in processes of its own: one for short texts, and one for longer ones, which wait for each other.

    A tokenizer that only exists in Python encodes in threads of this process, without the bounds.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._files = files
        backend = getattr(files.tokenizer, "backend_tokenizer", None)
        self.longest_token = max(map(len, files.tokenizer.get_vocab()), default=1)
        """Characters of the longest token; a text with more than that for each token is certainly too long."""
        described = None if backend is None else {"tokenizer": backend.to_str()}
        self._short, self._long = (_Lane(described, seconds) for seconds in (_SHORT_SECONDS, _LONG_SECONDS))
        self._kept = lru_cache(_KEPT)(lambda text: tuple(self._encode(self._short, [text], special=False)[0]))

    async def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the token ids of each text; `special` adds special tokens such as BOS. ApiError: too much work."""
        lane = self._short if sum(map(len, texts)) <= _SHORT else self._long
        return await lane.run(lambda: self._encode(lane, texts, special=special))

    async def render(
        self,
        template: str,
        conversation: Sequence[Mapping[str, Any]],
        tokens: Mapping[str, str],
        variables: Mapping[str, Any],
    ) -> str:
        """Return a conversation in a chat template. UsageError: the template refuses it, or takes or makes too much."""
        size = sum(len(str(message.get("content"))) + _MESSAGE for message in conversation)
        lane, seconds = (self._short, _SHORT_TEMPLATE_SECONDS) if size <= _SHORT else (self._long, TEMPLATE_SECONDS)
        return await lane.run(
            lambda: render(template, conversation, tokens, variables, seconds=seconds, process=lane.templates)
        )

    async def run(self, work: Callable[[Callable[[str], list[int]]], T]) -> T:
        """Return what `work` makes with a function that encodes short texts, without special tokens."""
        return await self._short.run(lambda: work(self._encode_one))

    def close(self) -> None:
        """End the processes."""
        for lane in (self._short, self._long):
            lane.close()

    def _encode_one(self, text: str) -> list[int]:
        if len(text) <= _LONGEST_KEPT:
            return list(self._kept(text))
        return self._encode(self._short, [text], special=False)[0]

    def _encode(self, lane: _Lane, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        if lane.process is None:
            return [self._files.encode(text, special=special) for text in texts]
        request = {"texts": list(texts), "special": special, "seconds": lane.seconds}
        try:
            answer: Mapping[str, Any] = lane.process.ask(request)
        except TimeoutError:
            answer = {"error": f"it takes more than {lane.seconds:g} s"}
        except ChildProcessError as error:
            answer = {"error": f"the process that encodes it, in at most {_MEMORY >> 20} MiB of memory, {error}"}
        if "error" in answer:
            raise ApiError(f"The text cannot be encoded: {answer['error']}.")
        ids: list[list[int]] = answer["ids"]
        return ids


class _Lane:
    """One thread and its processes: one renders templates, one encodes (none for a tokenizer in Python only)."""

    def __init__(self, described: Mapping[str, Any] | None, seconds: float) -> None:
        self.seconds = seconds
        self.templates = template_process()
        self.process: AnsweringProcess | None = None
        if described is not None:
            argv = (sys.executable, "-m", "trtserve.gateway.openai.encoding_process", str(_MEMORY))
            self.process = AnsweringProcess(argv, greeting=lambda: described)
        self._thread = ThreadPoolExecutor(1, "encoder")

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.templates.close()
        if self.process is not None:
            self.process.close()
