"""Everything that `trtserve doctor` looks at, judged for the runtime that is to work here."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from trtserve import machine
from trtserve.doctor import gpus, host, mpi, packages, stub, tensorrt_llm, token, tools
from trtserve.doctor.findings import GPU, GROUPS, OPENVINO, Finding, failed, look
from trtserve.doctor.nvidia import Gpus, find_gpus
from trtserve.errors import MachineError
from trtserve.progress import SILENT, Progress
from trtserve.releases import NEWEST, RELEASES
from trtserve.releases.installed import Installed, installed
from trtserve.releases.launcher import launcher_facts
from trtserve.runtimes import automatic_runtime
from trtserve.specs import RuntimeName
from trtserve.store import Store
from trtserve.triton.server import SHARED_MEMORY, Address


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was found on this machine, judged for one runtime; `reason` says why that one."""

    runtime: str
    reason: str
    findings: tuple[Finding, ...]

    @property
    def works(self) -> bool:
        """Whether nothing that the runtime needs has failed."""
        return not failed(self.findings)


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """What several checks go by: `here` is the installed TensorRT-LLM, `wanted` the one that is to run here."""

    gpus: Gpus | None
    here: Installed | None
    wanted: Installed | None

    @property
    def count(self) -> int:
        """GPUs."""
        return len(self.gpus.devices) if self.gpus else 0

    @property
    def needs_mpirun(self) -> bool:
        """Several ranks, and the launches of releases before --no-mpi, begin with mpirun."""
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
    """Every check, the round trip through a real Triton included (again, also when it passed before).

    `address` has the ports of a server to be, `trtllm_version` is the TensorRT-LLM that is to run here instead of the
    installed one, `online` allows to ask the hub. UsageError for a version that is none; whatever else goes wrong is
    a finding.
    """
    asked = installed(trtllm_version) if trtllm_version else None
    chosen, reason = automatic_runtime() if runtime == "auto" else (runtime, "asked for")
    store, here = store or Store(), installed()
    progress.step("Looking at the GPUs …")
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
        *look("hub", "token", lambda: token.check_token(online=online)),
    ]
    judged = sorted((finding.judged(chosen) for finding in found), key=lambda finding: GROUPS.index(finding.group))
    return Examination(runtime=chosen, reason=reason, findings=tuple(judged))


def _host(facts: _Machine, runtime: str, store: Store, address: Address) -> Iterator[Finding]:
    several = host.SHARED_MEMORY_OF_RANKS if runtime in GPU and facts.count > 1 else 0
    yield from look("machine", "system", lambda: host.check_system(platform.system(), platform.machine()))
    yield from look("machine", "glibc", lambda: host.check_glibc(platform.libc_ver()))
    yield from look("machine", "CPU", lambda: host.check_cpu(machine.cpu_flags(), len(os.sched_getaffinity(0))))
    yield from look("machine", "memory", lambda: host.check_memory(host.MINIMUM_MEMORY))
    yield from look("machine", "shared memory", lambda: host.check_shared_memory(SHARED_MEMORY, wanted=several))
    yield from look("machine", "disk", lambda: host.check_disk(store))
    yield from look("machine", "ports", lambda: host.check_ports(address))


def _python(runtime: str) -> Iterator[Finding]:
    yield from look("python", "Python", host.check_python_version)
    yield from look("python", "packages", lambda: packages.check_packages("cpu" if runtime in OPENVINO else ""))
    yield from look("python", "conflicts", packages.check_conflicts)


def _triton(runtime: str, store: Store, progress: Progress) -> Iterator[Finding]:
    """The stub's environment; the round trip where nothing of it has failed that the runtime needs."""
    findings = [
        *look("triton", "stub", stub.quick_checks),
        *look("triton", "store", lambda: stub.check_store(store)),
    ]
    yield from findings
    if not failed(finding.judged(runtime) for finding in findings) and stub.has_triton():
        progress.step("Starting Triton with a model that returns its input …")
        yield from look("triton", "round trip", lambda: stub.check_round_trip(store, system_first=runtime in GPU))


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


def _tools(facts: _Machine, progress: Progress) -> Iterator[Finding]:
    progress.step("Starting two ranks under mpirun …")
    yield from look("mpi", "mpirun", lambda: mpi.check_mpirun(needed=facts.needs_mpirun))
    yield from look("tools", "docker", lambda: tools.check_docker(facts.count))
    yield from look("tools", "podman", tools.check_podman)
    yield from look("tools", "Slurm", tools.check_slurm)
    yield from look("tools", "kubectl", tools.check_kubernetes)
    yield from look("tools", "nginx", tools.check_nginx)
