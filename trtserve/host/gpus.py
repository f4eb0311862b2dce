"""Which GPUs this machine has, which of them processes may see, and which each instance of a server gets.

CUDA_VISIBLE_DEVICES is read as CUDA's driver does, measured with driver 580.159 on two GPUs, and described in CUDA's
programming guide: the list ends at the first entry that is not a GPU of this machine, and if a GPU is named twice, CUDA
shows no GPU.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from trtserve.errors import MachineError, MissingDependencyError, UsageError, counted
from trtserve.host.machine import read_system_file
from trtserve.process import Command, run

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

# The driver reads the digits at the start of an entry and ignores the rest.
_NUMBER = re.compile(r"[+-]?\d+")
_UUID = "gpu-"
_PARTITION = "mig-"
NVIDIA_SMI = "nvidia-smi"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TIMEOUT = 60.0  # without persistence mode the driver is loaded first
_PCI = Path("/sys/bus/pci/devices")
_VENDOR = "0x10de"
_DISPLAY = "0x03"  # PCI class of display controllers, including 3D ones
_FIELDS = (
    "index",
    "compute_cap",
    "memory.total",
    "memory.used",
    "memory.free",
    "mig.mode.current",
    "persistence_mode",
    "ecc.errors.uncorrected.volatile.total",
    "driver_version",
    "uuid",
    "name",
)


def list_gpus() -> tuple[Device, ...]:
    """Return the GPUs of this machine in nvidia-smi's order, or () without a driver.

    nvidia-smi takes up to seconds, so a process asks once; `gpus_now` knows what is free now.
    """
    try:
        return _asked_once()
    except MachineError:
        return ()


def gpus_now() -> tuple[Device, ...]:
    """Return those GPUs with the memory that is free and used now."""
    _asked_once.cache_clear()
    return list_gpus()


@functools.cache
def _asked_once() -> tuple[Device, ...]:
    return query_nvidia_smi()


def count_gpus() -> int:
    """Return how many GPUs processes started here may see: those in $CUDA_VISIBLE_DEVICES if it is set, otherwise all.

    If nvidia-smi cannot resolve the variable (it is missing, or partitions are named), the entries are counted.
    """
    devices = visible_devices()
    if devices is None:
        names = os.environ[VISIBLE_DEVICES].split(",")
        return len([name for name in names if name.strip() not in ("", "-1")])
    return len(devices)


def visible_devices() -> tuple[int, ...] | None:
    """Return nvidia-smi's numbers of the GPUs that processes started here may see, in CUDA's order.

    Returns None when $CUDA_VISIBLE_DEVICES is set and nvidia-smi cannot resolve it.
    """
    gpus = list_gpus()
    text = os.environ.get(VISIBLE_DEVICES)
    if text is None:
        return tuple(gpu.index for gpu in gpus)
    shown = shown_devices(text, [gpu.uuid for gpu in gpus]) if gpus else None
    return None if shown is None else shown.devices


def visible_gpu() -> Device | None:
    """Return the first GPU that processes started here may see, or None if there is none."""
    gpus, devices = list_gpus(), visible_devices()
    # Which partition the variable names is unknown, but the GPUs of a machine are usually of one kind.
    first = 0 if devices is None else next(iter(devices), len(gpus))
    return gpus[first] if first < len(gpus) else None


def split_gpus(gpus: Sequence[int], *, instances: int, ranks: int) -> list[tuple[int, ...]]:
    """Return the GPUs of each instance, `ranks` each, in order.

    If no GPUs are named, one instance sees all GPUs, and several instances count from 0. Raises UsageError when there
    are not as many as instances × ranks.
    """
    if not gpus and instances == 1:
        return [()]
    devices = gpus or range(instances * ranks)
    if len(devices) != instances * ranks:
        what = f"{instances} instances of {counted(ranks, 'rank')}" if instances > 1 else counted(ranks, "rank")
        needs = f"{'needs' if instances * ranks == 1 else 'need'} {instances * ranks}"
        raise UsageError(
            f"--gpus names {counted(len(devices), 'GPU')}; {what} {needs}.", hint="One GPU per rank of the engine."
        )
    return [tuple(devices[number * ranks : (number + 1) * ranks]) for number in range(instances)]


def require_gpus(wanted: int, available: int, gpus: Sequence[int] = ()) -> None:
    """Raise MachineError when there are fewer GPUs than `wanted` ranks, or `gpus` names one that does not exist."""
    visible = os.environ.get(VISIBLE_DEVICES)
    if visible is not None:
        found = f"{VISIBLE_DEVICES}={visible} shows {available or 'none'}"
    else:
        found = f"this machine has {available}" if available else "nvidia-smi finds none on this machine"
    if available < wanted:
        place = f"on a machine with {counted(wanted, 'GPU')}"
        if visible is not None:
            hint = (
                f"Unset {VISIBLE_DEVICES}, or correct it (`trtserve doctor` shows how CUDA reads it); or start {place}."
            )
        elif wanted == 1:
            hint = f"Start it {place}, or serve the model on the CPU: trtserve import MODEL --runtime openvino."
        else:
            hint = (
                f"Build the engine for fewer ranks, or start it {place}; `trtserve plan MODEL` shows what fits on one."
            )
        raise MachineError(
            f"{'1 rank needs a GPU' if wanted == 1 else f'{wanted} ranks need a GPU each'}; {found}.", hint=hint
        )
    missing = [gpu for gpu in gpus if gpu >= available]
    if missing and visible is None:
        raise MachineError(
            f"--gpus names GPU {missing[0]}; {found}, numbered 0 … {available - 1}.",
            hint="nvidia-smi --list-gpus numbers them.",
        )


@dataclass(frozen=True, kw_only=True)
class Shown:
    devices: tuple[int, ...]  # nvidia-smi's numbers, in CUDA's order
    stopped: str = ""  # why the end of the list is ignored, or empty when all of it counts


def shown_devices(text: str, uuids: Sequence[str]) -> Shown | None:
    """Return which GPUs CUDA shows, given their UUIDs in nvidia-smi's order, or None when partitions are named."""
    entries = [entry.strip() for entry in text.split(",")]
    if any(entry.lower().startswith(_PARTITION) for entry in entries):
        return None
    devices: list[int] = []
    for place, entry in enumerate(entries):
        found = _device(entry, uuids)
        if found is None:
            return Shown(devices=tuple(devices), stopped=_reason(entries[place:]))
        if _is_uuid(entry) != _is_uuid(entries[0]):
            return Shown(devices=tuple(devices), stopped=f"{entry} ends the list: numbers and UUIDs do not mix")
        if found in devices:
            return Shown(devices=(), stopped=f"GPU {found} is named twice")
        devices.append(found)
    return Shown(devices=tuple(devices))


