"""`trtserve repo`: an engine and a tokenizer become a Triton model repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.artifacts import Adapter, Engine, Model, looks_like
from trtserve.cli.options import DryRunOption, JsonOption, OutOption, QuietOption, TrtllmVersionOption
from trtserve.cli.output import TerminalProgress, print_data, print_json, say
from trtserve.cli.repo_options import (
    AbsolutePathsOption,
    AccumulateOption,
    BatchingOption,
    BlsInstancesOption,
    ChunkedOption,
    ContainerPathsOption,
    DraftOption,
    ExcludeOption,
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
    TritonBackendOption,
    TritonBatchOption,
    WindowOption,
)
from trtserve.errors import TrtserveError, UsageError
from trtserve.specs import RepositorySpec
from trtserve.store import Store

if TYPE_CHECKING:
    from trtserve.repo import RepositoryPlan


def repo(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="Engine folder, or the name of an imported model.")],
    tokenizer: Annotated[
        str,
        typer.Option("--tokenizer", help="Hugging Face folder with the tokenizer, or the name of an imported model."),
    ],
    name: NameOption = None,
    streaming: StreamingOption = True,
    settings: SetOption = None,
    release: ReleaseOption = None,
    triton_max_batch_size: TritonBatchOption = None,
    preprocessing_instance_count: Annotated[int, typer.Option(help="Processes that tokenise.")] = 1,
    postprocessing_instance_count: Annotated[int, typer.Option(help="Processes that make text of tokens.")] = 1,
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
    copy: Annotated[bool, typer.Option("--copy", help="Copy the engine files instead of hard-linking them.")] = False,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="REPOSITORY", help="Add the models to this repository.")
    ] = None,
    out: OutOption = None,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Assemble the Triton model repository of an engine and print its path."""
    from trtserve.repo import assemble_repository, default_name, plan_repository, tree

    options = locals()  # before anything else has a name here
    store, progress = Store(), TerminalProgress(quiet=quiet)
    source = store.find(Engine, engine, progress=progress)
    spec = repository_spec({**options, "name": name or default_name(source)}, store)
    folder = store.find(Model, tokenizer, progress=progress).path
    draft, draft_tokenizer = find_draft(draft_engine, store, progress)
    more: dict[str, Any] = {"draft": draft, "draft_tokenizer": draft_tokenizer, "out": out, "into": into}
    plan = plan_repository(source, folder, spec, **more)
    if not dry_run:
        assemble_repository(source, folder, spec, **more, progress=progress)
    if json:
        print_json("repo", _described(plan))
    elif dry_run:
        print_data("\n".join(_lines(plan)))
    else:
        if not quiet:
            say(tree(plan.path))
        print_data(str(plan.path))


def repository_spec(options: Mapping[str, Any], store: Store) -> RepositorySpec:
    """What the options ask for; each option has the name of the field that it fills."""
    from trtserve.triton.settings import parse_assignments

    given = {field.name: options[field.name] for field in fields(RepositorySpec)}
    given["settings"] = parse_assignments(options["settings"] or [])
    given["lora"] = parse_adapters(options["lora"] or [], store)
    return RepositorySpec(**given)


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


def _lines(plan: RepositoryPlan) -> list[str]:
    verb = "reuse" if plan.reused else "make" if plan.into is None else "add to"
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
