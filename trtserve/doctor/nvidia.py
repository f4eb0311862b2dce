"""What NVIDIA's driver says of itself and its GPUs: through NVML (package nvidia-ml-py), else through nvidia-smi."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve.errors import MachineError, MissingDependencyError
from trtserve.process import Command, run
from trtserve.releases.drivers import Driver

NVML = "NVML"
NVIDIA_SMI = "nvidia-smi"
# NVML_P2P_CAPS_INDEX_READ of nvml.h; nvidia-ml-py 13 has a tuple of this name, which its own call does not take.
_READ = 0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TIMEOUT = 60.0  # a driver that is not kept loaded starts first
_PCI = Path("/sys/bus/pci/devices")
_VENDOR = "0x10de"
_DISPLAY = "0x03"  # classes of PCI: display controllers, 3D ones too
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


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU; None stands for what it does not tell. Memory is in bytes, `capability` as in 9.0.

    `used` is what programs hold, `free` what they can still take: the driver keeps a part for itself. `errors` are
    memory errors since the driver was loaded that ECC could not correct.
    """

    index: int
    name: str
    capability: str
    memory: int
    used: int
    free: int
    uuid: str = ""
    mig: bool | None = None
    persistence: bool | None = None
    errors: int | None = None


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """A driver and its GPUs. `apart` are pairs of them that cannot reach each other's memory; None: not told."""

    driver: Driver
    devices: tuple[Device, ...]
    source: str
    apart: tuple[tuple[int, int], ...] | None = None


def find_gpus() -> Gpus:
    """The driver and its GPUs; MachineError saying what is wrong where they cannot be had."""
    try:
        import pynvml
    except ImportError:
        return _from_nvidia_smi()
    with _open(pynvml) as opened:
        return _from_nvml(opened)


@contextmanager
def _open(nvml: Any) -> Iterator[Any]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise _no_driver(str(error), NVML) from error
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _from_nvml(nvml: Any) -> Gpus:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    cuda = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
    return Gpus(
        driver=Driver(
            version=_text(nvml.nvmlSystemGetDriverVersion()),
            cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        ),
        devices=tuple(_nvml_device(nvml, index, handle) for index, handle in enumerate(handles)),
        source=NVML,
        apart=_apart(nvml, handles),
    )


def _nvml_device(nvml: Any, index: int, handle: Any) -> Device:
    memory = _memory(nvml, handle)
    mig = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    persistence = _ask(nvml, nvml.nvmlDeviceGetPersistenceMode, handle)
    kind = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    errors = _ask(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, *kind)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Device(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        capability=f"{major}.{minor}",
        memory=0 if memory is None else int(memory.total),
        used=0 if memory is None else int(memory.used),
        free=0 if memory is None else int(memory.free),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        mig=None if mig is None else bool(mig[0]),  # as it is, and as it will be after a restart
        persistence=None if persistence is None else bool(persistence),
        errors=errors,
    )


def _memory(nvml: Any, handle: Any) -> Any:
    """Version 2 counts what the driver keeps for itself apart from what programs use, as nvidia-smi does."""
    newer = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    return newer or _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)


def _apart(nvml: Any, handles: list[Any]) -> tuple[tuple[int, int], ...] | None:
    """Pairs whose memory the one cannot read in the other; None where a driver does not tell."""
    pairs = [(one, other) for one in range(len(handles)) for other in range(one + 1, len(handles))]
    states = {
        (one, other): _ask(nvml, nvml.nvmlDeviceGetP2PStatus, handles[one], handles[other], _READ)
        for one, other in pairs
    }
    if None in states.values():
        return None
    return tuple(pair for pair, state in states.items() if state != nvml.NVML_P2P_STATUS_OK)


