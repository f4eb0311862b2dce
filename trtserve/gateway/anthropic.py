"""Anthropic's messages on the core of OpenAI's API: a body that becomes a chat, and the form of the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import to_json

from trtserve.gateway.openai.answering import Form, Sequenced
from trtserve.gateway.openai.answers import AnswerBlock, Json, Message, TextPiece, arguments_of
from trtserve.gateway.openai.bodies import Body, ChatBody, Listed, Thinking, ToolName, ToolParameters, chat_body
from trtserve.gateway.openai.errors import MESSAGES, ApiError, error_event
from trtserve.gateway.openai.reading import Part

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class CustomTool(Body):
    """A tool of the client; Anthropic's own tools run on its servers."""

    type: Literal["custom"] = "custom"
    name: ToolName
    description: str = ""
    input_schema: ToolParameters
    strict: bool = False


class ToolChoice(Body):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class OutputFormat(Body):
    """The schema of the answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class MessagesOutput(Body):
    """What the answer must match, and how much the model may think."""

    format: OutputFormat | None = None
    effort: str = ""


class CountBody(Body):
    """`POST /v1/messages/count_tokens`."""

    model: str
    messages: Listed[dict[str, Any]] = Field(min_length=1)
    system: str | Listed[dict[str, Any]] = ""
    tools: Listed[CustomTool] = Field(default_factory=list)
    tool_choice: ToolChoice = Field(default_factory=lambda: ToolChoice(type="auto"))
    thinking: Thinking | None = None
    output_config: MessagesOutput = Field(default_factory=MessagesOutput)
    output_format: OutputFormat | None = None  # the former place of the schema

    def chat(self, **more: Any) -> ChatBody:
        """Return the chat that this asks for. Raises ApiError for what the model cannot read."""
        messages = [
            *_system(self.system),
            *(each for number, m in enumerate(self.messages) for each in _said(number, m)),
        ]
        if not messages:
            raise ApiError("There is no message with a content.", param="messages")
        choice: Any = {"auto": "auto", "any": "required", "none": "none"}.get(self.tool_choice.type)
        if choice is None:
            choice = {"type": "function", "function": {"name": self.tool_choice.name}}
        wanted = self.output_config.format or self.output_format
        schema = wanted and {"name": "answer", "schema": wanted.json_schema}
        tools = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema} for tool in self.tools
        ]
        return chat_body(
            {
                "model": self.model,
                "messages": messages,
                "tools": [{"type": "function", "function": tool} for tool in tools],
                "tool_choice": choice,
                "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
                "response_format": schema and {"type": "json_schema", "json_schema": schema},
                "reasoning_effort": self.output_config.effort,
                "thinking": {"type": "disabled" if self.thinking is None else self.thinking.type},
                "include_reasoning": self.thinking is not None and self.thinking.type != "disabled",
                "continue_final_message": messages[-1]["role"] == "assistant" and bool(messages[-1]["content"]),
                **more,
            }
        )


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    fields: ClassVar = {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
    }
    """Field of the chat → the one here."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stream: bool = False
    stop_sequences: Listed[str] = Field(default_factory=list)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)

    def chat(self, **more: Any) -> ChatBody:
        """Return the chat that this asks for."""
        return super().chat(
            max_tokens=self.max_tokens,
            stream=self.stream,
            stop=self.stop_sequences or None,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            **more,
        )


def _system(system: str | list[dict[str, Any]]) -> list[Json]:
    text = system if isinstance(system, str) else "\n\n".join(_text("system", block) for block in system)
    return [{"role": "system", "content": text}] if text else []


