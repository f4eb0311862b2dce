"""A question and its answer: which model is asked, with which inputs, and how it is stopped."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

from trtserve.errors import RequestError, TrtserveError, UsageError
from trtserve.query.generation import Generation
from trtserve.query.spec import QuerySpec
from trtserve.triton.call_errors import RequestCancelledError
from trtserve.triton.client import (
    CORE_MODEL,
    STOP_TIMEOUT,
    Client,
    Endpoint,
    GrpcClient,
    ModelDescription,
    stop_request,
)

# The rest is imported where it is used: the command line loads this module for every command's help.
if TYPE_CHECKING:
    from trtserve.query.request import Context

__all__ = ["Generation", "QuerySpec", "connect", "contexts", "generate", "generate_each"]

# The models of TensorRT-LLM's repository; any other name in it is the alias.
STANDARD_MODELS = ("preprocessing", CORE_MODEL, "postprocessing", "ensemble", "tensorrt_llm_bls")

STOP_AGAIN = 0.25

OnText = Callable[[str], None]


def generate(spec: QuerySpec, server: Endpoint, *, on_text: OnText | None = None) -> Generation:
    """Ask one question, or several as the rows of one request; UsageError for several without `spec.batch`.

    See `generate_each`.
    """
    if spec.rows > 1 and not spec.batch:
        raise UsageError("Several prompts are several requests: use generate_each, or a batch.")
    return next(iter(generate_each(spec, server, on_text=on_text)))


def generate_each(spec: QuerySpec, server: Endpoint, *, on_text: OnText | None = None) -> Iterator[Generation]:
    """Ask every question of `spec`, one after the other, or all in one request with `spec.batch`.

    `on_text` receives the pieces of an answer as they come, where it has one sequence only. The call follows the model:
    a stream where its transaction policy is decoupled, else one response. An interrupt (KeyboardInterrupt), a timeout
    or an OSError of `on_text` cancels the call and stops the request in the engine before it is raised again.
    Errors: ServerUnreachableError, RequestError (unknown model, refused request), UsageError (no such input).
    """
    with closing(connect(spec, server)) as client:
        for number, context in enumerate(contexts(spec, server, client)):
            generation = _ask(context, server, client, number=number, on_text=on_text)
            for sequence in generation.sequences:
                sequence.prompt += number  # counted within the request so far
            yield generation


def contexts(spec: QuerySpec, server: Endpoint, client: Client) -> list[Context]:
    """What each request of `spec` is made of; reads the model's declaration, and of chat models the template."""
    from trtserve.query.prompts import prepare
    from trtserve.query.request import Context

    model = describe_model(client, spec.model or server.model)
    prompts, tokenizer = prepare(spec, model, server, client)
    return [
        Context(spec=spec, model=model, prompts=part, tokenizer=tokenizer, repository=server.repository)
        for part in ([prompts] if spec.batch else prompts.split())
    ]


def connect(spec: QuerySpec, server: Endpoint, *, timeout: float | None = None) -> Client:
    """A client for the protocol that `spec` names, or the executor in this process."""
    if server.in_process is not None:
        return server.in_process
    seconds = spec.timeout if timeout is None else timeout
    if spec.protocol == "http":
        from trtserve.triton.http_client import HttpClient

        return HttpClient(server, timeout=seconds)
    compression = None if spec.compression == "none" else spec.compression
    return GrpcClient(server, timeout=seconds, compression=compression)


def describe_model(client: Client, name: str | None) -> ModelDescription:
    """The model to ask; without a name the alias, else the BLS model, else the ensemble of the server."""
    from trtserve.query.request import IDS_INPUT, TEXT_INPUT

    model = client.describe(name if name is not None else _default_model(client.model_names()))
    if not model.has(TEXT_INPUT, IDS_INPUT):
        raise RequestError(
            f"The model {model.name!r} takes neither text nor token ids: it has no input {TEXT_INPUT!r}.",
            hint="Ask the alias, `tensorrt_llm_bls`, `ensemble`, or the core model `tensorrt_llm`.",
        )
    return model


def _default_model(names: Sequence[str]) -> str:
    aliases = [name for name in names if name not in STANDARD_MODELS]
    if len(aliases) == 1:
        return aliases[0]
    for standard in ("tensorrt_llm_bls", "ensemble"):
        if standard in names:
            return standard
    raise UsageError(f"Say which model to ask with --model; this server has {', '.join(sorted(names)) or 'none'}.")


def _ask(context: Context, server: Endpoint, client: Client, *, number: int, on_text: OnText | None) -> Generation:
    from trtserve.query.answer import Answer
    from trtserve.query.request import request_tensors

    spec, model = context.spec, context.model
    request_id = _request_id(spec, number)
    tensors = request_tensors(context)
    answer = Answer(context, on_text=on_text)
    with _stopping(context, server, client, request_id) as stopped:
        try:
            answer.read(
                client.infer(model, tensors, request_id=request_id, stream=context.streams, outputs=spec.outputs)
            )
        except RequestCancelledError:
            if not stopped.is_set():
                raise
        except (KeyboardInterrupt, OSError, RequestError):
            # OSError comes from `on_text` alone: the reader of our output went away. A RequestError may be a timeout,
            # whose cancellation does not reach the engine through every door; for a refused request nothing happens.
            _stop_in_engine(context, server, request_id)
            raise
    return answer.finished(request_id, stopped=stopped.is_set())


def _request_id(spec: QuerySpec, number: int) -> str:
    """The id of the `number`-th request: given ids are numbered, so that a stop reaches one request only."""
    if spec.request_id is None:
        return uuid.uuid4().hex
    return spec.request_id if number == 0 else f"{spec.request_id}-{number}"


@contextmanager
def _stopping(context: Context, server: Endpoint, client: Client, request_id: str) -> Iterator[threading.Event]:
    """Stop the request `stop_after_ms` from now, if it is still running; the event says that this was done."""
    spec, stopped, ended = context.spec, threading.Event(), threading.Event()
    if spec.stop_after_ms is None:
        yield stopped
        return
    # Described beforehand, so that stopping is one message.
    core = None if spec.stop_via_cancel else client.describe(_core_name(context))
    seconds = spec.stop_after_ms / 1000

    def stop() -> None:
        if ended.wait(seconds):
            return
        stopped.set()
        if spec.stop_via_cancel:
            client.cancel()
            return
        # A stop that overtakes its request stops nothing: it is sent until the call ends, which has a time limit.
        while not ended.is_set():
            _stop_in_engine(context, server, request_id, core)
            ended.wait(STOP_AGAIN)

    thread = threading.Thread(target=stop, daemon=True, name="stop")
    thread.start()
    try:
        yield stopped
    finally:
        ended.set()
        thread.join(STOP_TIMEOUT)


def _core_name(context: Context) -> str:
    """The model that runs the engine for the one that is asked."""
    from trtserve.query.request import IDS_INPUT

    if context.model.has(IDS_INPUT):
        return context.model.name
    return context.model.parameters.get("tensorrt_llm_model_name") or CORE_MODEL


def _stop_in_engine(context: Context, server: Endpoint, request_id: str, core: ModelDescription | None = None) -> None:
    """Stop the request by its id, within a bound; a server that is gone has nothing left to stop."""
    with suppress(TrtserveError), closing(connect(context.spec, server, timeout=STOP_TIMEOUT)) as client:
        stop_request(client, core or client.describe(_core_name(context)), request_id)
