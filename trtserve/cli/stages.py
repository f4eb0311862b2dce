"""The stages of an import as a dry run shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtserve.cli.output import print_block, print_data
from trtserve.machine import gibibytes

if TYPE_CHECKING:
    from trtserve.pipeline.stages import Stage


def print_stages(stages: Sequence[Stage]) -> None:
    """One line for each stage: what it does, the bytes it would write, and where."""
    for stage in stages:
        path = stage["path"] or "a folder of the store that follows from the weights"
        print_block(f"{stage['stage']:<9} {stage['action']:<6} {gibibytes(stage['bytes']):>9}  {path}")


def print_commands(stages: Sequence[Stage]) -> None:
    """The programs that the stages would run."""
    for stage in stages:
        if stage["command"]:
            print_data(f"command   {stage['command']}")
