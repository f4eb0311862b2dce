"""Query a served model: choose the model, send the request, stop it when asked to; alone or in a conversation."""

from __future__ import annotations

import json
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trtserve.client.answer import Answer, Generation
from trtserve.client.endpoint import Endpoint, RequestCancelledError
from trtserve.client.grpc_transport import grpc_client
from trtserve.client.request import RequestContext, model_request, with_named_adapter
from trtserve.client.spec import QuerySpec
from trtserve.client.tensors import (
    IDS_INPUT,
    STANDARD_MODELS,
    TEXT_INPUT,
    VLLM_INPUT,
    ModelDescription,
    stop_request,
)
from trtserve.client.tokenizer import core_name, messages, prepare_prompts
from trtserve.client.transport import STOP_TIMEOUT, SyncClient
from trtserve.errors import RequestError, TrtserveError, UsageError
from trtserve.files import write_whole

STOP_INTERVAL = 0.25
_STOPPED_WITHIN = 5.0  # on a busy machine it takes seconds to reach the server

OnText = Callable[[str], None]
OnStart = Callable[[RequestContext], None]
TextFilter = Callable[[str | None], str]
"""Takes the pieces of an answer, and None at its end; returns what of them is said, and not thought."""
Pieces = Generator[str, None, Generation]  # the pieces of a text as they arrive, and then the answer


def generate(
    spec: QuerySpec, server: Endpoint, *, on_text: OnText | None = None, on_start: OnStart | None = None
) -> Generation:
    """Send one request: a single prompt, or with `spec.batch` several as its rows. See `generate_each`."""
    if spec.rows > 1 and not spec.batch:
        raise UsageError("Several prompts need several requests: use generate_each, or set batch.")
    return next(iter(generate_each(spec, server, on_text=on_text, on_start=on_start)))


def generate_each(
    spec: QuerySpec, server: Endpoint, *, on_text: OnText | None = None, on_start: OnStart | None = None
) -> Iterator[Generation]:
    """Send every prompt of `spec` as a request of its own, or all in one request with `spec.batch`.

    `on_start` gets what a request is built from before it is sent, and
    `on_text` receives the pieces of an answer as they arrive, if the answer has only one sequence. The answer is
    streamed if the model's transaction policy is decoupled. An interrupt (KeyboardInterrupt), a timeout or an error of
    `on_text` cancels the call and stops the request in the engine before it is raised again.
    Errors: ServerUnreachableError, RequestError (unknown model, refused request), UsageError (no such input).
    """
    with closing(connect(spec, server)) as client:
        for number, context in enumerate(request_contexts(spec, server, client)):
            if on_start is not None:
                on_start(context)
            generation = _read(stream(context, server, client, number=number), on_text)
            for sequence in generation.sequences:
                sequence.prompt += number  # until here the number within this request
            yield generation


def request_contexts(spec: QuerySpec, server: Endpoint, client: SyncClient) -> list[RequestContext]:
    """Return what each request of `spec` is built from; asks the server for the model's inputs and outputs."""
    spec = with_named_adapter(spec, server.repository)
    model = describe_model(client, spec.model or server.model)
    prompts, tokenizer, model = prepare_prompts(spec, model, server, client)
    return [
        RequestContext(spec=spec, model=model, prompts=part, tokenizer=tokenizer, repository=server.repository)
        for part in ([prompts] if spec.batch else prompts.split())
    ]


def connect(spec: QuerySpec, server: Endpoint, *, timeout: float | None = None) -> SyncClient:
    """Return a client for the protocol of `spec`, or the one of the executor in this process."""
    if server.in_process is not None:
        return server.in_process
    seconds = spec.timeout if timeout is None else timeout
    if spec.protocol == "http" or not server.grpc_port:
        from trtserve.client.http_transport import http_client

        return http_client(server, timeout=seconds)
    compression = None if spec.compression == "none" else spec.compression
    return grpc_client(server, timeout=seconds, compression=compression)


