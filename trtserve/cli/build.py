"""`trtserve build`: a TensorRT-LLM checkpoint becomes an engine."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated

import typer

from trtserve.cli.options import (
    AllLogitsOption,
    ContextLogitsOption,
    DryRunOption,
    GenerationLogitsOption,
    JsonOption,
    KvPrecisionOption,
    LoraModulesOption,
    LoraPluginOption,
    MaxBatchSizeOption,
    MaxBeamWidthOption,
    MaxDraftLenOption,
    MaxInputLenOption,
    MaxLoraRankOption,
    MaxNumTokensOption,
    MaxSeqLenOption,
    OutOption,
    PagedContextOption,
    PromptTableOption,
    QuietOption,
    RuntimeOption,
    SpeculativeModeOption,
)
from trtserve.cli.output import TerminalProgress, print_data, print_json
from trtserve.machine import gibibytes
from trtserve.specs import BuildSpec

if TYPE_CHECKING:
    from trtserve.build import Plan


def build(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Checkpoint folder, or the name of an imported model.")
    ],
    max_batch_size: MaxBatchSizeOption = None,
    max_input_len: MaxInputLenOption = None,
    max_seq_len: MaxSeqLenOption = None,
    max_num_tokens: MaxNumTokensOption = None,
    max_beam_width: MaxBeamWidthOption = 1,
    max_draft_len: MaxDraftLenOption = 0,
    speculative_decoding_mode: SpeculativeModeOption = None,
    max_prompt_embedding_table_size: PromptTableOption = 0,
    gather_context_logits: ContextLogitsOption = False,
    gather_generation_logits: GenerationLogitsOption = False,
    gather_all_token_logits: AllLogitsOption = False,
    lora_plugin: LoraPluginOption = "disable",
    lora_target_modules: LoraModulesOption = None,
    max_lora_rank: MaxLoraRankOption = 64,
    use_paged_context_fmha: PagedContextOption = "enable",
    kv_precision: KvPrecisionOption = "auto",
    runtime: RuntimeOption = "auto",
    name: Annotated[str | None, typer.Option("--name", help="Name of the engine; default: the checkpoint's.")] = None,
    out: OutOption = None,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Build an engine from a checkpoint and print its path."""
    from trtserve.build import build_engine, find_checkpoint, plan_build

    options = locals()  # before anything else has a name here; each option has the name of the field that it fills
    spec = BuildSpec(**{field.name: options[field.name] for field in fields(BuildSpec)})
    progress = TerminalProgress(quiet=quiet)
    source = find_checkpoint(checkpoint, progress=progress)
    plan = plan_build(source, spec, name=name, out=out)
    facts: dict[str, object] = {}
    if not dry_run:
        engine = build_engine(source, spec, name=name, out=out, progress=progress)
        facts = dict(engine.manifest.facts) if engine.manifest else {}
    if json:
        print_json("build", {"path": str(plan.path), "reused": plan.reused, **_described(plan), **facts})
    elif dry_run:
        print_data("\n".join(_lines(plan)))
    else:
        print_data(str(plan.path))


def _described(plan: Plan) -> dict[str, object]:
    engine = plan.engine
    return {
        "runtime": engine.runtime,
        **asdict(engine.limits),
        **engine.features.record(),
        "weights_precision": engine.weights_precision,
        "compute_precision": engine.compute_precision,
        "kv_precision": engine.kv_precision,
        "memory_bytes": engine.memory_bytes,
        "disk_bytes": engine.disk_bytes,
        "fingerprint": plan.fingerprint,
    }


def _lines(plan: Plan) -> list[str]:
    engine, limits = plan.engine, plan.engine.limits
    tools = ", ".join(f"{tool} {version}" for tool, version in engine.tools.items())
    return [
        f"build     {engine.config['architecture']}, {gibibytes(engine.disk_bytes)}, by {tools}",
        f"as        {engine.precision}",
        f"limits    {limits.max_batch_size} requests, {limits.max_num_tokens} tokens per step",
        f"lengths   prompts up to {limits.max_input_len} tokens, prompt and answer up to {limits.max_seq_len}",
        *([f"takes     {engine.features.words()}"] if engine.features.words() else []),
        f"needs     {gibibytes(engine.memory_bytes)} of memory",
        *(f"note      {note}" for note in engine.notes),
        "state     reused: it lies there already"
        if plan.reused
        else "state     to be made; no external command is run",
        f"to        {plan.path}",
    ]
