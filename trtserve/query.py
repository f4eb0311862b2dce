"""One prompt to one answer: which model is asked, which of its inputs are filled, how its responses become a text."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from trtserve.errors import RequestError, TrtserveError, UsageError
from trtserve.specs import QuerySpec
from trtserve.triton.client import (
    CORE_MODEL,
    STOP_TIMEOUT,
    Client,
    Endpoint,
    GrpcClient,
    ModelDescription,
    Reply,
    Tensor,
    stop_request,
)
from trtserve.triton.http_client import HttpClient

TEXT_INPUT = "text_input"
TEXT_OUTPUT = "text_output"

# The models of TensorRT-LLM's repository; any other name in it is the alias.
STANDARD_MODELS = ("preprocessing", CORE_MODEL, "postprocessing", "ensemble", "tensorrt_llm_bls")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """An answer. Times are seconds since the request was sent.

    `text` is without the prompt and without leading spaces (tokenizers put one before a first word). `responses` counts
    the responses that carried text; `time_to_first_token` is None unless the answer came as a stream.
    """

    text: str
    model: str
    request_id: str
    streamed: bool
    responses: int
    latency: float
    time_to_first_token: float | None = None
    output_tokens: int | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens per second of latency; None when the server does not count them."""
        return self.output_tokens / self.latency if self.output_tokens and self.latency > 0 else None


def generate(spec: QuerySpec, server: Endpoint, *, on_text: Callable[[str], None] | None = None) -> Generation:
    """Ask a model; `on_text` receives the pieces of the answer as they come.

    The call follows the model: a stream where its transaction policy is decoupled, else one response. An interrupt
    (KeyboardInterrupt), a timeout or an OSError of `on_text` cancels the call and stops the request in the engine
    before it is raised again.
    Errors: ServerUnreachableError, RequestError (unknown model, refused request), UsageError (no such input).
    """
    with closing(connect(spec, server)) as client:
        model = describe_text_model(client, spec.model or server.model)
        request_id = spec.request_id or uuid.uuid4().hex
        tensors = request_tensors(spec, model)
        answer = _Answer(model=model, prompt=spec.prompt, streamed=spec.stream and model.decoupled, on_text=on_text)
        try:
            replies = client.infer(model, tensors, request_id=request_id, stream=spec.stream)
            answer.read(replies)
        except (KeyboardInterrupt, OSError, RequestError):
            # OSError comes from `on_text` alone: the reader of our output went away. A RequestError may be a timeout,
            # whose cancellation does not reach the engine through every door; for a refused request nothing happens.
            _stop(spec, server, model, request_id)
            raise
        return answer.finished(request_id)


def connect(spec: QuerySpec, server: Endpoint) -> Client:
    """A client for the protocol that `spec` names."""
    kind: type[GrpcClient] | type[HttpClient] = HttpClient if spec.protocol == "http" else GrpcClient
    return kind(server, timeout=spec.timeout)


def describe_text_model(client: Client, name: str | None) -> ModelDescription:
    """The model to ask; without a name the alias, else the BLS model, else the ensemble of the server."""
    model = client.describe(name if name is not None else _default_model(client.model_names()))
    if TEXT_INPUT not in model.inputs:
        raise RequestError(
            f"The model {model.name!r} takes no text: it has no input {TEXT_INPUT!r}.",
            hint="Ask the alias, `tensorrt_llm_bls` or `ensemble`.",
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


def request_tensors(spec: QuerySpec, model: ModelDescription) -> list[Tensor]:
    """The inputs of one request: only what was asked for, under the names that the model's release declares."""
    if not spec.prompt.strip():
        raise UsageError("The prompt is empty.", hint='Give one: trtserve query "What is ML?"')
    values = {**_required(spec), **_chosen(spec, model), **_switches(spec, model)}
    return [model.tensor(name, value) for name, value in values.items()]


def _required(spec: QuerySpec) -> dict[str, list[Any]]:
    return {TEXT_INPUT: [spec.prompt], "max_tokens": [spec.max_tokens]}


def _chosen(spec: QuerySpec, model: ModelDescription) -> dict[str, Sequence[Any]]:
    sampling = spec.sampling
    scalars = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        model.first_input("seed", "random_seed"): sampling.seed,
    }
    lists: dict[str, Sequence[Any]] = {"stop_words": _spellings(spec.stop_words), "bad_words": spec.bad_words}
    given: dict[str, Sequence[Any]] = {name: [value] for name, value in scalars.items() if value is not None}
    return {**given, **{name: words for name, words in lists.items() if words}}


