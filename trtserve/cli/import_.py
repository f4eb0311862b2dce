"""`trtserve import`: a model comes from the hub, a folder or the package, and becomes a model repository."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.cli.build_options import (
    AttentionPluginOption,
    BuilderFlagOption,
    ContextFmhaOption,
    Fp8ContextOption,
    GemmPluginOption,
    ImportWorkersOption,
    InputPaddingOption,
    KvCacheTypeOption,
    LogitsDtypeOption,
    OptNumTokensOption,
    ProfilesOption,
    ReduceFusionOption,
    TokensPerBlockOption,
    VerbosityOption,
)
from trtserve.cli.filled import filled
from trtserve.cli.options import (
    AllLogitsOption,
    CalibDatasetOption,
    CalibSizeOption,
    ContainerFlagOption,
    ContainerOption,
    ContextLogitsOption,
    ConverterFlagOption,
    ConverterOption,
    DryRunOption,
    DtypeOption,
    ExamplesOption,
    GenerationLogitsOption,
    GpuSmOption,
    IgnoreTensorsOption,
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
    MoeEpSizeOption,
    MoeTpSizeOption,
    OutOption,
    PagedContextOption,
    ParallelEmbeddingOption,
    PpSizeOption,
    PromptTableOption,
    QuantizeOption,
    QuietOption,
    RuntimeOption,
    ScriptOption,
    ShardingDimOption,
    SpeculativeModeOption,
    TpSizeOption,
    TrtllmVersionOption,
    VerifyOption,
    WorkersOption,
)
from trtserve.cli.output import TerminalProgress, print_data, print_json
from trtserve.cli.repo import find_draft, place_of, repository_spec, say_version_is_unused
from trtserve.cli.repo_options import (
    AbsolutePathsOption,
    AccumulateOption,
    BatchingOption,
    BlsInstancesOption,
    ChunkedOption,
    ContainerPathsOption,
    CopyOption,
    DetokenizersOption,
    DraftOption,
    ExcludeOption,
    IntoOption,
    KvFractionOption,
    KvTokensOption,
    LoraOption,
    PolicyOption,
    QueueOption,
    ReleaseOption,
    ReuseOption,
    SetOption,
    StreamingOption,
    SuffixOption,
    TokenizersOption,
    TritonBackendOption,
    TritonBatchOption,
    WindowOption,
)
from trtserve.cli.stages import print_commands, print_stages
from trtserve.machine import gibibytes
from trtserve.specs import BuildSpec, CheckSpec, ConvertSpec
from trtserve.store import Store

if TYPE_CHECKING:
    from trtserve.pipeline import ImportSpec


_SOURCE_HELP = (
    "demo, an alias (llama-2-7b, llama-3-8b-instruct, gpt2 …), org/name or org/name@revision of the hub, or a folder."
)


def import_(
    source: Annotated[str, typer.Argument(metavar="MODEL", help=_SOURCE_HELP)],
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the model; default: alias, last part of the id, or folder.")
    ] = None,
    download_only: Annotated[bool, typer.Option("--download-only", help="Stop after the pull.")] = False,
    discard_intermediate: Annotated[
        bool, typer.Option("--discard-intermediate", help="Remove the checkpoint when the repository is there.")
    ] = False,
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
    converter: ConverterOption = "own",
    workers: WorkersOption = None,
    calib_dataset: CalibDatasetOption = None,
    calib_size: CalibSizeOption = None,
    trtllm_examples: ExamplesOption = None,
    trtllm_script: ScriptOption = None,
    converter_flags: ConverterFlagOption = None,
    verify: VerifyOption = False,
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
    build_workers: ImportWorkersOption = None,
    container: ContainerOption = None,
    container_flags: ContainerFlagOption = None,
    builder_flags: BuilderFlagOption = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            help="Hugging Face folder with the tokenizer, or the name of an imported model; default: the model's own.",
        ),
    ] = None,
    streaming: StreamingOption = True,
    settings: SetOption = None,
    release: ReleaseOption = None,
    triton_max_batch_size: TritonBatchOption = None,
    preprocessing_instance_count: TokenizersOption = 1,
    postprocessing_instance_count: DetokenizersOption = 1,
    bls_instance_count: BlsInstancesOption = None,
    max_tokens_in_paged_kv_cache: KvTokensOption = None,
    kv_cache_free_gpu_mem_fraction: KvFractionOption = None,
    batching_strategy: BatchingOption = None,
    batch_scheduler_policy: PolicyOption = None,
    enable_kv_cache_reuse: ReuseOption = None,
    enable_chunked_context: ChunkedOption = None,
    max_attention_window_size: WindowOption = None,
    exclude_input_in_output: ExcludeOption = None,
    accumulate_tokens: AccumulateOption = None,
    max_queue_size: QueueOption = None,
    draft_engine: DraftOption = None,
    lora: LoraOption = None,
    triton_backend: TritonBackendOption = None,
    trtllm_version: TrtllmVersionOption = None,
    suffix: SuffixOption = "",
    absolute_paths: AbsolutePathsOption = False,
    container_paths: ContainerPathsOption = None,
    copy: CopyOption = False,
    into: IntoOption = None,
    out: OutOption = None,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Pull a model, convert it, build its engine and assemble its repository; what exists is reused.

    The engine goes to $ENGINE_DEST_PATH/NAME where that variable is set.
    """
    options = locals()  # before anything else has a name here
    progress = TerminalProgress(quiet=quiet)
    spec = _import_spec(options)
    if download_only:
        _download(spec, progress, json=json, dry_run=dry_run)
    elif dry_run:
        _print_plan(spec, progress, json=json)
    else:
        _run(spec, progress, json=json, quiet=quiet)


