"""The tokenizer of a GGUF file, rebuilt from its metadata: tokenizer.json, its config, and the ends of answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtserve.checkpoint.gguf import GgufFile
from trtserve.checkpoint.gguf_metadata import AGAIN, Metadata
from trtserve.errors import CorruptFileError, UnsupportedModelError

# Pre-tokenizers of BPE by llama.cpp's names: a pattern, whether digits are split one by one, NFC, and merges that are
# not needed where a word is a token.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARKS = (  # with combining marks among the letters
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _SHORT
    + r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _SHORT
    + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    + _SHORT
    + r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    + _SHORT
    + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class _Words:
    """How BPE cuts a text before it merges."""

    pattern: str
    before: tuple[str, ...] = ()  # patterns that cut first, one after another
    digits: bool = False
    composed: bool = False
    whole_words: bool = False
    begins: bool = False  # whether a text begins with the token for that, unless the file says otherwise


_WORDS = {
    "default": _Words(pattern=_GPT2),
    "gpt-2": _Words(pattern=_GPT2),
    "smollm": _Words(pattern=_GPT2, digits=True),
    "starcoder": _Words(pattern=_GPT2, digits=True),
    "refact": _Words(pattern=_GPT2, digits=True),
    "llama-bpe": _Words(pattern=_MODERN % "{1,3}", whole_words=True, begins=True),
    "llama3": _Words(pattern=_MODERN % "{1,3}", whole_words=True, begins=True),
    "lfm2": _Words(pattern=_MODERN % "{1,3}", whole_words=True, begins=True),
    "dbrx": _Words(pattern=_MODERN % "{1,3}"),
    "smaug-bpe": _Words(pattern=_MODERN % "{1,3}"),
    "glm4": _Words(pattern=_MODERN % "{1,3}"),
    **dict.fromkeys(("gpt-4o", "llama4"), _Words(pattern=_O200K)),
    "qwen2": _Words(pattern=_MODERN % "", composed=True),
    "deepseek-v3": _Words(pattern=_DEEPSEEK3, before=(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+")),
    "kimi-k2": _Words(pattern=_KIMI),
    "qwen35": _Words(pattern=_MARKS, composed=True),
    "tekken": _Words(pattern=_TEKKEN, whole_words=True, begins=True),
}
_NORMAL, _UNKNOWN, _CONTROL, _OWN, _BYTE = 1, 2, 3, 4, 6
# A token of another length takes part in no merge; the longest pieces of SentencePiece have 16 characters.
_LONGEST_PIECE = 64
# Tokens that end an answer, by their texts.
_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "<|end_of_text|>",
)


def tokenizer_of(file: GgufFile) -> dict[str, dict[str, Any]]:
    """Return tokenizer.json, tokenizer_config.json and generation_config.json by their names.

    Raises UnsupportedModelError for a tokenizer that is not known, CorruptFileError for lists that do not fit.
    """
    data = Metadata(file)
    tokens, kinds = _vocabulary(data)
    kind = data.get("tokenizer.ggml.model", str, "none")
    if kind == "gpt2":
        model, begins = _bpe(data, tokens), _words(data).begins
    elif kind in ("llama", "gemma4"):
        model, begins = _sentencepiece(data, tokens, kinds), True
    else:
        raise UnsupportedModelError(
            f"{file.path} has a tokenizer of the kind {kind:.80}; gpt2 (BPE), llama (SentencePiece) and gemma4 are "
            "rebuilt.",
            hint="Name the folder of the original's tokenizer with --tokenizer.",
        )
    added = [
        {
            "id": number,
            "content": tokens[number],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[number] != _OWN,
        }
        for number in range(len(tokens))
        if kinds[number] in (_UNKNOWN, _CONTROL, _OWN)
    ]
    names = {
        f"{word}_token": tokens[number]
        for word, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (number := data.token(key)) is not None
    }
    adds = data.get("tokenizer.ggml.add_bos_token", bool, begins) and "bos_token" in names
    ends = data.get("tokenizer.ggml.add_eos_token", bool, False) and "eos_token" in names
    model |= {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    edges = _edges(names["bos_token"] if adds else None, names["eos_token"] if ends else None, tokens)
    model["post_processor"] = edges or model["post_processor"]
    template = data.get("tokenizer.chat_template", str)
    eos = dict.fromkeys(number for key in ("eos", "eot", "eom") if (number := data.token(key)) is not None)
    eos |= dict.fromkeys(number for number, text in enumerate(tokens) if kinds[number] == _CONTROL and text in _ENDS)
    return {
        "tokenizer.json": model,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": data.size("context_length"),
            **names,
            **({"chat_template": template} if template else {}),
        },
        "generation_config.json": {
            "bos_token_id": data.token("bos"),
            "eos_token_id": list(eos) or None,
        },
    }


def _vocabulary(data: Metadata) -> tuple[list[str], list[int]]:
    tokens = data.get("tokenizer.ggml.tokens", list, [])
    kinds = data.get("tokenizer.ggml.token_type", list, [_NORMAL] * len(tokens))
    if not tokens or len(kinds) != len(tokens) or not all(isinstance(token, str) for token in tokens):
        raise CorruptFileError(
            f"{data.file.path} has {len(tokens)} tokens and {len(kinds)} kinds of tokens.", hint=AGAIN
        )
    if len(set(tokens)) != len(tokens):
        raise CorruptFileError(f"{data.file.path} gives two of its tokens the same text.", hint=AGAIN)
    return tokens, kinds


def _words(data: Metadata) -> _Words:
    name = data.get("tokenizer.ggml.pre", str, "default")
    if name not in _WORDS:
        raise UnsupportedModelError(
            f"{data.file.path} cuts its words as {name:.80}; known: {', '.join(_WORDS)}.",
            hint="Name the folder of the original's tokenizer with --tokenizer.",
        )
    return _WORDS[name]


def _merges(data: Metadata) -> list[list[str]]:
    merges = data.get("tokenizer.ggml.merges", list)
    if merges is None or not all(isinstance(merge, str) and merge.count(" ") == 1 for merge in merges):
        raise CorruptFileError(f"{data.file.path} has no merges of two tokens each.", hint=AGAIN)
    return [merge.split(" ") for merge in merges]


def _bpe(data: Metadata, tokens: Sequence[str]) -> dict[str, Any]:
    words, merges = _words(data), _merges(data)
    digits = [{"type": "Digits", "individual_digits": True}] if words.digits else []
    cuts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in (*words.before, words.pattern)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if words.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*digits, *cuts, level]},
        "post_processor": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
            "ignore_merges": words.whole_words,
        },
    }


def _is_finite(score: object) -> bool:
    return isinstance(score, int | float) and math.isfinite(score)


def _merges_of_scores(data: Metadata, vocabulary: Mapping[str, int], kinds: Sequence[int]) -> list[list[str]]:
    """Return the merges that make pieces of two others, in the order of their scores."""
    scores = data.get("tokenizer.ggml.scores", list)
    if scores is None or len(scores) != len(vocabulary) or not all(map(_is_finite, scores)):
        raise CorruptFileError(f"{data.file.path} has no score for each token.", hint=AGAIN)
    pieces = {token for token, kind in zip(vocabulary, kinds, strict=True) if kind == _NORMAL}
    merges = [
        (-scores[vocabulary[piece]], vocabulary[piece[:at]], vocabulary[piece[at:]], piece[:at], piece[at:])
        for piece in pieces
        if len(piece) <= _LONGEST_PIECE
        for at in range(1, len(piece))
        if piece[:at] in pieces and piece[at:] in pieces
    ]
    return [[left, right] for *_, left, right in sorted(merges)]


def _sentencepiece(data: Metadata, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """Return BPE whose merges have the order of SentencePiece's scores; Gemma 4's file has the merges."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    listed = data.get("tokenizer.ggml.model", str) == "gemma4"
    merges = _merges(data) if listed else _merges_of_scores(data, vocabulary, kinds)
    prefix = data.get("tokenizer.ggml.add_space_prefix", bool, not listed)
    unknown = data.token("unknown")
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
    ]
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if prefix else []), space],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown] if unknown is not None else None,
            "fuse_unk": True,
            "byte_fallback": _BYTE in kinds,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _edges(first: str | None, last: str | None, tokens: Sequence[str]) -> dict[str, Any] | None:
    """Return what adds the tokens at both ends of a text, or None."""
    ends = [token for token in (first, last) if token is not None]
    if not ends:
        return None

    def around(kind: str) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": kind, "type_id": 0}}
        special = [
            {"SpecialToken": {"id": token, "type_id": 0}} if token is not None else None for token in (first, last)
        ]
        return [each for each in (special[0], text, special[1]) if each is not None]

    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": [*around("A"), *around("B")],
        "special_tokens": {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in ends},
    }
