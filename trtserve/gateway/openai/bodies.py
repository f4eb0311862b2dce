"""The bodies of requests: OpenAI's keys, the extensions that vLLM made common, and their ranges.

A key with the value null counts as absent, and so does one whose value asks for what happens anyway. Keys that only
concern OpenAI's own service have no effect. Any other key is refused, so that a misspelt one is not silently ignored.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from trtserve.files import parse_json
from trtserve.gateway.openai.errors import ApiError, validation_error
from trtserve.gateway.openai.other_keys import understood
from trtserve.gateway.openai.schemas import moved

MOST_SEQUENCES = 128
_MOST_ANSWERS = 2048
_LONGEST_STOP = 1024  # characters
_MOST_STOP_IDS = 1024
_LONGEST_GUIDE = 128 << 10  # the engine takes no longer ones
_LONGEST_ID = 10  # digits
_MOST_KEYS = 1024
_MOST = {
    "stop": (64, "stop strings"),
    "logit_bias": (4096, "biases"),
    "choice": (_LONGEST_GUIDE, "choices"),
    "guided_choice": (_LONGEST_GUIDE, "choices"),
    "tools": (1024, "tools"),
}
"""Key → the most entries that it may have, and what they are."""


def _with_text(choices: list[str]) -> list[str]:
    if not any(choices):
        raise ValueError("every choice is empty; one must have at least one character")
    return choices


T = TypeVar("T")
Listed = Annotated[list[T], Field(fail_fast=True)]
"""A list that is checked up to its first fault: a million faults take seconds, and clients see the first."""
Choices = Annotated[Listed[str], Field(min_length=1), AfterValidator(_with_text)]
ToolName = Annotated[str, Field(min_length=1)]


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise ValueError(f"the arguments of a tool are an object, but this schema has the type {json.dumps(kinds)}")
    return schema


ToolParameters = Annotated[dict[str, Any], AfterValidator(_of_an_object)]
"""The schema of a call's arguments, which are an object whether it says so or not."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
Guide = tuple[str, str]
"""Guide type of TensorRT-LLM, and the guide."""


class Body(BaseModel):
    """A JSON object of a client."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MOST_KEYS:  # each that is unknown is a fault of its own
            raise ValueError(f"the object has {len(value)} keys; at most {_MOST_KEYS} are allowed")
        return understood(value, cls.model_fields) if isinstance(value, dict) else value

    @field_validator(*_MOST, mode="before", check_fields=False)
    @classmethod
    def _few(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse long lists before each entry is looked at."""
        most, what = _MOST[info.field_name or ""]
        if isinstance(value, (list, dict)) and len(value) > most:
            raise ValueError(f"there can be at most {most} {what}")
        return value


class StreamOptions(Body):
    """What a stream contains besides the answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: with every chunk
    include_obfuscation: bool = False  # no effect: nothing is padded


class JsonSchema(Body):
    """A named schema."""

    name: str = ""
    json_schema: dict[str, Any] = Field(default_factory=dict, alias="schema")
    description: str = ""
    strict: bool = True


class ResponseFormat(Body):
    """What the answer must match."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    object_schema: dict[str, Any] | None = Field(None, alias="schema")  # llama.cpp's, of json_object

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, which needs it")
        if self.type != "json_object" and self.object_schema is not None:
            raise ValueError("schema belongs to the type json_object; json_schema has its own")
        return self


class StructuredOutputs(Body):
    """vLLM's other form of the guided_ parameters."""

    json_schema: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = Field(None, min_length=1)
    choice: Choices | None = None
    grammar: str | None = Field(None, min_length=1)
    whitespace_pattern: str | None = None


