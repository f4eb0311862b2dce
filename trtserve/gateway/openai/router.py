"""The paths of the OpenAI API."""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute

from trtserve._version import __version__
from trtserve.client.tensors import STANDARD_MODELS
from trtserve.errors import TrtserveError, UsageError, did_you_mean
from trtserve.gateway.anthropic import CountBody, MessagesBody, MessagesForm
from trtserve.gateway.ollama import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaForm,
    OllamaGenerateBody,
    OllamaShowBody,
    shown,
    tags,
)
from trtserve.gateway.openai.answering import Answering, ChoicesForm, Form, Measures, Sequenced, while_connected
from trtserve.gateway.openai.answers import ChatAnswer, Completion, Envelope, Json, Message, TokenUsage
from trtserve.gateway.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    NamedTool,
    Sampling,
    StreamOptions,
    TokenizeBody,
    UnloadAdapterBody,
)
from trtserve.gateway.openai.errors import OLLAMA, TOKENS, ApiError, MethodNotAllowedError, OpenAIRoute, naming
from trtserve.gateway.openai.reading import reader_of
from trtserve.gateway.openai.request import (
    EngineRequest,
    Prompt,
    chat_prompt,
    chat_text,
    completion_prompt,
    engine_requests,
)
from trtserve.gateway.openai.responses import ResponsesBody, ResponsesForm, ResponseStore
from trtserve.gateway.openai.served import Backend, ServedModel
from trtserve.gateway.openai.vectors import EmbeddingBody, RerankBody, embeddings, makes_vectors, rerank
from trtserve.programs.shared.tokenizer import decode

_LONGEST_PATH = 100  # characters; a longer one is no misspelt path
COMPLETION_TOKENS = 16
"""Most tokens of a completion that does not say, as in OpenAI's API."""
CHAT_TOKENS = 1024
"""Most tokens of a chat that does not say: the engine may reserve memory for all of them."""


Require = Callable[[Request, str], Awaitable[None]]
"""Raises RefusedError for a request to a Triton model that cannot answer."""


def openai_router(
    backend: Backend,
    measures: Measures,
    *,
    api_keys: Collection[str] = (),
    require: Require | None = None,
    folder: Path | None = None,
) -> APIRouter:
    """Return the routes below /v1. With `api_keys` a request must have one of them as its bearer token.

    `folder` is for what several processes of a gateway share.
    """

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        preparing = backend.spawn(backend.prepare())
        yield
        preparing.cancel()
        await backend.close()

    router = APIRouter(
        route_class=OpenAIRoute,
        lifespan=lifespan,
        dependencies=[Depends(_key_check(api_keys))] if api_keys else [],
    )
    paths = Paths(backend, measures, require, folder)
    router.add_api_route("/v1/models", paths.models, methods=["GET"])
    router.add_api_route("/v1/models/{name}", paths.model, methods=["GET"])
    router.add_api_route("/v1/completions", paths.completions, methods=["POST"])
    router.add_api_route("/v1/chat/completions", paths.chat, methods=["POST"])
    router.add_api_route("/v1/responses", paths.responses, methods=["POST"])
    router.add_api_route("/v1/responses/{id}", paths.stored_response, methods=["GET", "DELETE"])
    router.add_api_route("/v1/messages", paths.messages, methods=["POST"])
    router.add_api_route("/v1/messages/count_tokens", paths.count_tokens, methods=["POST"])
    router.add_api_route("/v1/embeddings", paths.embeddings, methods=["POST"])
    router.add_api_route("/v1/rerank", paths.rerank, methods=["POST"])
    router.add_api_route("/v1/load_lora_adapter", paths.load_adapter, methods=["POST"])
    router.add_api_route("/v1/unload_lora_adapter", paths.unload_adapter, methods=["POST"])
    router.add_api_route("/api/chat", paths.ollama_chat, methods=["POST"])
    router.add_api_route("/api/generate", paths.ollama_generate, methods=["POST"])
    router.add_api_route("/api/embed", paths.ollama_embed, methods=["POST"])
    router.add_api_route("/api/show", paths.ollama_show, methods=["POST"])
    router.add_api_route("/api/tags", paths.ollama_tags, methods=["GET"])
    router.add_api_route("/api/ps", paths.ollama_tags, methods=["GET"])
    router.add_api_route("/api/version", paths.ollama_version, methods=["GET", "HEAD"])
    router.add_api_route("/tokenize", paths.tokenize, methods=["POST"])
    router.add_api_route("/detokenize", paths.detokenize, methods=["POST"])
    known = [route for route in router.routes if isinstance(route, APIRoute)]

    async def unknown(request: Request) -> Response:
        """Refuse any other path, and any other method of the paths above."""
        path, method = request.url.path, request.method
        methods = sorted({each for route in known if route.path_regex.match(path) for each in route.methods or ()})
        if methods:
            raise MethodNotAllowedError(f"{path} takes {' or '.join(methods)}, not {method}.", methods)
        near = did_you_mean(path, (route.path for route in known), cutoff=0.85) if len(path) <= _LONGEST_PATH else ""
        raise ApiError(f"Unknown request URL: {method} {path}. {near}".rstrip(), status=404, code="unknown_url")

    every = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    for path in ("/v1/{path:path}", f"{OLLAMA}{{path:path}}", *TOKENS):
        router.add_api_route(path, unknown, methods=every, include_in_schema=False)
    return router


