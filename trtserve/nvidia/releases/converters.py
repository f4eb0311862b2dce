"""NVIDIA's scripts of each release: those that convert models (`converters.yaml`) and those that launch Triton."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from trtserve.checkpoint.architectures import Architecture, UnknownArchitectureError
from trtserve.checkpoint.architectures.base import HfConfig
from trtserve.checkpoint.supported import supported_family
from trtserve.errors import UnsupportedModelError, listing
from trtserve.nvidia.releases import Row, load_table, normalize_release, order

QUANTIZE_SCRIPT = "examples/quantization/quantize.py"

_MOVED = "0.20"  # from this release on, families are in examples/models/core and examples/models/contrib


@dataclass(frozen=True, kw_only=True)
class Converter(Row):
    """The script that converts an architecture."""

    architecture: str  # as a Hugging Face config.json names it
    folder: str
    place: str  # core or contrib

    def script(self, release: str) -> str:
        return _script(self.folder, self.place, release)


@functools.cache
def converters() -> dict[str, Converter]:
    """Architecture → its converter."""
    table = load_table("converters")
    return {
        architecture: Converter(architecture=architecture, folder=folder, place=place, since=since)
        for place in ("core", "contrib")
        for folder, architectures in table[place].items()
        for architecture, since in architectures.items()
    }


def _script(folder: str, place: str, release: str) -> str:
    if order(release) < order(_MOVED):
        return f"examples/{folder}/convert_checkpoint.py"
    renamed = load_table("converters")["renamed"]
    return f"examples/models/{place}/{renamed.get(folder, folder)}/convert_checkpoint.py"


def require_converter(architecture: str) -> Converter:
    """Return the converter of an architecture. Raises UnsupportedModelError when there is none in any release."""
    converter = converters().get(architecture)
    if converter is None:
        raise UnsupportedModelError(
            f"No convert_checkpoint.py of TensorRT-LLM is known to convert {architecture}.",
            hint="If your release has one, name its folder: --trtllm-script llama (or core/llama, or the script's "
            "path). Without an engine: --runtime llmapi.",
        )
    return converter


def named_script(folder: str, release: str) -> str:
    """Return the path of the convert_checkpoint.py in a folder: `llama`, or from 0.20 on also `contrib/mpt`."""
    place, _, name = folder.strip("/").rpartition("/")
    known = {converter.folder: converter.place for converter in converters().values()}
    return _script(name, place or known.get(name, "core"), normalize_release(release))


def converter_script(architecture: str, release: str) -> str:
    """Return the path of the script for an architecture. Raises UnsupportedModelError when the release has none."""
    wanted = normalize_release(release)
    converter = require_converter(architecture)
    if not converter.within(wanted):
        raise UnsupportedModelError(
            f"TensorRT-LLM {wanted} does not convert {architecture}; {converter.since} is the first release that does.",
            hint=f"Use TensorRT-LLM {converter.since} or newer.",
        )
    return converter.script(wanted)


def convertible_family(hf: HfConfig) -> Architecture:
    """Return the family of a model; errors as in `supported_family`, with NVIDIA's converter for others in the hint."""
    try:
        return supported_family(hf)
    except UnknownArchitectureError as unknown:
        architecture, converter = unknown.architecture, converters().get(unknown.architecture)
        other = (
            f"If TensorRT-LLM has a convert_checkpoint.py for {architecture}, name its folder: --converter upstream "
            "--trtllm-script FOLDER. Its PyTorch backend may run it without an engine: --runtime llmapi."
        )
        if converter is not None:
            other = f"NVIDIA's converter supports it from TensorRT-LLM {converter.since}: --converter upstream."
        raise UnsupportedModelError(unknown.message, hint=f"{unknown.hint} {other}") from None


TRITONSERVER = "/opt/tritonserver/bin/tritonserver"
WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
"""Program that an orchestrator spawns unless the repository names one; the C++ backend's only default."""
LLMAPI_LAUNCH = "trtllm-llmapi-launch"

CORE_MODEL = "tensorrt_llm"

ORCHESTRATOR = "TRTLLM_ORCHESTRATOR"  # environment: 1 in orchestrator mode

SPAWN_PROCESSES = "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"
"""Environment: 1 when the orchestrator spawns its workers, 0 when they are started before."""


@dataclass(frozen=True, kw_only=True)
class LauncherFacts:
    """What the launcher of one release does; `launcher.yaml` explains the switches."""

    ports_twice: bool
    no_mpi: bool
    llmapi_launch: bool
    exit_timeout: bool
    spawn_switch: bool
    memory_pools: bool
    examples: str  # folder of the examples inside the containers


@dataclass(frozen=True, kw_only=True)
class _Examples(Row):
    folder: str


def launcher_facts(release: str) -> LauncherFacts:
    """Return the facts of a release. Raises UsageError for an unsupported one."""
    wanted = normalize_release(release)
    table = load_table("launcher")
    switches = {name: Row(since=first).within(wanted) for name, first in table["since"].items()}
    examples = (_Examples(**row) for row in table["examples"])
    return LauncherFacts(**switches, examples=next(each.folder for each in examples if each.within(wanted)))


EMBEDDED_TAG = "24.10"  # the container with the Triton of the package nvidia-pytriton, 2.51


@dataclass(frozen=True, kw_only=True)
class Advisory:
    """One security bulletin of NVIDIA."""

    bulletin: str  # its number
    fixed: str  # tag of the first container without the faults
    what: str
    cves: tuple[str, ...]


def advisories_of(tag: str) -> tuple[Advisory, ...]:
    """Return the bulletins whose faults the Triton of a container has, oldest first."""
    rows = load_table("advisories")["advisories"]
    return tuple(Advisory(**{**row, "cves": tuple(row["cves"])}) for row in rows if tag < row["fixed"])


def known_faults(tag: str) -> str | None:
    """Return a sentence about the known faults of a container's Triton, or None when there are none."""
    found: Sequence[Advisory] = advisories_of(tag)
    if not found:
        return None
    cves = [cve for advisory in found for cve in advisory.cves]
    harm = "; ".join(dict.fromkeys(advisory.what for advisory in found))
    fixed = max(advisory.fixed for advisory in found)
    return f"Triton {tag} has {len(cves)} known faults ({listing(cves, most=3)}): {harm}. Fixed in {fixed}."
