"""Compile guides with llguidance, and try them first in a process with bounds that the kernel keeps.

A guide is a program by an unknown client: a few bytes can cost llguidance minutes and gigabytes, and deep nesting can
end a process. So each is compiled in a fork that has read the tokenizer already and may be killed. The process that
tries guides uses this without the rest of the executor."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.executor.engine.requests import GuideType

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from trtserve.executor.engine.limits import GuideTokenizer

LIMITS = {"max_items_in_row": 1000, "step_max_items": 20_000, "step_lexer_fuel": 200_000, "max_lexer_states": 50_000}
"""llguidance's limits of the work for one token; its own are higher, and allow steps of more than a second."""
FIRST_SECONDS = 0.5  # seconds of CPU time that the tokens of a guide may take together, besides TOKEN_SECONDS for each
TOKEN_SECONDS = 0.02

_ANY_OBJECT = '{"type": "object"}'
# Without a bound an unsure model writes blanks until its answer is full. A schema may have another pattern, in
# `x-guidance`.
_JSON_OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,32}"}
_LONGEST_REASON = 500
# The formats that llguidance keeps.
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_ALWAYS_TRUE = {"uniqueItems": (False, None), "propertyNames": (True, {}, {"type": "string"})}
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples", "required")
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
# What llguidance says when a limit ends a guide → the limit.
_LIMIT_ERRORS = (
    (re.compile(r"Current row has"), "max_items_in_row"),
    (re.compile(r"Too many items"), "step_max_items"),
    (re.compile(r"too many expressions|fuel"), "step_lexer_fuel"),
    (re.compile(r"too many states"), "max_lexer_states"),
)


def read_tokenizer(settings: GuideTokenizer) -> LLTokenizer:
    """Read the tokenizer of guided decoding. Raises RuntimeError if that cannot be done."""
    return tokenizer_of(settings.text, settings.vocabulary, settings.ends)


def tokenizer_of(text: str | None, vocabulary: list[str] | None, ends: list[int] | None) -> LLTokenizer:
    """Read the tokenizer from `text` (a tokenizer.json), else from the plain tokens of `vocabulary`."""
    from llguidance import LLTokenizer, TokenizerWrapper

    try:
        if text:
            return LLTokenizer(text, eos_token=ends)
        if vocabulary and ends:
            return LLTokenizer(TokenizerWrapper(PlainVocabulary(vocabulary, ends)), eos_token=ends)
    except ValueError as error:
        raise RuntimeError(f"The tokenizer for guided decoding cannot be read: {sentence(str(error))}") from error
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


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a guide in llguidance's notation. Raises ValueError if it is invalid."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS, verbose_errors=False))
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def try_first_token(matcher: LLMatcher) -> None:
    """Find the tokens with which a text can begin. Raises ValueError if there are none, or it takes too much."""
    trial = matcher.deep_copy()
    began = time.thread_time()
    trial.compute_bitmask()
    if trial.is_error():
        raise ValueError(limit_reason(trial.get_error()))
    if time.thread_time() - began > FIRST_SECONDS:
        raise ValueError(f"its first token takes more than {FIRST_SECONDS:g} s")


def limit_reason(reason: str) -> str:
    """Name the limit that an error of llguidance is about."""
    if reason.startswith("NoExtension"):
        return "no text matches it, as where a schema refers only to itself"
    for pattern, name in _LIMIT_ERRORS:
        if pattern.search(reason):
            return f"a token needs more than the limit {name} of {LIMITS[name]} allows ({sentence(reason)})"
    return sentence(reason)


def grammar_of(kind: GuideType, guide: str) -> str:
    """Convert the guide to llguidance's notation. Raises ValueError if it cannot be read."""
    from llguidance import LLMatcher, grammar_from

    grammar: str
    if kind is GuideType.JSON:
        grammar = LLMatcher.grammar_from_json_schema(_ANY_OBJECT, defaults=_JSON_OPTIONS)
    elif kind is GuideType.JSON_SCHEMA:
        schema = json.loads(guide)
        if isinstance(schema, dict):
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(_enforced(schema)), defaults=_JSON_OPTIONS)
        else:
            grammar = LLMatcher.grammar_from_json_schema(guide)
    elif kind is GuideType.REGEX:
        grammar = LLMatcher.grammar_from_regex(guide)
    elif kind is GuideType.EBNF_GRAMMAR:
        grammar = grammar_from("ebnf", _join_rule_lines(guide) if "::=" in guide else guide)
    else:
        raise ValueError("this type of guide is not supported")
    return grammar


