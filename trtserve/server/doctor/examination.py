"""All checks of `trtserve doctor`, judged for the runtime that should work here, and the quick ones of `start`."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from trtserve.errors import MachineError
from trtserve.executor.runtimes import RUNTIMES, automatic_runtime
from trtserve.host import machine
from trtserve.host.gpus import Gpus, find_gpus
from trtserve.nvidia.releases import NEWEST, RELEASES
from trtserve.nvidia.releases.converters import launcher_facts
from trtserve.nvidia.releases.installed import Installed, installed
from trtserve.progress import SILENT, Progress
from trtserve.server.doctor import GROUPS, TENSORRT_LLM, CheckResult, failed, look, nvidia, raise_failed, stub, system
from trtserve.server.triton.tritonserver import Address
from trtserve.specs import RuntimeName
from trtserve.store import Store


@dataclass(frozen=True, kw_only=True)
class Examination:
    runtime: str
    reason: str  # why this runtime was chosen
    findings: tuple[CheckResult, ...]

    @property
    def works(self) -> bool:
        """Whether everything that the runtime needs works."""
        return not failed(self.findings)


@dataclass(frozen=True, kw_only=True)
class _Machine:
    gpus: Gpus | None
    here: Installed | None  # the installed TensorRT-LLM
    wanted: Installed | None  # the TensorRT-LLM that should run here

    @property
    def count(self) -> int:
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
    store, here = Store(), installed()
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
        *look("tools", "vLLM", nvidia.check_vllm),
        *look("hub", "token", lambda: system.check_token(online=online)),
    ]
    judged = sorted((finding.judged(chosen) for finding in found), key=lambda finding: GROUPS.index(finding.group))
    return Examination(runtime=chosen, reason=reason, findings=tuple(judged))


def _host(facts: _Machine, runtime: str, store: Store, address: Address) -> Iterator[CheckResult]:
    several = system.SHARED_MEMORY_OF_RANKS if runtime in TENSORRT_LLM and facts.count > 1 else 0
    yield from look("machine", "system", lambda: system.check_system(platform.system(), platform.machine()))
    yield from look("machine", "glibc", lambda: system.check_glibc(platform.libc_ver()))
    yield from look("machine", "CPU", lambda: system.check_cpu(machine.cpu_flags(), len(os.sched_getaffinity(0))))
    yield from look("machine", "memory", lambda: system.check_memory(system.MINIMUM_MEMORY))
    yield from look("machine", "shared memory", lambda: system.check_shared_memory(wanted=several))
    yield from look("machine", "disk", lambda: system.check_disk(store))
    yield from look("machine", "ports", lambda: system.check_ports(address, store))
    yield from look("machine", "proxy", system.check_proxy)


def _python(runtime: str) -> Iterator[CheckResult]:
    yield from look("python", "Python", system.check_python_version)
    yield from look("python", "packages", lambda: system.check_packages(RUNTIMES[runtime].extra))
    yield from look("python", "conflicts", system.check_conflicts)


def _triton(runtime: str, store: Store, progress: Progress) -> Iterator[CheckResult]:
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


def _driver() -> tuple[Gpus | None, list[CheckResult]]:
    held: list[Gpus] = []

    def probe() -> CheckResult:
        try:
            held.append(find_gpus())
        except MachineError as error:
            return nvidia.check_no_driver(error)
        return nvidia.check_driver(held[0])

    findings = look("gpu", "driver", probe)
    return next((each for each in held if each.devices), None), findings


def _gpus(facts: _Machine) -> Iterator[CheckResult]:
    found, wanted = facts.gpus, facts.wanted
    if found is None:
        return
    yield from look("gpu", "visible", lambda: nvidia.check_visible(found))
    for device in found.devices:
        yield from look("gpu", f"GPU {device.index}", partial(nvidia.check_device, device))
    yield from look("gpu", "peer access", lambda: nvidia.check_peers(found))
    yield from look("gpu", "CUDA", lambda: nvidia.check_cuda(found, wanted))
    yield from look("gpu", "kernels", lambda: nvidia.check_kernels(found, wanted))


def _tensorrt_llm(facts: _Machine, asked: Installed | None) -> Iterator[CheckResult]:
    here = facts.here
    suited = nvidia.suited_container(facts.gpus) if facts.gpus else ""
    yield from look("tensorrt_llm", "TensorRT-LLM", lambda: nvidia.check_installed(here, asked, suited=suited))
    if here is None:
        return
    yield from look("tensorrt_llm", "engines", lambda: nvidia.check_engine_path(here))
    yield from look("tensorrt_llm", "trtllm-build", lambda: nvidia.check_builder(here))
    yield from look("tensorrt_llm", "tensorrtllm backend", nvidia.check_backend)
    yield from look("tensorrt_llm", "LLM API", lambda: nvidia.check_llmapi(here, facts.count))


def _pytorch(facts: _Machine, progress: Progress) -> Iterator[CheckResult]:
    if facts.gpus is None:
        return
    progress.step("Loading PyTorch …")
    yield from look("gpu", "PyTorch", nvidia.check_pytorch)
    if facts.count > 1:
        yield from look("mpi", "NCCL", nvidia.check_ranks)


def _tools(facts: _Machine, progress: Progress) -> Iterator[CheckResult]:
    progress.step("Starting two ranks under mpirun …")
    yield from look("mpi", "mpirun", lambda: system.check_mpirun(needed=facts.needs_mpirun))
    yield from look("tools", "docker", lambda: system.check_docker(facts.count))
    yield from look("tools", "Slurm", system.check_slurm)
    for name in system.VERSIONS:
        yield from look("tools", name, partial(system.check_version, name))


def require_machine(store: Store, *, progress: Progress = SILENT) -> None:
    """Run the checks of `start`: all cheap ones, and the round trip through Triton once per environment.

    Raises MachineError with every failed check and its fix; warnings go to `progress`.
    """
    findings = [*quick_checks(), system.check_open_files(), stub.check_store(store)]
    if not failed(findings) and not stub.passed_file(store).exists():
        progress.step("First start in this environment: testing Triton with a small model …")
        findings.append(stub.check_round_trip(store))
    for finding in findings:
        if finding.state == "warning":
            progress.warn(f"{finding.name}: {finding.evidence}. {finding.fix}")
    raise_failed(findings)


def quick_checks() -> list[CheckResult]:
    """Check what a start with the wheel's Triton needs, without starting a server, in a fraction of a second."""
    return [system.check_glibc(platform.libc_ver()), *stub.quick_checks(), system.check_shared_memory()]