def _import_spec(options: Mapping[str, Any]) -> ImportSpec:
    """What the options ask for; each option has the name of the field that it fills."""
    from trtserve.artifacts import Model
    from trtserve.import_.sources import parse_source
    from trtserve.pipeline import ImportSpec, engine_destination
    from trtserve.runtimes import choose_runtime, openvino

    name = parse_source(options["source"], name=options["name"]).name
    tokenizer = options["tokenizer"]
    progress = TerminalProgress(quiet=options["quiet"])
    draft, draft_tokenizer = find_draft(options["draft_engine"], Store(), progress)
    convert, build = filled(ConvertSpec, options), filled(BuildSpec, options)
    if not convert.upstream and choose_runtime(build.runtime, container=build.container).NAME == openvino.NAME:
        # It may come from the environment of a whole machine, and means nothing to the embedded runtime.
        say_version_is_unused(convert.trtllm_version, progress)
        convert = replace(convert, trtllm_version=None)
    return ImportSpec(
        source=options["source"],
        convert=convert,
        build=build,
        repository=repository_spec({**options, "name": name}, Store()),
        tokenizer=Store().find(Model, tokenizer, progress=progress).path if tokenizer else None,
        draft=draft,
        draft_tokenizer=draft_tokenizer,
        engine_out=engine_destination(name),
        **place_of(options),
        discard_intermediate=options["discard_intermediate"],
        verify=CheckSpec() if options["verify"] else None,
    )


def _run(spec: ImportSpec, progress: TerminalProgress, *, json: bool, quiet: bool) -> None:
    from trtserve.pipeline import import_to_repository
    from trtserve.repo import tree

    repository = import_to_repository(spec, progress=progress)
    if json:
        record = next(record for record in Store().recorded() if record.name == spec.name)
        print_json("import", {"path": str(repository.path), **asdict(record)})
    elif quiet:
        print_data(str(repository.path))
    else:
        # The first line is the repository's path, the rest is what lies in it.
        print_data("\n".join([str(repository.path), *tree(repository.path).splitlines()[1:]]))


def _download(spec: ImportSpec, progress: TerminalProgress, *, json: bool, dry_run: bool) -> None:
    from trtserve.import_ import import_model, missing_bytes, model_destination, plan_model
    from trtserve.pipeline.llmapi import for_llmapi

    out, own = spec.out, spec.tokenizer is None
    others = spec.convert.converter == "upstream" or for_llmapi(spec)
    if not dry_run:
        model = import_model(
            spec.source, name=spec.name, out=out, own_tokenizer=own, any_architecture=others, progress=progress
        )
        facts = model.manifest.spec if model.manifest else {}
        if json:
            print_json("import", {"path": str(model.path), "name": model.name, **facts})
        else:
            print_data(str(model.path))
        return
    plan = plan_model(spec.source, name=spec.name, own_tokenizer=own, any_architecture=others, progress=progress)
    path, missing = model_destination(plan, out, Store()), missing_bytes(plan, out=out)
    if json:
        print_json("import", {"path": str(path), "name": plan.name, "missing_bytes": missing})
    else:
        print_data(f"pull      {gibibytes(missing)} of {gibibytes(plan.total_bytes)} to {path}")


def _print_plan(spec: ImportSpec, progress: TerminalProgress, *, json: bool) -> None:
    from trtserve.pipeline import plan_import
    from trtserve.pipeline.llmapi import for_llmapi, plan_llmapi_import

    memory = None
    if for_llmapi(spec, progress):
        stages = plan_llmapi_import(spec, progress=progress).stages()
    else:
        plan = plan_import(spec, progress=progress)
        stages, memory = plan.stages(), plan.memory_bytes
    if json:
        print_json("import", {"name": spec.name, "memory_bytes": memory, "stages": stages})
        return
    print_stages(stages)
    if memory is not None:
        run = "" if any(stage["command"] for stage in stages) else "; no external command is run"
        print_data(f"memory    needs  {gibibytes(memory):>9}  to build and serve{run}")
    print_commands(stages)
