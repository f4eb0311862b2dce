"""`trtserve plan`: estimate memory, disk and time for a model from its headers alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.cli.options import Fields, JsonOption, QuietOption, gpus, sources
from trtserve.cli.output import TerminalProgress, count, print_block, print_data, print_json, print_table, with_bytes
from trtserve.errors import UsageError
from trtserve.host.machine import format_bytes
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec

if TYPE_CHECKING:
    from trtserve.pipeline.estimate import GpuAnswer, MachineFit, ModelNeed
    from trtserve.pipeline.gpu_fit import Gpu, GpuFit
    from trtserve.pipeline.stages import StageNeeds

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


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder, name of an import, alias, or org/name[@revision] of the hub.",
            autocompletion=sources,
        ),
    ],
    *,
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
    """
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
