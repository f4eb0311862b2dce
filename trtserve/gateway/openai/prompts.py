"""Turn texts and conversations into prompts, as `trtserve query` does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from trtserve.client.prompts import find_chat_template, render, without_bos
from trtserve.errors import UsageError
from trtserve.gateway.openai.bodies import ChatBody, NamedTool
from trtserve.gateway.openai.errors import ApiError
from trtserve.gateway.openai.served import Served

# Encoding a longer text would hold up the answers of everybody else.
_LONG = 20_000


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt."""

    text: str | None = None
    """Its text, or None for token ids of the client."""
    ids: tuple[int, ...] = ()
    """Its token ids, or empty where the server encodes the text."""
    chat: bool = False
    """Whether it is a conversation, whose turn may end with any of the model's end tokens."""


async def completion_prompt(served: Served, prompt: str | list[int]) -> Prompt:
    """Return a prompt to continue."""
    if isinstance(prompt, str):
        if not served.takes_ids:
            return Prompt(text=prompt)
        return Prompt(text=prompt, ids=await _encode(served, prompt, special=served.adds_special))
    if served.takes_ids:
        return Prompt(ids=tuple(prompt))
    # The model takes text: special tokens in it would be added twice.
    files = served.require_tokenizer("A prompt of token ids")
    return Prompt(text=files.decode(prompt))


async def chat_prompt(served: Served, body: ChatBody) -> Prompt:
    """Return the conversation in the model's chat template.

    A model without a template gets the last message alone: it continues texts and follows no conversation.
    """
    files = served.require_tokenizer("A conversation")
    tools = [tool.model_dump(exclude_defaults=True) for tool in body.usable_tools]
    template = find_chat_template(files, tools=bool(tools))
    if template is None:
        if tools and not body.must_call:
            raise ApiError("tools need a chat template, and this model has none.", param="tools")
        return replace(await completion_prompt(served, body.messages[-1]["content"]), chat=True)
    tokens = files.special_tokens()
    choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedTool) else body.tool_choice
    variables = {**body.chat_template_kwargs, **({"tools": tools, "tool_choice": choice} if tools else {})}
    try:
        # A template may compute for seconds, up to its limit, while others are answered.
        text = await asyncio.to_thread(render, template, body.messages, tokens, **variables)
    except UsageError as error:
        raise ApiError(error.message, param="messages") from None
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ApiError(f"The model's chat template cannot render these messages: {error}", param="messages") from None
    if not served.takes_ids:
        return Prompt(
            text=without_bos(text, files, tokens.get("bos_token")) if served.adds_special else text, chat=True
        )
    return Prompt(text=text, ids=await _encode(served, text, special=False), chat=True)


async def _encode(served: Served, text: str, *, special: bool) -> tuple[int, ...]:
    files = served.require_tokenizer("A prompt")
    if len(text) > _LONG:
        return tuple(await asyncio.to_thread(files.encode, text, special=special))
    return tuple(files.encode(text, special=special))
