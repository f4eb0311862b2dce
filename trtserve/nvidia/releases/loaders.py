"""What the loader of each release takes of a checkpoint: keys, families, limits, names.

Tables: `checkpoint_config.yaml`, `loaders.yaml`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.errors import UnsupportedModelError, listing
from trtserve.nvidia.releases import NEWEST, RELEASES, Row, load_table, order
from trtserve.nvidia.releases.converters import converters

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


_LAST_TAG_RUN = "0.14"  # of 0.15 and 0.16 development snapshots ran


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why a checkpoint does not load in a release."""

    what: str  # a clause that follows a colon
    fix: str
    option: bool = False  # an option of `convert` causes it; otherwise the model does


@dataclass(frozen=True, kw_only=True)
class _Limit(Row):
    limit: Literal["pipeline", "inner_size", "hidden_axis", "shared_stages"]
    families: tuple[str, ...]
    because: str

    def breaks(self, config: CheckpointConfig) -> str | None:
        """Return what exceeds the limit, as the user gave it."""
        stages, ranks, shared = config.mapping.pp_size, config.mapping.tp_size, config.share_embedding_table
        inner, hidden = config.intermediate_size, config.hidden_size
        if self.limit == "pipeline" and stages > 1:
            return f"--pp-size {stages}"
        if self.limit == "shared_stages" and stages > 1 and shared:
            return f"--pp-size {stages}"
        if self.limit == "inner_size" and inner != 4 * hidden:
            return f"intermediate_size {inner} with hidden_size {hidden}"
        if self.limit == "hidden_axis" and shared and ranks > 1 and config.embedding_sharding_dim == 1:
            return "--embedding-sharding-dim 1"
        return None

    @property
    def fix(self) -> str:
        """What to do instead in the same release."""
        return {
            "pipeline": "Use --tp-size, or serve it with --runtime torch (convert without --trtllm-version).",
            "shared_stages": "Use --tp-size.",
            "inner_size": "Use --runtime openvino (convert without --trtllm-version), or --runtime llmapi.",
            "hidden_axis": "Use --embedding-sharding-dim 0.",
        }[self.limit]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """How it is known what the loader of a release accepts of a family."""

    kind: Literal["run", "text", "inferred"]
    source: str

    def __str__(self) -> str:
        return {
            "run": f"The loader of {self.source} has read checkpoints of this family.",
            "text": f"The model class was read: {self.source}.",
            "inferred": f"This is inferred: {self.source}.",
        }[self.kind]


def evidence(architecture: str, release: str) -> Evidence:
    """Return how it is known what the loader of `release` accepts of an architecture that the release has."""
    row = load_table("loaders")["families"].get(_families().get(architecture), {})
    since = converters()[architecture].since if architecture in converters() else RELEASES[0]
    run = [each for each in row.get("run", ()) if order(each) >= order(since)]
    texts: dict[str, str] = {each: text for each, text in row.get("text", {}).items() if order(each) >= order(since)}
    if release in run:
        snapshot = order(release) > order(_LAST_TAG_RUN)
        return Evidence(kind="run", source=f"a development snapshot of {release}" if snapshot else f"{release}.0")
    if release in texts:
        return Evidence(kind="text", source=texts[release])
    known = sorted({*run, *texts}, key=order)
    earlier = [each for each in known if order(each) < order(release)]
    later = [each for each in known if order(each) > order(release)]
    around = " and ".join(dict.fromkeys([*earlier[-1:], *later[:1]]))
    source = (
        f"known are {around}, and nothing between was looked up"
        if earlier and later
        else (f"the nearest that is known is {around}" if around else "no loader of this family was run or read")
    )
    return Evidence(kind="inferred", source=source)


def takes_stages(architecture: str, release: str) -> bool:
    """Return whether the loader of `release` takes pipeline stages of an architecture."""
    family = _families().get(architecture)
    return not any(
        row.limit in ("pipeline", "shared_stages") and family in row.families and row.within(release)
        for row in _limits()
    )


@functools.cache
def _limits() -> tuple[_Limit, ...]:
    return tuple(_Limit(**{**row, "families": tuple(row["families"])}) for row in load_table("loaders")["limits"])


@functools.cache
def _families() -> dict[str, str]:
    families: dict[str, dict[str, Any]] = load_table("loaders")["families"]
    return {name: family for family, row in families.items() for name in row["architectures"]}


def name_in_release(name: str, architecture: str, release: str | None) -> str:
    """Return a tensor's name in a release; without one that of the newest."""
    if release is not None:
        for ours, theirs in _renames(architecture, release):
            found = _matched(ours, name)
            if found is not None:
                return theirs.format(found[1]) + name[found.end() :]
    return name