def _ask(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """An answer of NVML; None where this driver or GPU has none."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    """Older versions of nvidia-ml-py return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _from_nvidia_smi() -> Gpus:
    rows = _query()
    driver = rows[0]["driver_version"] if rows else ""
    return Gpus(
        driver=Driver(version=driver, cuda=_cuda_of_header()),
        devices=tuple(_smi_device(row) for row in rows),
        source=NVIDIA_SMI,
        apart=_apart_by_smi(len(rows)) if len(rows) > 1 else (),
    )


def _apart_by_smi(count: int) -> tuple[tuple[int, int], ...] | None:
    """Pairs of its table of peer access that are not "OK"; None where it has no such table, or tells "U" (unknown)."""
    try:
        ended = run(Command(argv=(NVIDIA_SMI, "topo", "-p2p", "r")), timeout=_TIMEOUT)
    except TimeoutError:
        return None
    lines = (_COLOUR.sub("", line).split() for line in ended.stdout.splitlines())
    # The legend below the table has lines of "X" and as many cells, too.
    rows = [cells[1:] for cells in lines if len(cells) == count + 1 and cells[0].startswith("GPU")]
    if ended.code != 0 or len(rows) != count or any("U" in row for row in rows):
        return None
    pairs = ((one, other) for one in range(count) for other in range(one + 1, count))
    return tuple((one, other) for one, other in pairs if rows[one][other] != "OK")


def _query() -> list[dict[str, str]]:
    command = Command(argv=(NVIDIA_SMI, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"))
    try:
        ended = run(command, timeout=_TIMEOUT)
    except MissingDependencyError as error:
        raise _no_driver("not installed", NVIDIA_SMI) from error
    except TimeoutError as error:
        raise _no_driver(str(error), NVIDIA_SMI) from error
    if ended.code != 0:
        raise _no_driver(" ".join((ended.stdout + ended.stderr).split()), NVIDIA_SMI)
    rows = [line.split(", ", len(_FIELDS) - 1) for line in ended.stdout.splitlines() if line.strip()]
    return [dict(zip(_FIELDS, row, strict=True)) for row in rows]


def _cuda_of_header() -> tuple[int, int] | None:
    """The CUDA that plain nvidia-smi prints in its head; no field of a query has it."""
    try:
        found = re.search(
            r"CUDA[^|:]*Version:\s*(\d+)\.(\d+)", run(Command(argv=(NVIDIA_SMI,)), timeout=_TIMEOUT).stdout
        )
    except TimeoutError:
        return None
    return None if found is None else (int(found[1]), int(found[2]))


def _smi_device(row: dict[str, str]) -> Device:
    errors = row["ecc.errors.uncorrected.volatile.total"]
    return Device(
        index=int(row["index"]),
        name=row["name"],
        capability=row["compute_cap"],
        memory=_mebibytes(row["memory.total"]),
        used=_mebibytes(row["memory.used"]),
        free=_mebibytes(row["memory.free"]),
        uuid=row["uuid"],
        mig={"Enabled": True, "Disabled": False}.get(row["mig.mode.current"]),
        persistence={"Enabled": True, "Disabled": False}.get(row["persistence_mode"]),
        errors=int(errors) if errors.isdigit() else None,
    )


def _mebibytes(text: str) -> int:
    return int(text) * 2**20 if text.isdigit() else 0


def _no_driver(said: str, source: str) -> MachineError:
    """Why there are no GPUs, and what to do: by what the driver said, and what is on the bus."""
    if "mismatch" in said.lower():
        hint = "The driver was updated while its kernel module was loaded: reboot, or load the module anew."
    elif on_the_bus():
        hint = "Install NVIDIA's driver; in a container, start it with --gpus all (NVIDIA Container Toolkit)."
    else:
        hint = "Use a machine with an NVIDIA GPU, or --runtime openvino."
    return MachineError(f"{source}: {said.rstrip('.') or 'no answer'}", hint=hint)


def on_the_bus() -> int:
    """NVIDIA's GPUs that the PCI bus lists, whether or not there is a driver for them."""
    return sum(
        _read(device / "vendor") == _VENDOR and _read(device / "class").startswith(_DISPLAY) for device in _devices()
    )


def _devices() -> list[Path]:
    return sorted(_PCI.iterdir()) if _PCI.is_dir() else []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
