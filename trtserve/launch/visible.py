"""Which GPUs CUDA shows for a value of CUDA_VISIBLE_DEVICES, as its driver reads the list.

Found with driver 580.159 on two GPUs, and as CUDA's programming guide has it: the list ends at the first entry that is
no GPU here, whatever comes after it; a GPU named twice leaves none at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# The driver takes the digits in front and ignores the rest of an entry.
_NUMBER = re.compile(r"[+-]?\d+")
_UUID = "gpu-"
_PARTITION = "mig-"


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Numbers of the GPUs that CUDA shows, in its order; `stopped` is why not all of the list, empty when it does."""

    devices: tuple[int, ...]
    stopped: str = ""


def shown_devices(text: str, uuids: Sequence[str]) -> Shown | None:
    """What CUDA shows of GPUs with these UUIDs (nvidia-smi's order); None where partitions of a GPU are named."""
    entries = [entry.strip() for entry in text.split(",")]
    if any(entry.lower().startswith(_PARTITION) for entry in entries):
        return None
    devices: list[int] = []
    for place, entry in enumerate(entries):
        found = _device(entry, uuids)
        if found is None:
            return Shown(devices=tuple(devices), stopped=_stopped(entries[place:]))
        if _is_uuid(entry) != _is_uuid(entries[0]):
            return Shown(devices=tuple(devices), stopped=f"{entry} ends the list: numbers and UUIDs do not mix")
        if found in devices:
            return Shown(devices=(), stopped=f"GPU {found} is named twice")
        devices.append(found)
    return Shown(devices=tuple(devices))


def _device(entry: str, uuids: Sequence[str]) -> int | None:
    if _is_uuid(entry):
        # As much of a UUID as is no other's.
        found = [index for index, uuid in enumerate(uuids) if uuid.lower().startswith(entry.lower())]
        return found[0] if len(found) == 1 else None
    number = _NUMBER.match(entry)
    return int(number[0]) if number and 0 <= int(number[0]) < len(uuids) else None


def _stopped(rest: Sequence[str]) -> str:
    """Why the list ends before `rest`; nothing to say where no GPU is named in it."""
    if all(entry in ("", "-1") for entry in rest):
        return ""
    first = rest[0]
    if first in ("", "-1"):
        return f"{first or 'an empty entry'} ends the list"
    return f"GPU {first} is not there" if first.isdigit() else f"{first} is not there"


def _is_uuid(entry: str) -> bool:
    return entry.lower().startswith(_UUID)
