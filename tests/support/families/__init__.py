"""The model families that tests run on: every family in `trtserve.checkpoint.architectures.FAMILIES` has a row.

Tests iterate FAMILIES: config.json of checkpoints, shards, numerical check, logits and tokens against transformers,
int4, experts. Cases that are about one family stand in the tests.
"""

from __future__ import annotations

import os

from tests.support.families.family import Config, Family
from tests.support.families.gemma3n import GEMMA3N
from tests.support.families.gemma4 import GEMMA4, GEMMA4_MOE
from tests.support.families.llama_like import LLAMA_LIKE
from tests.support.families.mixtures import MIXTURE_FAMILIES
from tests.support.families.ours import OURS
from tests.support.families.own_names import OWN_NAMES
from tests.support.families.with_states import WITH_STATES

__all__ = ["EVERY", "FAMILIES", "Config", "Family", "cases", "in_turn", "representatives"]

FAMILIES: dict[str, Family] = (
    LLAMA_LIKE
    | {"gemma3n": GEMMA3N, "gemma4": GEMMA4, "gemma4_moe": GEMMA4_MOE}
    | MIXTURE_FAMILIES
    | OWN_NAMES
    | OURS
    | WITH_STATES
)


def cases(field: str) -> list[tuple[str, Config]]:
    """Return (family, changes of its config.json) for every model in `Family.shards` or `Family.logits`."""
    return [(name, changes) for name, family in FAMILIES.items() for changes in getattr(family, field)]


EVERY = bool(os.environ.get("TRTSERVE_ALL"))
"""Whether tests of families take every variant in every precision, as `make families` does, and not a part in turn."""


def representatives(field: str) -> list[tuple[str, Config]]:
    """Return the first model of each family; with `EVERY`, all of `cases`."""
    found = cases(field)
    return found if EVERY else [case for number, case in enumerate(found) if case[0] not in dict(found[:number])]


def in_turn(number: int, of: int) -> list[str]:
    """Return every `of`th family, from `number`; with `EVERY`, all of them."""
    return [name for place, name in enumerate(FAMILIES) if EVERY or place % of == number]
