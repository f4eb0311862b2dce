"""Load the repository's tokenizer, use it within bounds, and find its ids: of every token, and of ends and padding."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .files import MOST_TOKENIZER, read_json, read_object
from .parameters import ModelParameters

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
    """What the programs, the gateway and the clients ask of a tokenizer of transformers, with the same names.

    transformers takes a second of computing and 60 MB in every process that imports it, to change a few parts of what
    tokenizer.json says. What it makes is one tokenizer of the library `tokenizers`, which `prepare` keeps beside the
    files: the ids are the same by construction.
    """

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


_MOST_ADDED = 1 << 17  # tokens; each takes 0.1 ms whenever the tokenizer is loaded
_MOST_GROWTH = 16  # characters that a normalizer or a decoder may make of one
_MOST_ENDS = 1024  # ids, all of which go with each request
_MODULES = {"protobuf": "google.protobuf"}
_UNICODE_GROWTH = 18  # of the longest compatibility decomposition


def tokenizer_of(parameters: ModelParameters) -> tuple[Any, Path]:
    """Load the tokenizer that the parameter `tokenizer_dir` names; return it and its folder."""
    folder = parameters.path("tokenizer_dir")
    if folder is None:
        raise ValueError("Parameter tokenizer_dir is not set; it names the tokenizer's folder.")
    try:
        return load_tokenizer(folder), folder
    except ValueError as error:
        raise ValueError(f"The tokenizer cannot be loaded: {error}.") from error


def load_tokenizer(folder: Path) -> Any:
    """Load the Hugging Face tokenizer in `folder`, from local files only and without running custom code.

    Raises FileNotFoundError when there is no such folder; transformers would treat the path as a hub id. Raises
    ValueError for files that `require_bounded` refuses.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"tokenizer_dir is {folder}, which is not a folder on this machine")
    # Keep transformers from importing PyTorch: seconds and hundreds of megabytes that no tokenizer needs.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    return open_tokenizer(folder, padding_side="left")