def _spellings(words: Sequence[str]) -> list[str]:
    """Each word also as it stands inside a sentence: the engine compares tokens, and " data" has others than "data"."""
    return [spelling for word in words if word for spelling in dict.fromkeys((word, f" {word.lstrip(' ')}"))]


def _switches(spec: QuerySpec, model: ModelDescription) -> dict[str, list[bool]]:
    wanted = {
        "stream": spec.stream and model.decoupled,
        "exclude_input_in_output": True,
        "return_num_output_tokens": True,
    }
    return {name: [value] for name, value in wanted.items() if name in model.inputs}


class _Answer:
    """Collects responses into a text, with the times of the first and the last."""

    def __init__(
        self, *, model: ModelDescription, prompt: str, streamed: bool, on_text: Callable[[str], None] | None
    ) -> None:
        self._model = model
        self._prompt = prompt
        self._streamed = streamed
        self._on_text = on_text
        self._accumulated = streamed and model.flag("accumulate_tokens")
        self._started = time.monotonic()
        self._first: float | None = None
        self._text = ""
        self._repeated = ""
        self._responses = 0
        self._output_tokens: int | None = None

    def read(self, replies: Iterator[Reply]) -> None:
        """Read all responses of one request."""
        for reply in replies:
            for piece in reply.get(TEXT_OUTPUT, ())[:1]:
                self._add(str(piece))
            for count in reply.get("num_output_tokens", ())[:1]:
                # Every response counts its own tokens.
                self._output_tokens = (self._output_tokens or 0) + int(count)
        if not self._responses and self._output_tokens is None and not self._streamed:
            raise RequestError(f"The model {self._model.name!r} ended the request without a {TEXT_OUTPUT}.")

    def _add(self, piece: str) -> None:
        if not self._streamed:
            piece = self._without_prompt(piece)
        if self._accumulated:
            # Such a model repeats the whole text in every response.
            self._repeated, piece = piece, piece[len(self._repeated) :]
        if not self._text:
            piece = piece.lstrip(" ")
        self._responses += 1
        if piece and self._first is None:
            self._first = time.monotonic()
        self._text += piece
        if piece and self._on_text is not None:
            self._on_text(piece)

    def _without_prompt(self, text: str) -> str:
        """Releases before 0.16 have no input that leaves the prompt out."""
        if "exclude_input_in_output" in self._model.inputs:
            return text
        return text.removeprefix(self._prompt)

    def finished(self, request_id: str) -> Generation:
        """The answer after the last response."""
        first = self._first - self._started if self._streamed and self._first is not None else None
        return Generation(
            text=self._text,
            model=self._model.name,
            request_id=request_id,
            streamed=self._streamed,
            responses=self._responses,
            latency=time.monotonic() - self._started,
            time_to_first_token=first,
            output_tokens=self._output_tokens,
        )


def _stop(spec: QuerySpec, server: Endpoint, model: ModelDescription, request_id: str) -> None:
    """Stop the request in the engine, within a bound; a server that is gone has nothing left to stop."""
    import dataclasses

    core = model.parameters.get("tensorrt_llm_model_name") or CORE_MODEL
    with suppress(TrtserveError), closing(connect(dataclasses.replace(spec, timeout=STOP_TIMEOUT), server)) as client:
        stop_request(client, core, request_id)
