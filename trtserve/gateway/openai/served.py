"""What the endpoint knows about the model behind it; read once, when the first request comes."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Coroutine, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trtserve.client.endpoint import Endpoint
from trtserve.client.grpc_transport import grpc_client
from trtserve.client.query import describe_model
from trtserve.client.tensors import CORE_MODEL, IDS_INPUT, TEXT_INPUT, ModelDescription
from trtserve.client.tokenizer import (
    PREPROCESSING,
    TokenizerFiles,
    find_tokenizer,
    server_adds_special_tokens,
    takes_system,
)
from trtserve.client.transport import STOP_TIMEOUT, SyncClient
from trtserve.errors import RequestError, TrtserveError, UsageError
from trtserve.executor.loaders import MODELS
from trtserve.files import read_json_object
from trtserve.gateway.openai.answers import Token
from trtserve.gateway.openai.dialects import Dialect, dialect_of
from trtserve.gateway.openai.encoding import Encoder
from trtserve.gateway.openai.errors import ApiError
from trtserve.gateway.openai.images import ImageSources
from trtserve.gateway.replicas import Replicas
from trtserve.programs.shared.lora_names import LoraNames
from trtserve.programs.shared.tokenizer import AnchoredDecoder

_LOG = logging.getLogger(__name__)
_DESCRIBED_WITHIN = 30.0
_RETRY = 0.5
# gRPC hands a token over in the second turn of the event loop after it was read.
_QUIET_TURNS = 3
_LONGEST_JOIN = 0.02
# How the names of the models begin that are in every repository; the others are aliases.
_STANDARD = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble")
_TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
"""Clients of NVIDIA's front end name these; the alias does the same."""
# What stands for each byte in the tokens of byte-level tokenizers: itself where it can be printed, else the next free
# character from 256 on, as GPT-2 has it.
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTES = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + number): byte for number, byte in enumerate(sorted(set(range(256)) - set(_PRINTED)))
}
_NAMING_TOPS = frozenset(name for name, loader in MODELS.items() if loader.names_tops)
_DRAWING = frozenset(name for name, loader in MODELS.items() if loader.draws_without_seed)
_SAMPLED = ("temperature", "top_k", "top_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model as clients of the OpenAI API see it."""

    name: str
    """Its name in that API."""
    model: ModelDescription
    """The Triton model that is asked: the core model if its tokenizer is at hand, else one that takes text."""
    core: ModelDescription | None
    """The model that stops requests in the engine, or None where that is not known."""
    files: TokenizerFiles | None
    decoder: AnchoredDecoder | None
    encoder: Encoder | None
    adds_special: bool
    """Whether prompts get the tokenizer's special tokens, such as BOS."""
    vocab_size: int | None
    max_seq_len: int | None
    """Most tokens of prompt and answer together."""
    adapters: LoraNames | None
    context_logits: bool | None = None
    """Whether the engine returns logits of prompts, or None where that is not known."""
    generation_logits: bool | None = None
    """Whether the engine returns logits of answers, or None where that is not known."""
    names_tops: bool = False
    """Whether the engine returns the most likely tokens itself, without logits."""
    draws_without_seed: bool = False
    """Whether the engine draws at random for requests without a seed."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """What `generation_config.json` says about sampling."""
    reads_images: bool = False
    takes_system: bool = False
    """Whether its chat template has a place for a system message."""
    created: int = field(default_factory=lambda: int(time.time()))
    _marks: dict[tuple[str, ...], dict[int, str]] = field(default_factory=dict, init=False, repr=False)

    @property
    def defaults(self) -> dict[str, Any]:
        """How requests sample that do not say it: as `generation_config.json` has it, else as OpenAI does."""
        return {"temperature": 1.0, "top_p": 1.0, **self.sampling}

    @property
    def takes_ids(self) -> bool:
        """Whether the model that is asked takes token ids."""
        return TEXT_INPUT not in self.model.inputs

    @cached_property
    def dialect(self) -> Dialect:
        """How the model writes thoughts and calls."""
        templates = {} if self.files is None else self.files.chat_templates
        return dialect_of("\n".join(templates.values()))

    def mark_ids(self, marks: tuple[str, ...]) -> dict[int, str]:
        """Return the special tokens among some marks, which decoding would leave out."""
        if marks not in self._marks:
            self._marks[marks] = {}
            if self.files is not None and self.decoder is not None:
                tokenizer = self.files.tokenizer
                ids = [(tokenizer.convert_tokens_to_ids(mark), mark) for mark in marks]
                self._marks[marks] = {
                    number: mark
                    for number, mark in ids
                    if number is not None
                    and tokenizer.convert_ids_to_tokens(number) == mark
                    and not self.decoder.decode([[number]])[0]
                }
        return self._marks[marks]

    @property
    def names(self) -> tuple[str, ...]:
        """The model and its adapters."""
        return (self.name, *(self.adapters.names if self.adapters is not None else ()))

    def token_text(self, id: int) -> str:  # noqa: A002 - the field's word
        """Return the text of a single token, with its leading space; special tokens have their names."""
        assert self.files is not None
        assert self.decoder is not None
        return self.decoder.decode([[id]])[0] or str(self.files.tokenizer.convert_ids_to_tokens(id))

    def token(self, id: int) -> Token:  # noqa: A002 - the field's word
        """Return the text and the bytes of a token, which may be a part of a character."""
        text = self.token_text(id)
        if "\ufffd" not in text:
            return Token(text, text.encode(), id)
        assert self.files is not None
        spelled = str(self.files.tokenizer.convert_ids_to_tokens(id))
        if re.fullmatch("<0x[0-9A-F]{2}>", spelled):  # SentencePiece
            return Token(text, bytes.fromhex(spelled[3:5]), id)
        if all(character in _BYTES for character in spelled):
            return Token(text, bytes(_BYTES[character] for character in spelled), id)
        return Token(text, text.encode(), id)

    def token_by_id(self, id: int) -> Token:  # noqa: A002 - the field's word
        """Return a token that is shown by its id."""
        return replace(self.token(id), shown=f"token_id:{id}")

    def require_tokenizer(self, what: str) -> TokenizerFiles:
        """Return the tokenizer. Raises ApiError if the endpoint has none, because `what` needs it."""
        if self.files is None:
            raise ApiError(f"{what} needs the model's tokenizer; start `trtserve gateway` with --tokenizer DIR.")
        return self.files

    def require_reading(self, images: Sequence[str]) -> None:
        """Raise ApiError for images that the model cannot read."""
        if images and not self.reads_images:
            raise ApiError(
                f"The model `{self.name}` reads text only, and this conversation has images. A model that reads them "
                "is served with --runtime vllm.",
                param="messages",
            )

    def require_room(self, prompt: str | Sequence[int]) -> None:
        """Raise ApiError for a prompt that is certainly too long, before any work on it."""
        if self.max_seq_len is None or self.encoder is None:
            return
        longest, unit = self.max_seq_len, "tokens"
        if isinstance(prompt, str):
            longest, unit = longest * self.encoder.longest_token, "characters"
        if len(prompt) > longest:
            raise ApiError(
                f"The prompt has {len(prompt)} {unit}, which exceeds the maximum input length: at most {longest} fit "
                f"into {self.max_seq_len} tokens.",
                code="context_length_exceeded",
            )


class QuietMoment:
    """Wakes those who wait for tokens when no more of them arrive, or after 20 ms.

    A busy gateway takes in what has arrived for all streams before it writes: the tokens that one stream got meanwhile
    are one piece, which costs little more than a single token. An idle gateway writes at once.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._quiet, self._began = 0, 0.0

    def wake(self, waiting: asyncio.Future[None]) -> None:
        """Set the result of a future at the next quiet moment; it does no harm to ask again with each token."""
        self._quiet = 0
        if not self._waiting:
            loop = waiting.get_loop()
            self._began = loop.time()
            loop.call_soon(self._look, loop)
        self._waiting[waiting] = None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._quiet += 1
        if self._quiet < _QUIET_TURNS and loop.time() - self._began < _LONGEST_JOIN:
            loop.call_soon(self._look, loop)
            return
        waiting, self._waiting = self._waiting, {}
        for each in waiting:
            if not each.done():
                each.set_result(None)


class Backend:
    """The Triton server behind the endpoint."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        tokenizer: Path | None = None,
        timeout: float = 600.0,
        replicas: Replicas | None = None,
        images: ImageSources | None = None,
    ) -> None:
        """`replicas` serve the models of `endpoint`, which is one of them."""
        self._endpoint = endpoint
        self._given = replicas
        self._tokenizer = tokenizer
        self.images = images or ImageSources()
        self._lock = asyncio.Lock()
        self._served: tuple[ServedModel, ...] = ()
        self.timeout = timeout
        """Longest time for one answer, in seconds."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.quiet_moment = QuietMoment()

    @cached_property
    def replicas(self) -> Replicas:
        """The copies of the server."""
        return self._given or Replicas(self._endpoint, timeout=self.timeout)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in a task of its own, which may outlive the request that asks for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Wait a moment for requests that are being stopped, then close the connection."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_TIMEOUT)
        for encoder in {served.encoder for served in self._served}:
            if encoder is not None:
                encoder.close()
        await self.replicas.close()

    @property
    def repository(self) -> Path | None:
        """The model repository, if it is on this machine."""
        return self._endpoint.repository

    @property
    def adapters(self) -> int:
        """How many LoRA adapters the models have, as far as they are known."""
        return sum(len(served.names) - 1 for served in self._served)

    async def models(self) -> tuple[ServedModel, ...]:
        """Return the models. Raises ServerUnreachableError or RequestError while no copy can describe them."""
        async with self._lock:
            failures: list[TrtserveError] = []
            for each in () if self._served else self.replicas.in_order:
                try:
                    self._served = await asyncio.to_thread(_describe_all, each.endpoint, self._tokenizer)
                    break
                except TrtserveError as error:
                    failures.append(error)
            if not self._served:
                raise failures[0]
            return self._served

    async def prepare(self) -> None:
        """Describe the models as soon as the server can, so that the first request does not wait for the tokenizer.

        Meanwhile and afterwards, watch the copies.
        """
        needed = set[str]()

        async def describe() -> None:
            known = ""
            while not self._served:
                try:
                    await self.models()
                except Exception as error:  # noqa: BLE001, PERF203 - a file that is broken now may be mended
                    if not isinstance(error, TrtserveError) and (text := repr(error)) != known:
                        _LOG.exception("the models cannot be described yet")
                        known = text
                    await asyncio.sleep(_RETRY)
            needed.update(each.model.name for each in self._served)

        await asyncio.gather(describe(), self.replicas.watch(needed))

    async def find(self, name: str) -> tuple[ServedModel, str | None]:
        """Return the model that a request names, and the adapter if the name is one. ApiError: there is neither.

        A request without a name means the only model.
        """
        models = await self.models()
        if not name and len(models) > 1:
            raise ApiError("Missing required parameter: 'model'.", param="model", code="missing_required_parameter")
        if not name or name in _TEXT_MODELS:
            name = models[0].name
        for served in models:
            if name in served.names:
                return served, None if name == served.name else name
        known = ", ".join(each for served in models for each in served.names)
        raise ApiError(
            f"The model `{name}` does not exist. This server has: {known}.",
            status=404,
            param="model",
            code="model_not_found",
        )


def _describe_all(endpoint: Endpoint, tokenizer: Path | None) -> tuple[ServedModel, ...]:
    """Describe every alias, that of the endpoint first; a repository without one is described by its standard models.

    Loading a tokenizer takes a second or two.
    """
    with closing(grpc_client(endpoint, timeout=_DESCRIBED_WITHIN)) as client:
        aliases = [name for name in client.model_names() if not name.startswith(_STANDARD)]
        described = [client.describe(name) for name in sorted(aliases, key=lambda name: name != endpoint.model)]
        texts = [model for model in described if TEXT_INPUT in model.inputs]
        try:
            texts = texts or [describe_model(client, endpoint.model)]
        except UsageError:  # nothing but the core model
            texts = [client.describe(CORE_MODEL)]
        encoders: dict[Path, Encoder] = {}
        return tuple(_describe(text, endpoint, tokenizer, client, encoders) for text in texts)


def _describe(
    text: ModelDescription,
    endpoint: Endpoint,
    tokenizer: Path | None,
    client: SyncClient,
    encoders: dict[Path, Encoder],
) -> ServedModel:
    """Describe one model; models with the same tokenizer share its encoder."""
    names = text.parameters
    core_name = names.get("tensorrt_llm_model_name") or CORE_MODEL
    preprocessing = names.get("preprocessing_model_name") or PREPROCESSING
    try:
        core = client.describe(core_name)
    except RequestError:  # the text model runs the engine itself
        core = None
    files = find_tokenizer(tokenizer, endpoint, client, preprocessing=preprocessing)
    if files is not None and files.folder not in encoders:
        encoders[files.folder] = Encoder(files)
    ids = core is not None and IDS_INPUT in core.inputs and files is not None
    engine: dict[str, Any] = {}
    if endpoint.repository is not None and (path := endpoint.repository / core_name / "1" / "config.json").is_file():
        engine = read_json_object(path, RequestError)
    vocab_size = engine.get("pretrained_config", {}).get("vocab_size")
    table = names.get("lora_table") or "lora.json"
    return ServedModel(
        name=text.name,
        model=core if ids and core is not None else text,
        core=core,
        files=files,
        decoder=None if files is None else AnchoredDecoder(files.tokenizer, skip_special_tokens=True),
        encoder=None if files is None else encoders[files.folder],
        adds_special=server_adds_special_tokens(client, preprocessing=preprocessing),
        vocab_size=vocab_size or (None if files is None else len(files.tokenizer)),
        max_seq_len=engine.get("build_config", {}).get("max_seq_len"),
        context_logits=engine.get("build_config", {}).get("gather_context_logits"),
        generation_logits=engine.get("build_config", {}).get("gather_generation_logits"),
        names_tops=core is not None
        and core.has("num_top_log_probs")
        and core.parameters.get("executor") in _NAMING_TOPS,
        draws_without_seed=core is not None and core.parameters.get("executor") in _DRAWING,
        adapters=None if endpoint.repository is None else LoraNames(endpoint.repository, table),
        sampling={} if files is None else _sampling(files),
        reads_images=ids
        and core is not None
        and core.has("images")
        and engine.get("trtserve", {}).get("reads_images", False),
        takes_system=files is not None and takes_system(files),
    )


def _sampling(files: TokenizerFiles) -> dict[str, Any]:
    config = files.json("generation_config.json")
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    return {name: config[name] for name in _SAMPLED if config.get(name) is not None}
