"""The answer of the engine to one request: text, token ids and log-probabilities, piece by piece."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from trtserve.client.endpoint import understood
from trtserve.client.grpc_transport import GrpcTransport
from trtserve.client.tensors import IDS_INPUT, ModelRequest, Reply, stop_request
from trtserve.client.transport import STOP_TIMEOUT
from trtserve.errors import RequestError, TrtserveError
from trtserve.gateway.admission import stop_until_ended
from trtserve.gateway.openai.answers import (
    TextPiece,
    TokenLogProb,
    TokenUsage,
    named_prompt_log_probs,
    prompt_log_probs,
    token_log_probs,
)
from trtserve.gateway.openai.reading import overlap
from trtserve.gateway.openai.request import EngineRequest, with_adapter_weights
from trtserve.gateway.openai.served import Backend, ServedModel
from trtserve.gateway.replicas import Replica
from trtserve.programs.bls.texts import IncrementalText
from trtserve.programs.shared.lora_names import NOT_CACHED

_UNFINISHED = ("", "not_finished", "None")  # the last one from NVIDIA's vllm backend
# A stop is repeated, ever more rarely, until its request has ended.
_FIRST_PAUSE = 0.25
_STOPPED_WITHIN = 60.0
T = TypeVar("T")


async def generate(
    backend: Backend, served: ServedModel, request: EngineRequest, usage: TokenUsage, sequence: T
) -> AsyncGenerator[tuple[T, TextPiece], None]:
    """Yield the answer of one request, each piece with its `sequence`, and count its tokens in `usage`.

    A request whose iteration ends early is stopped in the engine.
    """
    call = EngineCall(backend, served, request)
    reader = _IdsReader(served, request, usage) if served.takes_ids else _TextReader(served, request, usage)
    stopped, begun, ended, echoed = TextBeforeStop(request.stops), False, False, False
    waiting, ids = list[TokenLogProb](), list[int]()
    try:
        while replies := await call.replies():
            with understood():
                piece = reader.read(replies)
            if request.echoes_log_probs and not echoed:
                echoed = True
                piece.prompt = await asyncio.to_thread(_prompt_log_probs, served, request, replies)
            ended = piece.finish_reason is not None
            piece.text = stopped.add(piece.text, last=ended)
            if request.prompt.chat and not begun:  # templates end before the space that begins the answer
                piece.text = piece.text.lstrip(" ")
            begun = begun or bool(piece.text)
            if waiting or ids:
                piece.tokens, piece.ids = [*waiting, *piece.tokens], [*ids, *piece.ids]
            if stopped.stopped:
                piece.finish_reason, piece.stop = "stop", stopped.stop
            if piece.text or piece.finish_reason is not None:
                yield sequence, piece
                waiting, ids = [], []
            else:
                waiting, ids = piece.tokens, piece.ids
            if piece.finish_reason is not None:
                return
        ended = True
        # Releases before 1.2 do not say why an answer ended.
        full = (usage.completion_tokens or 0) >= request.max_tokens
        rest = stopped.add(reader.rest(), last=True)
        reason = "length" if full and not stopped.stopped else "stop"
        yield sequence, TextPiece(text=rest, tokens=waiting, ids=ids, finish_reason=reason, stop=stopped.stop)
    finally:
        if not ended:
            call.abandon()


class _IdsReader:
    """Reads responses of the core model."""

    def __init__(self, served: ServedModel, request: EngineRequest, usage: TokenUsage) -> None:
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
        self._token = served.token_by_id if request.tokens_as_ids else served.token
        self._generated = 0

    def read(self, replies: Sequence[Reply]) -> TextPiece:
        """Return what these responses add."""
        piece, ids = TextPiece(), list[int]()
        for reply in replies:
            new = _ids(reply)[self._skip :]
            if self._request.tops is not None:
                piece.tokens += token_log_probs(
                    reply.outputs, new, before=self._generated, tops=self._request.tops, token=self._token
                )
            self._generated += len(new)
            ids += new
            if self._request.prompt.images:
                self._usage.prompt_tokens = next(iter(_numbers(reply, "num_input_tokens")), self._usage.prompt_tokens)
            piece.finish_reason = _finish_reason(reply) or piece.finish_reason
        self._usage.add_output(len(ids))
        piece.ids = ids
        piece.text = self._text_of(ids)
        if piece.finish_reason is not None:
            piece.text += self._text.finish()
        return piece

    def rest(self) -> str:
        """Return what was held back until the end."""
        return self._text.finish()

    def _text_of(self, ids: list[int]) -> str:
        """Return the text of new tokens, in which the marks of the model's dialect stay although they are special."""
        marks = self._request.prompt.marks
        if marks.keys().isdisjoint(ids):
            return self._text.add(ids)
        text, run = "", list[int]()
        for each in ids:
            if each in marks:
                text += self._text.add(run) + self._text.finish() + marks[each]
                run = []
            else:
                run.append(each)
        return text + self._text.add(run)


class _TextReader:
    """Reads responses of a model that returns text."""

    def __init__(self, served: ServedModel, request: EngineRequest, usage: TokenUsage) -> None:
        self._model, self._request, self._usage = served.model, request, usage
        self._cumulative = request.streams and served.model.flag("accumulate_tokens")
        self._seen = ""
        usage.prompt_tokens = request.prompt.tokens

    def read(self, replies: Sequence[Reply]) -> TextPiece:
        """Return what these responses add."""
        piece = TextPiece()
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


