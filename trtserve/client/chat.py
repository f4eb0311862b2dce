"""Chat templates: put a question into the text format that a chat model was trained on.

Templates are rendered with Jinja as transformers' `apply_chat_template` does, but without importing transformers, which
would take longer than most answers. Templates come from untrusted model authors, hence the process of their own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtserve.client.spec import QuerySpec
from trtserve.client.tokenizer import TokenizerFiles
from trtserve.errors import MissingDependencyError, UsageError
from trtserve.process.answering import AnsweringProcess

TEMPLATE_SECONDS = 5.0
"""Longest time that a template may take."""
TEMPLATE_MEMORY = 1 << 30
"""Bytes of memory of the process that renders templates."""
_FILE = "chat_template.jinja"
_RENDERER = AnsweringProcess((sys.executable, "-m", "trtserve.client.template_process"))


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A prompt rendered in the chat template."""

    text: str
    end_words: tuple[str, ...] = field(default=())
    """Special tokens, besides the end token, that end the model's turn."""


def find_chat_template(files: TokenizerFiles, *, tools: bool = False) -> str | None:
    """Return the source of the tokenizer's chat template, or None for a model without one.

    `tools`: prefer the template for conversations with tools, if the tokenizer has one of its own.
    """
    try:
        return (files.folder / _FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    template = files.config.get("chat_template") or files.json("chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = (named.get("tool_use") if tools else None) or named.get("default")
    return template if isinstance(template, str) else None


def chat_prompts(spec: QuerySpec, files: TokenizerFiles, template: str, *, adds_special: bool) -> list[ChatPrompt]:
    """Render every prompt of `spec` as the user's turn of the template.

    `adds_special`: the text will be encoded with special tokens, so a BOS that the tokenizer adds is removed here.
    """
    tokens = files.special_tokens()
    words = end_words(files)
    prompts = []
    for prompt in spec.prompts:
        text = render(template, messages(prompt, spec.system, spec.history), tokens)
        if adds_special:
            text = without_bos(text, files, tokens.get("bos_token"))
        prompts.append(ChatPrompt(text=text, end_words=words))
    return prompts


def messages(prompt: str, system: str | None, history: Sequence[Mapping[str, str]] = ()) -> list[Mapping[str, str]]:
    """Return the conversation that ends with a question."""
    system_turn = [{"role": "system", "content": system}] if system is not None else []
    return [*system_turn, *history, {"role": "user", "content": prompt}]


def without_bos(text: str, files: TokenizerFiles, bos: str | None) -> str:
    """Remove the BOS token from `text` if the tokenizer would add it a second time."""
    return text.removeprefix(bos) if bos and text.startswith(bos) and files.adds_bos() else text


def end_words(files: TokenizerFiles) -> tuple[str, ...]:
    """Return the texts of the tokens that end a turn, except the tokenizer's EOS, which the server handles."""
    eos = files.special_tokens().get("eos_token")
    texts = [files.decode_token(token) for token in files.end_ids()]
    return tuple(text for text in dict.fromkeys(texts) if text and text != eos)


def render(
    template: str, conversation: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, str], **variables: Any
) -> str:
    """Render the conversation and open the model's turn; `variables` are further ones of the template, such as `tools`.

    Raises UsageError with the reason the template gives.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise MissingDependencyError(
            "This model has a chat template, which needs the package jinja2.",
            hint="pip install jinja2, or send the prompt without a template: --raw.",
        )
    given = {"add_generation_prompt": True, **variables, **special_tokens, "messages": list(conversation)}
    try:
        answer = _RENDERER.ask({"template": template, "variables": given, "seconds": TEMPLATE_SECONDS})
    except TimeoutError:
        answer = {"error": f"it takes longer than {TEMPLATE_SECONDS:g} s"}
    except ChildProcessError as error:
        answer = {"error": f"the process that renders it {error}"}
    if "error" in answer:
        raise UsageError(
            f"The model's chat template rejects this prompt: {answer['error']}",
            hint="--raw sends the prompt without a template.",
        )
    text: str = answer["text"]
    return text
