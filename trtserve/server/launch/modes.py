"""The launch modes: how the processes of a server are started on the machine, or the nodes, that run it.

A new mode is one module with what `LaunchMode` asks for, and one word here.
"""

from __future__ import annotations

from typing import Final

from trtserve.repository.preflight import Served
from trtserve.server.launch import (
    leader,
    llmapi,
    orchestrator,
    single,
)
from trtserve.server.launch.base import LaunchMode
from trtserve.specs import ServerSpec

# The first one that serves a repository is taken.
_ALL: Final[tuple[LaunchMode, ...]] = (single, llmapi, orchestrator, leader)
MODES: Final = {mode.NAME: mode for mode in _ALL}


def launch_mode(served: Served, spec: ServerSpec) -> LaunchMode:
    """Return the mode that serves this repository with these options."""
    return next(mode for mode in MODES.values() if mode.serves(served, spec))
