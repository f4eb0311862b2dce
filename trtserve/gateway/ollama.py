"""Ollama's API on the core of OpenAI's: bodies that become chats, lines of JSON that are the answer, the models."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import to_json

from trtserve.gateway.openai.answering import Form, Sequenced
from trtserve.gateway.openai.answers import Json, Message, TextPiece, arguments_of
from trtserve.gateway.openai.bodies import Body, ChatBody, Listed, Tool, chat_body
from trtserve.gateway.openai.errors import OLLAMA, ApiError, error_event
from trtserve.gateway.openai.reading import Call
from trtserve.gateway.openai.vectors import MOST_DIMENSIONS

_LATEST = ":latest"
_MOST_IMAGES = 64
_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")


def without_tag(model: str) -> str:
    """Return the name of a model as it is here: Ollama's have a tag."""
    return model.removesuffix(_LATEST)


class OllamaOptions(Body):
    """How tokens are chosen."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Listed[str] | None = None
    num_predict: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def sampling(self) -> Json:
        """Return OpenAI's keys."""
        # 0 and less mean all there is room for, as in Ollama.
        most = self.num_predict if (self.num_predict or 0) > 0 else None
        return {
            **{name: getattr(self, name) for name in _SAMPLED},
            "repetition_penalty": self.repeat_penalty,
            "max_tokens": most,
        }


class NamedBody(Body):
    """A body that names a model."""

    model: str = Field(max_length=1024)

    @field_validator("model")
    @classmethod
    def _named(cls, model: str) -> str:
        return without_tag(model)


class OllamaShowBody(NamedBody):
    """`POST /api/show`."""

    verbose: bool = False  # no effect

    @model_validator(mode="before")
    @classmethod
    def _named_as_before(cls, value: Any) -> Any:
        """Take `name`, which Ollama takes for `model` from older clients."""
        if isinstance(value, dict) and "name" in value and not value.get("model"):
            value = {("model" if key == "name" else key): each for key, each in value.items() if key != "model"}
        return value


class OllamaBody(NamedBody):
    """What chats and texts have in common."""

    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] = ""
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    think: bool | Literal["low", "medium", "high"] | None = None
    fields: ClassVar = {
        "enable_thinking": "think",
        "max_tokens": "options.num_predict",
        "reasoning_effort": "think",
        "repetition_penalty": "options.repeat_penalty",
        "response_format": "format",
        **{name: f"options.{name}" for name in _SAMPLED},
    }
    """Field of a chat → the one here that becomes it."""

    def asked(self, messages: Sequence[Json], tools: Sequence[Tool] = ()) -> ChatBody:
        """Return the chat with these messages. Raises ApiError."""
        named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.format}}
        wanted = {"type": "json_object"} if self.format == "json" else named
        return chat_body(
            {
                "model": self.model,
                "messages": list(messages),
                "tools": [tool.model_dump(exclude_unset=True) for tool in tools],
                "stream": self.stream,
                "response_format": wanted if self.format else None,
                "enable_thinking": None if self.think is None else self.think is not False,
                "reasoning_effort": self.think if isinstance(self.think, str) else None,
                **self.options.sampling(),
            }
        )


class OllamaChatBody(OllamaBody):
    """`POST /api/chat`."""

    messages: Listed[dict[str, Any]] = Field(min_length=1)
    tools: Listed[Tool] = Field(default_factory=list)

    def chat(self) -> ChatBody:
        """Return the chat that this asks for. Raises ApiError."""
        return self.asked([_said(number, each) for number, each in enumerate(self.messages)], self.tools)


class OllamaGenerateBody(OllamaBody):
    """`POST /api/generate`: a question, or with `raw` a text that is continued."""

    prompt: str = ""
    system: str = ""
    images: Listed[str] = Field(default_factory=list, max_length=_MOST_IMAGES)
    raw: bool = False

    @model_validator(mode="after")
    def _alone(self) -> OllamaGenerateBody:
        if self.raw and (self.system or self.images):
            raise ValueError("raw continues the prompt alone; leave system and images out")
        return self

    def chat(self) -> ChatBody:
        """Return the chat that this asks for. Raises ApiError."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"role": "user", "content": self.prompt, "images": self.images}
        return self.asked([*system, _said(0, asked)])


class OllamaEmbedBody(NamedBody):
    """`POST /api/embed`."""

    input: str | Listed[str]
    dimensions: int | None = Field(None, ge=1, le=MOST_DIMENSIONS)
    truncate: bool = True  # no effect: an input that is too long is refused


def _said(number: int, message: dict[str, Any]) -> Json:
    """Return a message of a chat. Ollama's have images beside the text, and calls without ids."""
    other = ("images", "thinking", "tool_name")
    made = {key: value for key, value in message.items() if key not in other and value not in (None, "", [])}
    if message.get("thinking"):
        made["reasoning_content"] = message["thinking"]
    if message.get("tool_name"):
        made["name"] = message["tool_name"]
    if images := message.get("images"):
        if not (isinstance(images, list) and len(images) <= _MOST_IMAGES and all(isinstance(e, str) for e in images)):
            raise ApiError(f"message {number} needs its images as a list of texts in base64.", param="messages")
        urls = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{each}"}} for each in images]
        made["content"] = [{"type": "text", "text": message.get("content") or ""}, *urls]
    return made