def _prompt_log_probs(served: ServedModel, request: EngineRequest, replies: Sequence[Reply]) -> list[TokenLogProb]:
    """Return the tokens of the prompt; each takes a millisecond. Raises RequestError if their logits did not come."""
    ids, tops = request.prompt.ids, request.tops or 0
    token_of = served.token_by_id if request.tokens_as_ids else served.token
    special = set(served.require_tokenizer("echo").tokenizer.all_special_ids)
    named = next((reply.outputs for reply in replies if "prompt_log_probs" in reply.outputs), None)
    if named is not None:
        found = named_prompt_log_probs(named, ids, tops=tops, token=token_of)
        return [replace(entry, special=token in special) for entry, token in zip(found, ids, strict=True)]
    logits = next((reply.outputs["context_logits"] for reply in replies if "context_logits" in reply.outputs), None)
    if logits is None or logits.size // logits.shape[-1] < len(ids):
        raise RequestError("The engine did not return the logits of the prompt, which echo with logprobs needs.")
    found = prompt_log_probs(logits, ids, tops=tops, token=token_of)
    return [replace(entry, special=token in special) for entry, token in zip(found, ids, strict=True)]


def _ids(reply: Reply) -> list[int]:
    return reply.numbers("output_ids")[: reply.numbers("sequence_length")[0]]


def _numbers(reply: Reply, name: str) -> list[int]:
    return reply.numbers(name) if name in reply.outputs else []


def _finish_reason(reply: Reply) -> str | None:
    """Return OpenAI's word for why the answer ended, or None while it goes on and where the server does not say."""
    reason = str(reply.parameters.get("finish_reason", ""))
    if "finish_reason" in reply.outputs and (output := reply.outputs["finish_reason"]).size:
        reason = str(output.reshape(-1)[0]) or reason
    if reason in _UNFINISHED:
        return None
    return "length" if reason == "length" else "stop"


class EngineCall:
    """A request that is running.

    A task of its own reads the responses: cancelling a read cancels the call, and that can crash the gRPC front end of
    Triton 2.51 when the answer ends at the same moment. A request is stopped by its id instead.
    """

    def __init__(self, backend: Backend, served: ServedModel, request: EngineRequest) -> None:
        self._backend, self._served, self._request = backend, served, request
        self._id = uuid.uuid4().hex
        self._arrived: list[Reply] = []
        self._ended = False
        self._error: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._begun = False
        self._client: GrpcTransport | None = None
        self._reader = backend.spawn(self._read())

    async def replies(self) -> list[Reply]:
        """Return the responses that have arrived since the last call, once there are any; none at the end.

        Raises RequestError or ServerUnreachableError after the last response.
        """
        if not self._arrived and not self._ended:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
            self._waiting = None
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            return arrived
        if self._error is not None:
            raise self._error
        return []

    def abandon(self) -> None:
        """Stop the request in the engine, unless it has ended."""
        if not self._reader.done():
            self._backend.spawn(self._stop())

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _read(self) -> None:
        try:
            await self._read_from_any()
        except Exception as error:  # noqa: BLE001 - who waits for the responses raises it
            self._error = error
        self._ended = True
        self._wake()

    async def _read_from_any(self) -> None:
        ids = self._request.tensors.get(IDS_INPUT)
        prompt = () if ids is None else ids.values
        await self._backend.replicas.send(self._read_of, prompt, begun=lambda: self._begun)

    async def _read_of(self, replica: Replica) -> None:
        self._client = replica.client
        await self._read_from(replica, self._request)

    async def _read_from(self, replica: Replica, request: EngineRequest) -> None:
        replies = replica.client.infer(
            ModelRequest(
                model=self._served.model,
                tensors=list(request.tensors.values()),
                id=self._id,
                stream=True,
                outputs=request.outputs,
                timeout=self._backend.timeout,
            )
        )
        try:
            async for reply in replies:
                replica.hear()
                self._arrived.append(reply)
                if not self._begun:
                    self._begun = True
                    self._wake()  # the first token waits for nothing
                elif self._waiting is not None:
                    self._backend.quiet_moment.wake(self._waiting)
        except RequestError as error:
            if request.adapter is None or "lora_weights" in request.tensors or NOT_CACHED not in error.message:
                raise
            await self._read_from(replica, with_adapter_weights(self._served, request))

    async def _stop(self) -> None:
        core, client = self._served.core, self._client
        # The LLM API's model sees that its call was cancelled.
        if core is None or client is None or IDS_INPUT not in core.inputs:
            self._reader.cancel()
            return

        async def stop() -> None:
            with suppress(TrtserveError):  # the server may be gone
                async for _ in client.infer(stop_request(core, self._id, timeout=STOP_TIMEOUT)):
                    pass

        await stop_until_ended(self._reader, stop, within=_STOPPED_WITHIN, pause=_FIRST_PAUSE, growth=2)


class TextBeforeStop:
    """A growing text without its stop string; an end that may begin one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stop: str | None = None
        """The stop string that came."""

    @property
    def stopped(self) -> bool:
        """Whether one came."""
        return self.stop is not None

    def add(self, piece: str, *, last: bool = False) -> str:
        """Return what the next piece adds to the text; `last`: nothing follows, so nothing is held back."""
        if self.stopped:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        if starts := [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]:
            first, self.stop = min(starts)
            return text[:first]
        keep = 0 if last else max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
