"""The JSON of answers, whole and in chunks: texts, log-probabilities, and calls of tools."""

from __future__ import annotations

import time
import uuid
from bisect import bisect_left, bisect_right
from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from trtserve._version import __version__
from trtserve.files import parse_json
from trtserve.gateway.openai.reading import Call, Part, Reader

DONE = b"data: [DONE]\n\n"
Json = dict[str, Any]
_LOWEST = -9999.0
"""What OpenAI writes for a token that cannot come: JSON has no infinity."""


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
    discarded: bool = False
    """Whether the client gets none of the generated tokens, so that they do not count."""

    def add_output(self, tokens: int) -> None:
        """Count generated tokens."""
        self.completion_tokens = (self.completion_tokens or 0) + (0 if self.discarded else tokens)


@dataclass(kw_only=True, slots=True)
class TextPiece:
    """What came at once."""

    text: str = ""
    tokens: list[TokenLogProb] = field(default_factory=list)
    """The new tokens, if log-probabilities were requested."""
    prompt: list[TokenLogProb] = field(default_factory=list)
    """The tokens of the prompt, if theirs were requested."""
    ids: list[int] = field(default_factory=list)
    """The ids of the new tokens, where the engine names them."""
    finish_reason: str | None = None
    """`stop` or `length` with the last piece."""
    stop: str | None = None
    """The stop string that ended the text, with the last piece."""


@dataclass(kw_only=True)
class Completion:
    """One choice of a completion while it grows."""

    index: int
    echoed: str = ""
    """The prompt, if the answer repeats it."""
    shows_log_probs: bool = False
    shows_prompt: bool = False
    """Whether the tokens of the prompt are named beside the answer, as vLLM does."""
    only_echoed: bool = False
    """Whether the client wants no token; the engine makes at least one."""
    text: str = ""
    prompt: list[TokenLogProb] = field(default_factory=list)
    """The tokens of the prompt, if the answer has their log-probabilities."""
    tokens: list[TokenLogProb] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    shows_ids: bool = False
    prompt_ids: Sequence[int] = ()
    """The ids of the prompt, if the client wants ids."""
    finish_reason: str | None = None

    @property
    def mean_log_prob(self) -> float:
        """Mean log-probability of its tokens, by which the best of several answers is chosen."""
        return sum(token.log_prob or 0.0 for token in self.tokens) / max(1, len(self.tokens))

    def chunks(self, piece: TextPiece) -> list[Json]:
        """Add a piece and return the choices of the chunks that carry it."""
        if self.only_echoed:
            piece = replace(piece, text="", tokens=[], ids=[], finish_reason=piece.finish_reason and "length")
        text = piece.text if self.text else self.echoed + piece.text
        choice = self._choice(text, piece.tokens, start=len(self.text), finish_reason=piece.finish_reason)
        self.text += text
        self.prompt += piece.prompt
        self.tokens += piece.tokens
        self.ids += piece.ids
        self.finish_reason = piece.finish_reason
        if self.shows_ids:
            choice["token_ids"] = piece.ids
            if self.prompt_ids and len(self.ids) == len(piece.ids):  # told once
                choice["prompt_token_ids"] = list(self.prompt_ids)
        return [choice]

    def whole(self) -> Json:
        """Return the choice of the whole answer."""
        echoed = self.prompt if self.echoed else []
        choice = self._choice(self.text, [*echoed, *self.tokens], start=0, finish_reason=self.finish_reason)
        choice["prompt_logprobs"] = [each.by_id() for each in self.prompt] if self.shows_prompt else None
        choice["prompt_token_ids"] = list(self.prompt_ids) if self.shows_ids else None
        return {**choice, "token_ids": self.ids} if self.shows_ids else choice

    def _choice(self, text: str, tokens: Sequence[TokenLogProb], *, start: int, finish_reason: str | None) -> Json:
        log_probs = completion_log_probs(tokens, start) if tokens and self.shows_log_probs else None
        return {"index": self.index, "text": text, "logprobs": log_probs, "finish_reason": finish_reason}


