"""OpenAI's responses on the core of chats: a body that becomes one, a bounded store of past ones, and the form."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import from_json, to_json

from trtserve.gateway.asgi import SMALL
from trtserve.gateway.openai.answering import Form, Sequenced
from trtserve.gateway.openai.answers import AnswerBlock, Json, Message, TextPiece, TokenLogProb, call_json
from trtserve.gateway.openai.bodies import (
    Body,
    ChatBody,
    Listed,
    NamedFunction,
    ToolName,
    ToolParameters,
    chat_body,
)
from trtserve.gateway.openai.errors import ApiError
from trtserve.gateway.openai.reading import Part

_LOG = logging.getLogger(__name__)
_ID = re.compile(r"resp_[0-9a-f]{1,64}")
_MOST_STORED = 1024
_MOST_STORED_BYTES = 64 << 20
# Files are counted whenever a process has added this part of the most, so that there are never many more.
_TIDIED = 32
_PARTIAL, _ABANDONED = ".partial", 60.0
_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_NAMED = {"message": "role", "function_call": "name"}
"""Type of an item → the key that it needs."""


_LOG_PROBS = "message.output_text.logprobs"
_Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class FunctionOfResponses(Body):
    """A function that the model may call; OpenAI's other tools run on its servers."""

    type: Literal["function"]
    name: ToolName
    description: str = ""
    parameters: ToolParameters = Field(default_factory=lambda: {"type": "object"})
    strict: bool = False


class NamedToolOfResponses(NamedFunction):
    """The tool that the model must call."""

    type: Literal["function"]


class AllowedToolsOfResponses(Body):
    """The tools that the model may call in this answer."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Listed[NamedToolOfResponses] = Field(min_length=1)


class TextFormat(Body):
    """What the answer must match."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    description: str = ""
    strict: bool = True


class TextSettings(Body):
    """The form of the text."""

    format: TextFormat = Field(default_factory=lambda: TextFormat.model_validate({"type": "text"}))


class Reasoning(Body):
    """How much the model thinks."""

    effort: str = ""
    summary: str = ""  # no effect: thoughts are not summarised, they are part of the answer


_EXTENSIONS = (
    *("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "stop", "ignore_eos", "logit_bias", "chat_template_kwargs"),
)


class ResponsesBody(Body):
    """`POST /v1/responses`."""

    fields: ClassVar = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }
    """Field of the chat → the one here."""

    model: str = ""
    input: str | Listed[dict[str, Any]]
    instructions: str = ""
    previous_response_id: str = ""
    store: bool = True
    stream: bool = False
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    tools: Listed[FunctionOfResponses] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedToolOfResponses | AllowedToolsOfResponses = "auto"
    parallel_tool_calls: bool = True
    text: TextSettings = Field(default_factory=TextSettings)
    reasoning: Reasoning = Field(default_factory=Reasoning)
    metadata: dict[str, Any] = Field(default_factory=dict)
    background: Literal[False] = False

    # Extensions, as vLLM has them; the chat checks their ranges.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | Listed[str] | None = None
    ignore_eos: bool = False
    logit_bias: dict[str, float] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    truncation: Literal["disabled"] = "disabled"

    include: Listed[_Included] = Field(default_factory=list)
    """`message.output_text.logprobs` asks for log-probabilities; the others are about what there is not here."""
    top_logprobs: int | None = Field(None, ge=0, le=20)

    # No effect.
    stream_options: dict[str, Any] = Field(default_factory=dict)
    user: str = ""

    @model_validator(mode="after")
    def _shown(self) -> ResponsesBody:
        if self.top_logprobs and _LOG_PROBS not in self.include:
            raise ValueError(f"top_logprobs needs {_LOG_PROBS!r} in include")
        return self

    def messages(self, before: Sequence[Json]) -> list[Json]:
        """Return the conversation that goes on: what was said before, and the input. Raises ApiError."""
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        return [*before, *_messages(items)]

    def chat(self, messages: Sequence[Json]) -> ChatBody:
        """Return the chat that this asks for. Raises ApiError."""
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        choice: Any = self.tool_choice
        if isinstance(choice, AllowedToolsOfResponses):
            tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
        elif isinstance(choice, NamedToolOfResponses):
            choice = {"type": "function", "function": {"name": choice.name}}
        wanted = self.text.format
        named = {"name": wanted.name, "schema": wanted.json_schema or {}, "strict": wanted.strict}
        return chat_body(
            {
                "model": self.model,
                "messages": [*instructions, *messages],
                "stream": self.stream,
                "max_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "tools": [
                    {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_unset=True)}
                    for tool in self.tools
                ],
                "tool_choice": choice,
                "parallel_tool_calls": self.parallel_tool_calls,
                "logprobs": _LOG_PROBS in self.include,
                "top_logprobs": self.top_logprobs,
                "reasoning_effort": self.reasoning.effort,
                **{name: getattr(self, name) for name in _EXTENSIONS},
                "response_format": {
                    "type": wanted.type,
                    **({"json_schema": named} if wanted.type == "json_schema" else {}),
                },
            }
        )


