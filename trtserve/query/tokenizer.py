"""The tokenizer that a server uses, as far as its files can be read here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trtserve.errors import TrtserveError, UsageError
from trtserve.triton.client import Client, Endpoint

_FOLDER = Path("preprocessing", "1", "tokenizer")
_FALSE_WORDS = ("false", "0", "f", "n", "no")


class TokenizerFiles:
    """The folder of a Hugging Face tokenizer. Its JSON files are read at once, the tokenizer itself when it is used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """tokenizer_config.json."""
        return self.json("tokenizer_config.json")

    def json(self, name: str) -> Mapping[str, Any]:
        """Content of a JSON file; {} where there is none."""
        try:
            content: Mapping[str, Any] = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.folder / name} cannot be read: {error}.") from None
        return content

    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token` … as texts, where the tokenizer has them."""
        merged = {**self.json("special_tokens_map.json"), **self.config}
        names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
        found = {name: _content(merged.get(name)) for name in names}
        return {name: text for name, text in found.items() if text is not None}

    def adds_bos(self) -> bool:
        """Whether encoding with special tokens puts the BOS token first.

        From the post-processor of tokenizer.json, so that nothing heavy is imported; other tokenizers are asked.
        """
        said = self.config.get("add_bos_token")
        if isinstance(said, bool):
            return said
        processor = self.json("tokenizer.json").get("post_processor", ...)
        if processor is ...:
            return bool(self.encode("", special=True)[:1] == [self.tokenizer.bos_token_id])
        return _first_piece(processor) == self.special_tokens().get("bos_token")

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer as the preprocessing model loads it: local files, no code of the model's author."""
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                str(self.folder), legacy=False, trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            if not any(self.folder.glob("tokenizer*")):
                names = "tokenizer.json, tokenizer.model or tokenizer_config.json"
                raise UsageError(f"{self.folder} holds no tokenizer: it has no {names}.") from None
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UsageError(f"The tokenizer in {self.folder} cannot be loaded: {first}") from None

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`; `special`: with BOS and the like, as a prompt has them."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated ids, without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def decode_token(self, token: int) -> str:
        """The text of one special token, from tokenizer.json; "" when it is none."""
        added = self.json("tokenizer.json").get("added_tokens", ())
        listed = {entry["id"]: entry["content"] for entry in added}
        listed |= {int(key): entry["content"] for key, entry in self.config.get("added_tokens_decoder", {}).items()}
        return str(listed.get(token, ""))

    def end_ids(self) -> tuple[int, ...]:
        """Ids that end an answer by generation_config.json, else by config.json."""
        for name in ("generation_config.json", "config.json"):
            value = self.json(name).get("eos_token_id")
            if value is not None:
                return tuple(value) if isinstance(value, list) else (int(value),)
        return ()


def find_tokenizer(given: Path | None, server: Endpoint, client: Client) -> TokenizerFiles | None:
    """`--tokenizer`, else that of the repository which the server runs; None for a server of which nothing is known."""
    if given is not None:
        if not given.is_dir():
            raise UsageError(f"--tokenizer is {given}; expected the folder of a tokenizer.")
        return TokenizerFiles(given)
    if server.repository is None:
        return None
    folder = server.repository / _FOLDER
    if not folder.is_dir():
        folder = server.repository / _preprocessing(client).get("tokenizer_dir", "?")
    return TokenizerFiles(folder) if folder.is_dir() else None


def server_adds_special_tokens(client: Client) -> bool:
    """Whether the server's preprocessing model encodes prompts with special tokens, as it does by default."""
    return _preprocessing(client).get("add_special_tokens", "").lower() not in _FALSE_WORDS


def _preprocessing(client: Client) -> Mapping[str, str]:
    try:
        return client.describe("preprocessing").parameters
    except TrtserveError:  # a repository of another kind
        return {}


def _content(token: Any) -> str | None:
    """The text of a special token, which the files have as a text or as an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _first_piece(processor: Any) -> str | None:
    """Text of the special token that a post-processor puts first; None when the text itself comes first."""
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