def describe_model(client: SyncClient, name: str | None) -> ModelDescription:
    """Return the description of the model `name`; without a name that of the alias, the BLS model or the ensemble."""
    if name is None:
        names = client.model_names()
        aliases = [each for each in names if each not in STANDARD_MODELS]
        standard = [each for each in ("tensorrt_llm_bls", "ensemble") if each in names]
        if len(aliases) != 1 and not standard:
            served = ", ".join(sorted(names)) or "no models"
            raise UsageError(
                f"Choose the model to query with --model; this server has {served}.",
                hint=f"For example: --model {min(names)}" if names else None,
            )
        name = aliases[0] if len(aliases) == 1 else standard[0]
    model = client.describe(name)
    if not model.has(TEXT_INPUT, IDS_INPUT):
        raise RequestError(
            f"The model {model.name!r} takes neither text nor token ids: it has no input {TEXT_INPUT!r}.",
            hint="Query the alias, `tensorrt_llm_bls`, `ensemble`, or the core model `tensorrt_llm`.",
        )
    return model


def stream(context: RequestContext, server: Endpoint, client: SyncClient, *, number: int = 0) -> Pieces:
    """Send a request, yield the new pieces of its text as they arrive, and return the answer.

    Several sequences are not mixed: they come with the answer alone. Closing the generator, an interrupt or a timeout
    cancels the call and stops the request in the engine. `number` keeps the ids of several requests apart.
    """
    request_id = request_id_of(context.spec, number)
    request = model_request(context, request_id)
    answer = Answer(context)
    with _stop_later(context, server, client, request_id) as stopped:
        try:
            for reply in client.infer(request):
                if text := answer.add(reply):
                    yield text
                if answer.stopped:
                    stop_in_engine(context, server, request_id)
                    break
            if text := answer.rest():
                yield text
        except RequestCancelledError:
            if not stopped.is_set():
                raise
        except (KeyboardInterrupt, GeneratorExit, RequestError):
            # A RequestError may be a timeout, whose cancellation does not reach the engine on every path; stopping a
            # refused request has no effect.
            stop_in_engine(context, server, request_id)
            raise
    return answer.generation(request_id, stopped=stopped.is_set())


def request_id_of(spec: QuerySpec, number: int = 0) -> str:
    """Return the id of a request. Every request needs one of its own, so that a stop reaches only one."""
    if spec.request_id is None:
        return uuid.uuid4().hex
    return spec.request_id if number == 0 else f"{spec.request_id}-{number}"


def _read(pieces: Pieces, on_text: OnText | None) -> Generation:
    """Hand the pieces to `on_text` and return the answer."""
    with closing(pieces):
        while True:
            try:
                text = next(pieces)
            except StopIteration as end:
                generation: Generation = end.value
                return generation
            if on_text is not None:
                on_text(text)


@contextmanager
def _stop_later(
    context: RequestContext, server: Endpoint, client: SyncClient, request_id: str
) -> Iterator[threading.Event]:
    """Stop the request after `stop_after_ms` if it is still running; sets the event when it does."""
    spec, stopped, ended = context.spec, threading.Event(), threading.Event()
    if spec.stop_after_ms is None:
        yield stopped
        return
    # Described in advance, so that stopping takes only one message.
    by_cancel = spec.stop_via_cancel or VLLM_INPUT in context.model.inputs  # no request stops another one there
    core = None if by_cancel else client.describe(core_name(context.model))
    seconds = spec.stop_after_ms / 1000

    def stop() -> None:
        if ended.wait(seconds):
            return
        stopped.set()
        if by_cancel:
            client.cancel()
            return
        # A stop that arrives before its request has no effect, so it is repeated until the call ends or times out.
        while not ended.is_set():
            stop_in_engine(context, server, request_id, core)
            ended.wait(STOP_INTERVAL)

    thread = threading.Thread(target=stop, daemon=True, name="stop")
    thread.start()
    try:
        yield stopped
    finally:
        ended.set()
        thread.join(STOP_TIMEOUT)


def stop_in_engine(
    context: RequestContext, server: Endpoint, request_id: str, core: ModelDescription | None = None
) -> None:
    """Stop the request by its id, within a time limit; errors are ignored, since the server may be gone."""
    with suppress(TrtserveError), closing(connect(context.spec, server, timeout=_STOPPED_WITHIN)) as client:
        for _ in client.infer(stop_request(core or client.describe(core_name(context.model)), request_id)):
            pass


@dataclass(frozen=True, kw_only=True)
class AnswerTimes:
    """What one answer took."""

    seconds: float
    first: float | None  # seconds until the first text, or None without any
    tokens: int | None
    """Generated tokens, or None where the server does not count them and for an answer that was stopped."""
    thought: float = 0.0  # the share of thoughts in the characters of the answer
    cut: bool = False  # whether a limit on tokens ended the answer

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second of the whole answer."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None


