"""`trtserve plan`: what a model will take of memory, disk and time, and what fits, from its headers alone."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from trtserve.cli.options import (
    DtypeOption,
    IgnoreTensorsOption,
    JsonOption,
    KvPrecisionOption,
    MaxBatchSizeOption,
    MaxBeamWidthOption,
    MaxInputLenOption,
    MaxNumTokensOption,
    MaxSeqLenOption,
    MoeEpSizeOption,
    MoeTpSizeOption,
    ParallelEmbeddingOption,
    PpSizeOption,
    QuantizeOption,
    QuietOption,
    RuntimeOption,
    ShardingDimOption,
    TpSizeOption,
)
from trtserve.cli.output import TerminalProgress, count, print_block, print_data, print_json, print_table
from trtserve.cli.repo_options import KvTokensOption
from trtserve.errors import UsageError
from trtserve.machine import gibibytes
from trtserve.specs import BuildSpec, ConvertSpec, DType, Quantization

if TYPE_CHECKING:
    from trtserve.capacity.fitting import GpuFit
    from trtserve.capacity.gpus import Gpu
    from trtserve.plan import GpuAnswer, MachineFit, ModelNeed, StageNeed

_NOT_MEASURED = "not measured yet"


def plan(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder, name of an import, alias, or org/name[@revision] of the hub."),
    ],
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Plan for this NVIDIA GPU, e.g. h100-80gb; default: this machine.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", help="Plan for GPUs with this usable memory, e.g. 80GB or 79.6GiB.")
    ] = None,
    tp_size: TpSizeOption = 1,
    pp_size: PpSizeOption = 1,
    moe_tp_size: MoeTpSizeOption = None,
    moe_ep_size: MoeEpSizeOption = None,
    use_parallel_embedding: ParallelEmbeddingOption = False,
    embedding_sharding_dim: ShardingDimOption = 0,
    dtype: DtypeOption = "auto",
    quantize: QuantizeOption = "none",
    ignore_tensors: IgnoreTensorsOption = None,
    max_batch_size: MaxBatchSizeOption = None,
    max_input_len: MaxInputLenOption = None,
    max_seq_len: MaxSeqLenOption = None,
    max_num_tokens: MaxNumTokensOption = None,
    max_beam_width: MaxBeamWidthOption = 1,
    kv_precision: KvPrecisionOption = "auto",
    runtime: RuntimeOption = "auto",
    max_tokens_in_paged_kv_cache: KvTokensOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say what a model will take of memory, disk and time, and what fits; nothing is pulled or made."""
    options = locals()  # before anything else has a name here
    from trtserve.plan import Question, plan_needs, require_fit

    chosen = _gpu(gpu, gpu_memory)
    question = Question(
        convert=ConvertSpec(
            tp_size=tp_size,
            pp_size=pp_size,
            moe_tp_size=moe_tp_size,
            moe_ep_size=moe_ep_size,
            use_parallel_embedding=use_parallel_embedding,
            embedding_sharding_dim=embedding_sharding_dim,
            dtype=cast(DType, dtype),
            quantize=cast(Quantization, quantize),
            ignore_tensors=tuple(ignore_tensors or ()),
        ),
        build=BuildSpec(**{field.name: options[field.name] for field in fields(BuildSpec) if field.name in options}),
        kv_tokens=max_tokens_in_paged_kv_cache,
        gpu=chosen,
    )
    needs = plan_needs(model, question, progress=TerminalProgress(quiet=quiet))
    if json:
        print_json("plan", _described(needs))
    else:
        _print(needs)
    require_fit(needs)


def _gpu(name: str | None, memory: str | None) -> Gpu | None:
    from trtserve.capacity.gpus import Gpu, find_gpu, parse_size

    if name is not None and memory is not None:
        raise UsageError("--gpu and --gpu-memory were both given; give one.")
    if memory is not None:
        return Gpu(name=memory, memory=parse_size(memory, "--gpu-memory"))
    return None if name is None else find_gpu(name)


def _described(needs: ModelNeed) -> dict[str, Any]:
    result = asdict(needs)
    if needs.machine is not None:
        result["machine"]["sequences"] = needs.machine.sequences
    if needs.gpu is not None:
        for key, fit in (("asked", needs.gpu.asked), ("smallest", needs.gpu.smallest)):
            if fit is not None:
                result["gpu"][key] |= {"sequences": fit.sequences, "fits": fit.fits}
    return result


def _print(needs: ModelNeed) -> None:
    pull = f", {gibibytes(needs.pull_bytes)} to pull" if needs.pull_bytes else ""
    lines = [
        f"model       {needs.name}: {needs.architecture}, {count(needs.parameters)} parameters",
        f"weights     {gibibytes(needs.source_bytes)}{pull}; as {needs.dtype}"
        + (f", {needs.quantization}" if needs.quantization else ""),
    ]
    if needs.converter:
        lines.append(f"converter   {needs.converter}")
    if needs.engine_bytes is not None and needs.kv_bytes_per_token is not None:
        lines.append(f"engine      {gibibytes(needs.engine_bytes)}: {needs.precision}")
        lines.append(f"KV cache    {gibibytes(needs.kv_bytes_per_token)} per token")
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


def _row(stage: StageNeed) -> tuple[str, str, str, str]:
    sizes = ("-" if size is None else gibibytes(size) for size in (stage.disk, stage.memory))
    time = _NOT_MEASURED if stage.seconds is None else _duration(stage.seconds)
    disk, memory = sizes
    return stage.stage, disk, memory, "-" if stage.stage == "repo" else time


def _machine_lines(machine: MachineFit) -> list[str]:
    return [
        f"here        {gibibytes(machine.free_memory)} of memory and {gibibytes(machine.free_disk)} of disk are free",
        f"fits        {machine.tokens} tokens of KV cache: {machine.sequences} sequences of {machine.max_seq_len}"
        if machine.fits
        else f"fits        not. {machine.hint}",
    ]


def _gpu_lines(answer: GpuAnswer) -> list[str]:
    from trtserve.capacity.fitting import RESERVE

    asked = answer.asked
    free = "usable" if asked.gpu.here is None else "free"
    parts = (
        f"{gibibytes(asked.weights)} weights, {gibibytes(asked.activations)} activations and logits, "
        f"{gibibytes(RESERVE)} set aside, {gibibytes(asked.kv_per_token)} KV cache per token"
    )
    lines = [
        f"GPU         {asked.gpu.name}, {gibibytes(asked.gpu.memory)} {free} (estimated from shapes, not measured)",
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
