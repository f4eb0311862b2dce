"""`trtserve plan`: what a model will need and what fits, or with --fleet how many replicas meet a goal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.cli.options import Fields, JsonOption, QuietOption, gpus, sources
from trtserve.cli.output import TerminalProgress, count, print_block, print_data, print_json, print_table, with_bytes
from trtserve.errors import MissedLimitError, UsageError, counted
from trtserve.host.machine import format_bytes
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.specs.options import Spec, given_flags, option

if TYPE_CHECKING:
    from trtserve.pipeline import StageNeeds
    from trtserve.pipeline.estimate import GpuAnswer, MachineFit, ModelNeed
    from trtserve.pipeline.fleet.simulation import Simulated
    from trtserve.pipeline.fleet.sizing import SimulatedDay, Sized
    from trtserve.pipeline.gpu_fit import Gpu, GpuFit
    from trtserve.progress import Progress

_FLEET = "A fleet on paper"
_MODEL = "Folder, name of an import, alias, or org/name[@revision] of the hub."


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Spec):
    """What is planned: a fleet of a file, or a model for this machine or for another GPU."""

    fleet: Path | None = option(
        None,
        metavar="FILE",
        help="Plan the replicas of this fleet file instead, and simulate a day of them.",
        panel=_FLEET,
    )
    hours: int | None = option(
        None, help="Hours to simulate; 0: none.", minimum=0, maximum=168, unset="24", panel=_FLEET
    )
    write: Path | None = option(
        None, metavar="DIR", help="Write Kubernetes objects, a Slurm script or llm-d's values for it.", panel=_FLEET
    )
    gpu: str | None = option(
        None, metavar="GPU", help="Plan for this NVIDIA GPU, such as h100-80gb.", unset="this machine", completes=gpus
    )
    gpu_memory: str | None = option(None, metavar="SIZE", help="Plan for GPUs with this usable memory: 80GB, 79.6GiB.")


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


def plan(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL, autocompletion=sources)] = None,
    *,
    asked: PlanOptions,
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
    progress = TerminalProgress(quiet=quiet)
    if asked.fleet is not None:
        given = [] if model is None else ["MODEL"]
        given += given_flags(asked, ("gpu", "gpu_memory"))
        given += [flag for each in (convert, build, repository) for flag in given_flags(each)]
        if given:
            raise UsageError(f"--fleet plans the shapes of its file; leave {given[0]} out.")
        hours = 24 if asked.hours is None else asked.hours
        _plan_fleet(asked.fleet, hours=hours, write=asked.write, json=json, progress=progress)
        return
    if model is None:
        raise UsageError(
            "`trtserve plan` needs MODEL, or --fleet FILE.",
            hint=f"MODEL: {_MODEL} `trtserve plan -h` explains the rest.",
        )
    if given := given_flags(asked, ("hours", "write")):
        raise UsageError(f"{given[0]} is for the plan of a fleet; give --fleet.")
    from trtserve.pipeline.estimate import Question, plan_needs, require_fit

    chosen = _gpu(asked.gpu, asked.gpu_memory)
    question = Question(convert=convert, build=build, kv_tokens=repository.max_tokens_in_paged_kv_cache, gpu=chosen)
    needs = plan_needs(model, question, progress=progress)
    if json:
        print_json("plan", _described(needs))
    else:
        _print(needs)
    require_fit(needs)


def _gpu(name: str | None, memory: str | None) -> Gpu | None:
    """Return the GPU to plan for; None: those of this machine."""
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
    columns: tuple[str, ...] = ("stage", "disk", "peak memory", "time")
    rows = [_row(stage) for stage in needs.stages]
    if all(stage.seconds is None for stage in needs.stages):  # of this machine: the first import measures it
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    print_table(columns, rows)
    print_data("")
    if needs.machine is not None:
        most = max((stage.memory for stage in needs.stages if stage.memory is not None), default=0)
        disk = sum(stage.disk for stage in needs.stages if stage.disk is not None)
        unknown = "; what the converter needs of memory is not known" if needs.converter else ""
        print_block(f"needs       {format_bytes(most)} of memory and {format_bytes(disk)} of disk, at most{unknown}")
        print_block("\n".join(_machine_lines(needs.machine)))
    if needs.gpu is not None:
        print_block("\n".join(_gpu_lines(needs.gpu)))


def _row(stage: StageNeeds) -> tuple[str, ...]:
    sizes = (format_bytes(size) if size else "-" for size in (stage.disk, stage.memory))
    return stage.stage, *sizes, "-" if stage.seconds is None else _duration(stage.seconds)


def _machine_lines(machine: MachineFit) -> list[str]:
    memory, disk = format_bytes(machine.free_memory), format_bytes(machine.free_disk)
    return [
        f"here        {memory} of memory and {disk} of disk are free",
        f"fits        {machine.tokens} tokens of KV cache: {machine.sequences} sequences of {machine.max_seq_len}; "
        f"the memory of start includes {machine.start_tokens} of them"
        if machine.fits
        else "fits        no",
    ]


def _gpu_lines(answer: GpuAnswer) -> list[str]:
    from trtserve.pipeline.gpu_fit import RESERVE

    asked = answer.asked
    free = "usable" if asked.gpu.here is None else "free"
    parts = (
        f"{format_bytes(asked.weights)} weights, {format_bytes(asked.activations)} activations and logits, "
        f"{format_bytes(RESERVE)} set aside, {format_bytes(asked.kv_per_token)} KV cache per token"
        + (f", at most {format_bytes(asked.adapter_memory)} adapters" if asked.adapter_memory else "")
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
    what = f"{fit.tokens:,} tokens, {fit.sequences:,} sequences of {fit.limits.max_seq_len:,}"
    return f"{fit.tp_size} × {fit.pp_size} {'fits' if fit.fits else 'does not fit'}: {what}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


_FIGURES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")


def _plan_fleet(file: Path, *, hours: int, write: Path | None, json: bool, progress: Progress) -> None:
    """Print the plan. Raises MissedLimitError if the nodes do not suffice, or the simulated day misses the goal."""
    from trtserve.pipeline.fleet import read_fleet
    from trtserve.pipeline.fleet.handover import hand_over
    from trtserve.pipeline.fleet.sizing import simulate, size

    fleet = read_fleet(file)
    shapes = size(fleet)
    chosen, day, figures = shapes[0], None, dict[str, float]()
    if hours and chosen.fits:
        progress.step(f"Simulating {counted(hours, 'hour')} of {counted(chosen.replicas + chosen.spare, 'replica')}")
        day = simulate(fleet, chosen, hours=hours)
        figures = figures_of(day.found)
    written = hand_over(fleet, chosen, write) if write is not None else []
    if json:
        print_json("plan", _fleet_described(shapes, day, figures, written))
    else:
        _print_fleet(shapes, day, figures, hours)
        for path in written:
            print_data(str(path))
    if not chosen.fits:
        available = f"there {'is' if chosen.available == 1 else 'are'} {chosen.available}"
        raise MissedLimitError(
            f"{fleet.goal} needs {counted(chosen.nodes, 'node')} for {chosen.shape}; {available}.",
            hint="Add nodes, a faster shape, or relax the goal.",
        )
    missed = [name for name, limit in fleet.limits_ms.items() if figures and figures[name] > limit]
    if missed:
        raise MissedLimitError(
            f"The simulated day misses {fleet.goal}: {', '.join(f'{name} {figures[name]:.4g} ms' for name in missed)}.",
            hint="The table shows the hours. Lower update.at_once, add a faster shape, or relax the goal.",
        )


def figures_of(day: Simulated) -> dict[str, float]:
    """Return the figures of a goal, in milliseconds."""
    found = {}
    for name in _FIGURES:
        measure, _, quantile = name.partition("_p")
        value = (day.first if measure == "ttft" else day.gap).quantile(int(quantile) / 100)
        found[name] = math.inf if value is None else 1000 * value
    return found


def _fleet_described(
    shapes: Sequence[Sized], day: SimulatedDay | None, figures: dict[str, float], written: Sequence[Path]
) -> dict[str, object]:
    content: dict[str, object] = {
        "shapes": [{**asdict(each), "fits": each.fits} for each in shapes],
        "written": [str(path) for path in written],
    }
    if day is not None:
        found = day.found
        content["simulated"] = {
            "replicas": day.replicas,
            "minutes_of_each_hour": day.minutes,
            "requests": found.requests,
            "completed": found.completed,
            "failed": found.failed,
            "events": found.events,
            "output_tokens": found.tokens,
            "cached_tokens": found.cached_tokens,
            "longest_queue": found.longest_queue,
            "figures_ms": figures,
            "ttft_p99_ms_by_hour": {hour: 1000 * (each.quantile(0.99) or 0) for hour, each in found.hours.items()},
        }
    return content


def _print_fleet(shapes: Sequence[Sized], day: SimulatedDay | None, figures: dict[str, float], hours: int) -> None:
    rows = [
        (
            each.shape,
            f"{each.fewest} to {each.replicas}",
            str(each.spare),
            f"{each.nodes} of {each.available}",
            f"{each.price:,.2f}" if each.price else "",
            *(f"{each.pooled.figures[name]:.4g} to {each.expected.figures[name]:.4g}" for name in _FIGURES),
        )
        for each in shapes
    ]
    titles = [f"{name.replace('_', ' ')} (ms)" for name in _FIGURES]
    print_table(("shape", "replicas", "spare", "nodes", "price/h", *titles), rows)
    if day is None:
        return
    print_data("")
    found = day.found
    many = counted(hours, "hour")
    scale = many if day.minutes == 60 else f"{day.minutes:.3g} minutes of each of {many}"
    scale += "" if day.part == 1 else f", {day.part:.1%} of the fleet"
    answered = f"{found.completed:,} answered, {found.failed:,} cut off"
    cached = f"{found.cached_tokens / 1e6:,.1f} M tokens from caches"
    print_data(f"Simulated ({scale}): {found.requests:,} requests, {answered}, {cached}")
    print_data(", ".join(f"{name.replace('_', ' ')} {figures[name]:.4g} ms" for name in _FIGURES))
    print_table(
        ("hour", "ttft p50 (ms)", "ttft p99 (ms)"),
        [
            (str(hour), *(f"{1000 * (each.quantile(quantile) or 0):.4g}" for quantile in (0.5, 0.99)))
            for hour, each in sorted(found.hours.items())
        ],
    )
