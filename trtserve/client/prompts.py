"""Prepare prompts: apply the chat template and, for core models, encode them as token ids.

Templates are rendered with Jinja as transformers' `apply_chat_template` does, but without importing transformers, which
would take longer than most answers. Templates come from untrusted model authors, hence the process of their own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trtserve.client.endpoint import Endpoint
from trtserve.client.inputs import PreparedPrompts, require_tokenizer
from trtserve.client.spec import QuerySpec
from trtserve.client.tensors import IDS_INPUT, TEXT_INPUT, ModelDescription
from trtserve.client.tokenizer import TokenizerFiles, find_tokenizer, server_adds_special_tokens
from trtserve.client.transport import SyncClient
from trtserve.errors import MissingDependencyError, UsageError
from trtserve.process.answering import AnsweringProcess

TEMPLATE_SECONDS = 5.0
"""Longest time that a template may take."""
_FILE = "chat_template.jinja"
_RENDERER = AnsweringProcess((sys.executable, "-m", "trtserve.client.template_process", str(1 << 30)))


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


def chat_prompts(spec: QuerySpec, files: TokenizerFiles, template: str, *, adds_special: bool) -> PreparedPrompts:
    """Render every prompt of `spec` as the user's turn of the template.

    `adds_special`: the text will be encoded with special tokens, so a BOS that the tokenizer adds is removed here.
    """
    tokens = files.special_tokens()
    texts = [render(template, messages(prompt, spec.system, spec.history), tokens) for prompt in spec.prompts]
    if adds_special:
        texts = [without_bos(text, files, tokens.get("bos_token")) for text in texts]
    return PreparedPrompts(texts=tuple(texts), end_words=end_words(files))


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


def prepare_prompts(
    spec: QuerySpec, model: ModelDescription, server: Endpoint, client: SyncClient
) -> tuple[PreparedPrompts, TokenizerFiles | None]:
    """Return the prompts to send, and the tokenizer if its files are available.

    Raises UsageError for an empty prompt, for --system without a chat template, for token ids where the model expects
    text.
    """
    if not spec.rows or any(not prompt.strip() for prompt in spec.prompts):
        raise UsageError("The prompt is empty.", hint='Give one: trtserve query "What is ML?"')
    if spec.token_ids and IDS_INPUT not in model.inputs:
        raise UsageError(
            f"The model {model.name!r} takes text, not token ids.", hint="Query the core model: --model tensorrt_llm."
        )
    files = find_tokenizer(spec.tokenizer, server, client)
    core = TEXT_INPUT not in model.inputs
    if spec.token_ids:
        return PreparedPrompts(token_ids=spec.token_ids), files
    template = None if files is None or spec.raw else find_chat_template(files)
    # The server is asked only where the answer makes a difference.
    adds_special = server_adds_special_tokens(client) if files is not None and (core or template) else True
    prompts = _apply_template(spec, files, template, adds_special=adds_special and not core)
    if not core:
        return prompts, files
    files = require_tokenizer(files, model, "A prompt")
    # The rendered template already contains its special tokens.
    special = adds_special and prompts.texts == spec.prompts
    ids = tuple(tuple(files.encode(text, special=special)) for text in prompts.texts)
    eos = files.tokenizer.eos_token_id
    end_id = eos if eos is not None else next(iter(files.end_ids()), None)
    return PreparedPrompts(token_ids=ids, end_words=prompts.end_words, end_id=end_id), files


def _apply_template(
    spec: QuerySpec, files: TokenizerFiles | None, template: str | None, *, adds_special: bool
) -> PreparedPrompts:
    if files is None or template is None:
        if spec.system is not None:
            raise UsageError(
                "--system needs a chat template, and none is available for this model.",
                hint="--tokenizer names the folder of the model's tokenizer, which may contain one.",
            )
        return PreparedPrompts(texts=spec.prompts)
    return chat_prompts(spec, files, template, adds_special=adds_special)
