"""What this machine has of what runtimes need: `trtserve doctor`, and what `start` checks first.

The result of a check is a state, the evidence, and what to do. The runtime decides which failures matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from trtserve.errors import MachineError, TrtserveError
from trtserve.executor.runtimes import RUNTIMES, runtimes_with

State = Literal["ok", "warning", "failed", "unneeded"]
Group = Literal["machine", "python", "triton", "gpu", "tensorrt_llm", "mpi", "tools", "hub"]

GROUPS: tuple[Group, ...] = get_args(Group)
EVERY = frozenset(RUNTIMES)
EMBEDDED = runtimes_with("triton")
TENSORRT_LLM = runtimes_with("tensorrt_llm")
LLMAPI = runtimes_with("llm_api")
ENGINES = runtimes_with("engines")
GPU = runtimes_with("gpu")
PYTORCH = runtimes_with("pytorch")
VLLM = runtimes_with("vllm")
NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    group: Group
    name: str
    state: State
    evidence: str
    fix: str = ""  # what to do, or empty when the state is ok
    needed_by: frozenset[str] = NONE
    """Runtimes that cannot work when it has failed; for others the failure becomes `unneeded`."""

    def judged(self, runtime: str) -> CheckResult:
        """Return the finding with its severity for one runtime."""
        return replace(self, state="unneeded") if self.state == "failed" and runtime not in self.needed_by else self


def report_for(group: Group, needed_by: frozenset[str] = NONE) -> Callable[..., CheckResult]:
    """Return `report(name, state, evidence, fix="")`, which makes the results of a group.

    If one has failed, the runtimes `needed_by` cannot work; one that is ok has nothing to fix.
    """

    def report(name: str, state: State, evidence: str, fix: str = "") -> CheckResult:
        fix = "" if state == "ok" else fix
        return CheckResult(group=group, name=name, state=state, evidence=evidence, fix=fix, needed_by=needed_by)

    return report


Probe = Callable[[], "CheckResult | Iterable[CheckResult]"]


def look(group: Group, name: str, probe: Probe) -> list[CheckResult]:
    """Return the findings of a probe. If the probe itself fails, return that as a finding."""
    try:
        found = probe()
        return [found] if isinstance(found, CheckResult) else list(found)
    except Exception as error:  # noqa: BLE001 - one broken probe must not hide the other findings
        reason = error.message.rstrip(".") if isinstance(error, TrtserveError) else f"{type(error).__name__}: {error}"
        return [
            CheckResult(
                group=group,
                name=name,
                state="warning",
                evidence=f"could not be checked: {reason}",
                fix=(error.hint if isinstance(error, TrtserveError) else None) or "Check it yourself.",
            )
        ]


def failed(findings: Iterable[CheckResult]) -> list[CheckResult]:
    """Return the findings that prevent a start."""
    return [finding for finding in findings if finding.state == "failed"]


def raise_failed(findings: Iterable[CheckResult]) -> None:
    """Raise MachineError, with every fix, when a finding has failed."""
    wrong = failed(findings)
    if wrong:
        raise MachineError(
            "This machine cannot run the server: "
            + "; ".join(f"{finding.name}: {finding.evidence}" for finding in wrong)
            + ".",
            # One line for each, so that commands can be copied; the same command may fix several findings.
            hint="\n".join(dict.fromkeys(finding.fix for finding in wrong)),
        )