class Sampling(Body):
    """What completions and chat have in common."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MOST_SEQUENCES)
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | Listed[str] | None = None
    logit_bias: dict[str, float] | None = None

    # Extensions with the names that vLLM gave them.
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    repetition_penalty: float | None = Field(None, ge=1e-9, le=1e9)
    bad_words: Listed[str] = Field(default_factory=list)
    stop_token_ids: Listed[TokenId] = Field(default_factory=list, max_length=_MOST_STOP_IDS)
    ignore_eos: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: int | None = Field(None, ge=0, le=5)
    truncate_prompt_tokens: int | None = Field(None, ge=1, lt=2**31)
    truncation_side: Literal["left", "right"] = "left"
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = Field(None, min_length=1)
    guided_choice: Choices | None = None
    guided_grammar: str | None = Field(None, min_length=1)
    guided_whitespace_pattern: str | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None

    @field_validator("prompt_logprobs", mode="before")
    @classmethod
    def _no_number(cls, value: Any) -> Any:
        return None if value is False else value

    @field_validator("stop", "bad_words")
    @classmethod
    def _not_empty(cls, value: str | list[str] | None, info: ValidationInfo) -> str | list[str] | None:
        texts = [value] if isinstance(value, str) else value or []
        what = "a bad word" if info.field_name == "bad_words" else "a stop string"
        if not all(texts):
            raise ValueError(f"{what} must not be empty")
        if (longest := max(map(len, texts), default=0)) > _LONGEST_STOP:
            raise ValueError(f"{what} has {longest} characters; at most {_LONGEST_STOP} are allowed")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key, bias in (value or {}).items():
            if not (key.isascii() and key.isdecimal() and len(key) <= _LONGEST_ID):
                raise ValueError(f"{key[:50]!r} is not a token id")
            if not (math.isfinite(bias) and -100 <= bias <= 100):
                raise ValueError(f"the bias of {key} is {bias}; it must be from -100 to 100")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Sampling:
        if not self.stream and (self.stream_options or StreamOptions()) != StreamOptions():
            raise ValueError("stream_options is only allowed when stream is true")
        if self.prompt_logprobs is not None and self.tops not in (None, self.prompt_logprobs):
            raise ValueError("(top_)logprobs and prompt_logprobs must be the same number where both are given")
        if self.echoes_log_probs and self.stream:
            raise ValueError("log-probabilities of the prompt (echo with logprobs, prompt_logprobs) cannot be streamed")
        if len(self._guides) > 1:
            raise ValueError("give only one of response_format and the guided_ parameters")
        if self.guide is not None:
            _require_short(len(self.guide[1]))
        return self

    @property
    @abstractmethod
    def tops(self) -> int | None:
        """Alternatives to each token of the answer, or None without log-probabilities."""

    @property
    def echoes_log_probs(self) -> bool:
        """Whether the answer has the log-probabilities of the prompt."""
        return self.prompt_logprobs is not None

    def kept_of(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the token ids of a prompt that the client keeps."""
        most = self.truncate_prompt_tokens or len(ids)
        return ids[:most] if self.truncation_side == "right" else ids[-most:]

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @cached_property
    def guide(self) -> Guide | None:
        """What the answer must match, in TensorRT-LLM's words."""
        return next(iter(self._guides), None)

    @cached_property
    def _guides(self) -> list[Guide]:
        other = self.structured_outputs or StructuredOutputs.model_construct()
        schemas = (self.guided_json, other.json_schema, _ANY_OBJECT if other.json_object else None)
        found = [("json_schema", self._schema(schema)) for schema in schemas if schema is not None]
        found += [("regex", regex) for regex in (self.guided_regex, other.regex) if regex is not None]
        choices = (choice for choice in (self.guided_choice, other.choice) if choice is not None)
        found += [("regex", _one_of(choice)) for choice in choices]
        found += [("ebnf_grammar", text) for text in (self.guided_grammar, other.grammar) if text is not None]
        if self.response_format is not None and self.response_format.type != "text":
            named = self.response_format.json_schema or JsonSchema.model_validate(
                {"schema": self.response_format.object_schema or _ANY_OBJECT}
            )
            schema = self._schema(named.json_schema, strict=named.strict)
            found.append(("json_schema", schema))
        return found

    def _schema(self, schema: str | dict[str, Any], *, strict: bool = True) -> str:
        """Return the text of a schema; llguidance reads options from the schema itself."""
        pattern = self.guided_whitespace_pattern
        if pattern is None and self.structured_outputs is not None:
            pattern = self.structured_outputs.whitespace_pattern
        options: dict[str, Any] = {} if pattern is None else {"whitespace_pattern": pattern}
        options |= {} if strict else {"lenient": True}  # llguidance leaves out the keys that it cannot keep
        if not options:
            return schema if isinstance(schema, str) else json.dumps(schema)
        try:
            content = parse_json(schema) if isinstance(schema, str) else schema
        except ValueError as error:
            raise ValueError(f"the schema is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise ValueError("the schema must be an object where it has options")  # noqa: TRY004
        return json.dumps({**content, "x-guidance": options})


class CompletionBody(Sampling):
    """`POST /v1/completions`."""

    prompt: str | Listed[str] | Listed[TokenId] | Listed[Listed[TokenId]]
    best_of: int | None = Field(None, ge=1, le=MOST_SEQUENCES)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=5)

    @field_validator("logprobs", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return None if value is False else value

    @model_validator(mode="after")
    def _possible(self) -> CompletionBody:
        if not self.prompts or any(not prompt for prompt in self.prompts):
            raise ValueError("the prompt must not be empty")
        if self.max_tokens == 0 and not self.echo:
            message = "Invalid value for 'max_tokens': 0 needs echo; Input should be greater than or equal to 1."
            raise ApiError(message, param="max_tokens", code="invalid_value")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError("best_of must be at least n")
        if self.stream and (self.best_of or self.n) > self.n:
            raise ValueError("best_of must equal n when stream is true")
        if len(self.prompts) * (self.best_of or self.n) > _MOST_ANSWERS:
            raise ValueError(f"prompts times n (or best_of) must be at most {_MOST_ANSWERS}")
        return self

    @property
    def tops(self) -> int | None:
        """Alternatives to each token of the answer, or None without log-probabilities."""
        return self.logprobs

    @property
    def echoes_log_probs(self) -> bool:
        """Whether the answer has the log-probabilities of the prompt."""
        return super().echoes_log_probs or (self.echo and self.logprobs is not None)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]  # ids were handled above


