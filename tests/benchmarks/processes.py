"""The environment of the processes that are measured."""

from __future__ import annotations

import os

_NOTHING_COMPILED = "PYTHONDONTWRITEBYTECODE"


def environment(**variables: str) -> dict[str, str]:
    """That of this process and `variables`; modules are compiled once, as for users, and not at each start."""
    return {name: value for name, value in os.environ.items() if name != _NOTHING_COMPILED} | variables
