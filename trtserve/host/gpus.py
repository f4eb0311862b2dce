"""Which GPUs this machine has, which of them processes may see, and which each instance of a server gets."""

from __future__ import annotations

import os
from collections.abc import Sequence

from trtserve.errors import MachineError, UsageError, counted
from trtserve.host.cuda_devices import VISIBLE_DEVICES, shown_devices
from trtserve.host.nvidia import Device, query_nvidia_smi


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
