"""`trtserve check`: compare a checkpoint with its original, or look for faults in a repository."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from trtserve.cli.options import JsonOption, QuietOption, models
from trtserve.cli.output import (
    TerminalProgress,
    print_block,
    print_json,
    print_table,
    say,
)
from trtserve.errors import UsageError, counted
from trtserve.specs import CheckSpec
from trtserve.specs.options import given_flags
from trtserve.specs.repository import CHECKPOINTS

if TYPE_CHECKING:
    from trtserve.artifacts import Artifact, ModelRepository
    from trtserve.pipeline.parity import CheckReport
    from trtserve.repository.check.rules import RepositoryReport

_REPOSITORIES = "Model repositories"


def check(
    artifact: Annotated[
        str,
        typer.Argument(
            metavar="ARTEFACT",
            help="Folder of a checkpoint, engine or model repository, or the name of one made here.",
            autocompletion=models,
        ),
    ],
    *,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="MODEL",
            autocompletion=models,
            help="Hugging Face folder or name of the original.",
            show_default="what the checkpoint was converted from",
            rich_help_panel=CHECKPOINTS,
        ),
    ] = None,
    spec: CheckSpec,
    machine: Annotated[
        bool | None,
        typer.Option(
            "--machine/--no-machine",
            help="Also compare with the packages and GPUs of this machine.",
            show_default="--machine if there is a GPU",
            rich_help_panel=_REPOSITORIES,
        ),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare a checkpoint or an engine with its original, or find what keeps an artefact from loading.

    The exit code is 25 if it fails. With a checkpoint, the engine that was built from it here is compared too.

    With --trtllm-version a checkpoint is judged as that release's loader does, from its files' headers. The comparison
    needs PyTorch (the extra `oracle`) and OpenVINO. A repository needs neither a GPU nor a network.

    Examples:
        trtserve check ./checkpoint --against ./Llama-2-7b-hf
        trtserve check ./checkpoint --trtllm-version 0.16.0
        trtserve check ./repository
    """
    from trtserve.artifacts import Engine, ModelRepository
    from trtserve.pipeline.parity import find_artifact

    progress = TerminalProgress(quiet=quiet)
    found = find_artifact(artifact, progress=progress)
    given = [*(["--against"] if against else []), *given_flags(spec, spec.compares)]
    if isinstance(found, ModelRepository):
        _refuse_flags(given, "model repository", "checkpoints")
        _check_repository(found, machine=machine, trtllm_version=spec.trtllm_version, json=json)
        return
    _refuse_flags(["--machine"] if machine is not None else [], "checkpoint", "model repositories")
    if isinstance(found, Engine) and spec.trtllm_version is not None:
        raise UsageError(
            "--trtllm-version is for checkpoints and model repositories, and this is an engine.",
            hint="Leave it out to compare the engine with its original.",
        )
    if spec.trtllm_version is None:
        _check_checkpoint(found, against, spec, json=json, progress=progress)
        return
    if given:
        raise UsageError(
            f"{given[0]} is for the comparison with the original; --trtllm-version asks whether a release loads it.",
            hint="Run both checks, one after the other.",
        )
    _check_loading(found, spec.trtllm_version, json=json)


def _refuse_flags(given: Sequence[str], kind: str, others: str) -> None:
    if given:
        raise UsageError(f"{given[0]} is for {others}, and this is a {kind}.", hint=f"Leave {given[0]} out.")


def _check_loading(found: Artifact, version: str, *, json: bool) -> None:
    from trtserve.repository.check.checkpoints import check_loading, require_loading

    report = check_loading(found.path, version)
    if json:
        print_json("check", report.described())
    else:
        lines = [f"{report.path} loads in TensorRT-LLM {report.version}: {'yes' if report.loads else 'no, because'}"]
        lines += [f"  {problem.what}. {problem.fix}" for problem in report.problems]
        lines += [f"  warning: {warning}" for warning in report.warnings]
        lines += [] if report.evidence is None else [f"  {report.evidence}"]
        print_block("\n".join(lines))
    require_loading(report)


def _check_checkpoint(
    found: Artifact, against: str | None, spec: CheckSpec, *, json: bool, progress: TerminalProgress
) -> None:
    from trtserve.artifacts import Engine
    from trtserve.pipeline.parity import check_checkpoint, check_engine, engine_made_of, find_original, require_passed

    original = find_original(found, against, progress=progress)
    if isinstance(found, Engine):
        report = check_engine(found.path, original.path, spec, progress=progress)
    else:
        engine = engine_made_of(found)
        report = check_checkpoint(found.path, original.path, spec, engine=engine, progress=progress)
    if json:
        print_json("check", report.described())
    else:
        _print_report(report)
    require_passed(report)


def _check_repository(found: ModelRepository, *, machine: bool | None, trtllm_version: str | None, json: bool) -> None:
    from trtserve.repository.check import check_repository, require_clean
    from trtserve.repository.check.machine import has_gpu, this_machine
    from trtserve.repository.programs import foreign_programs, warning_of_programs

    wanted = trtllm_version is not None or (has_gpu() if machine is None else machine)
    here = this_machine(trtllm_version) if wanted else None
    report = check_repository(found, here=here)
    if json:
        print_json("check", {**report.described(), "programs": foreign_programs(found.path)})
    else:
        _print_findings(report)
        if (warning := warning_of_programs(found.path)) is not None:
            say(f"note: {warning}")
    require_clean(report)


def _print_findings(report: RepositoryReport) -> None:
    """Print one block per finding, errors first, and then the number of findings."""
    for finding in report.findings:
        place = "" if finding.file is None else f"  {finding.file}\n"
        print_block(
            f"{finding.severity}: {finding.model or report.path.name} [{finding.rule}]\n{place}  {finding.what}\n"
            + (f"  {finding.fix}\n" if finding.fix else "")
        )
    release = "" if report.release is None else f" (TensorRT-LLM {report.release})"
    print_block(
        f"{report.path}{release}: {len(report.models)} models, {len(report.rules)} rules, "
        f"{counted(len(report.errors), 'error')}, {counted(len(report.warnings), 'warning')}"
    )


def _print_report(report: CheckReport) -> None:
    """Print a table of figures with their bounds, then the differences of each stage."""
    rows = [
        (
            stage.name,
            verdict.name,
            f"{verdict.value:.3g}",
            f"{verdict.relation} {verdict.bound:g}",
            "passed" if verdict.passed else "beyond",
        )
        for stage in report.stages
        for verdict in stage.verdicts
    ]
    print_table(("Stage", "Figure", "Value", "Bound", "Judgement"), rows)
    lines = [f"{report.prompts} prompts, {report.stages[0].differences.positions} positions; {report.reason}"]
    for stage in report.stages:
        found = stage.differences
        lines.append(
            f"{stage.name}: logits differ by {found.mean:.3g} on average and {found.maximum:.3g} at most (their "
            f"standard deviation is {found.deviation:.3g}); top-1 {found.top1:.4f} and greedy {found.greedy:.4f} "
            "with ties counted as different"
        )
    print_block("\n".join(lines))