def _device(entry: str, uuids: Sequence[str]) -> int | None:
    if _is_uuid(entry):
        # The start of a UUID is enough if no other GPU's UUID starts with it.
        found = [index for index, uuid in enumerate(uuids) if uuid.lower().startswith(entry.lower())]
        return found[0] if len(found) == 1 else None
    number = _NUMBER.match(entry)
    return int(number[0]) if number and 0 <= int(number[0]) < len(uuids) else None


def _reason(rest: Sequence[str]) -> str:
    """Return why the list ends before `rest`, or "" when `rest` names no GPU."""
    if all(entry in ("", "-1") for entry in rest):
        return ""
    first = rest[0]
    if first in ("", "-1"):
        return f"{first or 'an empty entry'} ends the list"
    return f"GPU {first} does not exist" if first.isdigit() else f"{first} does not exist"


def _is_uuid(entry: str) -> bool:
    return entry.lower().startswith(_UUID)


@dataclass(frozen=True, kw_only=True)
class Driver:
    version: str
    cuda: tuple[int, int] | None = None  # the newest CUDA that it reports to run; None: unknown


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU. Memory is in bytes, and 0 when the driver does not report it."""

    index: int  # nvidia-smi's number
    name: str
    capability: str  # compute capability, such as 9.0
    memory: int  # total memory
    used: int  # memory that programs hold
    free: int  # memory that programs can still take; the driver keeps a part for itself
    driver: str  # version of the driver
    uuid: str = ""
    mig: bool | None = None  # whether it is split into partitions; None: not reported
    persistence: bool | None = None  # whether the driver stays loaded; None: not reported
    errors: int | None = None
    """Memory errors since the driver was loaded that ECC could not correct; None: not reported."""


@dataclass(frozen=True, kw_only=True)
class Gpus:
    driver: Driver
    devices: tuple[Device, ...]
    apart: tuple[tuple[int, int], ...] | None = None
    """Pairs of GPUs that cannot read each other's memory; None: not reported."""


def find_gpus() -> Gpus:
    """Return the driver and its GPUs. Raises MachineError with the reason when there is no driver."""
    devices = query_nvidia_smi()
    return Gpus(
        driver=Driver(version=devices[0].driver if devices else "", cuda=_cuda_of_header()),
        devices=devices,
        apart=_apart(len(devices)) if len(devices) > 1 else (),
    )


