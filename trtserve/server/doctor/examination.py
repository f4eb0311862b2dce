"""All checks of `trtserve doctor`, judged for the runtime that should work here."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from trtserve.errors import MachineError
from trtserve.executor.runtimes import RUNTIMES, automatic_runtime
from trtserve.host import machine
from trtserve.host.nvidia import Gpus, find_gpus
from trtserve.nvidia.releases import NEWEST, RELEASES
from trtserve.nvidia.releases.installed import Installed, installed
from trtserve.nvidia.releases.launcher import launcher_facts
from trtserve.progress import SILENT, Progress
from trtserve.server.doctor import (
    gpus,
    host,
    mpi,
    packages,
    pytorch,
    stub,
    tensorrt_llm,
    token,
    tools,
)
from trtserve.server.doctor.findings import (
    GROUPS,
    TENSORRT_LLM,
    Finding,
    failed,
    look,
)
from trtserve.server.triton.tritonserver import Address
from trtserve.specs import RuntimeName
from trtserve.store import Store


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The findings on this machine, judged for one runtime."""

    runtime: str
    reason: str
    """Why this runtime was chosen."""
    findings: tuple[Finding, ...]

    @property
    def works(self) -> bool:
        """Whether everything that the runtime needs works."""
        return not failed(self.findings)


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """Facts that several checks need."""

    gpus: Gpus | None
    here: Installed | None
    """The installed TensorRT-LLM."""
    wanted: Installed | None
    """The TensorRT-LLM that should run here."""

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return len(self.gpus.devices) if self.gpus else 0

    @property
    def needs_mpirun(self) -> bool:
        """Whether launches use mpirun: for several ranks, and always in releases without --no-mpi."""
        release = self.wanted.release if self.wanted and self.wanted.release in RELEASES else NEWEST
        return self.count > 1 or not launcher_facts(release).no_mpi


def examine(
    address: Address,
    *,
    runtime: RuntimeName = "auto",
    store: Store | None = None,
    trtllm_version: str | None = None,
    online: bool = False,
    progress: Progress = SILENT,
) -> Examination:
    """Run every check, including the round trip through a real Triton, even if it passed before.

    `address` has the ports of a future server, `trtllm_version` is the TensorRT-LLM that should run here instead of the
    installed one, `online` allows requests to the hub. Raises UsageError for an invalid version; everything else that
    goes wrong is a finding.
    """
    asked = installed(trtllm_version) if trtllm_version else None
    chosen, reason = automatic_runtime() if runtime == "auto" else (runtime, "asked for")
    store, here = store or Store(), installed()
    progress.step("Checking the GPUs …")
    found_gpus, driver = _driver()
    facts = _Machine(gpus=found_gpus, here=here, wanted=asked or here)
    found = [
        *_host(facts, chosen, store, address),
        *_python(chosen),
        *_triton(chosen, store, progress),
        *driver,
        *_gpus(facts),
        *_tensorrt_llm(facts, asked),
        *_tools(facts, progress),
        *_pytorch(facts, progress),
        *look("hub", "token", lambda: token.check_token(online=online)),
    ]
    judged = sorted((finding.judged(chosen) for finding in found), key=lambda finding: GROUPS.index(finding.group))
    return Examination(runtime=chosen, reason=reason, findings=tuple(judged))


def _host(facts: _Machine, runtime: str, store: Store, address: Address) -> Iterator[Finding]:
    several = host.SHARED_MEMORY_OF_RANKS if runtime in TENSORRT_LLM and facts.count > 1 else 0
    yield from look("machine", "system", lambda: host.check_system(platform.system(), platform.machine()))
    yield from look("machine", "glibc", lambda: host.check_glibc(platform.libc_ver()))
    yield from look("machine", "CPU", lambda: host.check_cpu(machine.cpu_flags(), len(os.sched_getaffinity(0))))
    yield from look("machine", "memory", lambda: host.check_memory(host.MINIMUM_MEMORY))
    yield from look("machine", "shared memory", lambda: host.check_shared_memory(wanted=several))
    yield from look("machine", "disk", lambda: host.check_disk(store))
    yield from look("machine", "ports", lambda: host.check_ports(address))


