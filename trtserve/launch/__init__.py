"""How a server becomes processes: the exact command of every launch mode, composed and not run."""

from trtserve.launch.base import Launch, Mode, Setup
from trtserve.launch.leader import leader, single
from trtserve.launch.llmapi import llmapi
from trtserve.launch.orchestrator import orchestrator

__all__ = ["Launch", "Mode", "Setup", "leader", "llmapi", "orchestrator", "single"]
