"""What a check says: a state, the evidence for it, and what to do; which failures matter is decided by the runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from trtserve.errors import MachineError, TrtserveError

State = Literal["ok", "warning", "failed", "unneeded"]
Group = Literal["machine", "python", "triton", "gpu", "tensorrt_llm", "mpi", "tools", "hub"]

GROUPS: tuple[Group, ...] = get_args(Group)
OPENVINO = frozenset({"openvino"})
GPU = frozenset({"tensorrt_llm", "llmapi"})
EVERY = OPENVINO | GPU
NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at.

    `needed_by` are the runtimes that cannot work when it has failed; for every other it is `unneeded` then (`judged`).
    """

    group: Group
    name: str
    state: State
    evidence: str
    fix: str = ""
    needed_by: frozenset[str] = NONE

    def judged(self, runtime: str) -> Finding:
        """As it counts for one runtime."""
        return replace(self, state="unneeded") if self.state == "failed" and runtime not in self.needed_by else self


Probe = Callable[[], "Finding | Iterable[Finding]"]


def look(group: Group, name: str, probe: Probe) -> list[Finding]:
    """The findings of a probe; a probe that breaks is a finding too, and no reason to stop looking."""
    try:
        found = probe()
        return [found] if isinstance(found, Finding) else list(found)
    except Exception as error:  # noqa: BLE001 - whatever a machine answers, the other findings are wanted
        said = error.message.rstrip(".") if isinstance(error, TrtserveError) else f"{type(error).__name__}: {error}"
        return [
            Finding(
                group=group,
                name=name,
                state="warning",
                evidence=f"could not be looked at: {said}",
                fix=(error.hint if isinstance(error, TrtserveError) else None) or "Look at it by hand.",
            )
        ]


def failed(findings: Iterable[Finding]) -> list[Finding]:
    """Those that forbid a start."""
    return [finding for finding in findings if finding.state == "failed"]


def raise_failed(findings: Iterable[Finding]) -> None:
    """MachineError, with every fix, when something has failed."""
    wrong = failed(findings)
    if wrong:
        raise MachineError(
            "This machine cannot run the server: "
            + "; ".join(f"{finding.name}: {finding.evidence}" for finding in wrong)
            + ".",
            # A line for each, so that a command can be copied; one command may mend several things.
            hint="\n".join(dict.fromkeys(finding.fix for finding in wrong)),
        )