def naming_problem(names: Iterable[str], architecture: str, release: str) -> Problem | None:
    """Return the problem of a checkpoint with tensors that are named as in another release."""
    names, renamed = list(names), _renames(architecture, release)
    for ours, theirs in _renames(architecture):
        other, own = (ours, theirs) if (ours, theirs) in renamed else (theirs, ours)
        found = next((match for name in names if (match := _matched(other, name))), None)
        if found is not None:
            return Problem(
                what=f"its tensors {found[0]}… are {own.format(found[1])}… in that release",
                fix=f"Convert the model again with --trtllm-version {release}.",
            )
    return None


def _matched(prefix: str, name: str) -> re.Match[str] | None:
    return re.match(re.escape(prefix).replace(r"\{\}", r"(\d+)"), name)


def _renames(architecture: str, release: str | None = None) -> list[tuple[str, str]]:
    """Return the prefixes of tensors that `release`, or without one any release, names otherwise: ours and its own."""
    family = _families().get(architecture)
    return [
        (row["ours"], row["theirs"])
        for row in load_table("loaders")["names"]
        if family in row["families"] and (release is None or Row(until=row["until"]).within(release))
    ]


def problems(config: CheckpointConfig, release: str) -> list[Problem]:
    """Return what the loader of `release` refuses in a checkpoint's config, or would load as another model."""
    foreign = (f"its loader refuses the key {key} of config.json" for key in foreign_keys(config, release))
    fix = f"Convert again with --trtllm-version {release}."
    return [*model_problems(config, release), *(Problem(what=what, fix=fix) for what in foreign)]


def model_problems(config: CheckpointConfig, release: str) -> list[Problem]:
    """Return the problems that converting again for `release` does not solve."""
    architecture, found = config.architecture, list[Problem]()
    if beyond := superset_problem(config):
        found.append(beyond)
    converter = converters().get(architecture)
    if converter is not None and not converter.within(release):
        found.append(
            Problem(
                what=f"it has no {architecture}; {converter.since} is the first release that does",
                fix=f"Use TensorRT-LLM {converter.since} or newer.",
            )
        )
    for limit in _limits():
        if _families().get(architecture) in limit.families and limit.within(release):
            broken = limit.breaks(config)
            if broken:
                later = _after(limit.until)
                fix = f"{limit.fix[:-1]}, or TensorRT-LLM {later} or newer." if later else limit.fix
                found.append(Problem(what=f"{broken}: {limit.because}", fix=fix, option=broken.startswith("--")))
    found += _stage_problems(config, release)
    if (
        config.moe.num_experts
        and config.quantization.algorithm == "W4A16_GPTQ"
        and order(release) < order(QUANTISED_EXPERTS_SINCE)
    ):
        found.append(
            Problem(
                what="it is not known to load 4-bit experts with scales for groups (AWQ, GPTQ)",
                fix=f"Use --trtllm-version {QUANTISED_EXPERTS_SINCE} or later, or the original model.",
            )
        )
    return [*found, *_lost_key_problems(config, release)]


def superset_problem(config: CheckpointConfig) -> Problem | None:
    """Return why no release loads a checkpoint that is marked as one for our own runtimes (decision 21), or None."""
    if not config.superset:
        return None
    return Problem(
        what=f"TensorRT-LLM's checkpoint format lacks {listing(config.superset)}, which this model has",
        fix="Use --runtime torch or vllm on GPUs, or --runtime openvino on this CPU.",
    )


def _stage_problems(config: CheckpointConfig, release: str) -> list[Problem]:
    layers, stages = config.num_hidden_layers, config.mapping.pp_size
    if not layers % stages or order(release) > order(EVEN_STAGES_UNTIL):
        return []
    fitting = ", ".join(str(size) for size in range(1, layers + 1) if layers % size == 0)
    later = _after(EVEN_STAGES_UNTIL)
    return [
        Problem(
            what=f"--pp-size {stages} does not divide the {layers} layers of this model",
            fix=f"Sizes that fit: {fitting}; or use TensorRT-LLM {later} or newer.",
            option=True,
        )
    ]


def _lost_key_problems(config: CheckpointConfig, release: str) -> list[Problem]:
    architecture = config.architecture
    parts: list[tuple[Section, Mapping[str, Any]]] = [
        ("model", config.content),
        ("quantization", config.content.get("quantization") or {}),
    ]
    return [
        Problem(
            what=f"it does not support {key} = {value} of this model; {since} is the first release that does",
            fix=f"Use TensorRT-LLM {since} or newer.",
        )
        for key, value, since in [
            lost for section, keys in parts for lost in _lost_keys(section, keys, architecture, release)
        ]
    ]


def _after(until: str | None) -> str | None:
    """Return the release that follows `until`."""
    return None if until is None else RELEASES[RELEASES.index(until) + 1]


def loading_releases(config: CheckpointConfig, named_in: str = NEWEST) -> list[str]:
    architecture = config.architecture
    names = _renames(architecture, named_in)
    return [
        release for release in RELEASES if _renames(architecture, release) == names and not problems(config, release)
    ]
