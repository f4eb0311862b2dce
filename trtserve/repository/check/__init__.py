"""Whether the engine, repository, tokenizer, release and machine fit together, from the files alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from trtserve.artifacts import ModelRepository
from trtserve.errors import CheckError, RepositoryError
from trtserve.progress import SILENT, Progress
from trtserve.repository.check import engines, files, machine, models, runtimes, tensors, tokenizers
from trtserve.repository.check.repository import MachineFacts, Repository, read_repository
from trtserve.repository.check.rules import Finding, Needs, RepositoryReport, Rule

_MODULES = (files, models, engines, tensors, tokenizers, runtimes, machine)

RULES = tuple(each for module in _MODULES for each in vars(module).values() if isinstance(each, Rule))
"""Every rule, in the order in which findings are reported."""


def check_repository(
    repository: ModelRepository, *, here: MachineFacts | None = None, load_tokenizers: bool = True
) -> RepositoryReport:
    """Apply the rules: those about the machine only if `here` is given, those that load tokenizers if they may.

    Starts nothing and uses no network. Raises MissingDependencyError if the package `transformers` is missing.
    """
    needs: set[Needs] = {"files", "contents"}
    if load_tokenizers:
        needs.add("tokenizer")
    if here is not None:
        needs.add("machine")
    read = read_repository(repository, here)
    applied = [rule for rule in RULES if rule.needs in needs]
    return RepositoryReport(
        path=read.path,
        release=next((read.parameter_release(model) for model in read.models.values()), None),
        models=tuple(read.models),
        rules=tuple(rule.name for rule in applied),
        findings=tuple(sorted(_findings(read, applied), key=lambda each: each.severity != "error")),
    )


def _findings(repository: Repository, rules: Iterable[Rule]) -> list[Finding]:
    found = (
        replace(finding, rule=rule.name, severity=rule.severity) for rule in rules for finding in rule.find(repository)
    )
    return list(dict.fromkeys(found))


def require_clean(report: RepositoryReport) -> None:
    """Raise CheckError when the report has an error."""
    if report.errors:
        one = len(report.errors) == 1
        raise CheckError(
            f"{report.path} cannot be served as it is: {len(report.errors)} error{'' if one else 's'}.",
            hint=report.errors[0].fix if one else "Correct them from the top: one may be the cause of others.",
        )


def require_sound(repository: ModelRepository, progress: Progress = SILENT) -> None:
    """Raise RepositoryError with every fault that keeps Triton from starting, from the files alone.

    Other faults go to `progress` as warnings.
    """
    read = read_repository(repository)
    stopping = _findings(read, (rule for rule in RULES if rule.stops))
    if stopping:
        lines = "\n".join(f"  {each.model or read.path.name}: {each.what}" for each in stopping)
        raise RepositoryError(f"{read.path} cannot be started:\n{lines}", hint=stopping[0].fix)
    for finding in _findings(read, (rule for rule in RULES if rule.needs == "files" and not rule.stops)):
        progress.warn(f"{finding.model or read.path.name}: {finding.what} {finding.fix}")
