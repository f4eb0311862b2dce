"""What a rule is, and what it finds in a repository."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtserve.errors import TrtserveError

if TYPE_CHECKING:
    from trtserve.check.repository.subject import Subject

Severity = Literal["error", "warning"]
Needs = Literal["files", "tokenizer", "machine"]


def refusal(action: Callable[[], object]) -> TrtserveError | None:
    """What `action` raises against what it is asked to do; None when it does it."""
    try:
        action()
    except TrtserveError as error:
        return error
    return None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that a rule found: `what` is a sentence with the evidence, `fix` says what to do.

    `model` is the folder's name and `file` the file to look into, where there is one.
    """

    what: str
    fix: str = ""
    model: str | None = None
    file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One thing that must hold; `find` yields what breaks it.

    `needs` tells what has to be there beside the files: the packages that load a tokenizer, or the machine that will
    serve. `stops` marks a fault with which Triton does not come up. `complaints` are numbers of users' complaints about
    such tools, `about` says in one line what is looked at.
    """

    name: str
    about: str
    find: Callable[[Subject], Iterator[Fault]]
    severity: Severity = "error"
    needs: Needs = "files"
    stops: bool = False
    complaints: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A broken rule, and where."""

    rule: str
    severity: Severity
    what: str
    fix: str
    model: str | None = None
    file: Path | None = None

    def described(self) -> dict[str, Any]:
        """The finding as JSON."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "model": self.model,
            "file": None if self.file is None else str(self.file),
            "what": self.what,
            "fix": self.fix,
        }


@dataclass(frozen=True, kw_only=True)
class RepositoryReport:
    """Everything that was found in the repository at `path`, errors first; `rules` were applied."""

    path: Path
    release: str | None
    models: tuple[str, ...]
    rules: tuple[str, ...]
    findings: tuple[Finding, ...] = field(default=())

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings with which the repository cannot be served as it should."""
        return tuple(each for each in self.findings if each.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings with which it can be served, and less well than it could be."""
        return tuple(each for each in self.findings if each.severity == "warning")

    def described(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "path": str(self.path),
            "passed": not self.errors,
            "release": self.release,
            "models": list(self.models),
            "rules": len(self.rules),
            "errors": len(self.errors),
            "warnings": len(self.warnings),
            "findings": [each.described() for each in self.findings],
        }
