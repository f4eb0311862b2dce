"""GPUs to plan for: common ones and their memory as `nvidia-smi` reports it, this machine's, and sizes as text."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from trtserve.errors import UsageError
from trtserve.host.gpus import list_gpus, visible_devices, visible_gpu

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A kind of GPU: `memory` is the total in bytes available to programs, excluding ECC.

    `sm` is its compute capability × 10, or None when only a memory size was given. `here` is the number of GPUs of this
    machine if it is one of them, and then `memory` is its free memory.
    """

    name: str
    memory: int
    sm: int | None = None
    here: int | None = None


# MiB of `memory.total` in nvidia-smi (ECC and the driver may reduce the advertised size), and the compute capability.
_TABLE = {
    "t4-16gb": (15360, 75),
    "v100-16gb": (16384, 70),
    "v100-32gb": (32768, 70),
    "a10-24gb": (23028, 86),
    "a10g-24gb": (23028, 86),
    "l4-24gb": (23034, 89),
    "a30-24gb": (24576, 80),
    "a2-16gb": (15356, 86),
    "rtx4060ti-16gb": (16380, 89),
    "rtx4070-12gb": (12282, 89),
    "rtx4080-16gb": (16376, 89),
    "rtx5070-12gb": (12227, 120),
    "rtx5070ti-16gb": (16303, 120),
    "rtx5080-16gb": (16303, 120),
    "rtx3090-24gb": (24576, 86),
    "rtx4090-24gb": (24564, 89),
    "rtx5090-32gb": (32607, 120),
    "a40-48gb": (46068, 86),
    "l20-48gb": (46068, 89),
    "l40-48gb": (46068, 89),
    "l40s-48gb": (46068, 89),
    "rtxa6000-48gb": (49140, 86),
    "rtx6000ada-48gb": (49140, 89),
    "a100-40gb": (40960, 80),
    "a100-80gb": (81920, 80),
    "a800-80gb": (81920, 80),
    "h800-80gb": (81559, 90),
    "h100-80gb": (81559, 90),
    "h100nvl-94gb": (95830, 90),
    "h20-96gb": (97871, 90),
    "rtxpro6000-96gb": (97887, 120),
    "gh200-96gb": (97871, 90),
    "h200-141gb": (143771, 90),
    "b200-180gb": (183359, 100),
    "gb200-186gb": (189471, 100),
    "b300-288gb": (275040, 103),
}
GPUS = {name: Gpu(name=name, memory=mebibytes * _MIB, sm=sm) for name, (mebibytes, sm) in _TABLE.items()}

_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def find_gpu(name: str) -> Gpu:
    """Return the GPU with this name, with or without its size if unambiguous; UsageError suggests similar names.

    Only letters and digits count, and vendor words are ignored: `NVIDIA GeForce RTX 4090` is rtx4090-24gb.
    """
    key = _plain(name)
    found = [gpu for gpu in GPUS.values() if key in (_plain(gpu.name), gpu.name.partition("-")[0])]
    if len(found) == 1:
        return found[0]
    plain = {_plain(known): known for known in GPUS}
    close = [gpu.name for gpu in found] or [plain[near] for near in difflib.get_close_matches(key, plain, n=3)]
    raise UsageError(
        f"--gpu {name} matches no known GPU, or several.",
        hint=f"{'Did you mean ' + ' or '.join(close) + '? ' if close else ''}Known: {', '.join(GPUS)}; otherwise use "
        "--gpu-memory 80GB.",
    )


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


def parse_size(text: str, flag: str) -> int:
    """Parse a size such as 80GB (10^9) or 79.6GiB (2^30).

    Raises UsageError for anything else, including a missing unit.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise UsageError(f"{flag} is {text!r}; expected a size such as 80GB or 79.6GiB.")
    return int(float(match[1]) * _UNITS[match[2]])


def own_gpu(ranks: int) -> Gpu | None:
    """Return the GPU with the least free memory among the first `ranks` visible ones, or None without nvidia-smi.

    The ranks take the first GPUs in $CUDA_VISIBLE_DEVICES.
    """
    gpu, devices = visible_gpu(), visible_devices()
    if gpu is None or not devices:
        return None
    taken = [each.free for each in list_gpus() if each.memory and each.index in devices[:ranks]]
    if not taken:
        return None
    sm = int(float(gpu.capability) * 10)
    return Gpu(name=f"this machine's {gpu.name}", memory=min(taken), sm=sm, here=len(devices))
