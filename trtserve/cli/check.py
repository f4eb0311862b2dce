"""`trtserve check`: whether a checkpoint is what it was made from, and whether a model repository can be served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtserve.cli.options import JsonOption, QuietOption
from trtserve.cli.output import TerminalProgress, print_block, print_json, print_table
from trtserve.errors import UsageError, counted

if TYPE_CHECKING:
    from trtserve.artifacts import Artifact
    from trtserve.check import CheckReport
    from trtserve.check.repository import RepositoryReport
    from trtserve.specs import CheckSpec


def check(
    artifact: Annotated[
        str,
        typer.Argument(
            metavar="ARTEFACT", help="Folder of a checkpoint or of a model repository, or the name of one made here."
        ),
    ],
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="MODEL",
            help="Checkpoints: Hugging Face folder or name of the original; default: what it was converted from.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Checkpoints: a prompt per line, a text or a JSON list of token ids; default: a small set of both.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Checkpoints: tokens of each greedy answer; default: 16.")
    ] = None,
    machine: Annotated[
        bool | None,
        typer.Option(
            "--machine/--no-machine",
            help="Repositories: look at what is installed here and at the GPUs too; default: where there is a GPU.",
        ),
    ] = None,
    trtllm_version: Annotated[
        str | None,
        typer.Option(
            "--trtllm-version", metavar="VERSION", help="Repositories: the TensorRT-LLM that serves; implies --machine."
        ),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare a checkpoint with its original, or a repository's parts with each other; exit code 25 when they differ.

    A checkpoint needs PyTorch (the extra `oracle`) and OpenVINO; a repository needs neither a GPU nor a network.
    """
    from trtserve.artifacts import ModelRepository
    from trtserve.check import find_artifact
    from trtserve.specs import CheckSpec

    progress = TerminalProgress(quiet=quiet)
    found = find_artifact(artifact, progress=progress)
    own: dict[str, object] = {"--machine": machine, "--trtllm-version": trtllm_version}
    others: dict[str, object] = {"--against": against, "--prompts": prompts, "--max-tokens": max_tokens}
    if isinstance(found, ModelRepository):
        _refuse_flags(others, "model repository", "checkpoints")
        _check_repository(found, machine=machine, trtllm_version=trtllm_version, json=json)
    else:
        _refuse_flags(own, "checkpoint", "model repositories")
        spec = CheckSpec(max_tokens=16 if max_tokens is None else max_tokens, prompts=prompts)
        _check_checkpoint(found, against, spec, json=json, progress=progress)


def _refuse_flags(flags: dict[str, object], kind: str, others: str) -> None:
    given = next((flag for flag, value in flags.items() if value is not None), None)
    if given is not None:
        raise UsageError(f"{given} is for {others}, and this is a {kind}.", hint=f"Leave {given} out.")


def _check_checkpoint(
    found: Artifact, against: str | None, spec: CheckSpec, *, json: bool, progress: TerminalProgress
) -> None:
    from trtserve.check import check_checkpoint, find_original, require_passed

    original = find_original(found, against, progress=progress)
    report = check_checkpoint(found.path, original.path, spec, progress=progress)
    if json:
        print_json("check", report.described())
    else:
        _print_report(report)
    require_passed(report)


def _check_repository(found: Artifact, *, machine: bool | None, trtllm_version: str | None, json: bool) -> None:
    from trtserve.artifacts import ModelRepository
    from trtserve.check.repository import check_repository, require_clean
    from trtserve.check.repository.machine import has_gpu, this_machine

    wanted = trtllm_version is not None or (has_gpu() if machine is None else machine)
    here = this_machine(trtllm_version) if wanted else None
    report = check_repository(ModelRepository(path=found.path, manifest=found.manifest), here=here)
    if json:
        print_json("check", report.described())
    else:
        _print_findings(report)
    require_clean(report)


def _print_findings(report: RepositoryReport) -> None:
    """One block for each finding, errors first, then how many there are."""
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
    """The figures with bounds as a table, then what else is known."""
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
    print_table(("Stage", "Figure", "Value", "Bound", "Verdict"), rows)
    lines = [f"{report.prompts} prompts, {report.stages[0].differences.positions} positions; {report.reason}"]
    for stage in report.stages:
        found = stage.differences
        lines.append(
            f"{stage.name}: logits differ by {found.mean:.3g} on average and {found.maximum:.3g} at most (their "
            f"standard deviation is {found.deviation:.3g}); top-1 {found.top1:.4f} and greedy {found.greedy:.4f} "
            "with ties counted as different"
        )
    print_block("\n".join(lines))
