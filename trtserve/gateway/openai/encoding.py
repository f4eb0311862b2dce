"""From the conversations and texts of clients to token ids, where a slow template or tokenizer holds up nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from trtserve.client.tokenizer import SlowTemplateError, TokenizerFiles, render, template_process
from trtserve.gateway.openai.errors import ApiError
from trtserve.programs.shared.encoding import Allowance, EncodingProcess

_SHORT = 20_000  # characters of all texts together that are encoded in some milliseconds
_MESSAGE = 100  # characters of a message besides its content, roughly
# Seconds of computing for texts and for templates. Short ones take less than 0.01 s on an idle core.
_LANES = ((0.05, 0.02), (1.0, 0.5), (20.0, 5.0))
_KEPT, _LONGEST_KEPT = 4096, 64  # stop strings come again and again
T = TypeVar("T")


class Encoder:
    """Encodes texts in processes of its own. What takes longer than others may wait is begun again in a slower lane.

    A tokenizer that only exists in Python encodes in threads of this process, without the bounds.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._files = files
        backend = getattr(files.tokenizer, "backend_tokenizer", None)
        self.longest_token = max(map(len, files.tokenizer.get_vocab()), default=1)
        """Characters of the longest token; a text with more than that for each token is certainly too long."""
        described = None if backend is None else backend.to_str()
        self._lanes = tuple(_Lane(described, *seconds) for seconds in _LANES)
        self._kept: dict[str, list[int]] = {}

    async def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the token ids of each text; `special` adds special tokens such as BOS. ApiError: too much work."""
        return await self._run(
            sum(map(len, texts)), lambda lane: self._encode(texts, lane.allowance(), special=special)
        )

    async def render(
        self,
        template: str,
        conversation: Sequence[Mapping[str, Any]],
        tokens: Mapping[str, str],
        variables: Mapping[str, Any],
    ) -> str:
        """Return a conversation in a chat template. UsageError: the template refuses it, or takes or makes too much."""

        def work(lane: _Lane) -> str:
            seconds, process = lane.template_seconds, lane.templates
            return render(template, conversation, tokens, variables, seconds=seconds, process=process)

        return await self._run(sum(len(str(message.get("content"))) + _MESSAGE for message in conversation), work)

    async def run(self, work: Callable[[Callable[[str], list[int]]], T]) -> T:
        """Return what `work` makes with a function that encodes short texts, without special tokens."""

        def started(lane: _Lane) -> T:
            allowance = lane.allowance()
            return work(lambda text: self._encode_one(text, allowance))

        return await self._run(0, started)

    def close(self) -> None:
        """End the processes."""
        for lane in self._lanes:
            lane.close()

    async def _run(self, characters: int, work: Callable[[_Lane], T]) -> T:
        *first, last = self._lanes[:2] if characters <= _SHORT else self._lanes[1:]
        for lane in first:
            with suppress(TimeoutError, SlowTemplateError):
                return await lane.run(partial(work, lane))
        try:
            return await last.run(partial(work, last))
        except TimeoutError as error:
            raise ApiError(f"The text cannot be encoded: {error}.") from None

    def _encode_one(self, text: str, allowance: Allowance | None) -> list[int]:
        if len(text) > _LONGEST_KEPT:
            return self._encode([text], allowance, special=False)[0]
        if text not in self._kept:
            found = self._encode([text], allowance, special=False)[0]
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            self._kept[text] = found
            return list(found)
        return list(self._kept[text])

    def _encode(self, texts: Sequence[str], allowance: Allowance | None, *, special: bool) -> list[list[int]]:
        if allowance is None:
            return [self._files.encode(text, special=special) for text in texts]
        try:
            return allowance.encode(texts, special=special)
        except ValueError as error:
            raise ApiError(f"The text cannot be encoded: {error}.") from None


class _Lane:
    """One thread and its processes: one renders templates, one encodes (none for a tokenizer in Python only)."""

    def __init__(self, described: str | None, seconds: float, template_seconds: float) -> None:
        self._seconds, self.template_seconds = seconds, template_seconds
        self.templates = template_process()
        self.process = None if described is None else EncodingProcess(described)
        self._thread = ThreadPoolExecutor(1, "encoder")

    def allowance(self) -> Allowance | None:
        return None if self.process is None else Allowance(self.process, self._seconds)

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.templates.close()
        if self.process is not None:
            self.process.close()
