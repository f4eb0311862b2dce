"""`trtserve convert`: a Hugging Face folder becomes a TensorRT-LLM checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trtserve.cli.filled import filled
from trtserve.cli.options import (
    CalibDatasetOption,
    CalibSizeOption,
    ContainerFlagOption,
    ContainerOption,
    ConverterFlagOption,
    ConverterOption,
    DryRunOption,
    DtypeOption,
    ExamplesOption,
    GpuSmOption,
    IgnoreTensorsOption,
    JsonOption,
    MoeEpSizeOption,
    MoeTpSizeOption,
    OutOption,
    ParallelEmbeddingOption,
    PpSizeOption,
    QuantizeOption,
    QuietOption,
    ScriptOption,
    ShardingDimOption,
    TpSizeOption,
    TrtllmVersionOption,
    VerifyOption,
    WorkersOption,
)
from trtserve.cli.output import TerminalProgress, print_block, print_data, print_json
from trtserve.errors import UsageError
from trtserve.machine import gibibytes
from trtserve.specs import CALIBRATED, CheckSpec, ConvertSpec

if TYPE_CHECKING:
    from trtserve.convert import Plan


def convert(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hugging Face folder, or the name of an imported model.")
    ],
    tp_size: TpSizeOption = 1,
    pp_size: PpSizeOption = 1,
    moe_tp_size: MoeTpSizeOption = None,
    moe_ep_size: MoeEpSizeOption = None,
    use_parallel_embedding: ParallelEmbeddingOption = False,
    embedding_sharding_dim: ShardingDimOption = 0,
    ignore_tensors: IgnoreTensorsOption = None,
    dtype: DtypeOption = "auto",
    quantize: QuantizeOption = "none",
    gpu_sm: GpuSmOption = 80,
    trtllm_version: TrtllmVersionOption = None,
    converter: ConverterOption = "own",
    workers: WorkersOption = None,
    calib_dataset: CalibDatasetOption = None,
    calib_size: CalibSizeOption = None,
    trtllm_examples: ExamplesOption = None,
    trtllm_script: ScriptOption = None,
    converter_flags: ConverterFlagOption = None,
    container: ContainerOption = None,
    container_flags: ContainerFlagOption = None,
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="-- FLAG", help="Flags for NVIDIA's tool as they are.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the checkpoint; default: the model's.")] = None,
    out: OutOption = None,
    verify: VerifyOption = False,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Convert a Hugging Face model to a TensorRT-LLM checkpoint and print its path."""
    options = locals()  # before anything else has a name here
    from trtserve.convert import convert_model, destination_of, find_model, plan_conversion

    if flags and converter == "own" and quantize not in CALIBRATED:
        raise UsageError(
            f"{' '.join(flags)} stands behind the model, which is for flags of NVIDIA's tools: none is run here.",
            hint="Give one model, and options by their names; add --converter upstream for NVIDIA's converter.",
        )
    spec = filled(ConvertSpec, {**options, "converter_flags": (*(converter_flags or ()), *(flags or ()))})
    if container is not None and not spec.upstream:
        raise UsageError("Our own converter runs here and needs no --container.", hint="Add --converter upstream.")
    progress = TerminalProgress(quiet=quiet)
    source = find_model(model, progress=progress)
    plan = plan_conversion(source, spec)
    place = destination_of(plan, name or source.name, out=out)
    if not dry_run:
        asked = CheckSpec() if verify else None
        convert_model(source, spec, name=name, out=out, verify=asked, plan=plan, progress=progress)
    result = {"path": str(place.path), "reused": place.reused, "verified": verify and not dry_run, **_described(plan)}
    if json:
        print_json("convert", result)
    elif dry_run:
        runs = []
        if spec.upstream:
            from trtserve.convert.upstream import upstream_command

            runs.append(f"command   {upstream_command(source, plan, place.path)}")
        print_block("\n".join([*_lines(plan, reused=place.reused), *runs, f"to        {place.path}"]))
    else:
        print_data(str(place.path))


def _described(plan: Plan) -> dict[str, object]:
    return {
        "architecture": plan.config["architecture"],
        "dtype": plan.spec.dtype,
        "quant_algo": plan.config["quantization"]["quant_algo"],
        "tp_size": plan.spec.tp_size,
        "pp_size": plan.spec.pp_size,
        "bytes": plan.total_bytes,
        "largest_tensor_bytes": plan.largest_tensor,
        "left_out": list(plan.left_out),
        "fingerprint": plan.fingerprint,
    }


def _lines(plan: Plan, *, reused: bool) -> list[str]:
    ranks = len(plan.sizes)
    if plan.spec.upstream:
        source, runs = "by NVIDIA's tool", "the command below is run"
    else:
        tensors = len(plan.moves) + len(plan.packed)
        source, runs = f"{tensors} tensors, {gibibytes(plan.source_bytes)}", "no external command is run"
    return [
        f"convert   {plan.config['architecture']}, {source}",
        f"as        {plan.spec.dtype}, quantization {plan.config['quantization']['quant_algo'] or 'none'}",
        f"ranks     {ranks} (tp {plan.spec.tp_size} × pp {plan.spec.pp_size}), {gibibytes(plan.total_bytes)}",
        "state     reused: it lies there already" if reused else f"state     to be made; {runs}",
    ]