class NamesModel(Protocol):
    """A body that names a model, or an adapter."""

    model: str


class Paths:
    """What each path answers."""

    def __init__(
        self, backend: Backend, measures: Measures, require: Require | None, folder: Path | None = None
    ) -> None:
        self._backend, self._measures, self._require = backend, measures, require
        self._store = ResponseStore(folder=folder)
        self._requests = partial(engine_requests, repository=backend.repository)

    async def models(self) -> Response:
        """List the models and their adapters."""
        served = await self._backend.models()
        data = [each for model in served for each in _described(model)]
        pages = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}  # Anthropic's clients ask
        return JSONResponse({"object": "list", "data": data, **pages})

    async def model(self, name: str) -> Response:
        """Describe one model or adapter."""
        served, _ = await self._backend.find(name)
        return JSONResponse(next(each for each in _described(served) if each["id"] == name))

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Continue one or several prompts."""
        served, adapter = await self._find(request, body)
        prompts = [await completion_prompt(served, body, prompt) for prompt in body.prompts]
        count = body.best_of or body.n
        tops = body.prompt_logprobs if body.tops is None else body.tops
        tops = 0 if tops is None and count > body.n else tops
        max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        sequences: list[Sequenced[Completion]] = []
        for prompt in prompts:
            echoed = _echoed(served, prompt) if body.echo else ""
            requests = await self._requests(
                served,
                body,
                prompt,
                count=count,
                max_tokens=max(1, max_tokens),
                adapter=adapter,
                tops=tops,
                echoes_log_probs=body.echoes_log_probs,
            )
            for each in requests:
                answer = Completion(
                    index=len(sequences),
                    echoed=echoed,
                    shows_log_probs=body.logprobs is not None,
                    shows_prompt=body.prompt_logprobs is not None,
                    only_echoed=max_tokens == 0,
                    shows_ids=body.return_token_ids,
                    prompt_ids=prompt.ids,
                )
                usage = TokenUsage(discarded=answer.only_echoed)
                sequences.append(Sequenced(request=each, answer=answer, usage=usage))
        kind = "text_completion"
        envelope = Envelope(prefix="cmpl", kind=kind, chunk_kind=kind, model=body.model)
        form = ChoicesForm(
            sequences,
            envelope,
            body.stream_options or StreamOptions(),
            prompts=len(prompts),
            kept=body.n,
            prompt_ids=_shown_ids(served, body, prompts),
        )
        return await self._respond(request, served, form, stream=body.stream)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        kind = "chat.completion"
        conversation = await self.conversation(request, body)
        envelope = Envelope(prefix="chatcmpl", kind=kind, chunk_kind=f"{kind}.chunk", model=body.model)
        shown: dict[str, Any] = {"shows_ids": body.return_token_ids, "shows_log_probs": body.logprobs}
        sequences = [
            Sequenced(request=each, answer=ChatAnswer(**conversation.message(index), **shown))
            for index, each in enumerate(conversation.requests)
        ]
        ids = _shown_ids(conversation.served, body, [conversation.prompt])
        form = ChoicesForm(sequences, envelope, body.stream_options or StreamOptions(), prompt_ids=ids)
        return await self._respond(request, conversation.served, form, stream=body.stream)

    async def conversation(self, request: Request, body: ChatBody, *, raw: str | None = None) -> AskedConversation:
        """Return what any API needs to answer a conversation, or to continue a `raw` text."""
        served, adapter = await self._find(request, body)
        if raw is None:
            prompt = await chat_prompt(served, body, self._backend.images, _reserve(request))
        else:
            prompt = await completion_prompt(served, body, raw)
        length = len(prompt.ids)
        room = CHAT_TOKENS if served.max_seq_len is None else max(1, served.max_seq_len - length)
        max_tokens = body.max_completion_tokens or body.max_tokens or min(CHAT_TOKENS, room)
        tops = body.prompt_logprobs if body.tops is None else body.tops
        requests = await self._requests(
            served,
            body,
            prompt,
            count=body.n,
            max_tokens=max_tokens,
            adapter=adapter,
            tops=tops,
            echoes_log_probs=body.echoes_log_probs,
        )
        return AskedConversation(served=served, body=body, prompt=prompt, requests=requests)

    async def responses(self, body: ResponsesBody, request: Request) -> Response:
        """Answer a conversation that the server may keep."""
        continued = body.previous_response_id
        before = (await self._store.find(continued)).messages if continued else ()
        said = await asyncio.to_thread(body.messages, before)
        with naming(body.fields):
            asked = await self.conversation(request, await asyncio.to_thread(body.chat, said))
        body.model = asked.body.model
        sequence = Sequenced(request=asked.requests[0], answer=Message(**asked.message()))

        def store(name: str, document: Json, answer: Json) -> None:
            self._store.add(name, document, [*said, answer])

        form = ResponsesForm(sequence, body, store if body.store else None)
        return await self._respond(request, asked.served, form, stream=body.stream)

    async def stored_response(self, id: str, request: Request) -> Response:  # noqa: A002 - the field's word
        """Return a stored response, or forget it."""
        if request.method == "DELETE":
            self._store.remove(id)
            return JSONResponse({"id": id, "object": "response", "deleted": True})
        return JSONResponse((await self._store.find(id)).document)

    async def messages(self, body: MessagesBody, request: Request) -> Response:
        """Answer a conversation in Anthropic's form."""
        with naming(body.fields):
            asked = await self.conversation(request, await asyncio.to_thread(body.chat))
        sequence = Sequenced(request=asked.requests[0], answer=Message(**asked.message()))
        return await self._respond(request, asked.served, MessagesForm(sequence, asked.body.model), stream=body.stream)

    async def ollama_chat(self, body: OllamaChatBody, request: Request) -> Response:
        """Answer a conversation in Ollama's form."""
        return await self._ollama(body, request, chat=True)

    async def ollama_generate(self, body: OllamaGenerateBody, request: Request) -> Response:
        """Answer a question, or continue a text, in Ollama's form."""
        return await self._ollama(body, request, chat=False)

    async def _ollama(self, body: OllamaChatBody | OllamaGenerateBody, request: Request, *, chat: bool) -> Response:
        raw = body.prompt if isinstance(body, OllamaGenerateBody) and body.raw else None
        with naming(body.fields):
            conversation = await self.conversation(request, await asyncio.to_thread(body.chat), raw=raw)
        sequence = Sequenced(request=conversation.requests[0], answer=Message(**conversation.message()))
        form = OllamaForm(sequence, conversation.body.model, chat=chat)
        return await self._respond(request, conversation.served, form, stream=body.stream)

    async def ollama_embed(self, body: OllamaEmbedBody, request: Request) -> Response:
        """Return the vectors of texts in Ollama's form."""
        served, _ = await self._find(request, body)
        asked = EmbeddingBody(model=body.model, input=body.input, dimensions=body.dimensions)
        return await while_connected(request.receive, embeddings(self._backend, served, asked, plain=True))

    async def ollama_tags(self) -> Response:
        """List the models and their adapters as Ollama does."""
        return JSONResponse(tags([each for model in await self._backend.models() for each in _described(model)]))

    async def ollama_show(self, body: OllamaShowBody) -> Response:
        """Describe a model as Ollama does."""
        served, adapter = await self._backend.find(body.model)
        entry = next(each for each in _described(served) if each["id"] == (adapter or served.name))
        templates = {} if served.files is None else served.files.chat_templates
        return JSONResponse(shown(entry, templates.get("default", ""), embeds=makes_vectors(served)))

    async def ollama_version(self) -> dict[str, str]:
        """Return our version; clients ask whether a server is there."""
        return {"version": __version__}

    async def count_tokens(self, body: CountBody, request: Request) -> Response:
        """Count the tokens of a conversation."""
        served, _ = await self._backend.find(body.model)
        chat = await asyncio.to_thread(body.chat)
        prompt = await chat_prompt(served, chat, self._backend.images, _reserve(request))
        return JSONResponse({"input_tokens": prompt.tokens})

    async def load_adapter(self, body: LoadAdapterBody) -> Response:
        """Add a LoRA adapter of a folder on this machine to the repository, where it stays."""
        from trtserve.repository.adapters import add_adapter  # brings every runtime

        served, repository, table = await self._adapters()
        known = [*STANDARD_MODELS, *(each for model in await self._backend.models() for each in model.names)]
        replaced = body.load_inplace and served.adapters is not None and body.lora_name in served.adapters.names
        if body.lora_name in known and not replaced:
            raise ApiError(f"The name `{body.lora_name}` is taken on this server.", param="lora_name")
        assert served.core is not None
        core, folder = served.core.name, Path(os.path.expanduser(body.lora_path))  # noqa: PTH111 - of any name
        if not await asyncio.to_thread(os.path.isdir, folder):
            raise ApiError(f"There is no folder {folder} on the server's machine.", status=404, param="lora_path")
        try:
            await asyncio.to_thread(add_adapter, repository, core, table, body.lora_name, folder, replacing=replaced)
        except TrtserveError as error:
            raise ApiError(" ".join(filter(None, (error.message, error.hint))), param="lora_path") from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, body: UnloadAdapterBody) -> Response:
        """Remove an adapter from the repository; requests that have begun go on."""
        from trtserve.repository.adapters import remove_adapter

        served, repository, table = await self._adapters()
        assert served.core is not None
        try:
            await asyncio.to_thread(remove_adapter, repository, served.core.name, table, body.lora_name)
        except TrtserveError as error:
            status = 404 if isinstance(error, UsageError) else 400
            text = " ".join(filter(None, (error.message, error.hint)))
            raise ApiError(text, status=status, param="lora_name") from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _adapters(self) -> tuple[ServedModel, Path, str]:
        """Return the model that adapters belong to, its repository, and the name of its table."""
        served, *others = await self._backend.models()
        repository = self._backend.repository
        if repository is None or served.adapters is None or served.core is None:
            raise ApiError("Adapters are loaded into a repository on this machine: start with --repository DIR.")
        if others:
            raise ApiError("This server has several models; adapters are loaded where there is one.")
        return served, repository, served.adapters.table

    async def tokenize(self, body: TokenizeBody) -> Response:
        """Return the token ids of a text, or of a conversation in the chat template, as vLLM does."""
        served, _ = await self._backend.find(body.model)
        files = served.require_tokenizer("tokenize")
        assert served.encoder is not None
        text, special = body.prompt, body.add_special_tokens is not False
        if text is None:
            chat = await asyncio.to_thread(body.chat)
            text, special = await chat_text(served, chat), bool(body.add_special_tokens)
            if text is None:  # no chat template
                text, special = chat.messages[-1]["content"], True
        served.require_room(text)
        (ids,) = await served.encoder.encode([text], special=special)
        names = files.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        head = {"count": len(ids), "max_model_len": served.max_seq_len}
        return JSONResponse({**head, "tokens": ids, "token_strs": names})

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """Return the text of token ids, special tokens included, as vLLM does."""
        served, _ = await self._backend.find(body.model)
        files = served.require_tokenizer("detokenize")
        served.require_room(body.tokens)
        if served.vocab_size is not None and max(body.tokens, default=0) >= served.vocab_size:
            raise ApiError(f"tokens has an id beyond the vocabulary of {served.vocab_size}.", param="tokens")
        text = await asyncio.to_thread(decode, files.tokenizer, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    async def embeddings(self, body: EmbeddingBody, request: Request) -> Response:
        """Return the vectors of texts."""
        served, _ = await self._find(request, body)
        return await while_connected(request.receive, embeddings(self._backend, served, body))

    async def rerank(self, body: RerankBody, request: Request) -> Response:
        """Order documents by what they have to do with a question."""
        served, _ = await self._find(request, body)
        return JSONResponse(await while_connected(request.receive, rerank(self._backend, served, body)))

    async def _find(self, request: Request, body: NamesModel) -> tuple[ServedModel, str | None]:
        """Return the model and the adapter that a body names; one that names none gets the name of the only model."""
        served, adapter = await self._backend.find(body.model)
        body.model = body.model or served.name
        if self._require is not None:
            await self._require(request, served.model.name)
        return served, adapter

    async def _respond(self, request: Request, served: ServedModel, form: Form[Any], *, stream: bool) -> Response:
        exchange = getattr(request.state, "exchange", None)  # of a gateway, which may keep a log
        note = {} if exchange is None else exchange.log
        answering = Answering(backend=self._backend, served=served, measures=self._measures, form=form, note=note)
        return await answering.respond(request, stream=stream)


@dataclass(frozen=True, kw_only=True)
class AskedConversation:
    """A conversation that is about to be answered."""

    served: ServedModel
    body: ChatBody
    prompt: Prompt
    requests: Sequence[EngineRequest]

    def message(self, index: int = 0) -> dict[str, Any]:
        """Return the fields of the `Message` that becomes one of its answers."""
        body = self.body
        reader = reader_of(
            self.served.dialect,
            {tool.function.name: tool.function.parameters for tool in body.usable_tools},
            thinks=self.prompt.thinks,
            thoughts=body.separates_thoughts,
            required=body.must_call,
        )
        return {
            "index": index,
            "reader": reader,
            "named": isinstance(body.tool_choice, NamedTool),
            "parallel": body.parallel_tool_calls,
            "shows_reasoning": body.include_reasoning,
        }


def _reserve(request: Request) -> Callable[[int], None]:
    """Return what reserves memory of the gateway, where there is one."""
    exchange = getattr(request.state, "exchange", None)
    return getattr(exchange, "reserve", None) or (lambda _size: None)


def _key_check(keys: Collection[str]) -> Callable[[Request], None]:
    encoded = [key.encode() for key in keys]

    def check(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.encode(), key) for key in encoded]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError("Incorrect API key provided.", status=401, code="invalid_api_key")

    return check


