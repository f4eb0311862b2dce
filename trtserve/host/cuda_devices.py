"""Interpret CUDA_VISIBLE_DEVICES as CUDA's driver does.

Measured with driver 580.159 on two GPUs, and described in CUDA's programming guide: the list ends at the first entry
that is not a GPU of this machine, and if a GPU is named twice, CUDA shows no GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

# The driver reads the digits at the start of an entry and ignores the rest.
_NUMBER = re.compile(r"[+-]?\d+")
_UUID = "gpu-"
_PARTITION = "mig-"


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
