"""GPUs: driver, each device, how they reach each other; driver ↔ CUDA ↔ TensorRT-LLM, and kernels for the GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

from trtserve.doctor.findings import GPU, Finding, State
from trtserve.doctor.nvidia import NVML, Device, Gpus, on_the_bus
from trtserve.errors import MachineError, counted
from trtserve.launch.base import VISIBLE_DEVICES
from trtserve.launch.visible import shown_devices
from trtserve.machine import gibibytes
from trtserve.releases.containers import CONTAINERS, Container, container, containers_of
from trtserve.releases.drivers import cuda_of, driver_of, newest_container
from trtserve.releases.gpus import kernels_for, runs_on
from trtserve.releases.installed import Installed

# More than a driver and its display take for themselves.
_TAKEN = 2**30


def check_no_driver(error: MachineError) -> Finding:
    """Why no GPU can be used here."""
    found = on_the_bus()
    bus = f"; {counted(found, 'NVIDIA GPU') if found else 'no NVIDIA GPU'} on the PCI bus"
    return _finding("driver", "failed", f"none ({error.message}){bus}", error.hint or "")


def check_driver(gpus: Gpus) -> Finding:
    """The driver, and the newest CUDA that it speaks."""
    if not gpus.devices:
        return _finding(
            "driver",
            "failed",
            f"{gpus.driver.version or gpus.source} shows no GPU",
            "Start the container with --gpus all, or look at `nvidia-smi`.",
        )
    said = "" if gpus.driver.cuda else " (by its version)"
    how = gpus.source if gpus.source == NVML else f"{gpus.source}; nvidia-ml-py is not installed"
    return _finding("driver", "ok", f"{gpus.driver.version}, speaks CUDA {_dotted(gpus.driver.speaks)}{said} ({how})")


def check_visible(gpus: Gpus) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES, where it is set: CUDA programs see only what it lists."""
    text = os.environ.get(VISIBLE_DEVICES)
    if text is None:
        return
    shown, all_of_them = shown_devices(text, [device.uuid for device in gpus.devices]), len(gpus.devices)
    if shown is None:
        yield _finding(VISIBLE_DEVICES, "ok", f"{text}: partitions, not looked at")
        return
    count = f"{len(shown.devices)} of {counted(all_of_them, 'GPU')}"
    fix = f"Unset {VISIBLE_DEVICES}, or correct it."
    if not shown.devices:
        why = f"{shown.stopped}, so that no GPU is left" if shown.stopped else "no GPU is left"
        yield _finding(VISIBLE_DEVICES, "failed", f"{text!r}: {why}", fix)
    elif shown.stopped:
        yield _finding(VISIBLE_DEVICES, "warning", f"{text!r}: {count}, since {shown.stopped}", fix)
    else:
        yield _finding(VISIBLE_DEVICES, "ok", f"{text}: {count}")


def check_device(device: Device) -> Finding:
    """One GPU: what it is, and what of it would hurt a server."""
    facts = [f"{device.name}, compute capability {device.capability}"]
    facts.append(f"{gibibytes(device.free)} free of {gibibytes(device.memory)}")
    facts += [f"{name} {'on' if value else 'off'}" for name, value in _modes(device) if value is not None]
    facts += [counted(device.errors, "uncorrected memory error")] if device.errors is not None else []
    troubles = list(_troubles(device))
    state: State = "warning" if troubles else "ok"
    return _finding(f"GPU {device.index}", state, ", ".join(facts), " ".join(troubles))


def _modes(device: Device) -> tuple[tuple[str, bool | None], ...]:
    return ("MIG", device.mig), ("persistence mode", device.persistence)


