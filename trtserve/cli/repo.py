"""`trtserve repo`: assemble the Triton model repository of an engine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.artifacts import Engine, Model
from trtserve.cli.options import (
    DryRunOption,
    Fields,
    JsonOption,
    OutOption,
    QuietOption,
    TokenizerOption,
    models,
    paths,
)
from trtserve.cli.output import TerminalProgress, print_block, print_data, print_json, say
from trtserve.errors import UsageError
from trtserve.executor.loaders import is_embedded_runtime
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.specs.options import given_flags
from trtserve.specs.repository import PATHS, REPOSITORY
from trtserve.store import Store

if TYPE_CHECKING:
    from trtserve.repository.assembling import EngineRepositoryPlan

DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft-engine",
        metavar="ENGINE",
        help="Engine of a smaller model that proposes tokens (speculative decoding): a folder, or an imported model.",
        autocompletion=models,
        rich_help_panel=REPOSITORY,
    ),
]
IntoOption = Annotated[
    Path | None,
    typer.Option(
        "--into",
        metavar="REPOSITORY",
        help="Add the models to this repository instead of making a new one.",
        autocompletion=paths,
        rich_help_panel=PATHS,
    ),
]
_LLMAPI = "With --runtime llmapi and vllm"
_TEMPLATES = "With --from-template"


def repo(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="ENGINE",
            help="Engine folder, or the name of an imported model; with --runtime llmapi or vllm a Hugging Face model; "
            "with --from-template KEY:VALUE,…",
            autocompletion=models,
        ),
    ],
    *,
    tokenizer: TokenizerOption = None,
    spec: RepositorySpec,
    build: Annotated[BuildSpec, Fields("runtime")],
    convert: Annotated[ConvertSpec, Fields("tp_size", "pp_size", panel=_LLMAPI)],
    draft_engine: DraftOption = None,
    into: IntoOption = None,
    from_template: Annotated[
        Path | None,
        typer.Option(
            "--from-template", metavar="DIR", help="Fill NVIDIA's templates in DIR.", rich_help_panel=_TEMPLATES
        ),
    ] = None,
    drop_unset: Annotated[
        bool,
        typer.Option("--drop-unset", help="Leave out optional parameters without a value.", rich_help_panel=_TEMPLATES),
    ] = False,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Overwrite the templates.", rich_help_panel=_TEMPLATES)
    ] = False,
    out: OutOption = None,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Assemble the Triton model repository of an engine and print its path.

    Examples:
        trtserve repo llama-2-7b --tokenizer llama-2-7b
        trtserve repo ./engine --tokenizer ./Llama-2-7b-hf --set max_queue_size=9
        trtserve repo 'triton_max_batch_size:4' --from-template ./all_models
    """
    call = _Call(engine, tokenizer, spec, draft_engine, into, out, json=json, dry_run=dry_run, quiet=quiet)
    if from_template is not None:
        _fill(
            call, from_template, [*given_flags(build), *given_flags(convert)], drop_unset=drop_unset, in_place=in_place
        )
        return
    require_one_place(out, into)
    from trtserve.executor.runtimes import RUNTIMES

    if (runtime := RUNTIMES.get(build.runtime)) is not None and runtime.folder_loader:
        with call.in_use():
            (_assemble_vllm if runtime.folder_as_engine else _assemble_llmapi)(call, convert)
        return
    if sizes := given_flags(convert):
        raise UsageError(
            f"{sizes[0]} is for --runtime llmapi and vllm: the ranks of an engine are those of its checkpoint.",
            hint=f"Convert with it: trtserve convert MODEL {sizes[0]} N",
        )
    with call.in_use():
        _assemble(call)


@dataclass(frozen=True)
class _Call:
    """What `repo` was called with."""

    engine: str
    tokenizer: str | None
    spec: RepositorySpec
    draft_engine: str | None
    into: Path | None
    out: Path | None
    json: bool = field(kw_only=True)
    dry_run: bool = field(kw_only=True)
    quiet: bool = field(kw_only=True)

    @property
    def progress(self) -> TerminalProgress:
        return TerminalProgress(quiet=self.quiet)

    def in_use(self) -> AbstractContextManager[None]:
        """Keep others from removing what is read and made here, unless nothing is made."""
        texts = () if self.dry_run else (self.engine, self.tokenizer, self.draft_engine, self.spec.name)
        return Store().in_use(*texts)


def _assemble(call: _Call) -> None:
    from trtserve.repository.adapters import find_adapters
    from trtserve.repository.assembling import default_name, plan_repository
    from trtserve.repository.draft import find_draft
    from trtserve.repository.publishing import assemble_repository

    store, progress = Store(), call.progress
    source = store.find(Engine, call.engine, progress=progress)
    if call.tokenizer is None:
        raise UsageError("--tokenizer is missing.", hint="Give the Hugging Face folder of the model, or its name.")
    spec = replace(call.spec, name=call.spec.name or default_name(source), lora=find_adapters(call.spec, store))
    folder = store.find(Model, call.tokenizer, progress=progress).path
    draft, draft_tokenizer = find_draft(call.draft_engine, store, progress)
    more: dict[str, Any] = {"draft": draft, "draft_tokenizer": draft_tokenizer, "out": call.out, "into": call.into}
    plan = plan_repository(source, folder, spec, **more)
    if is_embedded_runtime(plan.facts["runtime"]):
        say_version_is_unused(spec.trtllm_version, progress)
    if not call.dry_run:
        assemble_repository(plan, progress)
    _print_result(call, plan.path, _described(plan), _lines(plan))


