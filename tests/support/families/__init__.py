"""The model families that tests run on: every family in `trtserve.checkpoint.architectures.FAMILIES` has a row.

Tests iterate FAMILIES: config.json of checkpoints, shards, numerical check, logits and tokens against transformers,
int4, experts. Cases that are about one family stand in the tests.
"""

from __future__ import annotations

from tests.support.families.family import Config, Family
from tests.support.families.llama_like import LLAMA_LIKE
from tests.support.families.mixtures import MIXTURE_FAMILIES
from tests.support.families.ours import OURS
from tests.support.families.own_names import OWN_NAMES

__all__ = ["FAMILIES", "Config", "Family", "cases"]

FAMILIES: dict[str, Family] = LLAMA_LIKE | MIXTURE_FAMILIES | OWN_NAMES | OURS


def cases(field: str) -> list[tuple[str, Config]]:
    """Return (family, changes of its config.json) for every model in `Family.shards` or `Family.logits`."""
    return [(name, changes) for name, family in FAMILIES.items() for changes in getattr(family, field)]
