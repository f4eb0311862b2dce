"""The JSON of answers, whole and in chunks: texts, log-probabilities, and calls of tools."""

from __future__ import annotations

import json
import re
import time
import uuid
from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from trtserve.files import parse_json

DONE = b"data: [DONE]\n\n"
Json = dict[str, Any]
_LOWEST = -9999.0
"""What OpenAI writes for a token that cannot come: JSON has no infinity."""
_OPENING = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
Call = dict[str, Any]


def event(content: Mapping[str, Any]) -> bytes:
    """Return an event of a stream."""
    return b"data: " + to_json(content) + b"\n\n"


def usage_json(usages: Sequence[TokenUsage], prompts: Sequence[TokenUsage]) -> Json | None:
    """Return the tokens of all sequences and of each prompt once, or None where the engine did not count them."""
    prompt_tokens = [usage.prompt_tokens for usage in prompts]
    completion_tokens = [usage.completion_tokens for usage in usages]
    if None in prompt_tokens or None in completion_tokens:
        return None
    prompt, completion = sum(filter(None, prompt_tokens)), sum(filter(None, completion_tokens))
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


@dataclass(kw_only=True)
class TokenUsage:
    """Tokens of a request, as the engine counted them; None where it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def add_output(self, tokens: int) -> None:
        """Count generated tokens."""
        self.completion_tokens = (self.completion_tokens or 0) + tokens


@dataclass(kw_only=True)
class TextPiece:
    """What came at once."""

    text: str = ""
    tokens: list[TokenLogProb] = field(default_factory=list)
    """The new tokens, if log-probabilities were requested."""
    prompt: list[TokenLogProb] = field(default_factory=list)
    """The tokens of the prompt, if theirs were requested."""
    finish_reason: str | None = None
    """`stop` or `length` with the last piece."""


@dataclass(kw_only=True)
class Completion:
    """One choice of a completion while it grows."""

    index: int
    echoed: str = ""
    """The prompt, if the answer repeats it."""
    shows_log_probs: bool = False
    only_echoed: bool = False
    """Whether the client wants no token; the engine makes at least one."""
    text: str = ""
    prompt: list[TokenLogProb] = field(default_factory=list)
    """The tokens of the prompt, if the answer has their log-probabilities."""
    tokens: list[TokenLogProb] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def mean_log_prob(self) -> float:
        """Mean log-probability of its tokens, by which the best of several answers is chosen."""
        return sum(token.log_prob or 0.0 for token in self.tokens) / max(1, len(self.tokens))

    def add(self, piece: TextPiece) -> list[Json]:
        """Add a piece and return the choices of the chunks that carry it."""
        if self.only_echoed:
            piece = replace(piece, text="", tokens=[], finish_reason=piece.finish_reason and "length")
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

    def add(self, piece: TextPiece) -> list[Json]:
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


@dataclass(frozen=True)
class Token:
    """A token as it is shown."""

    text: str
    raw: bytes
    """Its bytes, which may be a part of a character."""


@dataclass(frozen=True, kw_only=True)
class TokenLogProb:
    """One token, its log-probability, and the likeliest tokens in its place."""

    token: Token
    log_prob: float | None
    """None for the first token of a prompt, which nothing precedes."""
    tops: tuple[tuple[Token, float], ...] = ()
    special: bool = False
    """Whether it is a special token of the prompt, which is not part of the text."""

    def chat(self) -> dict[str, Any]:
        """Return the entry of `choices[].logprobs.content`."""
        tops = [_entry(token, log_prob) for token, log_prob in self.tops]
        assert self.log_prob is not None  # chats have no echo
        return {**_entry(self.token, self.log_prob), "top_logprobs": tops}


def _entry(token: Token, log_prob: float) -> dict[str, Any]:
    return {"token": token.text, "logprob": log_prob, "bytes": list(token.raw)}


def completion_log_probs(tokens: Sequence[TokenLogProb], start: int) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion; `start` is the length of the text before these tokens."""
    offsets = []
    decoder = getincrementaldecoder("utf-8")("replace")  # a character counts where its last byte is
    for each in tokens:
        offsets.append(start)
        start += 0 if each.special else len(decoder.decode(each.token.raw))
    tops = [{token.text: log_prob for token, log_prob in each.tops} or None for each in tokens]
    return {
        "tokens": [each.token.text for each in tokens],
        "token_logprobs": [each.log_prob for each in tokens],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }


def token_log_probs(
    outputs: Mapping[str, NDArray[Any]], ids: Sequence[int], *, before: int, tops: int, token: Callable[[int], Token]
) -> list[TokenLogProb]:
    """Return the entries of new tokens, of which `before` came earlier in the same stream.

    With `tops` all values come from the logits, unless the engine names the most likely tokens. Otherwise they are the
    engine's, whose responses repeat those of earlier tokens.
    """
    if not ids:
        return []
    if tops and "top_log_probs" not in outputs:
        logits = outputs["generation_logits"]
        rows = logits.reshape(-1, logits.shape[-1])[: len(ids)].astype(np.float64)
        return [_with_tops(row, each, tops, token) for row, each in zip(rows, ids, strict=True)]
    values = outputs["output_log_probs"].reshape(-1).tolist()
    new = values[before : before + len(ids)] or values[: len(ids)]
    best = _named_tops(outputs, token) if tops else [()] * len(ids)
    return [
        TokenLogProb(token=token(each), log_prob=max(value, _LOWEST), tops=others)
        for each, value, others in zip(ids, new, best, strict=False)
    ]


def _named_tops(
    outputs: Mapping[str, NDArray[Any]], token: Callable[[int], Token]
) -> list[tuple[tuple[Token, float], ...]]:
    """Return the most likely tokens of each new token; rows are padded with -1."""
    ids, values = (outputs[name][0].tolist() for name in ("top_log_probs_ids", "top_log_probs"))
    return [
        tuple((token(each), max(value, _LOWEST)) for each, value in zip(*row, strict=True) if each >= 0)
        for row in zip(ids, values, strict=True)
    ]


def prompt_log_probs(
    logits: NDArray[Any], ids: Sequence[int], *, tops: int, token: Callable[[int], Token]
) -> list[TokenLogProb]:
    """Return the entries of a prompt; the row of a token in `logits` [..., token, vocabulary] is for the next one."""
    rows = logits.reshape(-1, logits.shape[-1])
    rest = [_with_tops(row.astype(np.float64), each, tops, token) for row, each in zip(rows, ids[1:], strict=False)]
    return [TokenLogProb(token=token(ids[0]), log_prob=None), *rest]


def _with_tops(logits: NDArray[np.float64], chosen: int, tops: int, token: Callable[[int], Token]) -> TokenLogProb:
    highest = float(logits.max())
    log_probs = np.maximum(logits - highest - np.log(np.exp(logits - highest).sum()), _LOWEST)
    best = np.argsort(-log_probs, kind="stable")[:tops] if tops else ()
    return TokenLogProb(
        token=token(chosen),
        log_prob=float(log_probs[chosen]),
        tops=tuple((token(int(each)), float(log_probs[each])) for each in best),
    )


class CallReader:
    """Separates the text of an answer from its calls.

    Text is released as it comes until a call may begin; the rest waits for the end.
    """

    def __init__(self, names: Collection[str], *, required: bool = False) -> None:
        """`names` are the tools; without any, all is text. With `required` nothing is: a call that was cut is none."""
        self._names = names
        self._required = required
        self._text = ""
        self._released = 0

    def add(self, piece: str) -> str:
        """Return the text that is certain not to belong to a call."""
        if not self._names:
            return piece
        self._text += piece
        return self._release(len(self._text) if (at := self._start()) is None else at)

    def finish(self) -> tuple[str, list[Call]]:
        """Return the rest of the text, and the calls."""
        at = self._start()
        calls = [] if at is None else self._calls(self._text[at:])
        rest = at is not None and not calls and not self._required
        return (self._release(len(self._text)) if rest else ""), calls

    def _release(self, end: int) -> str:
        start, self._released = self._released, max(self._released, end)
        return self._text[start:end]

    def _start(self) -> int | None:
        """Return where a call begins or may begin."""
        stripped = self._text.lstrip()
        if stripped.startswith(("{", "[")):
            return 0
        at = self._text.find(_OPENING)
        if at >= 0:
            return at
        sizes = range(min(len(self._text), len(_OPENING) - 1), 0, -1)
        return next((len(self._text) - size for size in sizes if self._text.endswith(_OPENING[:size])), None)

    def _calls(self, text: str) -> list[Call]:
        found = _CALL.findall(text) or [text]
        calls: list[Call] = []
        for each in found:
            try:
                content = parse_json(each)
            except ValueError:
                return []
            for call in content if isinstance(content, list) else [content]:
                arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
                if arguments is None or call.get("name") not in self._names:
                    return []
                function = {"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        return calls
