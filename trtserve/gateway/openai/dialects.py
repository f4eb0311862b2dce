"""How families of models write thoughts and calls of tools, as their chat templates show it.

The marks are those of the models' published chat templates. `dialect_of` chooses by what a template contains, so that a
model that was never heard of works if it writes as a known family does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

_NAME = r"(?P<name>[\w.:/\-]{1,256})"


@dataclass(frozen=True, kw_only=True)
class Head:
    """How a call begins, up to its arguments."""

    pattern: re.Pattern[str]
    """Has the group `name`; the arguments follow."""
    arguments: str = "json"
    """`json`: a JSON object, `pairs`: keys and values between marks, `python`: those of a call in Python."""
    key: re.Pattern[str] | None = None
    """Of `pairs`: what comes before a value, with the group `key`."""
    value_end: str = ""
    """Of `pairs`: what ends a value."""


JSON = Head(
    pattern=re.compile(
        r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"id"\s*:\s*"[^"\\]*"\s*,\s*)?"name"\s*:\s*"'
        + _NAME
        + r'"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
    )
)
_TAGGED = Head(
    pattern=re.compile(rf"<function={_NAME}>\s*"),
    arguments="pairs",
    key=re.compile(r"\s*<parameter=(?P<key>[^>]{1,256})>\n?"),
    value_end="</parameter>",
)
_ARG_KEYS = Head(
    pattern=re.compile(_NAME + r"\s*(?=<arg_key>|</tool_call>)"),
    arguments="pairs",
    key=re.compile(r"\s*<arg_key>(?P<key>[^<]{1,256})</arg_key>\s*<arg_value>"),
    value_end="</arg_value>",
)
_BARE_NAME = Head(pattern=re.compile(_NAME + r"(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)"))
_CALL_BEGIN, _CALL_SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK = (
    Head(pattern=re.compile(rf"{_CALL_BEGIN}function{_CALL_SEP}{_NAME}\s*```json\s*(?=\{{)")),
    Head(pattern=re.compile(rf"{_CALL_BEGIN}{_NAME}{_CALL_SEP}\s*(?=\{{)")),  # since V3.1
)
PYTHON = Head(pattern=re.compile(r"(?P<name>[A-Za-z_][\w.]{0,255})\("), arguments="python")


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of an answer that has calls."""

    opening: str
    """Its first mark; "" for an answer that begins with a call."""
    closing: str = ""
    """Its last mark; "" for one that lasts to the end of the answer."""
    heads: tuple[Head, ...]
    signs: tuple[str, ...] = ()
    """What chat templates of such models contain, if not the first mark."""
    inside: tuple[str, ...] = ()
    """Further marks."""


HERMES = Section(opening="<tool_call>", closing="</tool_call>", heads=(JSON, _TAGGED, _ARG_KEYS))
BARE = Section(opening="", heads=(JSON, PYTHON))
# Each is searched for in the answers of models whose chat templates have its mark.
_SECTIONS = (
    Section(opening="<|python_tag|>", heads=(JSON,)),
    Section(opening="<|python_start|>", closing="<|python_end|>", heads=(PYTHON,)),
    Section(opening="[TOOL_CALLS]", heads=(JSON, _BARE_NAME), inside=("[ARGS]", "[CALL_ID]")),
    Section(opening="<|tool_call|>", closing="<|/tool_call|>", heads=(JSON,), signs=("<|tool_call|>", "<|tool|>")),
    Section(opening="functools[", heads=(JSON,), signs=("<|tool|>",)),
    Section(
        opening="<｜tool▁calls▁begin｜>",
        closing="<｜tool▁calls▁end｜>",
        heads=_DEEPSEEK,
        inside=(_CALL_BEGIN, _CALL_SEP, _CALL_END),
    ),
)
CLOSERS = (_CALL_END, "</function>")
SEPARATORS = re.compile(rf"(?:[\s,;\[\]}}`]|{'|'.join(CLOSERS)})+")
"""What may stand between two calls, and between the last one and the closing mark."""
_THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_CHANNEL = "<|channel|>"
_CHANNEL_MARKS = (_CHANNEL, "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one model writes."""

    thoughts: tuple[str, str] | None = None
    """What begins and ends its thoughts."""
    sections: tuple[Section, ...] = (HERMES,)
    channels: bool = False
    """Whether an answer consists of messages on channels, as gpt-oss writes (harmony)."""

    def marks(self, *, tools: bool, thoughts: bool) -> tuple[str, ...]:
        """Return the marks that must be in the text, some of which are special tokens."""
        if self.channels:
            return _CHANNEL_MARKS
        calls = [mark for each in self.sections for mark in (each.opening, each.closing, *each.inside) if mark]
        return (*(calls if tools else ()), *(self.thoughts or () if thoughts else ()))

    def without_thoughts(self, prompt: str) -> str:
        """Return a prompt whose answer begins without thoughts: that of a guide."""
        if self.channels:
            return f"{prompt}{_CHANNEL}final<|message|>"
        return f"{prompt.rstrip()}\n{self.thoughts[1]}\n\n" if self.thoughts and self.thinks(prompt) else prompt

    def thinks(self, prompt: str) -> bool:
        """Return whether the answer to a prompt begins inside a thought."""
        return self.thoughts is not None and prompt.rstrip().endswith(self.thoughts[0])


@lru_cache(maxsize=64)
def dialect_of(template: str | None) -> Dialect:
    """Return how a model with this chat template writes."""
    text = template or ""
    return Dialect(
        thoughts=next((marks for marks in _THOUGHTS if any(mark in text for mark in marks)), None),
        sections=(HERMES, *(each for each in _SECTIONS if any(sign in text for sign in each.signs or (each.opening,)))),
        channels=_CHANNEL in text,
    )