def _messages(items: Sequence[dict[str, Any]]) -> list[Json]:
    """Return the messages of a chat that items are; thoughts and calls belong to the assistant's next text."""
    made: list[Json] = []
    thoughts = ""
    for number, item in enumerate(items):
        kind, where = str(item.get("type") or "message"), f"item {number} of the input"
        if kind in _NAMED and not isinstance(item.get(_NAMED[kind]), str):
            raise ApiError(f"{where} has no {_NAMED[kind]}.", param="input")
        if kind == "message":
            made.append({"role": item.get("role"), "content": _content(where, item.get("content"))})
        elif kind == "function_call":
            call = {"id": item.get("call_id"), "type": "function"}
            call["function"] = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            if not made or made[-1]["role"] != "assistant":
                made.append({"role": "assistant", "content": ""})
            made[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(where, item.get("output"))
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind == "reasoning":
            thoughts += _text(where, item.get("content") or item.get("summary") or "")
            continue
        else:
            raise ApiError(f"{where} has the type {kind[:50]!r}, which is not supported.", param="input")
        if thoughts and made[-1]["role"] == "assistant":
            made[-1]["reasoning_content"], thoughts = thoughts, ""
    if not made:
        raise ApiError("The input has no message.", param="input")
    return made


def _text(where: str, content: Any) -> str:
    parts = _content(where, content)
    if not isinstance(parts, str):
        raise ApiError(f"{where} has an image, which is expected in messages and outputs of functions.", param="input")
    return parts


def _content(where: str, content: Any) -> str | list[Json]:
    """Return the text of an item, or its parts as those of a chat if there are images among them."""
    if content is None or isinstance(content, str):
        return content or ""
    made: list[Json] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("refusal" if kind == "refusal" else "text") if kind in _TEXTS else None
        if isinstance(text, str):
            made.append({"type": "text", "text": text})
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            made.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            raise ApiError(
                f"{where} has a part of type {str(kind)[:50]!r}; expected input_text or input_image.",
                param="input",
            )
    return made if any("image_url" in part for part in made) else "".join(part["text"] for part in made)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A past response."""

    document: Json
    messages: Sequence[Json]
    """The conversation with its answer, without instructions."""


class ResponseStore:
    """The responses that clients may continue: the latest ones, within bounds.

    Several processes keep theirs together, in files of one folder.
    """

    def __init__(
        self, most: int = _MOST_STORED, most_bytes: int = _MOST_STORED_BYTES, *, folder: Path | None = None
    ) -> None:
        self._folder = folder
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = self._added = self._added_bytes = 0

    async def find(self, id: str) -> Stored:  # noqa: A002 - the field's word
        """Return a response. Raises ApiError for one that was never stored, or had to make room."""
        content = self._content(id)
        return Stored(**(await asyncio.to_thread(from_json, content) if len(content) > SMALL else from_json(content)))

    def _content(self, id: str) -> bytes:  # noqa: A002 - the field's word
        content = self._kept.get(id) if self._folder is None else self._read(id)
        if content is None:
            raise ApiError(
                f"Response with id {id[:100]!r} not found: it was not stored, or made room for newer ones.", status=404
            )
        if self._folder is None:
            self._kept.move_to_end(id)
        return content

    def add(self, id: str, document: Json, messages: Sequence[Json]) -> None:  # noqa: A002 - the field's word
        """Keep a response, and drop those that were not used for longest if there are too many."""
        content = to_json({"document": document, "messages": messages})
        if self._folder is not None:
            try:
                self._write(id, content)
            except OSError as error:  # a full disk is no reason to withhold the answer
                _LOG.warning("response %s is not stored: %s", id, error)
            return
        self._kept[id] = content
        self._bytes += len(content)
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._bytes -= len(self._kept.popitem(last=False)[1])

    def remove(self, id: str) -> None:  # noqa: A002 - the field's word
        """Forget a response. Raises ApiError if it is not there."""
        self._content(id)
        if self._folder is None:
            self._bytes -= len(self._kept.pop(id))
        else:
            self._path(id).unlink(missing_ok=True)

    def _read(self, id: str) -> bytes | None:  # noqa: A002 - the field's word
        if not _ID.fullmatch(id):
            return None
        try:
            content = self._path(id).read_bytes()
            _mark_used(self._path(id))
        except FileNotFoundError:  # another process may have dropped it meanwhile
            return None
        return content

    def _write(self, id: str, content: bytes) -> None:  # noqa: A002 - the field's word
        staged = self._path(id).with_suffix(_PARTIAL)
        try:
            staged.write_bytes(content)
            _mark_used(staged)
            staged.replace(self._path(id))  # a killed process leaves no half of a response
        finally:
            staged.unlink(missing_ok=True)
        self._added += 1
        self._added_bytes += len(content)
        if self._added >= self._most // _TIDIED or self._added_bytes >= self._most_bytes // _TIDIED:
            self._added = self._added_bytes = 0
            self._tidy()

    def _tidy(self) -> None:
        """Remove the oldest files beyond the bounds, whoever wrote them, and what killed processes left half done."""
        assert self._folder is not None
        found: list[tuple[float, int, Path]] = []
        for path in (*self._folder.glob("*.response"), *self._folder.glob(f"*{_PARTIAL}")):
            with suppress(FileNotFoundError):
                about = path.stat()
                found.append((about.st_mtime, about.st_size, path))
        kept = kept_bytes = 0
        for written, size, path in sorted(found, reverse=True):
            kept, kept_bytes = kept + 1, kept_bytes + size
            abandoned = path.suffix == _PARTIAL and time.time() - written > _ABANDONED
            if abandoned or kept > self._most or kept_bytes > self._most_bytes:
                path.unlink(missing_ok=True)

    def _path(self, id: str) -> Path:  # noqa: A002 - the field's word
        assert self._folder is not None
        return self._folder / f"{id}.response"


def _mark_used(path: Path) -> None:
    """Give a file the time since the boot, by which the oldest goes first: the time of day can be set back."""
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    os.utime(path, ns=(now, now))


class ResponsesForm(Form[Message]):
    """A response, or its events."""

    def __init__(
        self, sequence: Sequenced[Message], body: ResponsesBody, store: Callable[[str, Json, Json], None] | None
    ) -> None:
        """`store` gets the id, the document, and the answer as a message."""
        super().__init__([sequence])
        self._body, self._store = body, store
        self._created = int(time.time())
        self._ids: list[str] = []
        self._items = 0
        self._number = 0
        self._open: AnswerBlock | None = None

    def whole(self) -> Json:
        """Return the response, and store it."""
        answer = self.sequences[0].answer
        blocks = [block for block in answer.blocks if block.call is not None or block.text]
        cut = answer.finish_reason == "length"
        document = self._document("incomplete" if cut else "completed")
        document["output"] = [self._item(number, block, cut=cut) for number, block in enumerate(blocks)]
        document["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        document["usage"] = self._usage()
        if self._store is not None:
            said: Json = {"role": "assistant", "content": answer.text}
            if answer.calls:
                said["tool_calls"] = [call_json(call, call.arguments or "{}") for call in answer.calls]
            self._store(document["id"], document, said)
        return document

    def collect(self, sequence: Sequenced[Message], piece: TextPiece) -> None:
        """Add a piece."""
        sequence.answer.add(piece)

    def events(self, sequence: Sequenced[Message], piece: TextPiece) -> bytes:
        """Return the events of a piece."""
        made: list[bytes] = []
        if not self._number:
            document = self._document("in_progress")
            made += [self._event(f"response.{state}", response=document) for state in ("created", "in_progress")]
        for part in sequence.answer.add(piece):
            made.extend(self._part(part))
        return b"".join(made)

    def end(self) -> bytes:
        """Return the events that end the response."""
        made = list(self._close())
        document = self.whole()
        return b"".join([*made, self._event(f"response.{document['status']}", response=document)])

    def failed(self, error: ApiError) -> bytes:
        """Return the events of a response that failed."""
        document = self._document("failed")
        document["error"] = {"code": error.body["error"]["code"] or "server_error", "message": error.message}
        return self._event("response.failed", response=document)

    def _document(self, status: str) -> Json:
        body = self._body
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions or None,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id or None,
            "reasoning": {"effort": body.reasoning.effort or None, "summary": None},
            "store": body.store,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text.model_dump(by_alias=True, exclude_unset=True) or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user or None,
            "metadata": body.metadata,
        }

    def _usage(self) -> Json:
        usage, answer = self.sequences[0].usage, self.sequences[0].answer
        given, made = usage.prompt_tokens or 0, usage.completion_tokens or 0
        return {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": given + made,
        }

    def _item(self, number: int, block: AnswerBlock, *, begins: bool = False, cut: bool = False) -> Json:
        while number >= len(self._ids):
            self._ids.append(uuid.uuid4().hex)
        name, status = self._ids[number], "in_progress" if begins else "incomplete" if cut else "completed"
        if block.call is not None:
            call = {"call_id": block.call.id, "name": block.call.name}
            arguments = "" if begins else block.call.arguments or "{}"
            return {"id": f"fc_{name}", "type": "function_call", **call, "arguments": arguments, "status": status}
        content = [] if begins else [self._content(block)]
        if block.kind == "reasoning":
            return {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": content, "status": status}
        return {"id": f"msg_{name}", "type": "message", "role": "assistant", "content": content, "status": status}

    def _content(self, block: AnswerBlock, text: str | None = None) -> Json:
        text = block.text if text is None else text
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        log_probs = [token.chat() for token in block.tokens] if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": log_probs}

    def _part(self, part: Part) -> Iterator[bytes]:
        kind = "call" if part.call is not None else part.kind
        if self._open is None or part.kind == "call" or self._open.kind != kind:
            yield from self._close()
            self._open = AnswerBlock(kind="call" if kind == "arguments" else kind, call=part.call)
            item = self._item(self._items, self._open, begins=True)
            yield self._event("response.output_item.added", output_index=self._items, item=item)
            if part.call is None:
                yield self._at("response.content_part.added", part=self._content(self._open, ""))
        if part.kind != "call":
            self._open.add(part)
            yield self._at(f"{self._channel}.delta", delta=part.text, **self._log_probs(part.tokens))

    @property
    def _channel(self) -> str:
        kind = "" if self._open is None else self._open.kind
        names = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
        return f"response.{names[kind]}"

    def _log_probs(self, tokens: Sequence[TokenLogProb]) -> Json:
        shown = self._open is not None and self._open.kind == "text"
        return {"logprobs": [token.chat() for token in tokens]} if shown else {}

    def _close(self) -> Iterator[bytes]:
        block = self._open
        if block is None:
            return
        if block.call is not None:
            yield self._at(f"{self._channel}.done", arguments=block.call.arguments or "{}", name=block.call.name)
        else:
            yield self._at(f"{self._channel}.done", text=block.text, **self._log_probs(block.tokens))
            yield self._at("response.content_part.done", part=self._content(block))
        item = self._item(self._items, block)
        yield self._event("response.output_item.done", output_index=self._items, item=item)
        self._open = None
        self._items += 1

    def _at(self, kind: str, **content: Any) -> bytes:
        """Return an event about the open item."""
        assert self._open is not None
        where: Json = {"item_id": self._item(self._items, self._open, begins=True)["id"], "output_index": self._items}
        return self._event(kind, **where, **({} if self._open.call is not None else {"content_index": 0}), **content)

    def _event(self, kind: str, **content: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return b"event: %b\ndata: %b\n\n" % (
            kind.encode(),
            to_json({"type": kind, "sequence_number": number, **content}),
        )