@dataclass(kw_only=True)
class AnswerBlock:
    """Thoughts, text or a call, between which an answer changes."""

    kind: Literal["reasoning", "text", "call"]
    call: Call | None = None
    pieces: list[str] = field(default_factory=list)
    tokens: list[TokenLogProb] = field(default_factory=list)
    """Those of a text, if log-probabilities were requested."""

    @property
    def text(self) -> str:
        """Thoughts or text so far."""
        return "".join(self.pieces)

    def add(self, part: Part) -> None:
        """Add what continues it."""
        self.pieces.append(part.text)
        self.tokens += part.tokens


@dataclass(kw_only=True)
class Message:
    """One answer of a conversation while it grows, whatever the API."""

    index: int
    reader: Reader
    named: bool = False
    """Whether the client prescribed the tool, so that its call does not count as the reason to end."""
    parallel: bool = True
    """Whether there may be more than one call."""
    shows_reasoning: bool = True
    blocks: list[AnswerBlock] = field(default_factory=list)
    tokens: list[TokenLogProb] = field(default_factory=list)
    held: list[TokenLogProb] = field(default_factory=list)
    """Tokens whose text the reader holds back."""
    ids: list[int] = field(default_factory=list)
    reasoning_tokens: int = 0
    """Tokens of the pieces with thoughts; of a piece with other text too the share of its characters."""
    finish_reason: str | None = None
    """OpenAI's: `stop`, `length` or `tool_calls`."""
    stop: str | None = None
    """The stop string that ended it."""

    @property
    def text(self) -> str:
        """What was said."""
        return "".join(block.text for block in self.blocks if block.kind == "text")

    @property
    def reasoning(self) -> str:
        """What was thought."""
        return "".join(block.text for block in self.blocks if block.kind == "reasoning")

    @property
    def calls(self) -> list[Call]:
        """The calls of tools."""
        return [block.call for block in self.blocks if block.call is not None]

    def add(self, piece: TextPiece) -> list[Part]:
        """Add a piece and return the parts that it completes."""
        parts = list(self.reader.add(piece.text)) if piece.text else []
        if piece.finish_reason is not None:
            parts += self.reader.finish()
        if thought := sum(len(part.text) for part in parts if part.kind == "reasoning"):
            self.reasoning_tokens += round(len(piece.ids) * thought / sum(len(part.text) for part in parts))
        self.held += piece.tokens
        if parts:
            self.held = _share(self.held, parts)
        parts = [part for part in parts if self._kept(part)]
        for part in parts:
            if part.kind == "arguments":  # they grow in the call itself
                continue
            if part.kind == "call" or self._kind != part.kind:
                self.blocks.append(AnswerBlock(kind=part.kind, call=part.call))
            self.blocks[-1].add(part)
        self.tokens += piece.tokens
        self.ids += piece.ids
        if piece.finish_reason is not None:
            calls = piece.finish_reason == "stop" and self.calls and not self.named
            self.finish_reason, self.stop = "tool_calls" if calls else piece.finish_reason, piece.stop
        return parts

    @property
    def _kind(self) -> str:
        return self.blocks[-1].kind if self.blocks else ""

    def _kept(self, part: Part) -> bool:
        if part.call is not None:
            return self.parallel or part.call.index == 0
        return part.kind != "reasoning" or self.shows_reasoning