class FunctionTool(Body):
    """A function that the model may call."""

    name: ToolName
    description: str = ""
    parameters: ToolParameters = Field(default_factory=lambda: {"type": "object"})
    strict: bool = False


class Tool(Body):
    """A tool; OpenAI's other types run on its own servers."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedSet(Body):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Listed[NamedTool] = Field(min_length=1)


class AllowedTools(Body):
    """The tools that the model may call in this answer; the prompt has all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedSet


class Thinking(Body):
    """Whether the model thinks first, as GLM's, DeepSeek's and Anthropic's APIs ask."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]


class ChatBody(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Listed[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Listed[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # vLLM's name
    enable_thinking: bool | None = None  # the variable that templates of thinking models read
    thinking: Thinking | None = None
    reasoning_effort: str = ""
    include_reasoning: bool = True  # vLLM's: whether thoughts are part of the answer
    separate_reasoning: bool = True  # SGLang's: whether they are told from the text
    reasoning_format: Literal["auto", "deepseek", "deepseek-legacy", "none"] = "auto"  # llama.cpp's

    modalities: Listed[Literal["text"]] = Field(default_factory=list)  # no effect

    @field_validator("logprobs", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return False if value == 0 else value

    @field_validator("messages")
    @classmethod
    def _as_templates_expect(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [_message(number, message) for number, message in enumerate(messages)]

    @model_validator(mode="after")
    def _possible(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if unknown := sorted(self._chosen.difference(self.tool_names)):
            raise ValueError(f"tool_choice names {unknown[0]!r}, which is not among the tools")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message continues the last message; leave add_generation_prompt out")
        last = self.messages[-1]["content"]
        if self.continue_final_message and not (isinstance(last, str) and last.strip()):
            raise ValueError("only a text is continued, and the last message has none (continue_final_message)")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice asks for a call, but there are no tools")
        # A response_format is that of a text, as in OpenAI's API: there is none where a tool must be called.
        of_text = self.response_format is not None and self.response_format.type != "text"
        if self.must_call and self._guides and not of_text:
            raise ValueError("tool_choice prescribes the answer; leave the guided_ parameters out")
        return self

    @property
    def tops(self) -> int | None:
        """Alternatives to each token of the answer, or None without log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template gets besides messages and tools."""
        thinks = self.enable_thinking
        if thinks is None and (self.reasoning_effort == "none" or self.guide is not None):
            thinks = False  # a guide begins with the first token
        if self.thinking is not None and self.thinking.type not in ("auto", "adaptive"):
            thinks = self.thinking.type == "enabled"
        named: dict[str, Any] = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
        if self.reasoning_effort not in ("", "none"):
            named["reasoning_effort"] = self.reasoning_effort
        opens = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        return {**named, **self.chat_template_kwargs, **({} if opens else {"add_generation_prompt": False})}

    @property
    def image_urls(self) -> list[str]:
        """The URLs of the images, in their order."""
        contents = [message["content"] for message in self.messages if isinstance(message["content"], list)]
        return [part["image_url"]["url"] for parts in contents for part in parts if "image_url" in part]

    @property
    def separates_thoughts(self) -> bool:
        """Whether thoughts are told from the text."""
        return self.separate_reasoning and self.reasoning_format != "none"

    @property
    def tool_names(self) -> list[str]:
        """The names of all tools."""
        return [tool.function.name for tool in self.tools]

    @property
    def _chosen(self) -> set[str]:
        """The tools that `tool_choice` names."""
        if isinstance(self.tool_choice, NamedTool):
            return {self.tool_choice.function.name}
        if isinstance(self.tool_choice, AllowedTools):
            return {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
        return set()

    @property
    def usable_tools(self) -> list[Tool]:
        """The tools that the model may call in this answer."""
        if chosen := self._chosen:
            return [tool for tool in self.tools if tool.function.name in chosen]
        return [] if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode == "required"
        return isinstance(choice, NamedTool) or choice == "required"

    @cached_property
    def guide(self) -> Guide | None:
        """What the answer must match; a call that is required is a JSON object with a name and arguments."""
        if not self.must_call:
            return next(iter(self._guides), None)
        tools = [tool.function for tool in self.usable_tools]
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/{number}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for number, tool in enumerate(tools)
        ]
        # References of a tool's schema begin at its own root, which is below $defs here.
        definitions = {
            str(number): {**moved(tool.parameters, f"#/$defs/{number}"), "type": "object"}
            for number, tool in enumerate(tools)
        }
        strict = any(tool.strict for tool in tools)
        return "json_schema", self._schema({"anyOf": calls, "$defs": definitions}, strict=strict)


class LoadAdapterBody(Body):
    """An adapter that is loaded while the server runs, as in vLLM."""

    lora_name: str = Field(min_length=1, max_length=200)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False


class UnloadAdapterBody(Body):
    """An adapter that is unloaded; vLLM's `lora_int_id` has no meaning here."""

    lora_name: str = Field(min_length=1, max_length=200)
    lora_int_id: int | None = None


