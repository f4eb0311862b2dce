"""Check what this machine must have before a server starts; `examination` has all checks of `trtserve doctor`."""

from __future__ import annotations

import platform

from trtserve.progress import SILENT, Progress
from trtserve.server.doctor import host, stub
from trtserve.server.doctor.findings import Finding, failed, raise_failed
from trtserve.server.doctor.host import check_shared_memory
from trtserve.store import Store

__all__ = [
    "Finding",
    "check_shared_memory",
    "failed",
    "quick_checks",
    "raise_failed",
    "require_machine",
]


def require_machine(store: Store, *, progress: Progress = SILENT) -> None:
    """Run the checks of `start`: all cheap ones, and the round trip through Triton once per environment.

    Raises MachineError with every failed check and its fix; warnings go to `progress`.
    """
    findings = [*quick_checks(), stub.check_store(store)]
    if not failed(findings) and not stub.passed_before(store):
        progress.step("First start in this environment: testing Triton with a small model …")
        findings.append(stub.check_round_trip(store))
    for finding in findings:
        if finding.state == "warning":
            progress.warn(f"{finding.name}: {finding.evidence}. {finding.fix}")
    raise_failed(findings)


def quick_checks() -> list[Finding]:
    """Check what a start with the wheel's Triton needs, without starting a server, in a fraction of a second."""
    return [
        host.check_glibc(platform.libc_ver()),
        *stub.quick_checks(),
        host.check_shared_memory(),
    ]
