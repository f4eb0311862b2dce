"""Double of `nvidia-smi`: --list-gpus, --query-gpu with --format=csv, the table's head, and
topo -p2p r (driver 580: cells between tabs, the titles underlined).

Settings: gpus, gpus_apart, gpu_name, gpu_memory_mib, sm, driver; with gpus = 0 it fails as on a machine without a
driver.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.doubles.containers import versions
from tests.doubles.settings import Settings, read_settings, record_call

_UNITS = {"memory.total": " MiB", "memory.free": " MiB", "memory.used": " MiB", "utilization.gpu": " %"}


def _fields(index: int, settings: Settings) -> dict[str, str]:
    return {
        "index": str(index),
        "count": str(settings.gpus),
        "name": settings.gpu_name,
        "gpu_name": settings.gpu_name,
        "uuid": _uuid(index),
        "gpu_uuid": _uuid(index),
        "driver_version": settings.driver,
        "memory.total": str(settings.gpu_memory_mib),
        "memory.free": str(settings.gpu_memory_mib - 4),
        "memory.used": "4",
        "compute_cap": f"{settings.sm // 10}.{settings.sm % 10}",
        "utilization.gpu": "0",
        "mig.mode.current": "Disabled",
        "persistence_mode": "Enabled",
        "ecc.errors.uncorrected.volatile.total": "0",
        "pci.bus_id": f"00000000:{0x18 + index:02X}:00.0",
    }


def _uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


def _query(fields: list[str], form: list[str], indices: list[int], settings: Settings) -> int:
    if "csv" not in form or set(form) - {"csv", "noheader", "nounits"}:
        sys.stdout.write('"--format=" switch is missing or holds an unknown word.\n')
        return 6
    unknown = [name for name in fields if name not in _fields(0, settings)]
    if unknown:
        sys.stdout.write(f'Field "{unknown[0]}" is not a valid field to query.\n\n')
        return 2
    units = {} if "nounits" in form else _UNITS
    if "noheader" not in form:
        titles = [name + (f" [{_UNITS[name].strip()}]" if name in _UNITS else "") for name in fields]
        sys.stdout.write(", ".join(titles) + "\n")
    for index in indices:
        values = _fields(index, settings)
        sys.stdout.write(", ".join(values[name] + units.get(name, "") for name in fields) + "\n")
    return 0


def _peers(settings: Settings) -> int:
    apart = {frozenset(map(int, pair.split("-"))) for pair in settings.gpus_apart.split(",") if pair}
    titles = "\t".join(f"GPU{index}" for index in range(settings.gpus))
    sys.stdout.write(f" \t\x1b[4m{titles}\t\x1b[0m\n")
    for one in range(settings.gpus):
        cells = ["X" if one == other else "CNS" if {one, other} in apart else "OK" for other in range(settings.gpus)]
        sys.stdout.write(f" GPU{one}\t" + "\t".join(cells) + "\t\n")
    sys.stdout.write("\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n")
    return 0


def _chosen(text: str | None, settings: Settings) -> list[int]:
    return list(range(settings.gpus)) if text is None else [int(index) for index in text.split(",")]


def main(arguments: list[str], folder: Path) -> int:
    """Run the double; returns the exit code."""
    record_call(folder, "nvidia-smi", arguments)
    settings = read_settings(folder)
    if settings.gpus == 0:
        sys.stdout.write(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.\n\n"
        )
        return 9
    if arguments == ["topo", "-p2p", "r"]:
        return _peers(settings)
    options = dict(argument.partition("=")[::2] for argument in arguments)
    unknown = options.keys() - {"--list-gpus", "-L", "--query-gpu", "--format", "--id"}
    if unknown:
        sys.stdout.write(f"Invalid combination of input arguments. Unknown option {min(unknown)}.\n")
        return 1
    indices = _chosen(options.get("--id"), settings)
    if "--query-gpu" in options:
        return _query(options["--query-gpu"].split(","), options.get("--format", "").split(","), indices, settings)
    if options.keys() & {"--list-gpus", "-L"}:
        for index in indices:
            sys.stdout.write(f"GPU {index}: {settings.gpu_name} (UUID: {_uuid(index)})\n")
        return 0
    cuda = ".".join(versions(settings).cuda.split(".")[:2])
    line = f"NVIDIA-SMI {settings.driver}    Driver Version: {settings.driver}    CUDA Version: {cuda}"
    sys.stdout.write(f"| {line} |\n")
    return 0
