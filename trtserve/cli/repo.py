"""`trtserve repo`: an engine and a tokenizer become a Triton model repository."""

from __future__ import annotations

from typing import Annotated

import typer

from trtserve.artifacts import Engine, Model
from trtserve.cli.options import DryRunOption, JsonOption, OutOption, QuietOption
from trtserve.cli.output import TerminalProgress, print_data, print_json, say
from trtserve.repo import RepositoryPlan, assemble_repository, default_name, plan_repository, tree
from trtserve.specs import RepositorySpec
from trtserve.store import Store
from trtserve.triton.profiles import MODELS
from trtserve.triton.settings import parse_assignments

NameOption = Annotated[
    str | None, typer.Option("--name", help="Name under which the model is served; default: the engine's name.")
]
StreamingOption = Annotated[
    bool,
    typer.Option(
        "--streaming/--no-streaming",
        help="Streaming: core and BLS model may send many responses, and take streaming calls only.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="[MODEL.]KEY=VALUE", help="Parameter of a Triton model (default: the core model); repeatable."
    ),
]
ReleaseOption = Annotated[
    str | None,
    typer.Option(
        "--release", help="Exact tensors of one TensorRT-LLM release, 0.12 … 1.2; default: inputs of all of them."
    ),
]
TritonBatchOption = Annotated[
    int | None,
    typer.Option("--triton-max-batch-size", help="Prompts per request that Triton accepts; default: the engine's."),
]
KvTokensOption = Annotated[
    int | None, typer.Option("--max-tokens-in-paged-kv-cache", help="Size of the KV cache in tokens.")
]
KvFractionOption = Annotated[
    float | None,
    typer.Option("--kv-cache-free-gpu-mem-fraction", help="Share of the free memory for the KV cache, in (0, 1]."),
]


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
    bls_instance_count: Annotated[int, typer.Option(help="Processes of the BLS model; each serves many requests.")] = 1,
    max_tokens_in_paged_kv_cache: KvTokensOption = None,
    kv_cache_free_gpu_mem_fraction: KvFractionOption = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the engine files instead of hard-linking them.")] = False,
    out: OutOption = None,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Assemble the Triton model repository of an engine and print its path."""
    store, progress = Store(), TerminalProgress(quiet=quiet)
    source = store.find(Engine, engine, progress=progress)
    folder = store.find(Model, tokenizer, progress=progress).path
    spec = RepositorySpec(
        name=name or default_name(source),
        streaming=streaming,
        release=release,
        triton_max_batch_size=triton_max_batch_size,
        preprocessing_instance_count=preprocessing_instance_count,
        postprocessing_instance_count=postprocessing_instance_count,
        bls_instance_count=bls_instance_count,
        max_tokens_in_paged_kv_cache=max_tokens_in_paged_kv_cache,
        kv_cache_free_gpu_mem_fraction=kv_cache_free_gpu_mem_fraction,
        settings=parse_assignments(settings or []),
        copy=copy,
    )
    plan = plan_repository(source, folder, spec, out=out)
    if not dry_run:
        assemble_repository(source, folder, spec, out=out, progress=progress)
    if json:
        print_json("repo", _described(plan))
    elif dry_run:
        print_data("\n".join(_lines(plan)))
    else:
        if not quiet:
            say(tree(plan.path))
        print_data(str(plan.path))


def _described(plan: RepositoryPlan) -> dict[str, object]:
    return {
        "path": str(plan.path),
        "reused": plan.reused,
        "models": [*MODELS, plan.spec.name],
        "fingerprint": plan.fingerprint,
        **plan.facts,
    }


def _lines(plan: RepositoryPlan) -> list[str]:
    verb = "reuse" if plan.reused else "make"
    policy = "streaming (decoupled)" if plan.spec.streaming else "one response per request (not decoupled)"
    release = f"{plan.profile.release}, inputs of all releases" if plan.profile.union else plan.profile.release
    return [
        f"{verb:<9} {plan.path}",
        f"models    {', '.join([*MODELS, plan.spec.name])}",
        f"release   {release}",
        f"policy    {policy}",
        f"batch     at most {plan.options.max_batch_size} prompts per request",
    ]
