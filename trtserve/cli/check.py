"""`trtserve check` and `trtserve plan`: what to expect before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.cli.options import Fields, JsonOption, QuietOption, gpus, models, paths, sources
from trtserve.cli.output import (
    TerminalProgress,
    count,
    print_block,
    print_data,
    print_json,
    print_table,
    say,
    with_bytes,
)
from trtserve.errors import UsageError, counted
from trtserve.host.machine import format_bytes
from trtserve.specs import BuildSpec, CheckSpec, ConvertSpec, RepositorySpec
from trtserve.specs.options import given_flags
from trtserve.specs.repository import CHECKPOINTS

if TYPE_CHECKING:
    from trtserve.artifacts import Artifact
    from trtserve.pipeline.estimate import GpuAnswer, MachineFit, ModelNeed
    from trtserve.pipeline.gpu_fit import Gpu, GpuFit
    from trtserve.pipeline.parity import CheckReport
    from trtserve.pipeline.stages import StageNeeds
    from trtserve.repository.check.rules import RepositoryReport

_REPOSITORIES = "Model repositories"


def check(
    artifact: Annotated[
        str,
        typer.Argument(
            metavar="ARTEFACT",
            help="Folder of a checkpoint or of a model repository, or the name of one made here.",
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
    """Compare a checkpoint with its original, or find what keeps an artefact from loading; exit code 25 if it fails.

    With --trtllm-version a checkpoint is judged as that release's loader does, from its files' headers. The comparison
    needs PyTorch (the extra `oracle`) and OpenVINO. A repository needs neither a GPU nor a network.

    Examples:
        trtserve check ./checkpoint --against ./Llama-2-7b-hf
        trtserve check ./checkpoint --trtllm-version 0.16.0
        trtserve check ./repository
    """
    from trtserve.artifacts import ModelRepository
    from trtserve.pipeline.parity import find_artifact

    progress = TerminalProgress(quiet=quiet)
    found = find_artifact(artifact, progress=progress)
    if isinstance(found, ModelRepository):
        given = [*(["--against"] if against else []), *given_flags(spec, spec.compares)]
        _refuse_flags(given, "model repository", "checkpoints")
        _check_repository(found, machine=machine, trtllm_version=spec.trtllm_version, json=json)
        return
    _refuse_flags(["--machine"] if machine is not None else [], "checkpoint", "model repositories")
    if spec.trtllm_version is None:
        _check_checkpoint(found, against, spec, json=json, progress=progress)
        return
    if given := [*(["--against"] if against else []), *given_flags(spec, spec.compares)]:
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
    from trtserve.pipeline.parity import check_checkpoint, find_original, require_passed

    original = find_original(found, against, progress=progress)
    report = check_checkpoint(found.path, original.path, spec, progress=progress)
    if json:
        print_json("check", report.described())
    else:
        _print_report(report)
    require_passed(report)


def _check_repository(found: Artifact, *, machine: bool | None, trtllm_version: str | None, json: bool) -> None:
    from trtserve.artifacts import ModelRepository
    from trtserve.repository.check import check_repository, require_clean
    from trtserve.repository.check.machine import has_gpu, this_machine
    from trtserve.repository.programs import foreign_programs, warning_of_programs

    wanted = trtllm_version is not None or (has_gpu() if machine is None else machine)
    here = this_machine(trtllm_version) if wanted else None
    report = check_repository(ModelRepository(path=found.path, manifest=found.manifest), here=here)
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


_CONVERT = Fields(
    "tp_size",
    "pp_size",
    "dtype",
    "quantize",
    "moe_tp_size",
    "moe_ep_size",
    "use_parallel_embedding",
    "embedding_sharding_dim",
    "ignore_tensors",
)
_BUILD = Fields(
    "max_batch_size",
    "max_input_len",
    "max_seq_len",
    "runtime",
    "device",
    "max_num_tokens",
    "max_beam_width",
    "kv_precision",
)
_NOT_MEASURED = "not measured yet"


FLEET = "A fleet on paper"
_MODEL = "Folder, name of an import, alias, or org/name[@revision] of the hub."


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help=_MODEL,
            autocompletion=sources,
        ),
    ] = None,
    *,
    fleet: Annotated[
        Path | None,
        typer.Option(
            "--fleet",
            metavar="FILE",
            help="Plan the replicas of this fleet file instead, and simulate a day of them.",
            autocompletion=paths,
            rich_help_panel=FLEET,
        ),
    ] = None,
    hours: Annotated[
        int | None,
        typer.Option(
            "--hours",
            min=0,
            max=168,
            help="Hours to simulate; 0: none.",
            show_default="24",
            rich_help_panel=FLEET,
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write",
            metavar="DIR",
            help="Write Kubernetes objects, a Slurm script or llm-d's values for it.",
            autocompletion=paths,
            rich_help_panel=FLEET,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="GPU",
            help="Plan for this NVIDIA GPU, such as h100-80gb.",
            show_default="this machine",
            autocompletion=gpus,
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option("--gpu-memory", metavar="SIZE", help="Plan for GPUs with this usable memory: 80GB, 79.6GiB."),
    ] = None,
    convert: Annotated[ConvertSpec, _CONVERT],
    build: Annotated[BuildSpec, _BUILD],
    repository: Annotated[RepositorySpec, Fields("max_tokens_in_paged_kv_cache")],
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Estimate memory, disk and time for a model, and what fits; nothing is downloaded or built.

    Examples:
        trtserve plan llama-2-7b
        trtserve plan llama-2-7b --gpu h100-80gb --tp-size 2 --max-batch-size 64
        trtserve plan --fleet fleet.yaml --write handed-over
    """
    if model is not None and fleet is not None:
        raise UsageError("--fleet plans the shapes of its file; leave MODEL out.")
    if model is None and fleet is None:
        raise UsageError(
            "`trtserve plan` needs MODEL, or --fleet FILE.",
            hint=f"MODEL: {_MODEL} `trtserve plan -h` explains the rest.",
        )
    if model is None:
        from trtserve.cli.fleet import plan_fleet

        simulated = 24 if hours is None else hours
        plan_fleet(fleet, hours=simulated, write=write, json=json, progress=TerminalProgress(quiet=quiet))
        return
    for flag, value in (("--hours", hours), ("--write", write)):
        if value is not None:
            raise UsageError(f"{flag} is for the plan of a fleet; give --fleet.")
    from trtserve.pipeline.estimate import Question, plan_needs, require_fit

    chosen = _gpu(gpu, gpu_memory)
    question = Question(convert=convert, build=build, kv_tokens=repository.max_tokens_in_paged_kv_cache, gpu=chosen)
    needs = plan_needs(model, question, progress=TerminalProgress(quiet=quiet))
    if json:
        print_json("plan", _described(needs))
    else:
        _print(needs)
    require_fit(needs)


