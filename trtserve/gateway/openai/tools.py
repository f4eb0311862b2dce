"""Calls of tools in an answer: `<tool_call>{…}</tool_call>`, or an answer that is nothing but a call as JSON."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from typing import Any

from trtserve.files import parse_json

_OPENING = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)

Call = dict[str, Any]


class CallReader:
    """Separates the text of an answer from its calls.

    Text is released as it comes until a call may begin; the rest waits for the end.
    """

    def __init__(self, names: Collection[str]) -> None:
        """`names` are the tools; without any, all is text."""
        self._names = names
        self._text = ""
        self._released = 0

    def add(self, piece: str) -> str:
        """Return the text that is certain not to belong to a call."""
        if not self._names:
            return piece
        self._text += piece
        return self._release(len(self._text) if (at := self._start()) is None else at)

    def finish(self) -> tuple[str, list[Call]]:
        """Return the rest of the text, and the calls."""
        at = self._start()
        calls = [] if at is None else self._calls(self._text[at:])
        return (self._release(len(self._text)) if at is not None and not calls else ""), calls

    def _release(self, end: int) -> str:
        start, self._released = self._released, max(self._released, end)
        return self._text[start:end]

    def _start(self) -> int | None:
        """Return where a call begins or may begin."""
        stripped = self._text.lstrip()
        if stripped.startswith(("{", "[")):
            return 0
        at = self._text.find(_OPENING)
        if at >= 0:
            return at
        sizes = range(min(len(self._text), len(_OPENING) - 1), 0, -1)
        return next((len(self._text) - size for size in sizes if self._text.endswith(_OPENING[:size])), None)

    def _calls(self, text: str) -> list[Call]:
        found = _CALL.findall(text) or [text]
        calls: list[Call] = []
        for each in found:
            try:
                content = parse_json(each)
            except ValueError:
                return []
            for call in content if isinstance(content, list) else [content]:
                arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
                if arguments is None or call.get("name") not in self._names:
                    return []
                function = {"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        return calls