def _said(number: int, message: dict[str, Any]) -> Iterator[Json]:
    """Yield the messages of a chat that one of Anthropic's is: results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    where = f"message {number}"
    if role not in ("user", "assistant", "system"):
        raise ApiError(f"{where} has the role {str(role)[:50]!r}; expected user or assistant.", param="messages")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ApiError(f"{where} needs a content: a text or a list of blocks.", param="messages")
    parts, thoughts, calls = list[Json](), list[str](), list[Json]()
    for block in content:
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _result(where, block)}
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(where, block))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            parts.append(_part(where, block))
    if parts or calls or thoughts:
        more: Json = {"tool_calls": calls} if calls else {}
        more |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        yield {"role": role, "content": _joined(parts, "\n\n" if role == "user" else ""), **more}


def _call(where: str, block: dict[str, Any]) -> Json:
    if not isinstance(name := block.get("name"), str):
        raise ApiError(f"{where} has a tool_use without a name.", param="messages")
    function = {"name": name, "arguments": block.get("input") or {}}
    return {"id": block.get("id"), "type": "function", "function": function}


def _joined(parts: Sequence[Json], separator: str) -> str | list[Json]:
    """Return texts as one, and parts with images as they are."""
    return list(parts) if any("image_url" in part for part in parts) else separator.join(p["text"] for p in parts)


def _part(where: str, block: dict[str, Any]) -> Json:
    """Return the part of a chat that a block is."""
    source = block.get("source")
    if block.get("type") != "image" or not isinstance(source, dict):
        return {"type": "text", "text": _text(where, block)}
    url = source.get("url") if source.get("type") == "url" else None
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _text(where: str, block: dict[str, Any]) -> str:
    """Return the text of a block, or of a document that is one."""
    kind, text = block.get("type"), block.get("text")
    if kind == "document" and isinstance(source := block.get("source"), dict) and source.get("type") == "text":
        kind, text = "text", source.get("data")
    if kind != "text" or not isinstance(text, str):
        raise ApiError(
            f"{where} has a block of type {str(kind)[:50]!r}; expected text, or an image with a source.",
            param="messages",
        )
    return text


def _result(where: str, block: dict[str, Any]) -> str | list[Json]:
    content = block.get("content") or ""
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if not all(isinstance(each, dict) for each in blocks):
        raise ApiError(
            f"{where} has a tool_result whose content is neither text nor a list of blocks.", param="messages"
        )
    return _joined([_part(where, each) for each in blocks], "\n")


class MessagesForm(Form[Message]):
    """A message, or its events."""

    def __init__(self, sequence: Sequenced[Message], model: str) -> None:
        super().__init__([sequence])
        self._model = model
        self._begun = False
        self._open: AnswerBlock | None = None
        self._count = 0

    def whole(self) -> Json:
        """Return the message."""
        answer, usage = self.sequences[0].answer, self.sequences[0].usage
        return {
            **self._head(),
            "content": [self._block(block) for block in answer.blocks if block.call or block.text],
            **self._reason(),
            "usage": _usage(usage.prompt_tokens, usage.completion_tokens),
        }

    def collect(self, sequence: Sequenced[Message], piece: TextPiece) -> None:
        """Add a piece."""
        sequence.answer.add(piece)

    def events(self, sequence: Sequenced[Message], piece: TextPiece) -> bytes:
        """Return the events of a piece."""
        made = []
        parts = sequence.answer.add(piece)
        if not self._begun:
            self._begun = True
            usage = _usage(sequence.usage.prompt_tokens, 0)
            head = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            made.append(_event("message_start", message=head))
        for part in parts:
            made += self._part(part)
        return b"".join(made)

    def end(self) -> bytes:
        """Return the events that end the message."""
        usage = self.sequences[0].usage
        counted = _usage(usage.prompt_tokens, usage.completion_tokens)
        delta = _event("message_delta", delta=self._reason(), usage=counted)
        return b"".join([*self._close(), delta, _event("message_stop")])

    def failed(self, error: ApiError) -> bytes:
        """Return the error."""
        return error_event(MESSAGES, error.status, error.message)

    def _head(self) -> Json:
        return {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "model": self._model}

    def _reason(self) -> Json:
        answer = self.sequences[0].answer
        reason = _REASONS[answer.finish_reason or "stop"]
        if answer.calls and reason == "end_turn":  # of a tool that the client named
            reason = "tool_use"
        return {"stop_reason": "stop_sequence" if answer.stop else reason, "stop_sequence": answer.stop}

    def _block(self, block: AnswerBlock, *, empty: bool = False) -> Json:
        if block.call is not None:
            arguments = {} if empty else arguments_of(block.call.arguments)
            return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": arguments}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": "" if empty else block.text, "signature": ""}
        return {"type": "text", "text": "" if empty else block.text}

    def _part(self, part: Part) -> Iterator[bytes]:
        kind = "call" if part.call is not None else part.kind
        if self._open is None or part.kind == "call" or self._open.kind != kind:
            yield from self._close()
            self._open = AnswerBlock(kind="call" if kind == "arguments" else kind, call=part.call)
            yield _event("content_block_start", index=self._count, content_block=self._block(self._open, empty=True))
        if part.kind != "call":
            keys = {"text": "text", "reasoning": "thinking", "arguments": "partial_json"}
            types = {"text": "text_delta", "reasoning": "thinking_delta", "arguments": "input_json_delta"}
            delta = {"type": types[part.kind], keys[part.kind]: part.text}
            yield _event("content_block_delta", index=self._count, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._count)
            self._open = None
            self._count += 1


def _usage(prompt: int | None, made: int | None) -> Json:
    """Return the counts of tokens. A prompt counts whole: how much of it a cache held is not told."""
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt or 0, **cached, "output_tokens": made or 0}


def _event(kind: str, **content: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + to_json({"type": kind, **content}) + b"\n\n"