class TokenizeBody(Body):
    """`POST /tokenize`: a text or a conversation."""

    model: str = ""
    prompt: str | None = None
    messages: Listed[dict[str, Any]] | None = None
    tools: Listed[dict[str, Any]] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    """Without a word texts get them, and conversations have those of the template alone."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self

    def chat(self) -> ChatBody:
        """Return the conversation. Raises ApiError."""
        names = ("model", "messages", "tools", "add_generation_prompt", "continue_final_message")
        return chat_body({name: getattr(self, name) for name in (*names, "chat_template_kwargs")})


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str = ""
    tokens: Listed[TokenId]


def chat_body(asked: dict[str, Any]) -> ChatBody:
    """Return the chat that a body of another API asks for. Raises ApiError for what no chat can be."""
    try:
        return ChatBody.model_validate({key: value for key, value in asked.items() if value is not None})
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise validation_error(found, asked) from None


def _message(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates expect it: its content a text or parts, the arguments of calls objects."""
    if not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} has no role")  # noqa: TRY004 - pydantic reports ValueError
    made = {**message, "role": {"developer": "system", "function": "tool"}.get(message["role"], message["role"])}
    made["content"] = _content(number, message.get("content"))
    calls = message.get("tool_calls")
    if not calls and (former := made.pop("function_call", None)):  # before there were tools
        calls = [{"type": "function", "function": former}]
    if calls:
        if not isinstance(calls, list):
            raise ValueError(f"the tool_calls of message {number} must be a list")
        made["tool_calls"] = [_call(number, call) for call in calls]
    return made


def _content(number: int, content: Any) -> str | list[dict[str, Any]]:
    """Return the text of a message, or its parts if there are images among them."""
    if content is None:
        return ""
    if isinstance(content, list):
        parts = [_part(number, part) for part in content]
        return parts if any("image_url" in part for part in parts) else "".join(part["text"] for part in parts)
    if not isinstance(content, str):
        raise ValueError(f"the content of message {number} must be a text or a list of parts")  # noqa: TRY004
    return content


def _part(number: int, part: Any) -> dict[str, Any]:
    """Return a part: what somebody said, why an assistant refused to answer, or an image."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    text = part.get(kind) if kind in ("text", "refusal") else None
    if isinstance(text, str):
        return {"type": "text", "text": text}
    if kind in ("text", "refusal"):
        raise ValueError(f"message {number} has a part of type {kind!r} without a text under the key {kind!r}")
    if kind != "image_url":
        raise ValueError(f"message {number} has a part of type {str(kind)[:50]!r}; expected text or image_url")
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str):
        raise ValueError(f"message {number} has an image without a url")  # noqa: TRY004 - pydantic reports ValueError
    return {"type": "image_url", "image_url": {"url": url}}


def _call(number: int, call: Any) -> dict[str, Any]:
    """Return a past call with its arguments as an object; a text that was cut stays a text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"message {number} has a tool call without a function")  # noqa: TRY004 - pydantic reports ValueError
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):
            read = parse_json(arguments)
            json.dumps(read, ensure_ascii=False).encode()  # half a character cannot be part of a prompt
            arguments = read
    return {**call, "function": {**function, "arguments": arguments}}


def _one_of(texts: Sequence[str]) -> str:
    """Return a regular expression for one of the texts."""
    _require_short(sum(map(len, texts)))
    return "|".join(map(_literal, texts))


def _require_short(characters: int) -> None:
    if characters > _LONGEST_GUIDE:
        raise ValueError(f"the guide has {characters} characters; at most {_LONGEST_GUIDE} are allowed")


def _literal(text: str) -> str:
    """Return a regular expression for exactly `text`; `re.escape` escapes what other dialects do not allow to."""
    return "".join(f"\\{each}" if each in r"\.+*?()|[]{}^$" else each for each in text)
