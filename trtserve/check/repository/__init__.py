"""Whether engine, repository, tokenizer, release and machine fit each other, told in one go from the files alone.

`rules.RULES` lists what is looked at. What the preflight of `start` and the stages know already is asked of them.
"""

from __future__ import annotations

from collections.abc import Collection

from trtserve.artifacts import ModelRepository
from trtserve.check.repository.findings import Finding, Needs, RepositoryReport, Rule
from trtserve.check.repository.rules import RULES
from trtserve.check.repository.subject import MachineFacts, Subject, read_subject
from trtserve.errors import CheckError, RepositoryError
from trtserve.progress import SILENT, Progress

__all__ = ["RULES", "Finding", "RepositoryReport", "check_repository", "require_clean", "require_sound"]


def check_repository(
    repository: ModelRepository, *, here: MachineFacts | None = None, tokenizers: bool = True
) -> RepositoryReport:
    """Apply every rule: those about the machine when `here` describes it, those that load tokenizers unless not wanted.

    Nothing is started and no network used. MissingDependencyError without the package `transformers`.
    """
    needs: set[Needs] = {"files"}
    if tokenizers:
        needs.add("tokenizer")
    if here is not None:
        needs.add("machine")
    subject = read_subject(repository, here)
    applied = [rule for rule in RULES if rule.needs in needs]
    return RepositoryReport(
        path=subject.path,
        release=next((subject.parameter_release(model) for model in subject.models.values()), None),
        models=tuple(subject.models),
        rules=tuple(rule.name for rule in applied),
        findings=tuple(sorted(_findings(subject, applied), key=lambda each: each.severity != "error")),
    )


def _findings(subject: Subject, rules: Collection[Rule]) -> list[Finding]:
    found = [
        Finding(
            rule=rule.name,
            severity=rule.severity,
            what=fault.what,
            fix=fault.fix,
            model=fault.model,
            file=fault.file,
        )
        for rule in rules
        for fault in rule.find(subject)
    ]
    return list(dict.fromkeys(found))


def require_clean(report: RepositoryReport) -> None:
    """CheckError when there is an error in the report."""
    if report.errors:
        one = len(report.errors) == 1
        raise CheckError(
            f"{report.path} cannot be served as it is: {len(report.errors)} error{'' if one else 's'}.",
            hint=report.errors[0].fix if one else "Mend them from the top: one may be the cause of others.",
        )


def require_sound(repository: ModelRepository, progress: Progress = SILENT) -> None:
    """RepositoryError, with all of them, when there are faults with which Triton does not come up; files are read only.

    What else is wrong goes to `progress` as warnings.
    """
    subject = read_subject(repository)
    stopping = _findings(subject, [rule for rule in RULES if rule.stops])
    if stopping:
        lines = "\n".join(f"  {each.model or subject.path.name}: {each.what}" for each in stopping)
        raise RepositoryError(f"{subject.path} cannot be started:\n{lines}", hint=stopping[0].fix)
    other = _findings(subject, [rule for rule in RULES if rule.needs == "files" and not rule.stops])
    for finding in other:
        progress.warn(f"{finding.model or subject.path.name}: {finding.what} {finding.fix}")
