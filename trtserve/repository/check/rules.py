"""What a rule is, what it finds in a repository, and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtserve.errors import TrtserveError

if TYPE_CHECKING:
    from trtserve.repository.check.repository import ModelFolder, Repository

Severity = Literal["error", "warning"]
Needs = Literal["files", "contents", "tokenizer", "machine"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A broken rule, and where."""

    what: str  # one sentence with the evidence
    fix: str = ""
    model: str | None = None
    file: Path | None = None  # the file to look into
    rule: str = ""  # rule and severity are filled in by the rule
    severity: Severity = "error"


Find = Callable[["Repository"], Iterator["Finding"]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One thing that must hold."""

    name: str
    about: str  # one line for the documentation
    find: Find  # yields what breaks the rule
    severity: Severity
    needs: Needs  # also: to read every byte, packages that load a tokenizer, or the machine that will serve
    stops: bool  # whether Triton does not start with such a fault


def rule(
    name: str, about: str, *, severity: Severity = "error", needs: Needs = "files", stops: bool = False
) -> Callable[[Find], Rule]:
    """Make a rule of the function that yields what breaks it; `RULES` has every rule of the modules of this package."""
    return lambda find: Rule(name=name, about=about, find=find, severity=severity, needs=needs, stops=stops)


Models = Callable[["Repository"], Iterable["ModelFolder"]]
FindInModel = Callable[["Repository", "ModelFolder"], Iterator["Finding"]]


def model_rule(
    name: str, about: str, models: Models, *, severity: Severity = "error", needs: Needs = "files", stops: bool = False
) -> Callable[[FindInModel], Rule]:
    """Make a rule of the function that yields what breaks it in one of these models."""
    in_all = rule(name, about, severity=severity, needs=needs, stops=stops)
    return lambda find: in_all(lambda given: (each for model in models(given) for each in find(given, model)))


def every_model(repository: Repository) -> Iterable[ModelFolder]:
    """The models whose config.pbtxt can be read."""
    return repository.models.values()


def of_role(*roles: str) -> Models:
    return lambda repository: repository.of(*roles)


def with_engine(repository: Repository) -> Iterable[ModelFolder]:
    """The core models whose engine's config.json could be read."""
    return (model for model, _ in repository.engines)


def with_gpu_engine(repository: Repository) -> Iterable[ModelFolder]:
    """Those of TensorRT-LLM."""
    return (model for model, _ in repository.gpu_engines)


@dataclass(frozen=True, kw_only=True)
class RepositoryReport:
    """What the rules found in a repository, errors first."""

    path: Path
    release: str | None
    models: tuple[str, ...]
    rules: tuple[str, ...]  # names of the rules that were applied
    findings: tuple[Finding, ...] = field(default=())

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that keep the repository from being served correctly."""
        return tuple(each for each in self.findings if each.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that make serving slower or less reliable than it could be."""
        return tuple(each for each in self.findings if each.severity == "warning")

    def described(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "passed": not self.errors,
            "rules": len(self.rules),
            "errors": len(self.errors),
            "warnings": len(self.warnings),
        }


def refusal(action: Callable[[], object]) -> TrtserveError | None:
    """Call `action` and return the error it raises, or None."""
    try:
        action()
    except TrtserveError as error:
        return error
    return None
