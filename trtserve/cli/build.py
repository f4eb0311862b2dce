"""`trtserve build`: build an engine from a TensorRT-LLM checkpoint."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtserve.cli.options import DryRunOption, JsonOption, OutOption, QuietOption, models
from trtserve.cli.output import TerminalProgress, print_block, print_data, print_json, say
from trtserve.host.machine import format_bytes
from trtserve.specs import BuildSpec
from trtserve.store import Store

if TYPE_CHECKING:
    from trtserve.pipeline.build import BuildPlan


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
        str | None, typer.Option("--name", help="Name of the engine.", show_default="the checkpoint's")
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
    from trtserve.pipeline.build import find_checkpoint, plan_build, require_complete

    spec = replace(spec, builder_flags=(*spec.builder_flags, *(flags or ())))
    progress = TerminalProgress(quiet=quiet)
    facts: dict[str, object] = {}
    with Store().in_use(*([] if dry_run else [checkpoint, name])):
        source = find_checkpoint(checkpoint, progress=progress)
        plan = plan_build(source, spec, name=name, out=out, progress=progress)
        if dry_run and not plan.reused:
            require_complete(source)  # as a build does
        if not dry_run:
            engine = plan.run(progress)
            facts = dict(engine.manifest.facts) if engine.manifest else {}
    if json:
        print_json("build", {"path": str(plan.path), "reused": plan.reused, **_described(plan, source.path), **facts})
    elif dry_run:
        print_block("\n".join(_lines(plan, source.path)))
    else:
        print_data(str(plan.path))
        if not quiet:
            say(f"Next: trtserve repo {shlex.quote(str(plan.path))} --tokenizer MODEL")


def _described(plan: BuildPlan, checkpoint: Path) -> dict[str, object]:
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


def _lines(plan: BuildPlan, checkpoint: Path) -> list[str]:
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
        *([f"takes     {engine.words()}"] if engine.words() else []),
        f"needs     {engine.memory_words()}",
        *(f"note      {note}" for note in engine.notes),
        f"state     {'reused: it exists already' if plan.reused else made}",
        *([] if command is None or plan.reused else [f"command   {command}"]),
        f"to        {plan.path}",
    ]