@dataclass(kw_only=True)
class ChatAnswer(Message):
    """One choice of a chat while it grows."""

    begun: bool = False
    """Whether a chunk with the role was sent."""
    prompt: list[TokenLogProb] = field(default_factory=list)
    """The tokens of the prompt, if their log-probabilities were requested."""
    shows_log_probs: bool = False
    shows_ids: bool = False

    def chunks(self, piece: TextPiece) -> list[Json]:
        """Add a piece and return the choices of the chunks that carry it."""
        parts, choices = self.add(piece), list[Json]()
        self.prompt += piece.prompt
        shown = piece.ids if self.shows_ids else []
        if not (parts or piece.tokens or shown or self.finish_reason):
            return []  # of a text that may become a call
        if not self.begun:
            self.begun = True
            calls = bool(parts) and parts[0].kind == "call"  # otherwise clients begin an empty text
            choices.append(self._chunk({"role": "assistant", "content": None if calls else ""}))
        tokens: Sequence[TokenLogProb] = piece.tokens
        for part in parts:
            choices.append(self._chunk(_delta(part), tokens))
            tokens = ()
        if tokens or (shown and not choices):
            choices.append(self._chunk({"content": ""}, tokens))
        if self.finish_reason is not None:
            choices.append(self._chunk({}, finish_reason=self.finish_reason))
        if shown:
            choices[-1]["token_ids"] = shown
        return choices

    def whole(self) -> Json:
        """Return the choice of the whole answer."""
        message: Json = {
            "role": "assistant",
            "content": self.text or None if self.calls else self.text,
            "refusal": None,
        }
        if self.reasoning:
            message |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}
        if self.calls:
            message["tool_calls"] = [call_json(call, call.arguments or "{}") for call in self.calls]
        return {
            "index": self.index,
            "message": message,
            "logprobs": _chat_log_probs(self.tokens) if self.shows_log_probs else None,
            "finish_reason": self.finish_reason,
            **({"token_ids": self.ids} if self.shows_ids else {}),
        }

    def _chunk(self, delta: Json, tokens: Sequence[TokenLogProb] = (), finish_reason: str | None = None) -> Json:
        log_probs = _chat_log_probs(tokens)
        return {"index": self.index, "delta": delta, "logprobs": log_probs, "finish_reason": finish_reason}


def _share(tokens: Sequence[TokenLogProb], parts: Sequence[Part]) -> list[TokenLogProb]:
    """Give each part of text the tokens that spell it, among those of thoughts, calls and marks.

    Return the tokens behind the last part, whose own text may follow.
    """
    spelled, end = b"".join(each.token.raw for each in tokens), 0
    starts = list(accumulate((len(each.token.raw) for each in tokens), initial=0))
    for part in parts if tokens else ():
        text = part.text.encode()
        start = max(end, spelled.find(text, end))
        if part.kind == "text":  # a mark before it may have its letters, but no token that begins with it
            ahead = (starts[place] for place in range(bisect_left(starts, start), len(tokens)))
            start = next((each for each in ahead if spelled.startswith(text, each)), start)
            part.tokens = tokens[bisect_right(starts, start) - 1 : bisect_left(starts, start + len(text))]
        end = start + len(text)
    if parts[-1].kind in ("call", "arguments"):  # nobody asks for their tokens
        return []
    return list(tokens[bisect_left(starts, end) :])


def call_json(call: Call, arguments: str) -> Json:
    """Return a call of a tool in OpenAI's JSON."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def arguments_of(text: str) -> Json:
    """Return the arguments of a call as an object; those of one that was cut are none."""
    try:
        found = parse_json(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {"value": found}


def _delta(part: Part) -> Json:
    if part.kind == "text":
        return {"content": part.text}
    if part.kind == "reasoning":
        return {"reasoning_content": part.text, "reasoning": part.text}
    assert part.call is not None
    if part.kind == "call":
        return {"tool_calls": [{"index": part.call.index, **call_json(part.call, "")}]}
    return {"tool_calls": [{"index": part.call.index, "function": {"arguments": part.text}}]}


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

    def chunk(self, choices: Sequence[Json], more: Json | None = None) -> bytes:
        """Return the event of a chunk, with `more` keys. What all chunks have in common is encoded once."""
        rest = b"," + to_json(more)[1:] if more else b"}"
        return self._opening + to_json(choices) + rest + b"\n\n"

    @cached_property
    def _opening(self) -> bytes:
        return b"data: " + to_json(self._head(self.chunk_kind))[:-1] + b',"choices":'

    def _head(self, kind: str) -> Json:
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"trtserve-{__version__}",
        }


@dataclass(frozen=True)
class Token:
    """A token as it is shown."""

    text: str
    raw: bytes
    """Its bytes, which may be a part of a character."""
    id: int = -1
    shown: str = ""
    """What stands for it, if not its text."""

    @property
    def name(self) -> str:
        """The text, or as in OpenAI's completions the bytes of a part of a character: several have the same text."""
        if self.shown:
            return self.shown
        if self.text.encode() == self.raw:
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.raw)


