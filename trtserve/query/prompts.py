"""What becomes of a prompt before it is sent: the chat template, and for core models its token ids."""

from __future__ import annotations

from trtserve.errors import UsageError
from trtserve.query.chat import chat_prompts, find_chat_template
from trtserve.query.request import IDS_INPUT, TEXT_INPUT, Prompts, require_tokenizer
from trtserve.query.spec import QuerySpec
from trtserve.query.tokenizer import TokenizerFiles, find_tokenizer, server_adds_special_tokens
from trtserve.triton.client import Client, Endpoint, ModelDescription


def prepare(
    spec: QuerySpec, model: ModelDescription, server: Endpoint, client: Client
) -> tuple[Prompts, TokenizerFiles | None]:
    """The rows to send, and the tokenizer where its files are known.

    UsageError for an empty prompt, for --system without a chat template, for token ids where the model takes text.
    """
    _check(spec, model)
    files = find_tokenizer(spec.tokenizer, server, client)
    core = TEXT_INPUT not in model.inputs
    if spec.token_ids:
        return Prompts(token_ids=spec.token_ids), files
    adds_special = _adds_special(spec, files, client, core=core)
    prompts = _texts(spec, files, adds_special=adds_special and not core)
    if not core:
        return prompts, files
    files = require_tokenizer(files, model, "A prompt")
    # A template's text has its special tokens already.
    special = adds_special and prompts.texts == spec.prompts
    ids = tuple(tuple(files.encode(text, special=special)) for text in prompts.texts)
    end_id = next(iter((*_known(files.tokenizer.eos_token_id), *files.end_ids())), None)
    return Prompts(token_ids=ids, end_words=prompts.end_words, end_id=end_id), files


def _check(spec: QuerySpec, model: ModelDescription) -> None:
    if not spec.rows or any(not prompt.strip() for prompt in spec.prompts):
        raise UsageError("The prompt is empty.", hint='Give one: trtserve query "What is ML?"')
    if spec.token_ids and IDS_INPUT not in model.inputs:
        raise UsageError(
            f"The model {model.name!r} takes text, not token ids.", hint="Ask the core model: --model tensorrt_llm."
        )


def _adds_special(spec: QuerySpec, files: TokenizerFiles | None, client: Client, *, core: bool) -> bool:
    """Whether texts are encoded with special tokens; asked of the server only where it makes a difference."""
    if files is None or not (core or _template(spec, files)):
        return True
    return server_adds_special_tokens(client)


def _texts(spec: QuerySpec, files: TokenizerFiles | None, *, adds_special: bool) -> Prompts:
    template = None if files is None else _template(spec, files)
    if files is None or template is None:
        if spec.system is not None:
            raise UsageError(
                "--system goes into a chat template, and none is known for this model.",
                hint="--tokenizer names the folder of the model's tokenizer, if it has one.",
            )
        return Prompts(texts=spec.prompts)
    rendered = chat_prompts(spec, files, template, adds_special=adds_special)
    return Prompts(texts=tuple(prompt.text for prompt in rendered), end_words=rendered[0].end_words)


def _template(spec: QuerySpec, files: TokenizerFiles) -> str | None:
    return None if spec.raw else find_chat_template(files)


def _known(token: int | None) -> tuple[int, ...]:
    return () if token is None else (token,)