def _apart(count: int) -> tuple[tuple[int, int], ...] | None:
    """Return the pairs that are not "OK" in nvidia-smi's table of peer access, or None if the table does not say."""
    try:
        ended = run(Command(argv=(NVIDIA_SMI, "topo", "-p2p", "r")), timeout=_TIMEOUT)
    except TimeoutError:
        return None
    lines = (_COLOUR.sub("", line).split() for line in ended.stdout.splitlines())
    # The legend below the table can have lines with as many cells.
    rows = [cells[1:] for cells in lines if len(cells) == count + 1 and cells[0].startswith("GPU")]
    if ended.code != 0 or len(rows) != count or any("U" in row for row in rows):
        return None
    return tuple((one, other) for one, other in combinations(range(count), 2) if rows[one][other] != "OK")


def gpu_load_reader() -> Callable[[], dict[str, float]]:
    """Return a function that reads use (percent) and memory (bytes) of the first GPU; without NVML it reads nothing."""
    try:
        import pynvml

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # noqa: BLE001 - no package, no driver or no GPU
        return dict

    def read() -> dict[str, float]:
        use, memory = pynvml.nvmlDeviceGetUtilizationRates(device), pynvml.nvmlDeviceGetMemoryInfo(device)
        return {"gpu": float(use.gpu), "gpu_memory_bytes": float(memory.used)}

    return read


def query_nvidia_smi() -> tuple[Device, ...]:
    """Return the GPUs that nvidia-smi lists. Raises MachineError with its message when there is no driver."""
    command = Command(argv=(NVIDIA_SMI, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"))
    try:
        ended = run(command, timeout=_TIMEOUT)
    except (MissingDependencyError, TimeoutError) as error:
        reason = "not installed" if isinstance(error, MissingDependencyError) else str(error)
        raise _no_driver(reason) from error
    if ended.code != 0:
        raise _no_driver(" ".join((ended.stdout + ended.stderr).split()))
    rows = (line.split(", ", len(_FIELDS) - 1) for line in ended.stdout.splitlines() if line.strip())
    return tuple(_smi_device(dict(zip(_FIELDS, row, strict=True))) for row in rows)


def _cuda_of_header() -> tuple[int, int] | None:
    """Return the CUDA version in nvidia-smi's header; no query field has it."""
    try:
        text = run(Command(argv=(NVIDIA_SMI,)), timeout=_TIMEOUT).stdout
    except TimeoutError:
        return None
    found = re.search(r"CUDA[^|:]*Version:\s*(\d+)\.(\d+)", text)
    return None if found is None else (int(found[1]), int(found[2]))


def _smi_device(row: dict[str, str]) -> Device:
    errors = row["ecc.errors.uncorrected.volatile.total"]
    return Device(
        index=int(row["index"]),
        name=row["name"],
        capability=row["compute_cap"],
        memory=_bytes(row["memory.total"]),
        used=_bytes(row["memory.used"]),
        free=_bytes(row["memory.free"]),
        driver=row["driver_version"],
        uuid=row["uuid"],
        mig={"Enabled": True, "Disabled": False}.get(row["mig.mode.current"]),
        persistence={"Enabled": True, "Disabled": False}.get(row["persistence_mode"]),
        errors=int(errors) if errors.isdigit() else None,
    )


def _bytes(mebibytes: str) -> int:
    """Return the bytes of a field, or 0 for [N/A]."""
    return int(mebibytes) * 2**20 if mebibytes.isdigit() else 0


def _no_driver(message: str) -> MachineError:
    """Return the error for a machine without a driver; the advice depends on the message and the PCI bus."""
    if "mismatch" in message.lower():
        hint = "The driver was updated while its kernel module was loaded: reboot, or reload the module."
    elif on_the_bus():
        hint = "Install NVIDIA's driver; in a container, start it with --gpus all (NVIDIA Container Toolkit)."
    else:
        hint = "Use a machine with an NVIDIA GPU, or --runtime openvino."
    return MachineError(f"{NVIDIA_SMI}: {message.rstrip('.') or 'no answer'}", hint=hint)


def on_the_bus() -> int:
    """Return the number of NVIDIA GPUs on the PCI bus, with or without a driver."""
    devices = _PCI.iterdir() if _PCI.is_dir() else ()
    return sum(
        read_system_file(device / "vendor") == _VENDOR
        and (read_system_file(device / "class") or "").startswith(_DISPLAY)
        for device in devices
    )