def _python(runtime: str) -> Iterator[Finding]:
    yield from look("python", "Python", host.check_python_version)
    yield from look("python", "packages", lambda: packages.check_packages(RUNTIMES[runtime].extra))
    yield from look("python", "conflicts", packages.check_conflicts)


def _triton(runtime: str, store: Store, progress: Progress) -> Iterator[Finding]:
    """Check the stub's environment, and then the round trip if nothing that the runtime needs has failed."""
    findings = [
        *look("triton", "stub", stub.quick_checks),
        *look("triton", "known faults", stub.check_faults),
        *look("triton", "store", lambda: stub.check_store(store)),
    ]
    yield from findings
    if not failed(finding.judged(runtime) for finding in findings) and stub.has_triton():
        progress.step("Starting Triton with a model that returns its input …")
        yield from look(
            "triton", "round trip", lambda: stub.check_round_trip(store, system_first=runtime in TENSORRT_LLM)
        )


def _driver() -> tuple[Gpus | None, list[Finding]]:
    held: list[Gpus] = []

    def probe() -> Finding:
        try:
            held.append(find_gpus())
        except MachineError as error:
            return gpus.check_no_driver(error)
        return gpus.check_driver(held[0])

    findings = look("gpu", "driver", probe)
    return next((each for each in held if each.devices), None), findings


def _gpus(facts: _Machine) -> Iterator[Finding]:
    found, wanted = facts.gpus, facts.wanted
    if found is None:
        return
    yield from look("gpu", "visible", lambda: gpus.check_visible(found))
    for device in found.devices:
        yield from look("gpu", f"GPU {device.index}", partial(gpus.check_device, device))
    yield from look("gpu", "peer access", lambda: gpus.check_peers(found))
    yield from look("gpu", "CUDA", lambda: gpus.check_cuda(found, wanted))
    yield from look("gpu", "kernels", lambda: gpus.check_kernels(found, wanted))


def _tensorrt_llm(facts: _Machine, asked: Installed | None) -> Iterator[Finding]:
    here = facts.here
    suited = gpus.suited_container(facts.gpus) if facts.gpus else ""
    yield from look("tensorrt_llm", "TensorRT-LLM", lambda: tensorrt_llm.check_installed(here, asked, suited=suited))
    if here is None:
        return
    yield from look("tensorrt_llm", "engines", lambda: tensorrt_llm.check_engine_path(here))
    yield from look("tensorrt_llm", "trtllm-build", lambda: tensorrt_llm.check_builder(here))
    yield from look("tensorrt_llm", "tensorrtllm backend", tensorrt_llm.check_backend)
    yield from look("tensorrt_llm", "LLM API", lambda: tensorrt_llm.check_llmapi(here, facts.count))


def _pytorch(facts: _Machine, progress: Progress) -> Iterator[Finding]:
    if facts.gpus is None:
        return
    progress.step("Loading PyTorch …")
    yield from look("gpu", "PyTorch", pytorch.check_pytorch)
    if facts.count > 1:
        yield from look("mpi", "NCCL", pytorch.check_ranks)


def _tools(facts: _Machine, progress: Progress) -> Iterator[Finding]:
    progress.step("Starting two ranks under mpirun …")
    yield from look("mpi", "mpirun", lambda: mpi.check_mpirun(needed=facts.needs_mpirun))
    yield from look("tools", "docker", lambda: tools.check_docker(facts.count))
    yield from look("tools", "podman", tools.check_podman)
    yield from look("tools", "Slurm", tools.check_slurm)
    yield from look("tools", "kubectl", tools.check_kubernetes)
    yield from look("tools", "nginx", tools.check_nginx)