@dataclass(frozen=True, kw_only=True)
class TokenLogProb:
    """One token, its log-probability, and the likeliest tokens in its place."""

    token: Token
    log_prob: float | None
    """None for the first token of a prompt, which nothing precedes."""
    tops: tuple[tuple[Token, float], ...] = ()
    special: bool = False
    """Whether it is a special token of the prompt, which is not part of the text."""

    @property
    def named(self) -> list[tuple[Token, float | None]]:
        """The likeliest tokens, and the token itself."""
        return [*self.tops, (self.token, self.log_prob)]

    def by_id(self) -> dict[str, Any] | None:
        """Return the token and the likeliest ones by their ids, with their ranks where these are known, as in vLLM."""
        if self.log_prob is None:
            return None
        named: dict[int, tuple[Token, float, int | None]]
        named = {token.id: (token, value, rank) for rank, (token, value) in enumerate(self.tops, 1)}
        named.setdefault(self.token.id, (self.token, self.log_prob, None))
        return {
            str(number): {"logprob": value, "rank": rank, "decoded_token": token.text}
            for number, (token, value, rank) in named.items()
        }

    def chat(self) -> dict[str, Any]:
        """Return the entry of `choices[].logprobs.content`."""
        tops = [_entry(token, log_prob) for token, log_prob in self.tops]
        assert self.log_prob is not None  # chats have no echo
        return {**_entry(self.token, self.log_prob), "top_logprobs": tops}


def _entry(token: Token, log_prob: float) -> dict[str, Any]:
    return {"token": token.shown or token.text, "logprob": log_prob, "bytes": list(token.raw)}


def completion_log_probs(tokens: Sequence[TokenLogProb], start: int) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion; `start` is the length of the text before these tokens."""
    offsets = []
    decoder = getincrementaldecoder("utf-8")("replace")  # a character counts where its last byte is
    for each in tokens:
        offsets.append(start)
        start += 0 if each.special else len(decoder.decode(each.token.raw))
    tops = [None if each.log_prob is None else {token.name: value for token, value in each.named} for each in tokens]
    return {
        "tokens": [each.token.name for each in tokens],
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
        TokenLogProb(token=token(each), log_prob=_number(value), tops=others)
        for each, value, others in zip(ids, new, best, strict=False)
    ]


def _number(log_prob: float) -> float:
    """Return a log-probability as JSON has it: -inf, and NaN of an overflow in the model, become the lowest number."""
    return max(_LOWEST, log_prob)


def named_prompt_log_probs(
    outputs: Mapping[str, NDArray[Any]], ids: Sequence[int], *, tops: int, token: Callable[[int], Token]
) -> list[TokenLogProb]:
    """Return the entries of a prompt whose log-probabilities the engine names."""
    values = outputs["prompt_log_probs"].reshape(-1).tolist()
    best = _named_tops(outputs, token, "prompt_top_log_probs") if tops else [()] * len(values)
    rest = [
        TokenLogProb(token=token(each), log_prob=_number(value), tops=others)
        for each, value, others in zip(ids[1:], values, best, strict=True)
    ]
    return [TokenLogProb(token=token(ids[0]), log_prob=None), *rest]


def _named_tops(
    outputs: Mapping[str, NDArray[Any]], token: Callable[[int], Token], name: str = "top_log_probs"
) -> list[tuple[tuple[Token, float], ...]]:
    """Return the most likely tokens of each new token; rows are padded with -1."""
    ids, values = (outputs[each][0].tolist() for each in (f"{name}_ids", name))
    return [
        tuple((token(each), _number(value)) for each, value in zip(*row, strict=True) if each >= 0)
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