def _gpu(name: str | None, memory: str | None) -> Gpu | None:
    from trtserve.pipeline.gpu_fit import Gpu, find_gpu, parse_size

    if name is not None and memory is not None:
        raise UsageError("--gpu and --gpu-memory were both given; give one.")
    if memory is not None:
        return Gpu(name=memory, memory=parse_size(memory, "--gpu-memory"))
    return None if name is None else find_gpu(name)


def _described(needs: ModelNeed) -> Any:
    result = asdict(needs)
    if needs.machine is not None:
        result["machine"]["sequences"] = needs.machine.sequences
    if needs.gpu is not None:
        for key, fit in (("asked", needs.gpu.asked), ("smallest", needs.gpu.smallest)):
            if fit is not None:
                result["gpu"][key] |= {"sequences": fit.sequences, "fits": fit.fits}
    return with_bytes(result)


def _print(needs: ModelNeed) -> None:
    pull = f", {format_bytes(needs.pull_bytes)} to download" if needs.pull_bytes else ""
    lines = [
        f"model       {needs.name}: {needs.architecture}, {count(needs.parameters)} parameters",
        f"weights     {format_bytes(needs.source_bytes)}{pull}; as {needs.dtype}"
        + (f", {needs.quantization}" if needs.quantization else ""),
    ]
    if needs.shipped_shapes:
        lines.append(f"shapes      {needs.source}, from the table in trtserve; the hub was not asked")
    if needs.converter:
        lines.append(f"converter   {needs.converter}")
    if needs.engine_bytes is not None and needs.kv_bytes_per_token is not None:
        lines.append(f"engine      {format_bytes(needs.engine_bytes)}: {needs.precision}")
        lines.append(f"KV cache    {format_bytes(needs.kv_bytes_per_token)} per token")
    if needs.problem:
        lines.append(f"here        cannot be built: {needs.problem}")
    print_block("\n".join(lines))
    print_data("")
    print_table(("stage", "disk", "peak memory", "time"), [_row(stage) for stage in needs.stages])
    print_data("")
    if needs.machine is not None:
        print_block("\n".join(_machine_lines(needs.machine)))
    if needs.gpu is not None:
        print_block("\n".join(_gpu_lines(needs.gpu)))


def _row(stage: StageNeeds) -> tuple[str, str, str, str]:
    sizes = ("-" if size is None else format_bytes(size) for size in (stage.disk, stage.memory))
    time = _NOT_MEASURED if stage.seconds is None else _duration(stage.seconds)
    disk, memory = sizes
    return stage.stage, disk, memory, "-" if stage.stage == "repo" else time


def _machine_lines(machine: MachineFit) -> list[str]:
    memory, disk = format_bytes(machine.free_memory), format_bytes(machine.free_disk)
    return [
        f"here        {memory} of memory and {disk} of disk are free",
        f"fits        {machine.tokens} tokens of KV cache: {machine.sequences} sequences of {machine.max_seq_len}"
        if machine.fits
        else f"fits        no. {machine.hint}",
    ]


def _gpu_lines(answer: GpuAnswer) -> list[str]:
    from trtserve.pipeline.gpu_fit import RESERVE

    asked = answer.asked
    free = "usable" if asked.gpu.here is None else "free"
    parts = (
        f"{format_bytes(asked.weights)} weights, {format_bytes(asked.activations)} activations and logits, "
        f"{format_bytes(RESERVE)} set aside, {format_bytes(asked.kv_per_token)} KV cache per token"
    )
    lines = [
        f"GPU         {asked.gpu.name}, {format_bytes(asked.gpu.memory)} {free} (estimated from shapes, not measured)",
        f"tp × pp     {_fit_words(asked)}",
        f"per GPU     {parts}",
    ]
    lines += [f"cannot      {answer.problem}"] if answer.problem else []
    lines += [f"note        {answer.note}"] if answer.note else []
    if answer.steps:
        lines.append(f"steps       {answer.steps} would fit")
    if answer.longest:
        lines.append(f"shorter     --max-seq-len {answer.longest} would fit")
    if answer.smallest is None and not answer.problem:
        lines.append("smallest    no tp × pp up to 64 GPUs fits")
    elif answer.smallest is not None and answer.smallest is not asked:
        lines.append(f"smallest    {_fit_words(answer.smallest)}")
    return lines


def _fit_words(fit: GpuFit) -> str:
    what = f"{fit.tokens} tokens, {fit.sequences} sequences of {fit.limits.max_seq_len}"
    return f"{fit.tp_size} × {fit.pp_size}: {what}" + ("" if fit.fits else ": does not fit")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
