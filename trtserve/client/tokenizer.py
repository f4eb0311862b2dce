"""The tokenizer of a server, if its files are available on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trtserve.client.endpoint import Endpoint
from trtserve.client.transport import SyncClient
from trtserve.errors import TrtserveError, UsageError
from trtserve.files import read_json_object

PREPROCESSING = "preprocessing"
_FALSE_WORDS = ("false", "0", "f", "n", "no")


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
    given: Path | None, server: Endpoint, client: SyncClient, *, preprocessing: str = PREPROCESSING
) -> TokenizerFiles | None:
    """Return the tokenizer of `--tokenizer`, else the one in the server's repository, or None if that is unknown."""
    if given is not None:
        if not given.is_dir():
            raise UsageError(f"--tokenizer is {given}; expected the folder of a tokenizer.")
        return TokenizerFiles(given)
    if server.repository is None:
        return None
    folder = server.repository / preprocessing / "1" / "tokenizer"
    if not folder.is_dir():
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
