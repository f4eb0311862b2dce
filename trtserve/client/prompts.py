"""Prepare prompts: apply the chat template and, for core models, encode them as token ids."""

from __future__ import annotations

from trtserve.client.base import Client, Endpoint, ModelDescription
from trtserve.client.chat import chat_prompts, find_chat_template
from trtserve.client.request import (
    IDS_INPUT,
    TEXT_INPUT,
    PreparedPrompts,
    require_tokenizer,
)
from trtserve.client.spec import QuerySpec
from trtserve.client.tokenizer import TokenizerFiles, find_tokenizer, server_adds_special_tokens
from trtserve.errors import UsageError


def prepare_prompts(
    spec: QuerySpec, model: ModelDescription, server: Endpoint, client: Client
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
    rendered = chat_prompts(spec, files, template, adds_special=adds_special)
    return PreparedPrompts(texts=tuple(prompt.text for prompt in rendered), end_words=rendered[0].end_words)
