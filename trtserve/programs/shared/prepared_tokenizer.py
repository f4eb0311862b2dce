"""A tokenizer as transformers made it from a folder, kept beside its files: later starts need only `tokenizers`.

transformers takes a second of computing and 60 MB in every process that imports it, to change a few parts of what
tokenizer.json says. What it makes is one tokenizer of the library `tokenizers`: the ids are the same by construction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .files import MOST_TOKENIZER, read_object

PREPARED = "prepared_tokenizer.json"
_FORMAT = 1
# Files that change nothing about the ids of a text.
_OTHERS = (PREPARED, "generation_config.json", "chat_template.jinja", "chat_template.json")
# Classes of transformers 4 and 5 that hand the work to the library of Rust.
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
_DECODING = {"_decode", "decode", "clean_up_tokenization"}
_ENCODING = {"_encode_plus", "encode", "__call__", "get_vocab", "_convert_id_to_token", "convert_ids_to_tokens"}
_ANYWAY = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
_PROBES = ("What is machine learning?", " a  b\n\tc ", "Zażółć 東京 🙂 don't , 12345 .", "")


class PreparedTokenizer:
    """What the programs, the gateway and the clients ask of a tokenizer of transformers, with the same names."""

    is_fast = True
    clean_up_tokenization_spaces = False

    def __init__(self, text: str, special_tokens: dict[str, str], special_ids: Sequence[int]) -> None:
        from tokenizers import Tokenizer

        self.backend_tokenizer = Tokenizer.from_str(text)
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        self.special_tokens_map = special_tokens
        self.all_special_ids = list(special_ids)

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> dict[str, Any]:
        """Return `input_ids`, and the first and last character of each token."""
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids} | ({"offset_mapping": encoding.offsets} if return_offsets_mapping else {})

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        text: str = self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def get_vocab(self) -> dict[str, int]:
        """Return token → id, with the added tokens."""
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the token of an id, or those of several."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(int(each)) for each in ids]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token; that of the unknown token, or None without one, where it is not known."""
        found = self.backend_tokenizer.token_to_id(token)
        return self._id("unk_token") if found is None else found

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends an answer."""
        return self._id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id that fills up a row."""
        return self._id("pad_token")

    def _id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        number: int | None = None if token is None else self.backend_tokenizer.token_to_id(token)
        return number


def plain(tokenizer: Any, names: set[str] = _DECODING) -> bool:
    """Return whether a tokenizer of transformers does what `names` say with the library of Rust alone."""
    first = next((each.__name__ for each in type(tokenizer).__mro__ if names & vars(each).keys()), "")
    if getattr(tokenizer, "backend_tokenizer", None) is None or first not in _PLAIN:
        return False
    # transformers 5 cleans no text of BPE up, whatever the files say, unless they say so twice.
    kept = getattr(tokenizer, _ANYWAY, True) is False and type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return kept or not tokenizer.clean_up_tokenization_spaces


def prepare(tokenizer: Any, folder: Path) -> None:
    """Keep in `folder` what transformers made of its files; nothing for a tokenizer that does more than the library."""
    if not (plain(tokenizer) and plain(tokenizer, _ENCODING)) or tokenizer.backend_tokenizer.encode_special_tokens:
        return
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    made = (tokenizer.backend_tokenizer.to_str(), special, sorted(map(int, tokenizer.all_special_ids)))
    if len(made[0].encode()) < MOST_TOKENIZER // 2 and _same(tokenizer, PreparedTokenizer(*made)):
        content = dict(zip(("tokenizer", "special_tokens", "special_ids"), made, strict=True))
        text = json.dumps({"format": _FORMAT, "made_of": _digest(folder), **content}, ensure_ascii=False)
        (folder / PREPARED).write_text(text, encoding="utf-8")


def prepared(folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return what `prepare` kept, and the JSON of its tokenizer; None without it, or when a file has changed since."""
    try:
        content = read_object(folder / PREPARED, MOST_TOKENIZER)
        if content.get("format") != _FORMAT or content["made_of"] != _digest(folder):
            return None
        return content, json.loads(content["tokenizer"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _digest(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.name not in _OTHERS and path.is_file())
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
    return digest.hexdigest()


def _same(tokenizer: Any, made: PreparedTokenizer) -> bool:
    if (tokenizer.eos_token_id, tokenizer.pad_token_id) != (made.eos_token_id, made.pad_token_id):
        return False
    for text in (*_PROBES, "".join(made.special_tokens_map.values())):
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            texts = [each.decode(ids, skip_special_tokens=special) for each in (tokenizer, made)]
            if made.encode(text, add_special_tokens=special) != ids or texts[0] != texts[1]:
                return False
    return len(tokenizer) == len(made) and tokenizer.get_vocab() == made.get_vocab()