def _troubles(device: Device) -> Iterator[str]:
    if device.used > max(_TAKEN, device.memory // 20):
        yield f"Other programs hold {gibibytes(device.used)}: end them (`nvidia-smi` lists them)."
    if device.mig:
        yield "MIG splits it: one rank gets one slice, and several ranks cannot exchange tensors between slices."
    if device.errors:
        yield "Its memory is failing: reset the GPU, and replace it when the errors come back."


def check_peers(gpus: Gpus) -> Iterator[Finding]:
    """Whether several GPUs read each other's memory: tensor parallelism without it goes through the host."""
    count = len(gpus.devices)
    if count < 2 or gpus.apart is None:
        return
    if gpus.apart:
        pairs = ", ".join(f"{one}–{other}" for one, other in gpus.apart)
        yield _finding(
            "peer access",
            "warning",
            f"none between GPUs {pairs}",
            "Tensor parallelism is slow over them: choose others with --gpus; in a VM, check IOMMU and ACS.",
        )
    else:
        yield _finding("peer access", "ok", "between both GPUs" if count == 2 else f"between all {count} GPUs")


def check_cuda(gpus: Gpus, found: Installed | None) -> Finding:
    """The driver against the CUDA of the TensorRT-LLM that is to run here."""
    if found is None:
        return _finding("CUDA", "ok", f"this driver runs {_runs(gpus)}")
    made_in = _container_of(found)
    if made_in is None:
        return _finding(
            "CUDA",
            "warning",
            f"TensorRT-LLM {found.version} is not in the table of containers",
            "See its release notes.",
        )
    support = gpus.driver.runs(made_in)
    needs = f"TensorRT-LLM {found.version} is made with CUDA {_dotted(cuda_of(made_in))}"
    speaks = f"driver {gpus.driver.version} speaks CUDA {_dotted(gpus.driver.speaks)}"
    if support == "full":
        return _finding("CUDA", "ok", f"{speaks}; {needs}")
    if support == "minor":
        return _finding("CUDA", "ok", f"{speaks}; {needs}, which runs by minor version compatibility")
    return _finding(
        "CUDA",
        "failed",
        f"{speaks}; {needs}",
        f"Install driver {driver_of(made_in)} or newer, or use an older container: this driver runs {_runs(gpus)}.",
    )


def check_kernels(gpus: Gpus, found: Installed | None) -> Finding:
    """Whether the release of TensorRT-LLM that is to run here, or any, has kernels for these GPUs."""
    capabilities = sorted({device.capability for device in gpus.devices})
    release = found.release if found else CONTAINERS[-1].release
    known = {capability: runs_on(release, capability) for capability in capabilities}
    named = ", ".join(_architecture(capability) for capability in capabilities)
    subject = f"TensorRT-LLM {found.version if found else release}"
    lacking = [capability for capability, runs in known.items() if runs is False]
    if lacking:
        return _finding(
            "kernels", "failed", f"{subject} has none for {_architecture(lacking[0])}", _releases(lacking[0])
        )
    if None in known.values():
        return _finding("kernels", "warning", f"{named} is not in the table of {subject}", "See its release notes.")
    mixed = len({device.name for device in gpus.devices}) > 1
    return _finding(
        "kernels",
        "warning" if mixed else "ok",
        f"{subject} has them for {named}",
        "GPUs of different kinds: an engine runs on the kind that it was built on; choose with --gpus."
        if mixed
        else "",
    )


def _container_of(found: Installed) -> Container | None:
    exact = [each for each in CONTAINERS if each.tensorrt_llm == found.version]
    same = [each for each in CONTAINERS if each.release == found.release]
    return next(reversed(exact or same), None)


def suited_container(gpus: Gpus) -> str:
    """Tag of the newest container that runs here, best of all by all of the driver; empty without one."""
    full, minor = _newest(gpus)
    return full or minor


def _newest(gpus: Gpus) -> tuple[str, str]:
    """Tags of the newest containers that a driver runs fully, and by compatibility, with kernels for the first GPU."""

    def fits(release: str) -> bool:
        return runs_on(release, gpus.devices[0].capability) is not False

    return newest_container(gpus.driver, "full", fits=fits), newest_container(gpus.driver, "minor", fits=fits)


def _runs(gpus: Gpus) -> str:
    """The newest containers that a driver runs, in words."""
    full, minor = _newest(gpus)
    words = [f"container {full} (TensorRT-LLM {container(full).tensorrt_llm})"] if full else []
    if minor > full:
        words.append(f"by minor version compatibility {minor} ({container(minor).tensorrt_llm})")
    return ", ".join(words) or f"none of the containers {CONTAINERS[0].tag} … {CONTAINERS[-1].tag}"


def _releases(capability: str) -> str:
    row = kernels_for(capability)
    if row is None:
        return "Use a newer GPU, or --runtime openvino."
    if row.until is not None:
        last = containers_of(row.until)[-1]
        return f"Use TensorRT-LLM {row.until} at most (container {last.tag}), a newer GPU, or --runtime openvino."
    return f"Use TensorRT-LLM {row.since} or newer (container {containers_of(row.since)[0].tag})."


def _architecture(capability: str) -> str:
    row = kernels_for(capability)
    return f"compute capability {capability}" if row is None else f"{row.architecture} ({capability})"


def _dotted(cuda: tuple[int, int]) -> str:
    return f"{cuda[0]}.{cuda[1]}"


def _finding(name: str, state: State, evidence: str, fix: str = "") -> Finding:
    return Finding(group="gpu", name=name, state=state, evidence=evidence, fix=fix, needed_by=GPU)
