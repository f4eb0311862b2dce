"""The tokenizer of a server, if its files are here, and the prompts that it makes: chat template and token ids.

Templates are rendered with Jinja as transformers' `apply_chat_template` does, but without importing transformers, which
would take longer than most answers. Templates come from untrusted model authors, hence the process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trtserve.client.endpoint import Endpoint
from trtserve.client.spec import QuerySpec
from trtserve.client.tensors import IDS_INPUT, TEXT_INPUT, ModelDescription
from trtserve.client.transport import SyncClient
from trtserve.errors import MissingDependencyError, TrtserveError, UsageError
from trtserve.files import read_json_object
from trtserve.process.answering import AnsweringProcess

PREPROCESSING = "preprocessing"
_FALSE_WORDS = ("false", "0", "f", "n", "no")

TEMPLATE_SECONDS = 5.0
"""Longest time that a template may take."""
_TEMPLATE_FILE = "chat_template.jinja"
_RENDERER = AnsweringProcess((sys.executable, "-m", "trtserve.client.template_process", str(1 << 30)))


class TokenizerFiles:
    """The folder of a Hugging Face tokenizer; the tokenizer itself is only loaded when it is used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """tokenizer_config.json."""
        return self.json("tokenizer_config.json")

    def json(self, name: str) -> Mapping[str, Any]:
        """Return the content of a JSON file, or {} if the file does not exist."""
        try:
            return read_json_object(self.folder / name, UsageError)
        except FileNotFoundError:
            return {}

    def special_tokens(self) -> dict[str, str]:
        """Return the texts of `bos_token`, `eos_token` …, as far as the tokenizer has them."""
        merged = {**self.json("special_tokens_map.json"), **self.config}
        found = {}
        for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
            token = merged.get(name)
            text = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(text, str):
                found[name] = text
        return found

    def adds_bos(self) -> bool:
        """Return whether encoding with special tokens puts the BOS token first.

        Reads the post-processor of tokenizer.json if there is one, because loading the tokenizer imports transformers.
        """
        add_bos = self.config.get("add_bos_token")
        if isinstance(add_bos, bool):
            return add_bos
        processor = self.json("tokenizer.json").get("post_processor", ...)
        if processor is ...:
            return bool(self.encode("", special=True)[:1] == [self.tokenizer.bos_token_id])
        return _first_piece(processor) == self.special_tokens().get("bos_token")

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, loaded as the preprocessing model does: local files only, no remote code."""
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                str(self.folder), legacy=False, trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            if not any(self.folder.glob("tokenizer*")):
                names = "tokenizer.json, tokenizer.model or tokenizer_config.json"
                raise UsageError(f"{self.folder} contains no tokenizer: it has no {names}.") from None
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UsageError(f"The tokenizer in {self.folder} cannot be loaded: {first}") from None

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the token ids of `text`; `special` adds BOS and other special tokens, as for a prompt."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids, without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def decode_token(self, token: int) -> str:
        """Return the text of one special token from tokenizer.json, or "" for any other token."""
        added = self.json("tokenizer.json").get("added_tokens", ())
        listed = {entry["id"]: entry["content"] for entry in added}
        listed |= {int(key): entry["content"] for key, entry in self.config.get("added_tokens_decoder", {}).items()}
        return str(listed.get(token, ""))

    def end_ids(self) -> tuple[int, ...]:
        """Return the end token ids from generation_config.json, else from config.json."""
        for name in ("generation_config.json", "config.json"):
            value = self.json(name).get("eos_token_id")
            if value is not None:
                return tuple(value) if isinstance(value, list) else (int(value),)
        return ()


def find_tokenizer(
    given: Path | None, server: Endpoint, client: SyncClient | None, *, preprocessing: str = PREPROCESSING
) -> TokenizerFiles | None:
    """Return the tokenizer of `--tokenizer`, else the one in the server's repository, or None if that is unknown.

    `client` can ask where the repository's tokenizer is; without one it is where `repo` puts it.
    """
    if given is not None:
        if not given.is_dir():
            raise UsageError(f"--tokenizer is {given}; expected the folder of a tokenizer.")
        return TokenizerFiles(given)
    if server.repository is None:
        return None
    folder = server.repository / preprocessing / "1" / "tokenizer"
    if client is not None and not folder.is_dir():
        folder = server.repository / _parameters(client, preprocessing).get("tokenizer_dir", "?")
    return TokenizerFiles(folder) if folder.is_dir() else None


def server_adds_special_tokens(client: SyncClient, *, preprocessing: str = PREPROCESSING) -> bool:
    """Return whether the server's preprocessing model adds special tokens to prompts (the default)."""
    return _parameters(client, preprocessing).get("add_special_tokens", "").lower() not in _FALSE_WORDS


