"""Guided decoding with llguidance: restrict tokens to a JSON schema, a regular expression or a grammar.

Follows TensorRT-LLM's LLGUIDANCE backend, which uses the same library. Guides written for xgrammar, including its EBNF,
have the same meaning here.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trtserve.executor.interface.configs import GuidedDecodingConfig
from trtserve.executor.interface.enums import GuideType
from trtserve.executor.interface.requests import GuidedDecodingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Floats = npt.NDArray[np.float32]

_NOT_SET_UP = (
    "Request is specified with GuidedDecodingParams, but GuidedDecoder is not setup. "
    "Please provide a valid GuidedDecodingConfig to setup GuidedDecoder."
)
_ANY_OBJECT = '{"type": "object"}'
_CACHED_GRAMMARS = 64


class GuideFactory:
    """Compiles guides for the vocabulary of one engine. Thread-safe.

    The tokenizer is read for the first guide; the latest 64 compiled guides are cached.
    """

    def __init__(self, config: GuidedDecodingConfig | None, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[GuideType, str | None], LLMatcher] = OrderedDict()

    def guide(self, params: GuidedDecodingParams, *, end_id: int = -1) -> Guide:
        """Return the guide of `params` for a sequence that ends with `end_id` (-1: the tokenizer's end token).

        Raises RuntimeError if the executor has no GuidedDecodingConfig, its tokenizer cannot be read, or the guide is
        invalid.
        """
        if self._config is None:
            raise RuntimeError(_NOT_SET_UP)
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _read_tokenizer(self._config)
            tokenizer = self._tokenizer
            known = self._compiled.get((params.guide_type, params.guide))
        matcher = known or _compile(tokenizer, params)
        with self._lock:
            self._compiled[params.guide_type, params.guide] = matcher
            self._compiled.move_to_end((params.guide_type, params.guide))
            while len(self._compiled) > _CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return Guide(matcher.deep_copy(), tokenizer.eos_tokens, self._vocab_size, end_id)


class Guide:
    """The state of one sequence in its guide; `failure` says why it cannot continue."""

    def __init__(self, matcher: LLMatcher, ends: list[int], vocab_size: int, end_id: int) -> None:
        self.failure: str | None = None
        self.matcher = matcher
        self._ends = [end for end in ends if end < vocab_size]
        self._end_id = end_id

    def mask(self, row: Floats) -> None:
        """Set the logits f32[V] of tokens that cannot come next to −∞; all of them if the guide has failed.

        Where the guide may end, `end_id` is allowed. Ids outside the tokenizer's vocabulary are never allowed.
        """
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        if self.matcher.is_error():
            self._fail(self.matcher.get_error())
        if self.failure is not None:
            row[:] = -np.inf
            return
        allowed = np.zeros(len(row), dtype=bool)
        known = np.unpackbits(bits, count=min(len(row), 8 * len(bits)), bitorder="little")
        allowed[: len(known)] = known
        if self._end_id >= 0:
            allowed[self._ends] = False
            allowed[self._end_id] |= self.matcher.is_accepting()
        row[~allowed] = -np.inf

    def accept(self, token: int) -> None:
        """Advance to the state after `token`; `end_id` and tokens after the end of the guide change nothing."""
        ended = token == self._end_id or self.matcher.is_stopped()
        if not ended and self.matcher.try_consume_tokens([token]) != 1:
            self._fail(f"token {token} does not fit it")

    def fork(self) -> Guide:
        """Return an independent guide in the same state."""
        twin = copy.copy(self)
        twin.matcher = self.matcher.deep_copy()
        return twin

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = f"The guide cannot be followed any further: {_sentence(reason)}"


def _read_tokenizer(config: GuidedDecodingConfig) -> LLTokenizer:
    """Read the tokenizer from `tokenizer_str` (a tokenizer.json), else from the plain tokens of `encoded_vocab`."""
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = config.stop_token_ids or None
    try:
        if config.tokenizer_str:
            return LLTokenizer(config.tokenizer_str, eos_token=ends)
        if config.encoded_vocab and ends:
            return LLTokenizer(TokenizerWrapper(PlainVocabulary(config.encoded_vocab, ends)), eos_token=ends)
    except ValueError as error:
        raise RuntimeError(f"The tokenizer for guided decoding cannot be read: {_sentence(str(error))}") from error
    raise RuntimeError("guided_decoding_config needs tokenizer_str, or encoded_vocab and stop_token_ids")


class PlainVocabulary:
    """A vocabulary of plain text tokens, with the interface that llguidance expects."""

    def __init__(self, vocabulary: list[str], ends: list[int]) -> None:
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        self.special_token_ids = ends
        self.tokens = [token.encode() for token in vocabulary]
        self._ids = {token: number for number, token in reversed(list(enumerate(self.tokens))) if token}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Encode with the longest token at each position; bytes that start no token are skipped."""
        ids: list[int] = []
        start = 0
        while start < len(text):
            pieces = (text[start : start + length] for length in range(self._longest, 0, -1))
            piece = next((piece for piece in pieces if piece in self._ids), None)
            if piece is not None:
                ids.append(self._ids[piece])
            start += len(piece or b" ")
        return ids


def _compile(tokenizer: LLTokenizer, params: GuidedDecodingParams) -> LLMatcher:
    """Compile the guide of `params`. Raises RuntimeError if it is invalid."""
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(tokenizer, _grammar(params), log_level=0)
    except (ValueError, OverflowError, RecursionError) as error:
        raise _invalid_guide(params, str(error)) from error
    if matcher.is_error():
        raise _invalid_guide(params, matcher.get_error())
    trial = matcher.deep_copy()
    trial.compute_bitmask()
    if trial.is_error():
        reason = trial.get_error()
        raise _invalid_guide(params, "no text matches it" if reason.startswith("NoExtension") else reason)
    return matcher


def _grammar(params: GuidedDecodingParams) -> str:
    """Convert the guide to llguidance's notation. Raises ValueError if it cannot be read."""
    from llguidance import LLMatcher, grammar_from

    guide = params.guide or ""
    grammar: str
    if params.guide_type is GuideType.JSON:
        grammar = LLMatcher.grammar_from_json_schema(_ANY_OBJECT)
    elif params.guide_type is GuideType.JSON_SCHEMA:
        json.loads(guide)
        grammar = LLMatcher.grammar_from_json_schema(guide)
    elif params.guide_type is GuideType.REGEX:
        grammar = LLMatcher.grammar_from_regex(guide)
    elif params.guide_type is GuideType.EBNF_GRAMMAR:
        grammar = grammar_from("ebnf", _join_rule_lines(guide) if "::=" in guide else guide)
    else:
        raise ValueError("this type of guide is not supported")
    return grammar


def _invalid_guide(params: GuidedDecodingParams, reason: str) -> RuntimeError:
    return RuntimeError(f"The guide of type {params.guide_type.name} is invalid: {_sentence(reason)}")


def _sentence(text: str) -> str:
    """Shorten a message of llguidance to one line: its first line and the errors of a regular expression."""
    lines = [line.strip() for line in text.strip().splitlines()] or ["no reason given"]
    errors = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    return " ".join([lines[0], *errors])


_EBNF_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\#[^\n]*')
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_RULE_START = re.compile(r"\s*[\w-]+\s*::=")


def _join_rule_lines(grammar: str) -> str:
    """Convert EBNF as xgrammar reads it to the narrower form that llguidance converts.

    llguidance expects one rule per line, no comments inside a rule, and fewer escapes.
    """
    rules: list[str] = []
    for line in _EBNF_PARTS.sub(_plain_part, grammar).splitlines():
        if rules and not _RULE_START.match(line):
            rules[-1] += " " + line.strip()
        else:
            rules.append(line.strip())
    return "\n".join(rules) + "\n"


def _plain_part(match: re.Match[str]) -> str:
    text = match[0]
    if text.startswith("#"):
        return ""
    special = '"\\' if text.startswith('"') else '"\\[]'
    return text[0] + _ESCAPE.sub(lambda escape: _plain_escape(escape, special), text[1:-1]) + text[-1]


def _plain_escape(escape: re.Match[str], special: str) -> str:
    """Return an escape that both notations have, or the character itself."""
    *codes, letter = escape.groups()
    code = next((each for each in codes if each), None)
    if code is None and letter in "nrt":
        return escape[0]
    character = chr(int(code, 16)) if code else str(letter)
    if character in special:
        return "\\" + character
    if character in "-^" and "[" in special:  # operators of a character class
        return f"\\x{ord(character):02x}"
    return character if character >= " " else f"\\x{ord(character):02x}"
