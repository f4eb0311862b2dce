"""`trtserve build`: a TensorRT-LLM checkpoint becomes an engine."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtserve.cli.build_options import (
    AttentionPluginOption,
    BuildWorkersOption,
    ContextFmhaOption,
    Fp8ContextOption,
    GemmPluginOption,
    InputPaddingOption,
    KvCacheTypeOption,
    LogitsDtypeOption,
    OptNumTokensOption,
    ProfilesOption,
    ReduceFusionOption,
    TokensPerBlockOption,
    VerbosityOption,
)
from trtserve.cli.options import (
    AllLogitsOption,
    ContainerFlagOption,
    ContainerOption,
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
    TrtllmVersionOption,
)
from trtserve.cli.output import TerminalProgress, print_block, print_data, print_json
from trtserve.machine import gibibytes
from trtserve.specs import BuildSpec

if TYPE_CHECKING:
    from trtserve.build import Plan


def build(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Checkpoint folder, or the name of an imported model.")
    ],
    builder_flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- FLAG", help="Flags for trtllm-build as they are.", show_default=False),
    ] = None,
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
    use_paged_context_fmha: PagedContextOption = None,
    kv_precision: KvPrecisionOption = "auto",
    runtime: RuntimeOption = "auto",
    trtllm_version: TrtllmVersionOption = None,
    gemm_plugin: GemmPluginOption = None,
    gpt_attention_plugin: AttentionPluginOption = None,
    context_fmha: ContextFmhaOption = None,
    use_fp8_context_fmha: Fp8ContextOption = None,
    remove_input_padding: InputPaddingOption = None,
    reduce_fusion: ReduceFusionOption = None,
    multiple_profiles: ProfilesOption = None,
    kv_cache_type: KvCacheTypeOption = None,
    tokens_per_block: TokensPerBlockOption = None,
    opt_num_tokens: OptNumTokensOption = None,
    logits_dtype: LogitsDtypeOption = None,
    profiling_verbosity: VerbosityOption = None,
    build_workers: BuildWorkersOption = None,
    container: ContainerOption = None,
    container_flags: ContainerFlagOption = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the engine; default: the checkpoint's.")] = None,
    out: OutOption = None,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Build an engine from a checkpoint and print its path; for NVIDIA GPUs by `trtllm-build`."""
    options = locals()  # before anything else has a name here; each option has the name of the field that it fills
    from trtserve.build import build_engine, find_checkpoint, plan_build, require_whole

    lists = {"builder_flags": tuple(builder_flags or ()), "container_flags": tuple(container_flags or ())}
    given = {**options, **lists}
    spec = BuildSpec(**{field.name: given[field.name] for field in fields(BuildSpec)})
    progress = TerminalProgress(quiet=quiet)
    source = find_checkpoint(checkpoint, progress=progress)
    plan = plan_build(source, spec, name=name, out=out)
    facts: dict[str, object] = {}
    if dry_run and not plan.reused:
        require_whole(source)  # as a build does
    if not dry_run:
        engine = build_engine(source, spec, name=name, out=out, progress=progress)
        facts = dict(engine.manifest.facts) if engine.manifest else {}
    if json:
        print_json("build", {"path": str(plan.path), "reused": plan.reused, **_described(plan, source.path), **facts})
    elif dry_run:
        print_block("\n".join(_lines(plan, source.path)))
    else:
        print_data(str(plan.path))


def _described(plan: Plan, checkpoint: Path) -> dict[str, object]:
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


def _lines(plan: Plan, checkpoint: Path) -> list[str]:
    engine, limits = plan.engine, plan.engine.limits
    tools = ", ".join(f"{tool} {version}" for tool, version in engine.versions().items())
    command = engine.command(checkpoint.absolute(), plan.path)
    made = "to be made; no external command is run" if command is None else "to be made"
    return [
        f"build     {engine.config['architecture']}, {gibibytes(engine.disk_bytes)}, by {tools}",
        f"as        {engine.precision}",
        f"limits    {limits.max_batch_size} requests, {limits.max_num_tokens} tokens per step",
        f"lengths   prompts up to {limits.max_input_len} tokens, prompt and answer up to {limits.max_seq_len}",
        *([f"takes     {engine.words()}"] if engine.words() else []),
        f"needs     {engine.memory_words()}",
        *(f"note      {note}" for note in engine.notes),
        f"state     {'reused: it lies there already' if plan.reused else made}",
        *([] if command is None or plan.reused else [f"command   {command}"]),
        f"to        {plan.path}",
    ]