def open_tokenizer(folder: Path, **options: Any) -> Any:
    """Load a tokenizer. Raises OSError, ValueError or KeyError when that fails, whatever its files hold.

    Raises ModuleNotFoundError when it needs packages that are not installed.
    """
    if (found := prepared(folder)) is not None:
        content, made = found
        _require_bounded(made)
        with _failures("its prepared form"):
            return PreparedTokenizer(content["tokenizer"], content["special_tokens"], content["special_ids"])
    require_bounded(folder)
    require_packages(folder)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its warnings repeat what files say, whatever its length
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(folder), legacy=False, trust_remote_code=False, local_files_only=True, **options
        )
    except (OSError, ValueError, KeyError, ImportError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - what Rust panics with is no Exception; wrong types are TypeErrors
        raise ValueError(_reason(error)) from None


def require_packages(folder: Path) -> None:
    """Raise ModuleNotFoundError when a folder without tokenizer.json needs packages that are not installed.

    Raises ValueError for packages that do not work together. transformers would try another format and name that.
    """
    if (folder / "tokenizer.json").is_file():
        return
    for path in sorted(folder.glob("*.model")):
        with path.open("rb") as file:
            # A SentencePiece model begins with the length of its first piece, other files of this name with text.
            sentencepiece = file.read(1) == b"\n"
        needed = ("sentencepiece", "protobuf") if sentencepiece else ("tiktoken",)
        missing = [name for name in needed if find_spec(_MODULES.get(name, name)) is None]
        if missing:
            kind = "a SentencePiece model" if sentencepiece else "a tiktoken vocabulary"
            packages = f"the package{'s' * (len(missing) > 1)} {' and '.join(missing)}"
            raise ModuleNotFoundError(f"{path.name} is {kind}, which needs {packages}", name=missing[0])
        if sentencepiece:
            with _failures(f"{path.name} is a SentencePiece model, and that package does not work here"):
                import_module("sentencepiece.sentencepiece_model_pb2")


def require_bounded(folder: Path) -> None:
    """Raise ValueError for tokenizer files that take minutes to load, or that make megabytes of a short text."""
    for path in folder.glob("*.json"):
        if path.name.startswith(("tokenizer", "added_tokens")) and (size := path.stat().st_size) > MOST_TOKENIZER:
            raise ValueError(f"{path.name} has {size >> 20} MiB; at most {MOST_TOKENIZER >> 20} MiB are allowed")
    further = _json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    _require_bounded(_json(folder / "tokenizer.json"), further, _json(folder / "added_tokens.json"))


def _require_bounded(content: dict[str, Any], *further: Any) -> None:
    for added in (content.get("added_tokens") or [], *further):
        if isinstance(added, (list, dict)) and len(added) > _MOST_ADDED:
            raise ValueError(f"the tokenizer has {len(added)} added tokens; at most {_MOST_ADDED} are allowed")
    for part in ("normalizer", "decoder"):
        if (growth := _growth(content.get(part))) > _MOST_GROWTH:
            raise ValueError(
                f"the tokenizer's {part} may make {growth} characters of one; at most {_MOST_GROWTH} are allowed"
            )


def text_growth(folder: Path) -> int:
    """Return how many characters the tokenizer's normalizer may make of one."""
    return _growth(_json(folder / "tokenizer.json").get("normalizer"))


def _json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one: whoever loads the file says what is wrong with it."""
    if not path.is_file():  # a pipe would block
        return {}
    try:
        content = read_json(path, MOST_TOKENIZER)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _growth(part: Any) -> int:
    """Return how many characters a normalizer or decoder may make of one; those of Unicode make few.

    One that makes more than the limit is not counted to its end. Whoever loads it refuses values of other types.
    """
    growth, waiting = 1, [part]
    while waiting and growth <= _MOST_GROWTH:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        inner = each.get("normalizers") or each.get("decoders")
        if each.get("type") != "Sequence":
            growth *= max(1, _own_growth(each))
        elif isinstance(inner, list):
            waiting += inner
    return growth


def _own_growth(part: dict[str, Any]) -> int:
    kind = part.get("type")
    if kind == "Precompiled":
        # A trie and its size, then the texts that it leads to, each with a zero at its end.
        table = base64.b64decode(_text(part, "precompiled_charsmap"))
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        longest = max((len(text.decode(errors="replace")) for text in texts), default=1)
        return 1 if longest <= _UNICODE_GROWTH else longest
    if kind == "Prepend":
        return len(_text(part, "prepend"))
    if kind == "Replace":
        length, pattern = len(_text(part, "content")), part.get("pattern")
        pattern = pattern if isinstance(pattern, dict) else {}
        # An expression may match nothing between two characters.
        return 1 + length if "Regex" in pattern else -(-length // max(1, len(_text(pattern, "String"))))
    return 1


def _text(part: dict[str, Any], name: str) -> str:
    value = part.get(name)
    return value if isinstance(value, str) else ""


_UNDECODABLE = "The tokenizer cannot decode these tokens"


def encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Return the ids of `text`. Raises ValueError when the tokenizer fails."""
    with _failures("The tokenizer cannot encode this text"):
        ids: list[int] = tokenizer.encode(text, add_special_tokens=special)
    return ids


def decode(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of `ids`. Raises ValueError when the tokenizer fails."""
    with _failures(_UNDECODABLE):
        text: str = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
    return text


def decode_function(tokenizer: Any, *, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """Return `decode` for one tokenizer; without transformers' wrappers, a fifth of the cost, where they do nothing."""
    if not isinstance(tokenizer, PreparedTokenizer) and not plain(tokenizer):
        return lambda ids: decode(tokenizer, ids, skip_special_tokens=skip_special_tokens)

    def quickly(ids: list[int]) -> str:
        with _failures(_UNDECODABLE):
            text: str = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    return quickly


@contextmanager
def _failures(what: str) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - what Rust panics with is no Exception
        raise ValueError(f"{what}: {_reason(error)}.") from None


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def token_ids(content: dict[str, Any]) -> dict[str, int]:
    """Return token → id, including the added tokens, from the content of tokenizer.json."""
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # a Unigram model: pairs of token and score
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{added["content"]: added["id"] for added in content.get("added_tokens", [])}}


def end_ids(tokenizer: Any, folder: Path) -> list[int]:
    """Return the ids that end an answer: the tokenizer's EOS, then those that the model's files name."""
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return list(dict.fromkeys([*own, *configured_end_ids(folder)]))


def configured_end_ids(folder: Path) -> list[int]:
    """Return the end ids of `generation_config.json`, else those of `config.json`. Raises ValueError for other JSON."""
    for name in ("generation_config.json", "config.json"):
        try:
            content = read_json(folder / name)
        except FileNotFoundError:
            continue
        value = content.get("eos_token_id") if isinstance(content, dict) else None
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if len(ids) > _MOST_ENDS or not all(type(each) is int and each < 2**31 for each in ids):
                raise ValueError(
                    f"{name} has the eos_token_id {value!r:.100}; expected an id or a list of at most {_MOST_ENDS} ids"
                )
            return [each for each in dict.fromkeys(ids) if each >= 0]  # some files have -1 for none
    return []


def pad_id(tokenizer: Any, end: int) -> int:
    """Return the id that pads a sequence: the tokenizer's, or the one that ends it."""
    return end if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


_REMEMBERED = 16384


class AnchoredDecoder:
    """Decodes rows of ids after an anchor letter, which is cut off again.

    Many tokenizers drop the space before the first word. A row that begins with a special token (BOS) is the
    beginning of a text and is decoded without an anchor; any other row may continue a text, so it keeps its space.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        self._decode = decode_function(tokenizer, skip_special_tokens=skip_special_tokens)
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._anchor = encode(tokenizer, "a", special=False)
        self._anchor_text = self._decode(self._anchor)
        self._token = lru_cache(maxsize=_REMEMBERED)(lambda token: self._row([token]))

    def decode(self, rows: Sequence[list[int]]) -> list[str]:
        """Return the text of each row. Texts of single tokens, which streams consist of, are remembered."""
        return [self._token(ids[0]) if len(ids) == 1 else self._row(ids) for ids in rows]

    def _row(self, ids: list[int]) -> str:
        if ids and ids[0] in self._special_ids:
            return self._decode(ids)
        text = self._decode(self._anchor + ids)
        if text.startswith(self._anchor_text):
            return text[len(self._anchor_text) :]
        # The tokenizer joined the anchor with what follows, so it cannot be cut off: decode the row alone.
        return self._decode(ids)