def _parameters(client: SyncClient, model: str) -> Mapping[str, str]:
    try:
        return client.describe(model).parameters
    except TrtserveError:  # a repository without a preprocessing model
        return {}


def _first_piece(processor: Any) -> str | None:
    """Return the special token that a post-processor puts first, or None if it starts with the text itself."""
    if not isinstance(processor, Mapping):
        return None
    if processor.get("type") == "Sequence":
        firsts = (_first_piece(part) for part in processor.get("processors", ()))
        return next((piece for piece in firsts if piece is not None), None)
    if processor.get("type") == "TemplateProcessing":
        pieces = processor.get("single") or [{}]
        return str(pieces[0]["SpecialToken"]["id"]) if "SpecialToken" in pieces[0] else None
    cls = processor.get("cls")
    return cls[0] if isinstance(cls, list) else None


@dataclass(frozen=True, kw_only=True)
class PreparedPrompts:
    """The rows of one request, as texts, or as token ids for a core model."""

    texts: tuple[str, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    end_words: tuple[str, ...] = ()
    """Words that end an answer in addition to `end_id`."""
    end_id: int | None = None

    @property
    def rows(self) -> int:
        """Batch size."""
        return len(self.texts) or len(self.token_ids)

    def split(self) -> list[PreparedPrompts]:
        """Return one request per row."""
        texts = [replace(self, texts=(text,)) for text in self.texts]
        return texts or [replace(self, token_ids=(ids,)) for ids in self.token_ids]


def require_tokenizer(files: TokenizerFiles | None, model: ModelDescription, what: str) -> TokenizerFiles:
    """Return the tokenizer. Raises UsageError if there is none, because a core model needs it for `what`."""
    if files is None:
        raise UsageError(
            f"{what} needs a tokenizer: the model {model.name!r} takes token ids, and no tokenizer is available here.",
            hint="Give the tokenizer's folder with --tokenizer, or the prompt as ids with --input-tokens-csv.",
        )
    return files


def find_chat_template(files: TokenizerFiles, *, tools: bool = False) -> str | None:
    """Return the source of the tokenizer's chat template, or None for a model without one.

    `tools`: prefer the template for conversations with tools, if the tokenizer has one of its own.
    """
    try:
        return (files.folder / _TEMPLATE_FILE).read_text(encoding="utf-8")
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
    if files is not None and template is not None:
        prompts = chat_prompts(spec, files, template, adds_special=adds_special and not core)
    elif spec.system is not None:
        raise UsageError(
            "--system needs a chat template, and none is available for this model.",
            hint="--tokenizer names the folder of the model's tokenizer, which may contain one.",
        )
    else:
        prompts = PreparedPrompts(texts=spec.prompts)
    if not core:
        return prompts, files
    files = require_tokenizer(files, model, "A prompt")
    # The rendered template already contains its special tokens.
    special = adds_special and prompts.texts == spec.prompts
    ids = tuple(tuple(files.encode(text, special=special)) for text in prompts.texts)
    eos = files.tokenizer.eos_token_id
    end_id = eos if eos is not None else next(iter(files.end_ids()), None)
    return PreparedPrompts(token_ids=ids, end_words=prompts.end_words, end_id=end_id), files
