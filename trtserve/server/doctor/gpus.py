"""GPUs: the driver, each device, peer access, and whether driver, CUDA, TensorRT-LLM and GPU fit together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from trtserve.errors import MachineError, counted
from trtserve.host.cuda_devices import VISIBLE_DEVICES, shown_devices
from trtserve.host.machine import format_bytes
from trtserve.host.nvidia import (
    NVML,
    Device,
    Gpus,
    on_the_bus,
)
from trtserve.nvidia.releases.containers import (
    all_containers,
    container,
    containers_of,
    latest_container,
)
from trtserve.nvidia.releases.drivers import cuda_of, driver_of, driver_support, newest_container, newest_cuda
from trtserve.nvidia.releases.gpus import kernels_for, runs_on
from trtserve.nvidia.releases.installed import Installed
from trtserve.server.doctor.findings import (
    GPU,
    TENSORRT_LLM,
    Finding,
    State,
)

# More memory than the driver and a display use.
_OWN_USE = 2**30


def check_no_driver(error: MachineError) -> Finding:
    """Report why no GPU can be used here."""
    found = on_the_bus()
    bus = f"; {counted(found, 'NVIDIA GPU') if found else 'no NVIDIA GPU'} on the PCI bus"
    return _finding("driver", "failed", f"none ({error.message}){bus}", error.hint or "")


def check_driver(gpus: Gpus) -> Finding:
    """Report the driver and the newest CUDA that it supports."""
    if not gpus.devices:
        return _finding(
            "driver",
            "failed",
            f"{gpus.driver.version or gpus.source} shows no GPU",
            "In a container, start it with --gpus all; otherwise see what `nvidia-smi` reports.",
        )
    derived = "" if gpus.driver.cuda else " (derived from its version)"
    how = gpus.source if gpus.source == NVML else f"{gpus.source}; nvidia-ml-py is not installed"
    return _finding(
        "driver", "ok", f"{gpus.driver.version}, supports CUDA {_dotted(newest_cuda(gpus.driver))}{derived} ({how})"
    )


def check_visible(gpus: Gpus) -> Iterator[Finding]:
    """Check CUDA_VISIBLE_DEVICES, if it is set: CUDA programs see only the GPUs that it lists."""
    text = os.environ.get(VISIBLE_DEVICES)
    if text is None:
        return
    shown = shown_devices(text, [device.uuid for device in gpus.devices])
    if shown is None:
        yield _finding(VISIBLE_DEVICES, "ok", f"{text}: partitions, not checked")
        return
    count = f"{len(shown.devices)} of {counted(len(gpus.devices), 'GPU')}"
    fix = f"Unset {VISIBLE_DEVICES}, or correct it."
    if not shown.devices:
        why = f"{shown.stopped}, so no GPU is left" if shown.stopped else "no GPU is left"
        yield _finding(VISIBLE_DEVICES, "failed", f"{text!r}: {why}", fix)
    elif shown.stopped:
        yield _finding(VISIBLE_DEVICES, "warning", f"{text!r}: {count}, because {shown.stopped}", fix)
    else:
        yield _finding(VISIBLE_DEVICES, "ok", f"{text}: {count}")


def check_device(device: Device) -> Finding:
    """Describe one GPU, and warn about conditions that would slow down or break a server."""
    facts = [f"{device.name}, compute capability {device.capability}"]
    facts.append(f"{format_bytes(device.free)} free of {format_bytes(device.memory)}")
    modes = (("MIG", device.mig), ("persistence mode", device.persistence))
    facts += [f"{name} {'on' if value else 'off'}" for name, value in modes if value is not None]
    facts += [counted(device.errors, "uncorrected memory error")] if device.errors is not None else []
    problems = list(_problems(device))
    state: State = "warning" if problems else "ok"
    return _finding(f"GPU {device.index}", state, ", ".join(facts), " ".join(problems))


def _problems(device: Device) -> Iterator[str]:
    if device.used > max(_OWN_USE, device.memory // 20):
        yield f"Other programs hold {format_bytes(device.used)}: end them (`nvidia-smi` lists them)."
    if device.mig:
        yield "MIG splits it: a rank gets one partition, and ranks cannot exchange tensors between partitions."
    if device.errors:
        yield "Its memory has errors: reset the GPU, and replace it if they come back."


def check_peers(gpus: Gpus) -> Iterator[Finding]:
    """Check whether GPUs can read each other's memory; without that, tensor parallelism goes through the host."""
    count = len(gpus.devices)
    if count < 2 or gpus.apart is None:
        return
    if gpus.apart:
        pairs = ", ".join(f"{one}–{other}" for one, other in gpus.apart)
        yield _finding(
            "peer access",
            "warning",
            f"none between GPUs {pairs}",
            "Tensor parallelism between them is slow: choose others with --gpus; in a VM, check IOMMU and ACS.",
        )
    else:
        yield _finding("peer access", "ok", "between both GPUs" if count == 2 else f"between all {count} GPUs")