def _enforced(schema: Any) -> Any:
    """Return a schema without the keys that ask for nothing, which llguidance refuses.

    A format that nobody knows is a note to readers, as JSON Schema says. zod writes formats as patterns too, some of
    them with look-around; the format stands for those.
    """
    if isinstance(schema, list):
        return [_enforced(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if value not in _ALWAYS_TRUE.get(key, ())}
    kind = kept.get("format")
    if kind is None or (isinstance(kind, str) and kind not in _FORMATS):
        kept.pop("format", None)
    elif _LOOK_AROUND.search(str(kept.get("pattern"))):
        del kept["pattern"]
    return {key: _enforced_inside(key, value) for key, value in kept.items()}


def _enforced_inside(key: str, value: Any) -> Any:
    if key in _OF_NAMES and isinstance(value, dict):
        return {name: _enforced(each) for name, each in value.items()}
    return value if key in _VALUES else _enforced(value)


def sentence(text: str) -> str:
    """Shorten a message of llguidance to one line: its first line and the errors of a regular expression."""
    lines = [line.strip() for line in text.strip().splitlines()] or ["no reason given"]
    errors = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    return " ".join(line[:_LONGEST_REASON] for line in [lines[0], *errors[:4]])


# A part that is not closed matches too, up to the end: looking for its end again and again would take n² steps.
_EBNF_PARTS = re.compile(r'"(?:\\.|[^"\\])*(")?|\[(?:\\.|[^\]\\])*(\])?|\#[^\n]*')
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_RULE_START = re.compile(r"\s*[\w-]+\s*::=")


def _join_rule_lines(grammar: str) -> str:
    """Convert EBNF as xgrammar reads it to the narrower form that llguidance converts.

    llguidance expects one rule per line, no comments inside a rule, and fewer escapes.
    """
    rules: list[list[str]] = []
    for line in _EBNF_PARTS.sub(_plain_part, grammar).splitlines():
        if rules and not _RULE_START.match(line):
            rules[-1].append(line.strip())
        else:
            rules.append([line.strip()])
    return "\n".join(map(" ".join, rules)) + "\n"


def _plain_part(match: re.Match[str]) -> str:
    text = match[0]
    if text.startswith("#"):
        return ""
    if match.lastindex is None:  # it is not closed, which llguidance reports
        return text
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


FIRST_LOOK_SECONDS = 0.2  # seconds of CPU time for which other guides wait while one is compiled
GUIDE_SECONDS = 2.0  # seconds of CPU time in which a guide must be compiled
GUIDE_MEMORY = 256 << 20  # bytes of memory that compiling a guide may need
KEPT_MEMORY = 64 << 20  # bytes of memory that a compiled guide may keep

WAITED = 10  # times as long, where other processes have the CPU
_STACK = 2 << 20  # less than any thread of the engine that uses guides has
_NICENESS = 5  # requests that run already come first


def main() -> None:
    """Answer requests from stdin until it ends: first the tokenizer, then guides."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads would be missing in forks
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer: LLTokenizer | None = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if "tokenizer" in request:
            tokenizer = tokenizer_of(**request["tokenizer"])
            answer: dict[str, Any] = {}
        else:
            assert tokenizer is not None
            answer = _try_in_fork(tokenizer, GuideType[request["kind"]], request["guide"], request["seconds"])
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _try_in_fork(tokenizer: LLTokenizer, kind: GuideType, guide: str, seconds: float) -> dict[str, Any]:
    """Return `grammar` and `bytes` of a guide within the bounds.

    Else `late` after `seconds`, `starved` where other processes kept it from taking them, `invalid` or `excess` (a
    reason), or `died`.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            _bound(seconds)
            answer = json.dumps(try_guide(tokenizer, kind, guide)).encode()
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        given = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -signal.SIGPROF:
        return {"late": True}
    if code == -signal.SIGALRM:
        return {"starved": True}
    if code == -signal.SIGABRT or (code == 0 and not given):
        return {"excess": f"more than {GUIDE_MEMORY >> 20} MiB of memory"}
    if code == -signal.SIGSEGV:
        return {"excess": f"more than {_STACK >> 20} MiB of stack; it is nested too deeply"}
    if code:
        return {"died": code}
    answered: dict[str, Any] = json.loads(given)
    return answered


def _bound(seconds: float) -> None:
    """Let this process end when it exceeds the bounds from now on."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it does
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * WAITED)
    resource.setrlimit(resource.RLIMIT_AS, (_memory()[0] + GUIDE_MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))


def try_guide(tokenizer: LLTokenizer, kind: GuideType, guide: str) -> dict[str, Any]:
    """Return `grammar` and `bytes` of a guide; else `invalid` or `excess`."""
    _, resident = _memory()
    try:
        grammar = grammar_of(kind, guide)
        matcher = compiled(tokenizer, grammar)
        try_first_token(matcher)
    except MemoryError:
        return {"excess": f"more than {GUIDE_MEMORY >> 20} MiB of memory"}
    except RecursionError:
        return {"invalid": "its lists or objects are nested too deeply"}
    except BaseException as error:  # noqa: BLE001 - a panic of llguidance is one
        return {"invalid": sentence(str(error) or type(error).__name__)}
    kept = max(0, _memory()[1] - resident)
    if kept > KEPT_MEMORY:
        return {"excess": f"{kept >> 20} MiB of memory for as long as it is used, of {KEPT_MEMORY >> 20} MiB allowed"}
    return {"grammar": grammar, "bytes": kept}


def _memory() -> tuple[int, int]:
    """Return the bytes of address space and of memory that this process has."""
    total, resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[:2]
    return int(total) * resource.getpagesize(), int(resident) * resource.getpagesize()


if __name__ == "__main__":
    main()
