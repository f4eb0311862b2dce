"""`trtserve check`: whether an artefact is what it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtserve.cli.options import JsonOption, QuietOption
from trtserve.cli.output import TerminalProgress, print_data, print_json, print_table

if TYPE_CHECKING:
    from trtserve.check import CheckReport


def check(
    artifact: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Checkpoint folder, or the name of an imported model.")
    ],
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="MODEL",
            help="Hugging Face folder or name of the original; default: what the checkpoint was converted from.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="A prompt per line: a text, or a JSON list of token ids; default: a small set of both.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of each greedy answer.")] = 16,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare a checkpoint with the model it was converted from; exit code 25 when they differ too much.

    Needs PyTorch (the extra `oracle`) and OpenVINO.
    """
    from trtserve.check import check_checkpoint, find_artifact, find_original, require_passed
    from trtserve.specs import CheckSpec

    spec, progress = CheckSpec(max_tokens=max_tokens, prompts=prompts), TerminalProgress(quiet=quiet)
    found = find_artifact(artifact, progress=progress)
    original = find_original(found, against, progress=progress)
    report = check_checkpoint(found.path, original.path, spec, progress=progress)
    if json:
        print_json("check", report.described())
    else:
        _print_report(report)
    require_passed(report)


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
    print_data("\n".join(lines))
