"""Which GPUs this machine has, which of them processes may see, and which each instance of a server gets.

CUDA_VISIBLE_DEVICES is read as CUDA's driver does, measured with driver 580.159 on two GPUs, and described in CUDA's
programming guide: the list ends at the first entry that is not a GPU of this machine, and if a GPU is named twice, CUDA
shows no GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from trtserve.errors import MachineError, UsageError, counted
from trtserve.host.nvidia import Device, query_nvidia_smi

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

# The driver reads the digits at the start of an entry and ignores the rest.
_NUMBER = re.compile(r"[+-]?\d+")
_UUID = "gpu-"
_PARTITION = "mig-"


def list_gpus() -> tuple[Device, ...]:
    """Return the GPUs of this machine in nvidia-smi's order, or () without a driver."""
    try:
        return query_nvidia_smi()
    except MachineError:
        return ()


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
            f"--gpus names {counted(len(devices), 'GPU')}; {what} {needs}.",
            hint="One GPU per rank of the engine.",
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
    """The GPUs that CUDA shows."""

    devices: tuple[int, ...]
    """nvidia-smi's numbers, in CUDA's order."""
    stopped: str = ""
    """Why the end of the list is ignored, or empty when all of it counts."""


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
