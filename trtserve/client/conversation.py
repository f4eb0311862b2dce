"""A conversation with a chat model: what was said, and what the answers took."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from trtserve.client.base import Endpoint
from trtserve.client.chat import messages
from trtserve.client.query import generate
from trtserve.client.spec import QuerySpec
from trtserve.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class AnswerTimes:
    """What one answer took."""

    seconds: float
    first: float | None
    """Seconds until the first text, or None without any."""
    tokens: int | None
    """Generated tokens, or None where the server does not count them and for an answer that was stopped."""

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second of the whole answer."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None


@dataclass(kw_only=True)
class Conversation:
    """The turns of one conversation; `spec` says which model is asked, and how."""

    spec: QuerySpec
    server: Endpoint
    history: list[Mapping[str, str]] = field(default_factory=list)
    times: list[AnswerTimes] = field(default_factory=list)

    def ask(self, question: str, on_text: Callable[[str], None]) -> AnswerTimes:
        """Send a question with all that was said before, and return what the answer took.

        An interrupt (KeyboardInterrupt) stops the answer in the engine; what came of it stays part of the conversation.
        Any other error leaves the conversation as it was.
        """
        begin, first, pieces = time.monotonic(), None, list[str]()

        def add(piece: str) -> None:
            nonlocal first
            first = first if pieces else time.monotonic() - begin
            pieces.append(piece)
            on_text(piece)

        spec = replace(self.spec, prompts=(question,), history=tuple(self.history), stream=True)
        try:
            tokens = generate(spec, self.server, on_text=add).output_tokens
        except KeyboardInterrupt:
            self._remember(question, "".join(pieces))
            raise
        self._remember(question, "".join(pieces))
        self.times.append(AnswerTimes(seconds=time.monotonic() - begin, first=first, tokens=tokens))
        return self.times[-1]

    def _remember(self, question: str, answer: str) -> None:
        self.history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def set_system(self, text: str) -> None:
        """Replace the system message; an empty text removes it."""
        self.spec = replace(self.spec, system=text or None)

    def reset(self) -> None:
        """Forget what was said; the system message stays."""
        self.history.clear()

    def save(self, path: Path) -> None:
        """Write the messages as JSON if the name ends with .json, else as Markdown. Raises UsageError on failure."""
        turns = messages("", self.spec.system, self.history)[:-1]
        if path.suffix == ".json":
            text = json.dumps(turns, indent=2, ensure_ascii=False) + "\n"
        else:
            text = "\n".join(f"**{turn['role']}**\n\n{turn['content'].strip()}\n" for turn in turns)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
