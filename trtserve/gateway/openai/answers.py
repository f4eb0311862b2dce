"""The JSON of answers, whole and in chunks: `text_completion`, `chat.completion` and `chat.completion.chunk`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from trtserve.gateway.openai.generation import Piece, Usage
from trtserve.gateway.openai.log_probs import TokenLogProb, completion_log_probs
from trtserve.gateway.openai.tools import Call, CallReader

DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]


def event(content: Mapping[str, Any]) -> bytes:
    """Return an event of a stream."""
    return b"data: " + to_json(content) + b"\n\n"


def usage_json(usages: Sequence[Usage], prompts: Sequence[Usage]) -> Json | None:
    """Return the tokens of all sequences and of each prompt once, or None where the engine did not count them."""
    prompt_tokens = [usage.prompt_tokens for usage in prompts]
    completion_tokens = [usage.completion_tokens for usage in usages]
    if None in prompt_tokens or None in completion_tokens:
        return None
    prompt, completion = sum(filter(None, prompt_tokens)), sum(filter(None, completion_tokens))
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


@dataclass(kw_only=True)
class Completion:
    """One choice of a completion while it grows."""

    index: int
    echoed: str = ""
    """The prompt, if the answer repeats it."""
    shows_log_probs: bool = False
    text: str = ""
    prompt: list[TokenLogProb] = field(default_factory=list)
    """The tokens of the prompt, if the answer has their log-probabilities."""
    tokens: list[TokenLogProb] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def mean_log_prob(self) -> float:
        """Mean log-probability of its tokens, by which the best of several answers is chosen."""
        return sum(token.log_prob or 0.0 for token in self.tokens) / max(1, len(self.tokens))

    def add(self, piece: Piece) -> list[Json]:
        """Add a piece and return the choices of the chunks that carry it."""
        text = piece.text if self.text else self.echoed + piece.text
        choice = self._choice(text, piece.tokens, start=len(self.text), finish_reason=piece.finish_reason)
        self.text += text
        self.prompt += piece.prompt
        self.tokens += piece.tokens
        self.finish_reason = piece.finish_reason
        return [choice]

    def whole(self) -> Json:
        """Return the choice of the whole answer."""
        return self._choice(self.text, [*self.prompt, *self.tokens], start=0, finish_reason=self.finish_reason)

    def _choice(self, text: str, tokens: Sequence[TokenLogProb], *, start: int, finish_reason: str | None) -> Json:
        log_probs = completion_log_probs(tokens, start) if tokens and self.shows_log_probs else None
        return {"index": self.index, "text": text, "logprobs": log_probs, "finish_reason": finish_reason}


@dataclass(kw_only=True)
class ChatAnswer:
    """One choice of a chat while it grows."""

    index: int
    calls: CallReader
    named: bool = False
    """Whether the client prescribed the tool, so that its call does not count as the reason to end."""
    text: str = ""
    tokens: list[TokenLogProb] = field(default_factory=list)
    finish_reason: str | None = None
    made: list[Call] = field(default_factory=list)
    begun: bool = False
    """Whether a chunk with the role was sent."""

    def add(self, piece: Piece) -> list[Json]:
        """Add a piece and return the choices of the chunks that carry it."""
        text = self.calls.add(piece.text)
        if piece.finish_reason is not None:
            rest, self.made = self.calls.finish()
            text += rest
            self.finish_reason = "tool_calls" if self.made and not self.named else piece.finish_reason
        self.text += text
        self.tokens += piece.tokens
        choices = [] if self.begun else [self._chunk({"role": "assistant", "content": ""})]
        self.begun = True
        if text or piece.tokens:
            choices.append(self._chunk({"content": text}, piece.tokens))
        if self.made:
            choices.append(self._chunk({"tool_calls": [{"index": i, **call} for i, call in enumerate(self.made)]}))
        if self.finish_reason is not None:
            choices.append(self._chunk({}, finish_reason=self.finish_reason))
        return choices

    def whole(self) -> Json:
        """Return the choice of the whole answer."""
        message: Json = {"role": "assistant", "content": self.text or None if self.made else self.text, "refusal": None}
        if self.made:
            message["tool_calls"] = self.made
        return {
            "index": self.index,
            "message": message,
            "logprobs": _chat_log_probs(self.tokens),
            "finish_reason": self.finish_reason,
        }

    def _chunk(self, delta: Json, tokens: Sequence[TokenLogProb] = (), finish_reason: str | None = None) -> Json:
        log_probs = _chat_log_probs(tokens)
        return {"index": self.index, "delta": delta, "logprobs": log_probs, "finish_reason": finish_reason}


def _chat_log_probs(tokens: Sequence[TokenLogProb]) -> Json | None:
    return {"content": [token.chat() for token in tokens], "refusal": None} if tokens else None


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """What every chunk of an answer and the whole answer have in common."""

    prefix: str
    """How the id begins."""
    kind: str
    """`object` of the whole answer."""
    chunk_kind: str
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Json], usage: Json | None) -> Json:
        """Return the whole answer."""
        return {**self._head(self.kind), "choices": list(choices), "usage": usage}

    def chunk(self, choices: Sequence[Json], **more: Any) -> bytes:
        """Return the event of a chunk."""
        return event({**self._head(self.chunk_kind), "choices": list(choices), **more})

    def _head(self, kind: str) -> Json:
        return {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
