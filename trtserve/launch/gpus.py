"""Which GPUs this machine has, and which of them each instance of a server gets."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from trtserve.errors import MachineError, MissingDependencyError, UsageError, counted
from trtserve.launch.base import VISIBLE_DEVICES
from trtserve.launch.visible import shown_devices
from trtserve.process import Command, run

_LIST = Command(argv=("nvidia-smi", "--list-gpus"))
_DESCRIBE = Command(argv=("nvidia-smi", "--query-gpu=compute_cap,driver_version,name", "--format=csv,noheader"))
_MEMORY = Command(argv=("nvidia-smi", "--query-gpu=index,memory.free,memory.total", "--format=csv,noheader,nounits"))
_UUID = re.compile(r"\(UUID: ([^)]+)\)")
_TIMEOUT = 60.0  # a driver that is not kept loaded starts first


def count_gpus() -> int:
    """GPUs that processes started here may see: those of $CUDA_VISIBLE_DEVICES where it is set, else all.

    0 without a driver. Where nvidia-smi cannot say what the variable names (it is not here, or it names partitions),
    its entries are counted.
    """
    devices = visible_devices()
    if devices is None:
        names = os.environ[VISIBLE_DEVICES].split(",")
        return len([name for name in names if name.strip() not in ("", "-1")])
    return len(devices)


def visible_devices() -> tuple[int, ...] | None:
    """nvidia-smi's numbers of the GPUs that processes started here may see, in the order in which CUDA shows them.

    None where $CUDA_VISIBLE_DEVICES is set, and nvidia-smi cannot say what it names.
    """
    found = [_UUID.search(line) for line in _answer(_LIST) if line.startswith("GPU ")]
    visible = os.environ.get(VISIBLE_DEVICES)
    if visible is None:
        return tuple(range(len(found)))
    shown = shown_devices(visible, [match[1] if match else "" for match in found]) if found else None
    return None if shown is None else shown.devices


def _answer(question: Command) -> list[str]:
    """The lines that nvidia-smi prints; none where it is missing, hangs or fails."""
    try:
        ended = run(question, timeout=_TIMEOUT)
    except (MissingDependencyError, TimeoutError):
        return []
    return ended.stdout.splitlines() if ended.code == 0 else []


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU: its compute capability (`9.0`), the version of its driver, and its name."""

    sm: str
    driver: str
    name: str


def describe_gpus() -> list[Gpu]:
    """The GPUs of this machine in nvidia-smi's order; none without a driver."""
    rows = ([part.strip() for part in line.split(",", 2)] for line in _answer(_DESCRIBE))
    return [Gpu(sm=row[0], driver=row[1], name=row[2]) for row in rows if len(row) == 3]


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """Memory of one GPU, in bytes; `index` is nvidia-smi's."""

    index: int
    free: int
    total: int


def gpu_memory() -> list[GpuMemory]:
    """Memory of the GPUs of this machine; those whose memory the driver does not tell are left out."""
    rows = ([part.strip() for part in line.split(",")] for line in _answer(_MEMORY))
    return [
        GpuMemory(index=int(row[0]), free=int(row[1]) * 2**20, total=int(row[2]) * 2**20)
        for row in rows
        if len(row) == 3 and all(part.isdigit() for part in row) and int(row[2]) > 0
    ]


def visible_gpu() -> Gpu | None:
    """The first GPU that processes started here may see; None without one."""
    gpus, devices = describe_gpus(), visible_devices()
    # A partition of one that is not known here: machines have GPUs of one kind.
    first = 0 if devices is None else next(iter(devices), len(gpus))
    return gpus[first] if first < len(gpus) else None


def parse_gpus(text: str) -> tuple[int, ...]:
    """`0,1` → (0, 1); UsageError for what is no list of different numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise UsageError(
            f"--gpus is {text!r}; expected numbers such as 0,1.", hint="nvidia-smi --list-gpus numbers them."
        )
    gpus = tuple(int(part) for part in parts)
    if len(set(gpus)) != len(gpus):
        raise UsageError(f"--gpus {text} names a GPU twice: two ranks cannot share it.")
    return gpus


def split_gpus(gpus: Sequence[int], *, instances: int, ranks: int) -> list[tuple[int, ...]]:
    """GPUs of each instance, `ranks` each, in order; without any, one instance sees all, several count from 0.

    UsageError when there are not as many as instances × ranks.
    """
    if not gpus and instances == 1:
        return [()]
    devices = gpus or range(instances * ranks)
    if len(devices) != instances * ranks:
        what = f"{instances} instances of {counted(ranks, 'rank')}" if instances > 1 else counted(ranks, "rank")
        needs = f"{'needs' if instances * ranks == 1 else 'need'} {instances * ranks}"
        raise UsageError(
            f"--gpus names {counted(len(devices), 'GPU')}; {what} {needs}.",
            hint="One GPU per rank of the engine.",
        )
    return [tuple(devices[number * ranks : (number + 1) * ranks]) for number in range(instances)]


def require_gpus(wanted: int, available: int, gpus: Sequence[int] = ()) -> None:
    """MachineError when `wanted` ranks do not find a GPU each, or `gpus` names one that is not there."""
    if available < wanted:
        raise MachineError(
            f"{'1 rank needs a GPU' if wanted == 1 else f'{wanted} ranks need a GPU each'}; {_found(available)}.",
            hint=_place(wanted),
        )
    lacking = [gpu for gpu in gpus if gpu >= available]
    if lacking and VISIBLE_DEVICES not in os.environ:
        raise MachineError(
            f"--gpus names GPU {lacking[0]}; {_found(available)}, numbered 0 … {available - 1}.",
            hint="nvidia-smi --list-gpus numbers them.",
        )


def _place(wanted: int) -> str:
    """Where so many ranks could be started, and what else would do."""
    place = f"where {counted(wanted, 'GPU')} {'is' if wanted == 1 else 'are'}"
    if VISIBLE_DEVICES in os.environ:
        return f"Unset {VISIBLE_DEVICES}, or correct it (`trtserve doctor` says how CUDA reads it); or start {place}."
    if wanted == 1:
        return f"Start it {place}, or serve the model from the CPU: trtserve import MODEL --runtime openvino."
    return f"Build the engine for fewer ranks, or start it {place}; `trtserve plan MODEL` says what fits on one."


def _found(available: int) -> str:
    visible = os.environ.get(VISIBLE_DEVICES)
    if visible is not None:
        return f"{VISIBLE_DEVICES}={visible} shows {available or 'none'}"
    return f"this machine has {available}" if available else "nvidia-smi finds none on this machine"
