"""A YAML file that names models and the servers that serve them, and what it takes to get there.

Here is what it may say: the keys of models, servers and benchmarks, and what they become.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve.specs import BenchRuns, BenchSpec, BuildSpec, ConvertSpec, RepositorySpec, ServerSpec
from trtserve.specs.bench import RANDOM
from trtserve.specs.cluster import OPTIONS, ClusterSpec, KubernetesOptions, SlurmOptions
from trtserve.specs.options import Option, Spec, options_of

SCALARS = {
    "source": "demo, an alias (`trtserve models`), org/name or org/name@revision of the hub, or a folder.",
    "tokenizer": "Hugging Face folder with the tokenizer, or the name of an imported model.",
    "draft": "Another model of this file, which drafts tokens for this one.",
}
"""Keys of a model that are not fields of a spec, with their meaning."""
SERVED_MODEL = "The model of this file that it serves."
BENCHMARK_KEYS = {
    "server": "The server of this file that it measures.",
    "traffic": f"Random prompts: {', '.join(RANDOM)}.",
    "dataset": "File with prompts, as `trtserve bench dataset` takes it.",
    "trace": "File with times and lengths, as `trtserve bench replay` takes it.",
    "out": "Folder for report.json, requests.jsonl and more.",
    "limits": "Targets that the figures must meet; otherwise `up` ends with code 53.",
}
"""Keys of a benchmark that are not fields of a spec, with their meaning."""
SEARCH_KEYS = {
    "goal": "What must hold, such as `ttft p99 < 500 ms, itl p99 < 40 ms`.",
    "max": "What to maximise: throughput (output tokens/s) or requests (per second).",
    "ranges": "Values to try: a list for each option of the model, of the server, or of the load.",
}
"""Keys of a search besides those of its benchmark, with their meaning."""
AIMS = ("throughput", "requests")
LOADS = ("concurrency", "request_rate", "speed")
"""Options of a benchmark that a range may have: how much is asked of the server."""
MODEL_SPECS: tuple[type[Spec], ...] = (ConvertSpec, BuildSpec, RepositorySpec)
# The name is the key of the mapping. An API key does not belong in a shared file: api_key_file names its file.
# The number of ranks follows from the model's tp_size and pp_size.
_NOT_IN_FILES = {"name", "api_key", "world_size"}
_NOT_OF_JOBS = {"submit", *OPTIONS}  # `up` may run often, and would submit a job each time
_OTHER_TARGETS = {"openai", "chat", "in_process"}  # a benchmark of the file measures a server of the file


# A flag, and the name of its value where one follows.
_FLAG = re.compile(r"(?<![\w=-])(--[a-z][a-z-]*)(?![\w=-])( [A-Z]{2,}\b)?")


@dataclass(frozen=True, kw_only=True)
class ModelSetup:
    """A model of the file: its source and the options of all stages."""

    name: str
    source: str
    tokenizer: str | None
    draft: str | None  # name of another model of the file
    convert: ConvertSpec
    build: BuildSpec
    repository: RepositorySpec


@dataclass(frozen=True, kw_only=True)
class ClusterSetup:
    """The cluster for which a server's job or manifest is written."""

    kind: str  # a key of `trtserve.specs.cluster.OPTIONS`
    spec: ClusterSpec
    options: SlurmOptions | KubernetesOptions
    place: Path  # folder of the job, or file of the manifest


@dataclass(frozen=True, kw_only=True)
class ServerSetup:
    model: str
    spec: ServerSpec
    cluster: ClusterSetup | None = None  # None for a server on this machine

    @property
    def name(self) -> str:
        """Name of the server, which the file always gives."""
        return str(self.spec.name)


@dataclass(frozen=True, kw_only=True)
class BenchmarkSetup:
    """A benchmark of the file, which `up` runs when all servers are ready."""

    name: str
    server: str
    spec: BenchSpec
    strict: bool  # whether a verdict other than `valid` is an error
    requirements: Mapping[str, float]  # as `read_requirements` returns them
    out: Path | None


@dataclass(frozen=True, kw_only=True)
class SearchSetup:
    """A search of the file, which `tune` runs."""

    benchmark: BenchmarkSetup  # what is sent to each server that is tried
    goal: Mapping[str, float]  # as `read_goal` returns it
    aim: str  # one of AIMS
    ranges: Mapping[str, tuple[Any, ...]]  # option → values; empty: those of the runtime


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a setup file asks for."""

    path: Path
    models: tuple[ModelSetup, ...]  # each after the model that drafts for it
    servers: tuple[ServerSetup, ...]
    benchmarks: tuple[BenchmarkSetup, ...] = ()
    searches: tuple[SearchSetup, ...] = ()


@functools.cache
def model_options() -> Mapping[str, Option]:
    """Return key → option of a model: those of `trtserve import`."""
    found = {name: option for spec in reversed(MODEL_SPECS) for name, option in options_of(spec).items()}
    return {name: option for name, option in found.items() if name not in _NOT_IN_FILES}


@functools.cache
def server_options() -> Mapping[str, Option]:
    """Return key → option of a server: those of `trtserve start`."""
    return {name: option for name, option in options_of(ServerSpec).items() if name not in _NOT_IN_FILES}


@functools.cache
def cluster_options(kind: str) -> Mapping[str, Option]:
    """Return key → option of a server's `slurm` or `kubernetes`: those of `trtserve start`."""
    found = {**options_of(ClusterSpec), **options_of(OPTIONS[kind])}
    return {name: option for name, option in found.items() if name not in _NOT_OF_JOBS}


def in_keys(text: str) -> str:
    """Return a message about options with the keys of a setup file in place of flags, but for whole commands."""
    if "trtserve " in text:
        return text
    known = {each.flag: name for kind in OPTIONS for name, each in cluster_options(kind).items()}
    known |= {each.flag: name for name, each in server_options().items()} | {f"--{kind}": kind for kind in OPTIONS}

    def key(found: re.Match[str]) -> str:
        flag, value = found.groups("")
        return found[0] if flag not in known else f"{known[flag]}:{value}" if value else known[flag]

    return _FLAG.sub(key, text)


@functools.cache
def benchmark_options() -> Mapping[str, Option]:
    """Return key → option of a benchmark: those of `trtserve bench`, and `strict`."""
    found = {name: option for name, option in options_of(BenchSpec).items() if name not in _OTHER_TARGETS}
    return {**found, "strict": options_of(BenchRuns)["strict"]}


@functools.cache
def range_options() -> Mapping[str, Option]:
    """Return key → option of which a search may try several values."""
    single = {**server_options(), **model_options()} | {name: options_of(BenchSpec)[name] for name in LOADS}
    return {name: option for name, option in single.items() if option.container is None}
