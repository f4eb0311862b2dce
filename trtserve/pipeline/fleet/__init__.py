"""Plan a fleet on paper: how many replicas of which shape on which nodes, checked by a simulation in virtual time.

Here is what a fleet file says: GPUs and their prices, shapes of a replica with their speed, traffic, failures, updates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from msgspec import Meta

from trtserve.bench.targets import read_goal
from trtserve.errors import UsageError, did_you_mean
from trtserve.files import LARGEST_YAML, decode_as, read_text

_Some = Annotated[int, Meta(ge=1, le=1_000_000)]
_Time = Annotated[float, Meta(gt=0, le=1e9)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Amount = Annotated[float, Meta(ge=0, le=1e9)]
Hours = Annotated[tuple[_Amount, ...], Meta(min_length=24, max_length=24)]
_FIGURES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of a shape: jobs are named after it in a shell script


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """Nodes with one kind of GPU."""

    nodes: _Some
    per_node: Annotated[int, Meta(ge=1, le=64)] = 8
    price: _Amount = 0.0  # of a GPU for an hour


@dataclass(frozen=True, kw_only=True)
class SpeedFigures:
    """What a replica takes, in milliseconds; `measured` results give the same."""

    step_ms: _Time
    sequence_ms: _Amount
    prompt_token_ms: _Amount
    request_ms: _Amount = 0.0
    error: _Share = 0.1  # how far these figures may be off, as a part


@dataclass(frozen=True, kw_only=True)
class ShapeOption:
    """One way to serve the model: a replica on some GPUs of one kind."""

    gpu: str
    gpus: _Some = 1
    max_batch_size: Annotated[int, Meta(ge=1, le=4096)]
    measured: tuple[Path, ...] = ()  # results of `bench` of one replica, at two or more loads
    speed: SpeedFigures | None = None
    load_seconds: _Amount = 120.0  # from the start of a replica to its first answer
    manifest: Path | None = None
    """What `start --kubernetes` wrote for one replica, from which the objects of the fleet are made."""
    job: Path | None = None  # what `start --slurm` wrote for one replica
    model: str | None = None  # model of the hub, for llm-d's chart and NVIDIA Dynamo
    model_size: str = "200Gi"  # room for its files in llm-d
    image: str = "vllm/vllm-openai:latest"  # what serves it in llm-d
    dynamo_image: str = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.5.1"
    """What serves it in Dynamo, whose operator wants a version as its tag."""


@dataclass(frozen=True, kw_only=True)
class FleetTraffic:
    """What arrives."""

    requests_per_second: _Time  # in the busiest hour
    day: Hours = (1.0,) * 24  # of each hour, as a part of the busiest one
    input_tokens: _Time
    output_tokens: _Time
    variation: _Amount = 0.5  # standard deviation of lengths ÷ their mean
    burstiness: Annotated[float, Meta(ge=1, le=1000)] = 1.0
    """Variance of the requests in a second ÷ their mean; 1 is Poisson."""
    shared_prefix: _Share = 0.0  # part of a prompt that other requests begin with too
    prefixes: _Some = 100  # how many such prefixes there are


@dataclass(frozen=True, kw_only=True)
class FailureRate:
    """How often nodes fail."""

    node_hours: _Time = 5000.0  # mean time between failures of one node
    repair_minutes: _Amount = 30.0


@dataclass(frozen=True, kw_only=True)
class RollingUpdate:
    """A new version, replica by replica."""

    hour: Annotated[float, Meta(ge=0, lt=24)] = 10.0
    at_once: _Share = 0.05  # part of the replicas that are updated together
    drain_seconds: _Amount = 60.0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What a fleet file says."""

    goal: str
    gpus: Mapping[str, GpuKind]
    shapes: Mapping[str, ShapeOption]
    traffic: FleetTraffic
    failures: FailureRate | None = None
    update: RollingUpdate | None = None
    limits_ms: Mapping[str, float] = field(default_factory=dict)  # the goal, as it was read


def read_fleet(path: Path) -> Fleet:
    """Read a fleet file. Raises UsageError for anything that it should not say."""
    hint = "`trtserve help how-to/fleet` shows one."
    try:
        content: Any = yaml.safe_load(read_text(path, UsageError, limit=LARGEST_YAML))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist.", hint=hint) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a date such as 2001-99-99
        raise UsageError(f"{path} is not YAML: {str(error).splitlines()[0]}.", hint=hint) from None
    if isinstance(content, dict):
        content.pop("limits_ms", None)
    fleet = decode_as(content, Fleet, "a fleet", path, UsageError, hint=hint)
    _require_known(content, fleet, str(path))
    limits = read_goal(fleet.goal)
    for name in limits:
        if name not in _FIGURES:
            raise UsageError(f"{path}: the goal has {name}.", hint=f"A fleet is planned for {', '.join(_FIGURES)}.")
    shapes = {}
    for name, shape in fleet.shapes.items():
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{path}: shapes has {name!r:.80}; a name has 1 to 64 letters, digits, dots, underscores and hyphens, "
                "and begins with a letter or a digit.",
                hint="Rename the shape.",
            )
        if shape.gpu not in fleet.gpus:
            hint = did_you_mean(shape.gpu, fleet.gpus, f"The file has: {', '.join(fleet.gpus)}.")
            raise UsageError(f"{path}: shapes.{name}.gpu is {shape.gpu!r}, which is not under gpus.", hint=hint)
        if bool(shape.measured) == (shape.speed is not None):
            raise UsageError(f"{path}: shapes.{name} needs either `measured` or `speed`.", hint=hint)
        shapes[name] = _beside(shape, path.parent)
    return replace(fleet, shapes=shapes, limits_ms=limits)


def _require_known(content: Any, read: object, place: str) -> None:
    """Raise UsageError for a key, at any depth, that nothing was read from."""
    if isinstance(content, dict) and is_dataclass(read):
        known = [each.name for each in fields(read)]
        for key, below in content.items():
            if key not in known:
                raise UsageError(f"{place} has no key {key!r}.", hint=did_you_mean(str(key), known, ", ".join(known)))
            _require_known(below, getattr(read, key), f"{place}: {key}")
    elif isinstance(content, dict) and isinstance(read, Mapping):
        for key, below in content.items():
            _require_known(below, read[key], f"{place}.{key}")


def _beside(shape: ShapeOption, folder: Path) -> ShapeOption:
    """Return the shape with paths that start at the file's folder."""
    return replace(
        shape,
        measured=tuple(folder / each for each in shape.measured),
        manifest=shape.manifest and folder / shape.manifest,
        job=shape.job and folder / shape.job,
    )
