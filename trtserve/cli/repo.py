"""`trtserve repo`: an engine and a tokenizer become a Triton model repository."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.artifacts import Adapter, Engine, Model, looks_like
from trtserve.cli.options import (
    DryRunOption,
    JsonOption,
    OutOption,
    PpSizeOption,
    QuietOption,
    RuntimeOption,
    TpSizeOption,
    TrtllmVersionOption,
)
from trtserve.cli.output import TerminalProgress, print_block, print_data, print_json, say
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
    NameOption,
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
from trtserve.errors import TrtserveError, UsageError
from trtserve.specs import RepositorySpec
from trtserve.store import Store

if TYPE_CHECKING:
    from trtserve.repo import RepositoryPlan

# Options that mean something where NVIDIA's templates are filled.
_OF_TEMPLATES = frozenset(
    {
        "engine", "from_template", "release", "trtllm_version", "drop_unset", "in_place", "out", "json", "dry_run",
        "quiet",
    }
)  # fmt: skip


def repo(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="ENGINE",
            help="Engine folder, or the name of an imported model; with --runtime llmapi a Hugging Face model; with "
            "--from-template KEY:VALUE,…",
        ),
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", help="Hugging Face folder with the tokenizer, or the name of an imported model."),
    ] = None,
    name: NameOption = None,
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
    runtime: RuntimeOption = "auto",
    tp_size: TpSizeOption = 1,
    pp_size: PpSizeOption = 1,
    from_template: Annotated[
        Path | None,
        typer.Option("--from-template", metavar="DIR", help="Fill NVIDIA's own templates in DIR instead."),
    ] = None,
    drop_unset: Annotated[
        bool, typer.Option("--drop-unset", help="With --from-template: leave out optional parameters without a value.")
    ] = False,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="With --from-template: fill the files where they are.")
    ] = False,
    copy: CopyOption = False,
    into: IntoOption = None,
    out: OutOption = None,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Assemble the Triton model repository of an engine and print its path."""
    options = locals()  # before anything else has a name here
    progress = TerminalProgress(quiet=quiet)
    if from_template is not None:
        _fill(from_template, options, progress)
    elif runtime == "llmapi":
        _assemble_llmapi(options, progress)
    else:
        _assemble(options, progress)


def _assemble(options: Mapping[str, Any], progress: TerminalProgress) -> None:
    from trtserve.repo import assemble_repository, default_name, plan_repository

    store, tokenizer = Store(), options["tokenizer"]
    sizes = [f"--{name.replace('_', '-')}" for name in ("tp_size", "pp_size") if options[name] != 1]
    if sizes:
        raise UsageError(
            f"{sizes[0]} is for --runtime llmapi: the ranks of an engine are those of its checkpoint.",
            hint=f"Convert with it: trtserve convert MODEL {sizes[0]} N",
        )
    if tokenizer is None:
        raise UsageError("--tokenizer is missing.", hint="Give the Hugging Face folder of the model, or its name.")
    source = store.find(Engine, options["engine"], progress=progress)
    spec = repository_spec({**options, "name": options["name"] or default_name(source)}, store)
    folder = store.find(Model, tokenizer, progress=progress).path
    draft, draft_tokenizer = find_draft(options["draft_engine"], store, progress)
    more: dict[str, Any] = {"draft": draft, "draft_tokenizer": draft_tokenizer}
    more |= place_of(options)
    plan = plan_repository(source, folder, spec, **more)
    if plan.facts["runtime"] == "openvino":
        say_version_is_unused(options["trtllm_version"], progress)
    if not options["dry_run"]:
        assemble_repository(source, folder, spec, **more, progress=progress)
    _print_result(options, plan.path, _described(plan), _lines(plan))


def _assemble_llmapi(options: Mapping[str, Any], progress: TerminalProgress) -> None:
    from trtserve.import_.sources import parse_source
    from trtserve.repo import default_name
    from trtserve.repo.llmapi import assemble_llmapi, plan_llmapi

    for name in ("tokenizer", "draft_engine"):
        if options[name] is not None:
            raise UsageError(f"--{name.replace('_', '-')} has no meaning with --runtime llmapi.")
    store, text = Store(), options["engine"]
    hub_id = text.removeprefix("hf:")
    remote = text != hub_id or ("/" in text and not Path(text).expanduser().exists())
    model = hub_id if remote else store.find(Model, text, progress=progress)
    default = parse_source(f"hf:{hub_id}").name if isinstance(model, str) else default_name(model)
    spec = repository_spec({**options, "name": options["name"] or default}, store)
    more: dict[str, Any] = {name: options[name] for name in ("tp_size", "pp_size")} | place_of(options)
    plan = plan_llmapi(model, spec, **more, store=store, progress=progress)
    if isinstance(model, str):
        progress.warn(f"The server loads {model} from the hub when it starts.")
    if not options["dry_run"]:
        assemble_llmapi(plan, progress=progress)
    described = {"path": str(plan.path), "reused": plan.reused, "models": list(plan.models), **plan.manifest.facts}
    lines = [
        f"{_verb(reused=plan.reused, added=plan.added):<9} {plan.path}",
        f"models    {', '.join(plan.models)}",
        f"model     {model if isinstance(model, str) else model.path}",
        "ranks     tensor parallel {tp_size}, pipeline parallel {pp_size}".format_map(plan.manifest.facts),
    ]
    _print_result(options, plan.path, described, lines)


