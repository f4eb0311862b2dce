"""From the growing text of an answer to its parts, the same for every API: thoughts, text, and calls of tools."""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trtserve.files import parse_json
from trtserve.gateway.openai.dialects import BARE, CLOSERS, JSON, PYTHON, SEPARATORS, Dialect, Head, Section

if TYPE_CHECKING:
    from trtserve.gateway.openai.answers import TokenLogProb

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool → the schema of its arguments."""
_LONGEST_HEAD = 1000  # characters before the arguments of a call
_CALL_KEYS = ("name", "type", "id", "function", "arguments", "parameters")
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_BRACKETS = re.compile(r"""["'\\{}\[\]()]""")


@dataclass(kw_only=True)
class Call:
    """One call of a tool while it grows."""

    index: int
    name: str
    arguments: str = ""
    """JSON."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(kw_only=True, slots=True)
class Part:
    """What a piece of text adds to an answer."""

    kind: Literal["reasoning", "text", "call", "arguments"]
    """`call` begins one, `arguments` continues the last one."""
    text: str = ""
    call: Call | None = None
    tokens: Sequence[TokenLogProb] = ()
    """Those of a text, if log-probabilities were requested."""


class Reader(Protocol):
    """Separates the text of an answer into parts."""

    def add(self, text: str) -> Iterator[Part]:
        """Yield what the next piece of text adds; what may be part of a mark waits."""

    def finish(self) -> Iterator[Part]:
        """Yield what waited until the end of the answer."""


def reader_of(dialect: Dialect, tools: Schemas, *, thinks: bool, thoughts: bool, required: bool) -> Reader:
    """Return the reader of one answer.

    `thinks`: it begins inside a thought. `thoughts`: these are told from the text. `required`: it must be a call, so
    that a call which was cut is not text.
    """
    if dialect.channels and not required:
        return ChannelReader(tools, thoughts=thoughts)
    return MarkReader(dialect, tools, thinks=thinks, thoughts=thoughts, required=required)


class MarkReader:
    """Reads answers in which marks begin and end thoughts and calls."""

    def __init__(self, dialect: Dialect, tools: Schemas, *, thinks: bool, thoughts: bool, required: bool) -> None:
        self._thoughts = dialect.thoughts if thoughts else None
        self._tools, self._required = tools, required
        self._sections = {each.opening: each for each in dialect.sections} if tools else {}
        self._state: Literal["start", "thought", "text"] = "thought" if self._thoughts and thinks else "start"
        if not (self._thoughts or self._sections):
            self._state = "text"
        self._bare = self._state == "thought"
        self._held = ""
        self._calls: SectionReader | None = None
        self._made: list[Call] = []

    def add(self, text: str) -> Iterator[Part]:
        """Yield what the next piece adds."""
        if self._state == "text" and not self._sections:
            if text:
                yield Part(kind="text", text=text)
            return
        self._held += text
        yield from self._read(last=False)

    def finish(self) -> Iterator[Part]:
        """Yield what waited."""
        yield from self._read(last=True)

    def _read(self, *, last: bool) -> Iterator[Part]:
        more = True
        while more:
            if self._calls is not None:
                more = yield from self._read_calls(last=last)
            elif self._state == "thought":
                more = yield from self._read_thought(last=last)
            else:
                more = yield from self._read_text(last=last)

    def _read_calls(self, *, last: bool) -> Generator[Part, None, bool]:
        assert self._calls is not None
        held, self._held = self._held, ""
        yield from self._calls.add(held, last=last)
        if (rest := self._calls.rest) is None:
            return False
        if self._calls.no_call and not self._required:
            yield Part(kind="text", text=self._calls.no_call)
        self._held = rest
        self._calls, self._state = None, "text"
        return bool(self._held)

    def _read_thought(self, *, last: bool) -> Generator[Part, None, bool]:
        assert self._thoughts is not None
        end = self._thoughts[1]
        if self._bare:  # the white space around a thought is not part of it
            self._held = self._held.lstrip()
        at = self._held.find(end)
        if at < 0:
            thought = self._held if last else self._held[: len(self._held) - overlap(self._held, end)].rstrip()
            self._held = self._held[len(thought) :]
        else:
            thought = self._held[:at].rstrip()
            self._state, self._bare, self._held = "start", True, self._held[at + len(end) :]
        if thought:
            self._bare = self._state == "start"
            yield Part(kind="reasoning", text=thought)
        return self._state == "start"

    def _read_text(self, *, last: bool) -> Generator[Part, None, bool]:
        if self._state == "start":
            bare = self._held.lstrip()
            marks = [*self._sections, *(self._thoughts or ())[:1]]
            if not last and (not bare or any(mark.startswith(bare) and mark != bare for mark in marks)):
                return False
            if self._thoughts and bare.startswith(self._thoughts[0]):
                self._state, self._bare, self._held = "thought", True, bare[len(self._thoughts[0]) :]
                return True
            if self._bare:
                self._held = bare
            self._state = "text"
            if self._tools and bare[:1] in ("{", "[") and not any(bare.startswith(mark) for mark in self._sections):
                self._calls = SectionReader(BARE, self._tools, self._made)
                return True
        found = [(at, mark) for mark in self._sections if (at := self._held.find(mark)) >= 0]
        at, mark = min(found, default=(len(self._held), ""))
        if not mark and not last:
            at -= max((overlap(self._held, each) for each in self._sections), default=0)
        text, self._held = self._held[:at], self._held[at + len(mark) :]
        if text and not (self._required and not text.strip()):
            yield Part(kind="text", text=text)
        if mark:
            self._calls = SectionReader(self._sections[mark], self._tools, self._made)
        return bool(mark)


class SectionReader:
    """Reads the calls of one section."""

    def __init__(self, section: Section, tools: Schemas, made: list[Call]) -> None:
        self._section, self._tools, self._made = section, tools, made
        self._buffer = ""
        self._skipped = ""
        self._arguments: _Arguments | None = None
        self._whole: Balance | None = None
        self._any = False
        self.rest: str | None = None
        """What follows the section; None while it goes on."""
        self.no_call = ""
        """What turned out to be text."""

    def add(self, text: str, *, last: bool) -> Iterator[Part]:
        """Yield the parts that are complete."""
        self._buffer += text
        while self.rest is None:
            before = len(self._buffer), self._arguments
            yield from self._step()
            if (len(self._buffer), self._arguments) == before:
                break
        if last and self.rest is None:
            if self._arguments is None and (not self._any or SEPARATORS.sub("", self._buffer)):
                self._fail()
                self.no_call += self._buffer
            self.rest = ""

    def _fail(self) -> None:
        """End the section where no call begins: what was taken for its beginning is text."""
        self.rest = self._buffer
        if not self._any:
            self.no_call = self._section.opening + self._skipped

    def _step(self) -> Iterator[Part]:
        if self._arguments is not None:
            ended, self._buffer = yield from self._arguments.add(self._buffer)
            if ended:
                self._arguments = None
            return
        opening, bare = self._section.opening, self._buffer.lstrip()
        if self._any and opening and bare and opening.startswith(bare[: len(opening)]):
            if len(bare) >= len(opening):
                self._buffer = bare[len(opening) :]
            return
        found = SEPARATORS.match(self._buffer) if self._whole is None else None
        start = found.end() if found else 0
        text = self._buffer[start:]
        closing = self._section.closing
        if closing and text.startswith(closing) and self._any:
            self.rest = text[len(closing) :]
        elif self._whole is not None or (text.startswith("{") and JSON in self._section.heads):
            self._skipped, self._buffer = self._skipped + self._buffer[:start], text
            yield from self._json_call()
        else:
            yield from self._other_call(text)

    def _other_call(self, text: str) -> Iterator[Part]:
        closing = self._section.closing
        for head in self._section.heads:
            if (begun := head.pattern.match(text)) is not None:
                yield from self._begin(head, begun, text)
                return
        if not text or any(mark.startswith(text) for mark in (closing, *CLOSERS)):
            return
        if self._any:
            self._buffer = text
        if len(text) > _LONGEST_HEAD or (closing and closing in text) or self._no_head(text):
            self._fail()

    def _no_head(self, text: str) -> bool:
        """Return whether the text of an answer without marks is certainly no call in Python."""
        return self._section is BARE and re.fullmatch(r"[A-Za-z_][\w.]*", text) is None

    def _begin(self, head: Head, found: re.Match[str], text: str) -> Iterator[Part]:
        name = found["name"]
        if name not in self._tools:
            self._fail()
            return
        self._buffer, self._whole = text[found.end() :], None
        call = self._new(name)
        yield Part(kind="call", call=call)
        self._arguments = _Arguments(head, call, self._tools[name])

    def _json_call(self) -> Iterator[Part]:
        """Read an object with a call: its arguments as they come if its name is first, otherwise at its end."""
        if self._whole is None or len(self._buffer) < _LONGEST_HEAD:
            if (found := JSON.pattern.match(self._buffer)) is not None:
                yield from self._begin(JSON, found, self._buffer)
                return
            first = _FIRST_KEY.match(self._buffer)
            if first is not None and first[1] not in _CALL_KEYS:
                self._fail()
                return
        self._whole = self._whole or Balance()
        if (end := self._whole.end(self._buffer)) is None:
            return
        call = self._whole_call(self._buffer[:end])
        if call is None:
            self._fail()
            return
        self._buffer, self._whole = self._buffer[end:], None
        yield Part(kind="call", call=call)
        yield Part(kind="arguments", text=call.arguments, call=call)

    def _whole_call(self, text: str) -> Call | None:
        try:
            content = parse_json(text)
        except ValueError:
            return None
        if isinstance(content, dict) and isinstance(content.get("function"), dict):
            content = content["function"]
        name = content.get("name") if isinstance(content, dict) else None
        arguments = content.get("arguments", content.get("parameters")) if isinstance(content, dict) else None
        if not isinstance(name, str) or name not in self._tools or arguments is None:
            return None
        call = self._new(name)
        call.arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return call

    def _new(self, name: str) -> Call:
        call = Call(index=len(self._made), name=name)
        self._made.append(call)
        self._any = True
        return call


class _Arguments:
    """Reads the arguments of one call."""

    def __init__(self, head: Head, call: Call, schema: Mapping[str, Any]) -> None:
        self._head, self._call = head, call
        properties = schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._balance = Balance(quotes="\"'" if head is PYTHON else '"', depth=1 if head is PYTHON else 0)
        self._key: str | None = None
        self._searched = 0

    def add(self, text: str) -> Generator[Part, None, tuple[bool, str]]:
        """Yield parts; return whether the arguments have ended, and the text that is left."""
        kind = self._head.arguments
        if kind == "pairs":
            return (yield from self._pairs(text))
        end = self._balance.end(text)
        if kind == "json":
            self._balance.drop(len(text))
            yield from self._part(text[:end])
            return end is not None, "" if end is None else text[end:]
        if end is None:
            return False, text
        yield from self._part(_of_python(text[: end - 1]))
        return True, text[end:]

    def _pairs(self, text: str) -> Generator[Part, None, tuple[bool, str]]:
        if self._key is None:
            found = self._head.key.match(text) if self._head.key is not None else None
            if found is None:
                ended = re.match(r"\s*(?=</)", text) is not None
                if ended:
                    yield from self._part("}" if self._call.arguments else "{}")
                return ended, text
            self._key, self._searched = found["key"].strip(), 0
            return False, text[found.end() :]
        end = self._head.value_end
        at = text.find(end, max(0, self._searched - len(end)))
        self._searched = len(text)
        if at < 0:
            return False, text
        value = json.dumps(self._value(text[:at]), ensure_ascii=False)
        yield from self._part(f"{', ' if self._call.arguments else '{'}{json.dumps(self._key)}: {value}")
        self._key = None
        return False, text[at + len(end) :]

    def _value(self, text: str) -> Any:
        """Return the value of an argument: a text where the schema says so, or where it is no JSON."""
        schema = self._properties.get(self._key or "")
        text = text.removeprefix("\n").removesuffix("\n")
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            return text
        try:
            return parse_json(text)
        except ValueError:
            return text

    def _part(self, text: str) -> Iterator[Part]:
        if text:
            self._call.arguments += text
            yield Part(kind="arguments", text=text, call=self._call)


def _of_python(text: str) -> str:
    """Return JSON of the arguments of a call in Python; what is none is an empty object."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        found = {each.arg or "": ast.literal_eval(each.value) for each in call.keywords}
        return json.dumps(found, ensure_ascii=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return "{}"


class Balance:
    """Finds the end of a value in brackets whose text grows, and looks at each character once."""

    def __init__(self, quotes: str = '"', depth: int = 0) -> None:
        self._quotes, self._depth = quotes, depth
        self._quote = ""
        self._at = 0

    def end(self, text: str) -> int | None:
        """Return the index after the value, or None while it goes on; `text` is all of it."""
        for found in _BRACKETS.finditer(text, self._at):
            if found.start() < self._at:
                continue
            mark = found[0]
            if self._quote:
                if mark == "\\":
                    self._at = found.start() + 2
                elif mark == self._quote:
                    self._quote = ""
            elif mark in self._quotes:
                self._quote = mark
            elif mark in "{[(":
                self._depth += 1
            elif mark in "}])":
                self._depth -= 1
                if self._depth == 0:
                    return found.end()
        self._at = max(self._at, len(text))
        return None

    def drop(self, count: int) -> None:
        """Forget that many characters at the beginning."""
        self._at = max(0, self._at - count)


class ChannelReader:
    """Reads answers that consist of messages with headers: `<|channel|>NAME to=RECIPIENT<|message|>TEXT<|end|>`."""

    _ends = re.compile(r"<\|(?:end|call|return|start|channel)\|>")
    _recipient = re.compile(r"to=functions\.([\w.\-]+)")

    def __init__(self, tools: Schemas, *, thoughts: bool) -> None:
        self._tools, self._thoughts = tools, thoughts
        self._held = ""
        self._in_header = True
        self._call: Call | None = None
        self._kind: Literal["reasoning", "text", "arguments"] = "text"
        self._count = 0

    def add(self, text: str) -> Iterator[Part]:
        """Yield what the next piece adds."""
        self._held += text
        yield from self._read(last=False)

    def finish(self) -> Iterator[Part]:
        """Yield what waited."""
        yield from self._read(last=True)

    def _read(self, *, last: bool) -> Iterator[Part]:
        while self._held:
            if self._in_header:
                header, mark, rest = self._held.partition("<|message|>")
                bare = self._held.lstrip()
                if not any(begin.startswith(bare[: len(begin)]) for begin in ("<|", "assistant", "to=")):
                    self._in_header, self._kind, self._call = False, "text", None  # a text without a header
                    continue
                if not mark:
                    return
                self._held, self._in_header = rest, False
                yield from self._begin(header)
                continue
            found = self._ends.search(self._held)
            at = found.start() if found else len(self._held)
            if found is None and not last:
                at -= max(overlap(self._held, mark) for mark in ("<|end|>", "<|call|>", "<|return|>", "<|channel|>"))
            text = self._held[:at]
            self._held = self._held[found.end() :] if found else self._held[at:]
            if found and found[0] == "<|channel|>":
                self._held = found[0] + self._held
            self._in_header = found is not None
            if text:
                if self._call is not None:
                    self._call.arguments += text
                yield Part(kind=self._kind, text=text, call=self._call)
            if found is None:
                return

    def _begin(self, header: str) -> Iterator[Part]:
        recipient = self._recipient.search(header)
        self._call = None
        if recipient is not None and recipient[1] in self._tools:
            self._call, self._kind = Call(index=self._count, name=recipient[1]), "arguments"
            self._count += 1
            yield Part(kind="call", call=self._call)
        else:
            self._kind = "reasoning" if "analysis" in header and self._thoughts else "text"


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` are also the beginning of `mark`, but not all of it."""
    longest = min(len(text), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)