def check_cuda(gpus: Gpus, found: Installed | None) -> Finding:
    """Compare the driver with the CUDA of the TensorRT-LLM that should run here."""
    if found is None:
        return _of_tensorrt_llm("CUDA", "ok", f"this driver runs {_runs(gpus)}")
    exact = [each for each in all_containers() if each.tensorrt_llm == found.version]
    same = [each for each in all_containers() if each.release == found.release]
    made_in = next(reversed(exact or same), None)
    if made_in is None:
        return _of_tensorrt_llm(
            "CUDA",
            "warning",
            f"unknown for TensorRT-LLM {found.version}, which is not in any known container",
            "See its release notes.",
        )
    support = driver_support(gpus.driver, made_in)
    needs = f"TensorRT-LLM {found.version} is built with CUDA {_dotted(cuda_of(made_in))}"
    speaks = f"driver {gpus.driver.version} supports CUDA {_dotted(newest_cuda(gpus.driver))}"
    if support == "full":
        return _of_tensorrt_llm("CUDA", "ok", f"{speaks}; {needs}")
    if support == "minor":
        return _of_tensorrt_llm("CUDA", "ok", f"{speaks}; {needs}, which runs thanks to minor version compatibility")
    return _of_tensorrt_llm(
        "CUDA",
        "failed",
        f"{speaks}; {needs}",
        f"Install driver {driver_of(made_in)} or newer, or use an older container: this driver runs {_runs(gpus)}.",
    )


def check_kernels(gpus: Gpus, found: Installed | None) -> Finding:
    """Check whether the TensorRT-LLM that should run here, else the newest one, has kernels for these GPUs."""
    capabilities = sorted({device.capability for device in gpus.devices})
    release = found.release if found else latest_container().release
    known = {capability: runs_on(release, capability) for capability in capabilities}
    named = ", ".join(_architecture(capability) for capability in capabilities)
    subject = f"TensorRT-LLM {found.version if found else release}"
    lacking = [capability for capability, runs in known.items() if runs is False]
    if lacking:
        return _of_tensorrt_llm(
            "kernels", "failed", f"{subject} has no kernels for {_architecture(lacking[0])}", _releases(lacking[0])
        )
    if None in known.values():
        return _of_tensorrt_llm(
            "kernels", "warning", f"unknown whether {subject} has kernels for {named}", "See its release notes."
        )
    mixed = len({device.name for device in gpus.devices}) > 1
    return _of_tensorrt_llm(
        "kernels",
        "warning" if mixed else "ok",
        f"{subject} has kernels for {named}",
        "The GPUs differ, and an engine runs only on the kind that it was built on: choose with --gpus."
        if mixed
        else "",
    )


def suited_container(gpus: Gpus) -> str:
    """Return the tag of the newest container that runs here, preferably with full driver support, or ""."""
    full, minor = _newest(gpus)
    return full or minor


def _newest(gpus: Gpus) -> tuple[str, str]:
    """Return the newest containers for the first GPU, fully supported by the driver and by minor compatibility."""

    def fits(release: str) -> bool:
        return runs_on(release, gpus.devices[0].capability) is not False

    return newest_container(gpus.driver, "full", fits=fits), newest_container(gpus.driver, "minor", fits=fits)


def _runs(gpus: Gpus) -> str:
    """Describe the newest containers that the driver runs."""
    full, minor = _newest(gpus)
    words = [f"container {full} (TensorRT-LLM {container(full).tensorrt_llm})"] if full else []
    if minor > full:
        words.append(f"{minor} ({container(minor).tensorrt_llm}) by minor version compatibility")
    return ", ".join(words) or f"none of the containers {all_containers()[0].tag} … {latest_container().tag}"


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


def _of_tensorrt_llm(name: str, state: State, evidence: str, fix: str = "") -> Finding:
    return replace(_finding(name, state, evidence, fix), needed_by=TENSORRT_LLM)