class OllamaForm(Form[Message]):
    """An answer, or its lines."""

    media_type = "application/x-ndjson"

    def __init__(self, sequence: Sequenced[Message], model: str, *, chat: bool) -> None:
        super().__init__([sequence])
        self._model, self._chat = model, chat
        self._began, self._first = time.perf_counter_ns(), 0

    def whole(self) -> Json:
        """Return the answer."""
        answer = self.sequences[0].answer
        return self._last(answer.text, answer.reasoning, answer.calls)

    def collect(self, sequence: Sequenced[Message], piece: TextPiece) -> None:
        """Add a piece."""
        sequence.answer.add(piece)

    def events(self, sequence: Sequenced[Message], piece: TextPiece) -> bytes:
        """Return a line for the text and one for the thoughts of a piece; calls come whole, at the end."""
        self._first = self._first or time.perf_counter_ns()
        parts = sequence.answer.add(piece)
        lines = [
            self._said(part.text) if part.kind == "text" else self._said("", part.text)
            for part in parts
            if part.kind in ("text", "reasoning")
        ]
        return b"".join(_line({**each, "done": False}) for each in lines)

    def end(self) -> bytes:
        """Return the last line, before it one with the calls."""
        calls = self.sequences[0].answer.calls
        called = _line({**self._said("", calls=calls), "done": False}) if calls else b""
        return called + _line(self._last())

    def failed(self, error: ApiError) -> bytes:
        """Return the error."""
        return error_event(OLLAMA, error.status, error.message)

    def _said(self, text: str, thoughts: str = "", calls: Sequence[Call] = ()) -> Json:
        made = {"model": self._model, "created_at": datetime.now(timezone.utc).isoformat()}
        thinking = {"thinking": thoughts} if thoughts else {}
        if not self._chat:
            return {**made, "response": text, **thinking}
        functions = [
            {"function": {"index": call.index, "name": call.name, "arguments": arguments_of(call.arguments)}}
            for call in calls
        ]
        called = {"tool_calls": functions} if functions else {}
        return {**made, "message": {"role": "assistant", "content": text, **thinking, **called}}

    def _last(self, text: str = "", thoughts: str = "", calls: Sequence[Call] = ()) -> Json:
        answer, usage = self.sequences[0].answer, self.sequences[0].usage
        now = time.perf_counter_ns()
        first = self._first or self._began  # an answer that comes as a whole does not say when it began
        return {
            **self._said(text, thoughts, calls),
            "done": True,
            "done_reason": "length" if answer.finish_reason == "length" else "stop",
            "total_duration": now - self._began,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens or 0,
            "prompt_eval_duration": first - self._began,
            "eval_count": usage.completion_tokens or 0,
            "eval_duration": now - first,
        }


def _line(content: Json) -> bytes:
    return to_json(content) + b"\n"


def tags(entries: Sequence[Json]) -> Json:
    """Return Ollama's list of models for OpenAI's; what only its own files have is empty."""
    details = {"format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
    models = [
        {
            "name": entry["id"],
            "model": entry["id"],
            "modified_at": entry["created_at"],
            "size": 0,
            "digest": "",
            "details": {**details, "parent_model": entry["parent"] or ""},
        }
        for entry in entries
    ]
    return {"models": models}


def shown(entry: Json, template: str, *, embeds: bool) -> Json:
    """Return what `/api/show` says of a model, which writes answers or `embeds` texts."""
    sees, calls = "image" in entry["input_modalities"], "tools" in template
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "modified_at": entry["created_at"],
        "details": tags([entry])["models"][0]["details"],
        "model_info": {"general.architecture": "trtserve", "trtserve.context_length": entry["max_model_len"]},
        "capabilities": [
            "embedding" if embeds else "completion",
            *(["vision"] if sees else []),
            *(["tools"] if calls else []),
        ],
    }