def _sampled(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options as OpenAI's API means them: a temperature alone samples, with a new seed for each answer."""
    temperature, top_k, top_p = (options.get(name) for name in ("temperature", "top_k", "top_p"))
    if not (temperature or top_k or top_p) or temperature == 0 or top_k == 1 or options.get("beam_width", 1) > 1:
        return options
    whole = {} if top_k or top_p else {"top_k": 0, "top_p": 1.0}
    return {"seed": secrets.randbits(63), **options, **whole}


@dataclass(kw_only=True)
class Conversation:
    """The turns of one conversation; `spec` says which model is asked, and how."""

    spec: QuerySpec
    server: Endpoint
    history: list[Mapping[str, str]] = field(default_factory=list)
    times: list[AnswerTimes] = field(default_factory=list)
    asked: str | None = None  # the last question, whether it was answered or not
    filter: Callable[[RequestContext], TextFilter | None] | None = None
    """What tells the thoughts of an answer from its text; they are not remembered."""

    def ask(self, question: str, on_text: Callable[[str], None]) -> AnswerTimes:
        """Send a question with all that was said before, and return what the answer took.

        An interrupt (KeyboardInterrupt) stops the answer in the engine; the text so far stays in the conversation.
        Any other error leaves the conversation as it was.
        """
        begin, pieces, self.asked = time.monotonic(), list[str](), question
        first: float | None = None
        kept: TextFilter | None = None
        total = 0

        def start(context: RequestContext) -> None:
            nonlocal kept
            kept = None if self.filter is None else self.filter(context)

        def add(piece: str | None) -> None:
            nonlocal first, total
            first = time.monotonic() - begin if first is None and piece else first
            total += len(piece or "")
            if text := (piece or "") if kept is None else kept(piece):
                pieces.append(text)
                on_text(text)

        spec = replace(
            self.spec,
            prompts=(question,),
            history=tuple(self.history),
            stream=True,
            options=_sampled(self.spec.options),
        )
        try:
            generation = generate(spec, self.server, on_text=add, on_start=start)
            add(None)
        except KeyboardInterrupt:
            self._remember(question, "".join(pieces))
            raise
        self._remember(question, "".join(pieces))
        thought = 1 - len("".join(pieces)) / total if total and kept is not None else 0.0
        times = AnswerTimes(
            seconds=time.monotonic() - begin,
            first=first,
            tokens=generation.output_tokens,
            thought=max(0.0, thought),
            cut=any(sequence.finish_reason == "length" for sequence in generation.sequences),
        )
        self.times.append(times)
        return times

    def retry(self, on_text: Callable[[str], None]) -> AnswerTimes:
        """Ask the last question again; its answer so far is forgotten unless this fails."""
        if self.asked is None:
            raise UsageError("There is no question to ask again.")
        before = list(self.history)
        if self.history and self.history[-2]["content"] == self.asked:
            del self.history[-2:]
        try:
            return self.ask(self.asked, on_text)
        except TrtserveError:
            self.history = before
            raise

    def models(self) -> list[str]:
        """Return the names of the server's models."""
        with closing(connect(self.spec, self.server)) as client:
            return sorted(client.model_names())

    def switch(self, model: str | None, server: Endpoint) -> None:
        """Ask another model from now on, with what was said. Raises RequestError when it takes no questions."""
        spec = replace(self.spec, model=model)
        with closing(connect(spec, server)) as client:
            describe_model(client, with_named_adapter(spec, server.repository).model or server.model)
        self.spec, self.server = spec, server

    def _remember(self, question: str, answer: str) -> None:
        self.history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def set_system(self, text: str) -> None:
        """Replace the system message; an empty text removes it. UsageError: the model has no system messages."""
        spec = replace(self.spec, system=text or None)
        if text:
            with closing(connect(spec, self.server)) as client:
                request_contexts(replace(spec, prompts=("?",)), self.server, client)
        self.spec = spec

    def reset(self) -> None:
        """Forget what was said; the system message stays."""
        self.history.clear()
        self.asked = None

    def save(self, path: Path) -> None:
        """Write the messages as JSON if the name ends with .json, else as Markdown."""
        turns = messages("", self.spec.system, self.history)[:-1]
        if path.suffix == ".json":
            text = json.dumps(turns, indent=2, ensure_ascii=False) + "\n"
        else:
            text = "\n".join(f"**{turn['role']}**\n\n{turn['content'].strip()}\n" for turn in turns)
        write_whole(path, text)