def _assemble_vllm(call: _Call, convert: ConvertSpec) -> None:
    from trtserve.repository.adapters import find_adapters
    from trtserve.repository.assembling import default_name, plan_vllm_repository
    from trtserve.repository.publishing import assemble_repository

    if call.draft_engine is not None:
        raise UsageError("--draft-engine has no meaning with --runtime vllm.")
    store, progress = Store(), call.progress
    model = store.find(Model, call.engine, progress=progress)
    spec = replace(call.spec, name=call.spec.name or default_name(model), lora=find_adapters(call.spec, store))
    tokenizer = None if call.tokenizer is None else store.find(Model, call.tokenizer, progress=progress).path
    plan = plan_vllm_repository(
        model, spec, convert=convert, build=BuildSpec(runtime="vllm"), tokenizer=tokenizer, out=call.out, into=call.into
    )
    if not call.dry_run:
        assemble_repository(plan, progress)
    _print_result(call, plan.path, _described(plan), _lines(plan))


def _assemble_llmapi(call: _Call, convert: ConvertSpec) -> None:
    from trtserve.repository.adapters import find_adapters
    from trtserve.repository.assembling import default_name
    from trtserve.repository.llmapi import plan_llmapi_repository
    from trtserve.repository.publishing import assemble_repository
    from trtserve.store.sources import parse_source

    for flag, value in (("--tokenizer", call.tokenizer), ("--draft-engine", call.draft_engine)):
        if value is not None:
            raise UsageError(f"{flag} has no meaning with --runtime llmapi.")
    store, progress, text = Store(), call.progress, call.engine
    hub_id = text.removeprefix("hf:")
    remote = text != hub_id or ("/" in text and not Path(text).expanduser().exists())
    model = hub_id if remote else store.find(Model, text, progress=progress)
    default = parse_source(f"hf:{hub_id}").name if isinstance(model, str) else default_name(model)
    spec = replace(call.spec, name=call.spec.name or default, lora=find_adapters(call.spec, store))
    plan = plan_llmapi_repository(
        model,
        spec,
        tp_size=convert.tp_size,
        pp_size=convert.pp_size,
        out=call.out,
        into=call.into,
        store=store,
        progress=progress,
    )
    if isinstance(model, str):
        progress.warn(f"The server loads {model} from the hub when it starts.")
    if not call.dry_run:
        assemble_repository(plan, progress)
    described = {"path": str(plan.path), "reused": plan.reused, "models": list(plan.models), **plan.manifest.facts}
    lines = [
        f"{_verb(reused=plan.reused, added=plan.added):<9} {plan.path}",
        f"models    {', '.join(plan.models)}",
        f"model     {model if isinstance(model, str) else model.path}",
        "ranks     tensor parallel {tp_size}, pipeline parallel {pp_size}".format_map(plan.manifest.facts),
    ]
    _print_result(call, plan.path, described, lines)


def _fill(call: _Call, folder: Path, others: list[str], *, drop_unset: bool, in_place: bool) -> None:
    """Fill NVIDIA's templates in `folder`. Raises UsageError for `others`, options of repositories."""
    from trtserve.repository.templates import fill_templates, write_filled

    mine = {"tokenizer": call.tokenizer, "draft-engine": call.draft_engine, "into": call.into}
    others = [*(f"--{name}" for name, value in mine.items() if value is not None), *others]
    others += [flag for flag in given_flags(call.spec) if flag not in ("--release", "--trtllm-version")]
    if others:
        raise UsageError(
            f"With --from-template these have no meaning: {', '.join(others)}.",
            hint="Give what the templates need as KEY:VALUE,…",
        )
    if call.out is not None and in_place:
        raise UsageError("--out and --in-place contradict each other; give one.")
    release = call.spec.release or call.spec.trtllm_version
    filled = fill_templates(folder, call.engine, release=release, drop_unset=drop_unset, progress=call.progress)
    written = call.out is not None or in_place
    if written and not call.dry_run:
        write_filled(folder, filled, call.out)
    if call.json:
        print_json(
            "repo", {"path": str(call.out or folder), "files": {str(path): text for path, text in filled.items()}}
        )
    elif written:
        print_data(str(call.out or folder))
    else:  # as NVIDIA's tool does
        print_data("\n".join(filled.values()))


def _print_result(call: _Call, path: Path, described: Mapping[str, object], lines: Sequence[str]) -> None:
    from trtserve.repository.programs import tree

    if call.json:
        print_json("repo", described)
    elif call.dry_run:
        print_block("\n".join(lines))
    else:
        if not call.quiet:
            say(tree(path))
        print_data(str(path))
        if not call.quiet:
            say(f"Next: trtserve start --model-repository {shlex.quote(str(path))}")


def say_version_is_unused(version: str | None, progress: TerminalProgress) -> None:
    """Warn that `--trtllm-version` has no effect on CPUs, unless the environment sets it for the whole machine."""
    from trtserve.nvidia.converters import VERSION_VARIABLE

    if version is not None and version != os.environ.get(VERSION_VARIABLE):
        progress.warn(
            f"--trtllm-version {version} is not used: the embedded executor serves this engine, without TensorRT-LLM. "
            "--release says whose inputs its models have."
        )


def require_one_place(out: Path | None, into: Path | None) -> None:
    """Raise UsageError when both a new folder and an existing repository are given."""
    if out is not None and into is not None:
        raise UsageError(
            "--out and --into contradict each other; give one.", hint="--into adds the models to a repository."
        )


def _described(plan: EngineRepositoryPlan) -> dict[str, object]:
    return {
        "path": str(plan.path),
        "reused": plan.reused,
        "models": list(plan.models),
        "fingerprint": plan.fingerprint,
        **plan.facts,
    }


def _verb(*, reused: bool, added: bool) -> str:
    return "reuse" if reused else "add to" if added else "make"


def _lines(plan: EngineRepositoryPlan) -> list[str]:
    verb = _verb(reused=plan.reused, added=plan.added)
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
