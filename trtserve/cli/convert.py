"""`trtserve convert`, `build` and `lora`: one stage each, planned, described and run."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtserve.artifacts import Checkpoint, Model
from trtserve.cli.options import DryRunOption, JsonOption, OutOption, QuietOption, VerifyOption, models, paths
from trtserve.cli.output import TerminalProgress, print_block, print_data, print_json, say
from trtserve.errors import UsageError
from trtserve.host.machine import format_bytes
from trtserve.specs import BuildSpec, CheckSpec, ConvertSpec
from trtserve.store import Store

if TYPE_CHECKING:
    from trtserve.pipeline.build import BuildPlan
    from trtserve.pipeline.convert import ConversionPlan
    from trtserve.pipeline.lora import AdapterPlan


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
        str | None, typer.Option("--name", metavar="NAME", help="Name of the checkpoint.", show_default="the model's")
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
    from trtserve.pipeline.convert import plan_conversion

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
        source = Store().find(Model, model, progress=progress)
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


def build(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="Checkpoint folder, or the name of an imported model.", autocompletion=models
        ),
    ],
    spec: BuildSpec,
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="-- FLAG", help="Flags for trtllm-build, passed on unchanged.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the engine.", show_default="the checkpoint's")
    ] = None,
    out: OutOption = None,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Build an engine from a checkpoint and print its path; for NVIDIA GPUs with `trtllm-build`.

    Examples:
        trtserve build llama-2-7b --max-batch-size 32 --max-seq-len 2048
        trtserve build ./checkpoint --out ./engine --dry-run
        trtserve build ./checkpoint --runtime tensorrt_llm -- --moe_plugin auto
    """
    from trtserve.pipeline.build import plan_build, require_complete

    spec = replace(spec, builder_flags=(*spec.builder_flags, *(flags or ())))
    progress = TerminalProgress(quiet=quiet)
    facts: dict[str, object] = {}
    with Store().in_use(*([] if dry_run else [checkpoint, name])):
        source = Store().find(Checkpoint, checkpoint, progress=progress)
        plan = plan_build(source, spec, name=name, out=out, progress=progress)
        if dry_run and not plan.reused:
            require_complete(source)  # as a build does
        if not dry_run:
            engine = plan.run(progress)
            facts = dict(engine.manifest.facts) if engine.manifest else {}
    if json:
        print_json(
            "build", {"path": str(plan.path), "reused": plan.reused, **_engine_described(plan, source.path), **facts}
        )
    elif dry_run:
        print_block("\n".join(_engine_lines(plan, source.path)))
    else:
        print_data(str(plan.path))
        if not quiet:
            say(f"Next: trtserve repo {shlex.quote(str(plan.path))} --tokenizer MODEL")


def _engine_described(plan: BuildPlan, checkpoint: Path) -> dict[str, object]:
    engine = plan.engine
    command = engine.command(checkpoint.absolute(), plan.path)
    return {
        "runtime": engine.runtime,
        **asdict(engine.limits),
        **engine.settings(),
        "tools": engine.versions(),
        "weights_precision": engine.weights_precision,
        "memory_bytes": engine.peak_memory,
        "disk_bytes": engine.disk_bytes,
        "command": None if command is None else str(command),
        "fingerprint": plan.fingerprint,
    }


def _engine_lines(plan: BuildPlan, checkpoint: Path) -> list[str]:
    engine, limits = plan.engine, plan.engine.limits
    tools = ", ".join(f"{tool} {version}" for tool, version in engine.versions().items())
    command = engine.command(checkpoint.absolute(), plan.path)
    longest = min(limits.max_input_len, limits.max_seq_len - 1)  # an answer has at least one token
    made = "to be made; no external command is run" if command is None else "to be made"
    return [
        f"build     {engine.config.architecture}, {format_bytes(engine.disk_bytes)}, by {tools}",
        f"as        {engine.precision}",
        f"limits    {limits.max_batch_size} requests, {limits.max_num_tokens} tokens per step",
        f"lengths   prompts up to {longest} tokens, prompt and answer up to {limits.max_seq_len}",
        *([f"features  {engine.words()}"] if engine.words() else []),
        f"needs     {engine.memory_words()}",
        *(f"note      {note}" for note in engine.notes),
        f"state     {'reused: it exists already' if plan.reused else made}",
        *([] if command is None or plan.reused else [f"command   {command}"]),
        f"to        {plan.path}",
    ]


def lora(
    adapter: Annotated[
        str,
        typer.Argument(
            metavar="ADAPTER", help="Folder of a PEFT adapter, or org/name[@revision] of the hub.", autocompletion=paths
        ),
    ],
    storage_type: Annotated[
        Literal["float16", "float32", "bfloat16"], typer.Option("--storage-type", help="Type of the weights.")
    ] = "float16",
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the result.", show_default="the adapter's")
    ] = None,
    out: OutOption = None,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Convert a LoRA adapter, as NVIDIA's hf_lora_convert does, and print the folder of its two .npy files.

    `import` and `repo` take the adapter with --lora, and a running server loads it over HTTP: `trtserve help query.md`
    and `trtserve help openai.md` say how.

    Examples:
        trtserve lora ./poet-lora
        trtserve lora org/poet-lora --storage-type bfloat16 --name poet
    """
    from trtserve.pipeline.lora import build_options, plan_adapter, run_adapter_conversion

    progress = TerminalProgress(quiet=quiet)
    plan = plan_adapter(adapter, name=name, out=out, storage_type=storage_type)
    facts: dict[str, object] = {}
    if not dry_run:
        made = run_adapter_conversion(plan, progress=progress)
        facts = dict(made.manifest.facts) if made.manifest else {}
        progress.step(f"Engines for it are built with: {build_options(made)}")
    if json:
        print_json("lora", {**_adapter_described(plan), **facts})
    elif dry_run:
        print_data("\n".join(_adapter_lines(plan)))
    else:
        print_data(str(plan.path))


def _adapter_described(plan: AdapterPlan) -> dict[str, object]:
    return {
        "path": str(plan.path),
        "reused": plan.reused,
        "source": plan.source.text,
        "storage_type": plan.storage_type,
        "base_model": plan.config.base_model,
        "targets": plan.targets,
        "rows": len(plan.pairs),
        "fingerprint": plan.fingerprint,
    }


def _adapter_lines(plan: AdapterPlan) -> list[str]:
    pull = plan.revision is not None and not plan.reused
    return [
        f"adapter   {plan.source.text}, made for {plan.config.base_model or 'a model that it does not name'}",
        f"modules   {', '.join(plan.targets)} ({len(plan.pairs)})"
        if plan.pairs
        else "modules   known after the download",
        f"type      {plan.storage_type}",
        "state     reused: it exists already" if plan.reused else f"state     to be {'downloaded and ' * pull}made",
        f"to        {plan.path}",
    ]