def _described(served: ServedModel) -> list[Json]:
    """Return the entries of a model and its adapters."""
    head = {
        "object": "model",
        "created": served.created,
        "owned_by": "trtserve",
        "type": "model",
        "created_at": datetime.fromtimestamp(served.created, timezone.utc).isoformat(),
        "max_model_len": served.max_seq_len,
        "system_messages": served.takes_system,
        "input_modalities": ["text", "image"] if served.reads_images else ["text"],
        "default_parameters": {
            "top_k": 0,
            "repetition_penalty": 1.0,
            "max_tokens": min(CHAT_TOKENS, served.max_seq_len or CHAT_TOKENS),
            **served.defaults,
        },
    }
    parents = {name: None if name == served.name else served.name for name in served.names}
    return [
        {"id": name, "display_name": name, **head, "root": name, "parent": parent} for name, parent in parents.items()
    ]


def _echoed(served: ServedModel, prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    return served.require_tokenizer("echo").decode(prompt.ids)


def _shown_ids(served: ServedModel, body: Sampling, prompts: Sequence[Prompt]) -> list[int] | None:
    """Return the ids of the first prompt if the client wants ids. Raises ApiError for a model that has none."""
    if not body.return_token_ids:
        return None
    if not served.takes_ids:
        raise ApiError("return_token_ids needs a model that takes token ids.", param="return_token_ids")
    return list(prompts[0].ids)
