"""`trtserve convert`: convert a Hugging Face model to a TensorRT-LLM checkpoint."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from trtserve.cli.options import DryRunOption, JsonOption, OutOption, QuietOption, VerifyOption, models
from trtserve.cli.output import TerminalProgress, print_block, print_data, print_json, say
from trtserve.errors import UsageError
from trtserve.host.machine import format_bytes
from trtserve.specs import CheckSpec, ConvertSpec
from trtserve.store import Store

if TYPE_CHECKING:
    from trtserve.pipeline.convert import ConversionPlan


def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Hugging Face folder, or the name of an imported model.", autocompletion=models
        ),
    ],
    spec: ConvertSpec,
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="-- FLAG", help="Flags for NVIDIA's tool, passed on unchanged.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the checkpoint.", show_default="the model's")
    ] = None,
    out: OutOption = None,
    verify: VerifyOption = False,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Convert a Hugging Face model to a TensorRT-LLM checkpoint and print its path.

    Examples:
        trtserve convert ./Llama-2-7b-hf --tp-size 2
        trtserve convert llama-2-7b --quantize int8 --out ./checkpoint
        trtserve convert llama-2-7b --converter upstream -- --load_by_shard
    """
    from trtserve.pipeline.convert import find_model, plan_conversion

    if flags and not spec.upstream:
        raise UsageError(
            f"{' '.join(flags)} follows the model, but only NVIDIA's tools take such flags, and none runs here.",
            hint="Give one model, and options by their names; add --converter upstream for NVIDIA's converter.",
        )
    spec = replace(spec, converter_flags=(*spec.converter_flags, *(flags or ())))
    if spec.container is not None and not spec.upstream:
        raise UsageError("Our own converter needs no --container.", hint="Add --converter upstream.")
    progress = TerminalProgress(quiet=quiet)
    with Store().in_use(*([] if dry_run else [model, name])):
        source = find_model(model, progress=progress)
        plan = plan_conversion(source, spec, name=name, out=out, verify=CheckSpec() if verify else None)
        if not dry_run:
            plan.run(progress)
    result = {"path": str(plan.path), "reused": plan.reused, "verified": verify and not dry_run, **_described(plan)}
    if json:
        print_json("convert", result)
    elif dry_run:
        command = plan.work.command(plan.path)
        runs = [] if command is None else [f"command   {command}"]
        print_block("\n".join([*_lines(plan), *runs, f"to        {plan.path}"]))
    else:
        print_data(str(plan.path))
        if not quiet:
            say(f"Next: trtserve build {shlex.quote(str(plan.path))}")


def _described(plan: ConversionPlan) -> dict[str, object]:
    return {
        "architecture": plan.config.architecture,
        "dtype": plan.work.spec.dtype,
        "quant_algo": plan.config.quantization.quant_algo,
        "tp_size": plan.work.spec.tp_size,
        "pp_size": plan.work.spec.pp_size,
        "bytes": plan.total_bytes,
        "largest_tensor_bytes": plan.work.largest_tensor,
        "left_out": list(plan.work.left_out),
        "fingerprint": plan.fingerprint,
    }


def _lines(plan: ConversionPlan) -> list[str]:
    work, ranks = plan.work, len(plan.work.sizes)
    runs = "the command below is run" if plan.by_nvidia else "no external command is run"
    return [
        f"convert   {plan.config.architecture}, {work.source}",
        f"as        {work.spec.dtype}, quantization {plan.config.quantization.quant_algo or 'none'}",
        f"ranks     {ranks} (tp {work.spec.tp_size} × pp {work.spec.pp_size}), {format_bytes(plan.total_bytes)}",
        "state     reused: it exists already" if plan.reused else f"state     to be made; {runs}",
    ]
