"""Keys of a checkpoint's config.json that not every release has (`checkpoint_config.yaml`)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.errors import UnsupportedModelError
from trtserve.nvidia.releases import Row, order
from trtserve.nvidia.releases.tables import load_table

Section = Literal["model", "mapping", "quantization", "moe"]

STRICT: tuple[Section, ...] = ("mapping", "quantization", "moe")
"""Sections whose loader refuses a key that its release lacks."""

SHARED_TABLE_UNTIL = "0.15"
"""The last release whose configs have `share_embedding_table`, which replaces lm_head.weight."""

EVEN_STAGES_UNTIL = "0.19"
"""The last release that needs equal pipeline stages; later ones give extra layers to the first stages."""

QUANTISED_EXPERTS_SINCE = "1.0"
"""The first release whose loader is known to take 4-bit experts with scales for groups.

`MOEWeightWrapper` lacked them in 0.17 (development snapshot of 2024-12-17) and has them in 1.x.
"""


@dataclass(frozen=True, kw_only=True)
class _Key(Row):
    section: str
    owner: str  # "all", or a config class
    name: str
    drop_if: tuple[object, ...] | None = None  # values that may be dropped; None: any
    needed_with: str | None = None  # another key, without which this one has no effect

    def may_be_dropped(self, keys: Mapping[str, Any]) -> bool:
        return (
            self.drop_if is None
            or keys[self.name] in self.drop_if
            or (self.needed_with is not None and not keys.get(self.needed_with))
        )


@functools.cache
def _keys() -> tuple[_Key, ...]:
    table = load_table("checkpoint_config")
    return tuple(
        _Key(
            section=section,
            owner=owner,
            name=name,
            **{**row, "drop_if": tuple(row["drop_if"]) if "drop_if" in row else None},
        )
        for section in ("model", *STRICT)
        for owner, names in table[section].items()
        for name, row in names.items()
    )


def keys_of_release(
    section: Section, keys: Mapping[str, Any], *, architecture: str, release: str | None
) -> dict[str, Any]:
    """Return those of `keys` that `release` has; without a release, those that the loaders of all releases accept.

    Raises UnsupportedModelError when the model needs a key that the release lacks.
    """
    lacking = _rows(section, architecture)
    if release is None:
        return {key: value for key, value in keys.items() if section not in STRICT or key not in lacking}
    for key, value, since in _lost_keys(section, keys, architecture, release):
        raise UnsupportedModelError(
            f"TensorRT-LLM {release} does not support {key} = {value} of this model; {since} is the first release that "
            "does.",
            hint=f"Use TensorRT-LLM {since} or newer (--trtllm-version {since}).",
        )
    return {key: value for key, value in keys.items() if key not in lacking or lacking[key].within(release)}


def _rows(section: Section, architecture: str) -> dict[str, _Key]:
    classes: dict[str, list[str]] = load_table("checkpoint_config")["classes"]
    owners = ("all", next((name for name, architectures in classes.items() if architecture in architectures), None))
    return {row.name: row for row in _keys() if row.section == section and row.owner in owners}


def _lost_keys(
    section: Section, keys: Mapping[str, Any], architecture: str, release: str
) -> Iterator[tuple[str, Any, str]]:
    """Yield the keys that a release lacks and whose value the model needs: name, value, first release with the key."""
    for key, row in _rows(section, architecture).items():
        if key in keys and order(release) < order(row.since) and not row.may_be_dropped(keys):
            yield key, keys[key], row.since


def unsupported_keys(config: CheckpointConfig, release: str) -> list[tuple[str, Any, str]]:
    """Return what a checkpoint's config sets and a release ignores: name, value and the first release with the key."""
    architecture = config.architecture
    parts: list[tuple[Section, Mapping[str, Any]]] = [
        ("model", config.content),
        ("quantization", config.content.get("quantization") or {}),
    ]
    return [lost for section, keys in parts for lost in _lost_keys(section, keys, architecture, release)]


def foreign_keys(config: CheckpointConfig, release: str) -> list[str]:
    """Return the keys of a checkpoint's config, such as `mapping.cp_config`, that the loader of a release refuses."""
    return [
        f"{row.section}.{row.name}"
        for row in _keys()
        if row.section in STRICT and row.name in (config.content.get(row.section) or {}) and not row.within(release)
    ]


def smoothquant_val(architecture: str) -> float | None:
    """Return `smoothquant_val` of a model without SmoothQuant: the Gemma script writes null."""
    return None if architecture.startswith("Gemma") else 0.5


def shares_head(architecture: str) -> bool:
    """Return whether the head is the embedding table in configs with `share_embedding_table`: only Gemma's is."""
    return architecture.startswith("Gemma")


def shares_table(release: str | None) -> bool:
    """Return whether the release's configs have `share_embedding_table`."""
    return release is not None and order(release) <= order(SHARED_TABLE_UNTIL)
