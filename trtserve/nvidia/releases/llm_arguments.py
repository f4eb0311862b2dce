"""Arguments of TensorRT-LLM's `LLM` class, which model.yaml may name (`llm_arguments.yaml`)."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from trtserve.nvidia.releases import order
from trtserve.nvidia.releases.tables import load_table


def dropped_argument(name: str, release: str) -> tuple[str, str] | None:
    """Return the last release with an argument that `release` lacks, and what replaces the argument."""
    found = load_table("llm_arguments")["dropped"].get(name)
    return (found["until"], found["instead"]) if found and order(release) > order(found["until"]) else None


def unknown_argument(name: str, *, others: Collection[str] = ()) -> str | None:
    """Return advice on an argument that no release has.

    Returns None for one that some release has or that is in `others`.
    """
    table = load_table("llm_arguments")
    known = {*table["arguments"], *others}
    if name in known or name in table["dropped"]:
        return None
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"Did you mean {close[0]}?" if close else "Leave it out, or check its name."
