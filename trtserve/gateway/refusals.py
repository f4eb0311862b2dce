"""A request that the door answers itself, with an error."""

from __future__ import annotations

from collections.abc import Mapping


class RefusedError(Exception):
    """The status and the text of an answer."""

    def __init__(self, status: int, text: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = dict(headers or {})
