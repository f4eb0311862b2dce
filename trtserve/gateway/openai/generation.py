"""The answer to one engine request: text, token ids and log-probabilities, piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trtserve.client.tensors import Reply
from trtserve.errors import RequestError
from trtserve.gateway.openai.engine_call import EngineCall
from trtserve.gateway.openai.log_probs import TokenLogProb, prompt_log_probs, token_log_probs
from trtserve.gateway.openai.request import EngineRequest
from trtserve.gateway.openai.served import Backend, Served
from trtserve.gateway.openai.stop_strings import StoppedText
from trtserve.programs.bls.texts import IncrementalText

_UNFINISHED = ("", "not_finished")


@dataclass(kw_only=True)
class Usage:
    """Tokens of a request, as the engine counted them; None where it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def add_output(self, tokens: int) -> None:
        """Count generated tokens."""
        self.completion_tokens = (self.completion_tokens or 0) + tokens


@dataclass(kw_only=True)
class Piece:
    """What came at once."""

    text: str = ""
    tokens: list[TokenLogProb] = field(default_factory=list)
    """The new tokens, if log-probabilities were requested."""
    prompt: list[TokenLogProb] = field(default_factory=list)
    """The tokens of the prompt, if theirs were requested."""
    finish_reason: str | None = None
    """`stop` or `length` with the last piece."""


async def generate(
    backend: Backend, served: Served, request: EngineRequest, usage: Usage
) -> AsyncGenerator[Piece, None]:
    """Yield the answer of one request, and count its tokens in `usage`.

    A request whose iteration ends early is stopped in the engine.
    """
    call = EngineCall(backend, served, request)
    reader = _IdsReader(served, request, usage) if served.takes_ids else _TextReader(served, request, usage)
    stopped, begun, ended, echoed = StoppedText(request.stops), False, False, False
    waiting: list[TokenLogProb] = []
    try:
        async for replies in call.replies():
            piece = reader.read(replies)
            if request.echoes_log_probs and not echoed:
                echoed = True
                piece.prompt = await asyncio.to_thread(_prompt_log_probs, served, request, replies)
            ended = piece.finish_reason is not None
            piece.text = stopped.add(piece.text, last=ended)
            if request.prompt.chat and not begun:  # templates end before the space that begins the answer
                piece.text = piece.text.lstrip(" ")
            begun = begun or bool(piece.text)
            piece.tokens = waiting = [*waiting, *piece.tokens]
            if stopped.stopped:
                piece.finish_reason = "stop"
            if piece.text or piece.finish_reason is not None:
                yield piece
                waiting = []
            if piece.finish_reason is not None:
                return
        ended = True
        # Releases before 1.2 do not say why an answer ended.
        full = (usage.completion_tokens or 0) >= request.max_tokens
        rest = stopped.add(reader.rest(), last=True)
        yield Piece(text=rest, tokens=waiting, finish_reason="length" if full and not stopped.stopped else "stop")
    finally:
        if not ended:
            call.abandon()


class _IdsReader:
    """Reads responses of the core model."""

    def __init__(self, served: Served, request: EngineRequest, usage: Usage) -> None:
        assert served.decoder is not None
        self._served, self._request, self._usage = served, request, usage
        self._decoder = served.decoder
        self._text = IncrementalText(self._decoder.decode)
        model, prompt = served.model, request.prompt.ids
        usage.prompt_tokens = len(prompt)
        usage.add_output(0)
        # Releases before 0.14 have no input that excludes the prompt from an answer that is not streamed.
        excludes = "exclude_input_in_output" in model.inputs or model.flag("exclude_input_in_output")
        self._skip = 0 if request.streams or excludes else len(prompt)
        self._generated = 0

    def read(self, replies: Sequence[Reply]) -> Piece:
        """Return what these responses add."""
        piece, ids = Piece(), list[int]()
        for reply in replies:
            new = _ids(reply)[self._skip :]
            if self._request.tops is not None:
                piece.tokens += token_log_probs(
                    reply.outputs, new, before=self._generated, tops=self._request.tops, text=self._served.token_text
                )
            self._generated += len(new)
            ids += new
            piece.finish_reason = _finish_reason(reply) or piece.finish_reason
        self._usage.add_output(len(ids))
        piece.text = self._text.add(ids)
        if piece.finish_reason is not None:
            piece.text += self._text.finish()
        return piece

    def rest(self) -> str:
        """Return what was held back until the end."""
        return self._text.finish()


class _TextReader:
    """Reads responses of a model that returns text."""

    def __init__(self, served: Served, request: EngineRequest, usage: Usage) -> None:
        self._model, self._request, self._usage = served.model, request, usage
        self._cumulative = request.streams and served.model.flag("accumulate_tokens")
        self._seen = ""
        if served.files is not None and request.prompt.text is not None:
            special = served.adds_special
            usage.prompt_tokens = len(served.files.encode(request.prompt.text, special=special))

    def read(self, replies: Sequence[Reply]) -> Piece:
        """Return what these responses add."""
        piece = Piece()
        for reply in replies:
            piece.text += self._new_text(reply)
            piece.finish_reason = _finish_reason(reply) or piece.finish_reason
            for counted in _numbers(reply, "num_output_tokens"):
                self._usage.add_output(counted)
            for counted in _numbers(reply, "num_input_tokens"):
                self._usage.prompt_tokens = counted
        return piece

    def rest(self) -> str:
        """Return nothing: the server holds no text back."""
        return ""

    def _new_text(self, reply: Reply) -> str:
        output = reply.outputs.get("text_output")
        text = "" if output is None or not output.size else str(output.reshape(-1)[0])
        if self._cumulative:
            self._seen, text = text or self._seen, text[len(self._seen) :]
        elif not self._request.streams and not self._model.has("exclude_input_in_output"):
            text = text.removeprefix(self._request.prompt.text or "")
        return text


def _prompt_log_probs(served: Served, request: EngineRequest, replies: Sequence[Reply]) -> list[TokenLogProb]:
    """Return the tokens of the prompt; each takes a millisecond. Raises RequestError if their logits did not come."""
    ids, tops = request.prompt.ids, request.tops or 0
    logits = next((reply.outputs["context_logits"] for reply in replies if "context_logits" in reply.outputs), None)
    if logits is None or logits.size // logits.shape[-1] < len(ids):
        raise RequestError("The engine did not return the logits of the prompt, which echo with logprobs needs.")
    special = set(served.require_tokenizer("echo").tokenizer.all_special_ids)
    found = prompt_log_probs(logits, ids, tops=tops, text=served.token_text)
    return [replace(entry, special=token in special) for entry, token in zip(found, ids, strict=True)]


def _ids(reply: Reply) -> list[int]:
    ids, lengths = reply.outputs["output_ids"], reply.outputs["sequence_length"]
    flat: list[int] = ids.reshape(-1)[: int(lengths.reshape(-1)[0])].tolist()
    return flat


def _numbers(reply: Reply, name: str) -> list[int]:
    return [int(number) for number in reply.outputs[name].reshape(-1)] if name in reply.outputs else []


def _finish_reason(reply: Reply) -> str | None:
    """Return OpenAI's word for why the answer ended, or None while it goes on and where the server does not say."""
    output: Any = reply.outputs.get("finish_reason")
    reason = str(output.reshape(-1)[0]) if output is not None and output.size else ""
    reason = reason or str(reply.parameters.get("finish_reason", ""))
    if reason in _UNFINISHED:
        return None
    return "length" if reason == "length" else "stop"