def _fill(folder: Path, options: Mapping[str, Any], progress: TerminalProgress) -> None:
    from trtserve.repo.templates import fill_templates, write_filled

    given = [name for name, each in signature(repo).parameters.items() if options[name] != each.default]
    meaningless = [f"--{name.replace('_', '-')}" for name in given if name not in _OF_TEMPLATES]
    if meaningless:
        raise UsageError(
            f"With --from-template these have no meaning: {', '.join(meaningless)}.",
            hint="What the templates get stands in KEY:VALUE,…",
        )
    out, in_place = options["out"], options["in_place"]
    if out is not None and in_place:
        raise UsageError("--out and --in-place contradict each other; give one.")
    release = options["release"] or options["trtllm_version"]
    filled = fill_templates(
        folder, options["engine"], release=release, drop_unset=options["drop_unset"], progress=progress
    )
    if (out is not None or in_place) and not options["dry_run"]:
        write_filled(folder, filled, out)
    if options["json"]:
        print_json("repo", {"path": str(out or folder), "files": {str(each.path): each.text for each in filled}})
    elif out is not None or in_place:
        print_data(str(out or folder))
    else:  # as NVIDIA's tool does
        print_data("\n".join(each.text for each in filled))


def _print_result(
    options: Mapping[str, Any], path: Path, described: Mapping[str, object], lines: Sequence[str]
) -> None:
    from trtserve.repo import tree

    if options["json"]:
        print_json("repo", described)
    elif options["dry_run"]:
        print_block("\n".join(lines))
    else:
        if not options["quiet"]:
            say(tree(path))
        print_data(str(path))


def repository_spec(options: Mapping[str, Any], store: Store) -> RepositorySpec:
    """What the options ask for; each option has the name of the field that it fills."""
    from trtserve.triton.settings import parse_assignments

    given = {field.name: options[field.name] for field in fields(RepositorySpec)}
    given["settings"] = parse_assignments(options["settings"] or [])
    given["lora"] = parse_adapters(options["lora"] or [], store)
    return RepositorySpec(**given)


def say_version_is_unused(version: str | None, progress: TerminalProgress) -> None:
    """Say that `--trtllm-version` does nothing for the CPU; from the environment it is for a whole machine's work."""
    from trtserve.upstream.toolkit import VERSION_VARIABLE

    if version is not None and version != os.environ.get(VERSION_VARIABLE):
        progress.warn(
            f"--trtllm-version {version} is not used: the embedded executor serves this engine, without TensorRT-LLM. "
            "--release says whose inputs its models have."
        )


def place_of(options: Mapping[str, Any]) -> dict[str, Path | None]:
    """`--out`, a folder of its own, or `--into`, the repository to which its models are added."""
    if options["out"] is not None and options["into"] is not None:
        raise UsageError(
            "--out and --into contradict each other; give one.", hint="--into adds the models to a repository."
        )
    return {name: options[name] for name in ("out", "into")}


def parse_adapters(texts: Sequence[str], store: Store) -> dict[str, Path]:
    """`["name=folder", …]` as a dict of folders; a folder may be the name of an adapter that `trtserve lora` made.

    UsageError for a text without `=`, or a name given twice.
    """
    adapters: dict[str, Path] = {}
    for text in texts:
        name, sign, folder = text.partition("=")
        if not sign or not name or not folder:
            raise UsageError(f"--lora {text!r} is not NAME=FOLDER.", hint="For example: --lora poet=./poet-lora")
        if name in adapters:
            raise UsageError(f"--lora gives {name} twice.")
        adapters[name] = _adapter_folder(folder, store)
    return adapters


def _adapter_folder(text: str, store: Store) -> Path:
    """A PEFT folder gives way to the converted adapter of the same name: `trtserve lora ./poet`, `--lora poet=poet`."""
    folder = Path(text).expanduser()
    if folder.is_dir() and (looks_like(Adapter, folder) or text not in store.made(Adapter)):
        return folder.absolute()
    return store.find(Adapter, text).path


def find_draft(text: str | None, store: Store, progress: TerminalProgress) -> tuple[Engine | None, Path | None]:
    """The draft engine and, for an imported model, the folder of its tokenizer."""
    if text is None:
        return None, None
    engine = store.find(Engine, text, progress=progress)
    with suppress(TrtserveError):
        if not Path(text).is_dir():
            return engine, store.find(Model, text).path
    return engine, None


def _described(plan: RepositoryPlan) -> dict[str, object]:
    return {
        "path": str(plan.path),
        "reused": plan.reused,
        "models": list(plan.models),
        "fingerprint": plan.fingerprint,
        **plan.facts,
    }


def _verb(*, reused: bool, added: bool) -> str:
    return "reuse" if reused else "add to" if added else "make"


def _lines(plan: RepositoryPlan) -> list[str]:
    verb = _verb(reused=plan.reused, added=plan.into is not None)
    policy = "streaming (decoupled)" if plan.spec.streaming else "one response per request (not decoupled)"
    release = f"{plan.profile.release}, inputs of all releases" if plan.profile.union else plan.profile.release
    lines = [
        f"{verb:<9} {plan.path}",
        f"models    {', '.join(plan.models)}",
        f"release   {release}",
        f"policy    {policy}",
        f"batch     at most {plan.options.max_batch_size} prompts per request",
    ]
    if plan.draft is not None:
        lines.append(f"draft     {plan.draft.engine.name}, at most {plan.draft.facts['max_draft_len']} tokens per step")
    if plan.adapters:
        lines.append(f"adapters  {', '.join(adapter.name for adapter in plan.adapters)}")
    return lines
