"""`trtserve repo`: assemble the Triton model repository of an engine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtserve.artifacts import Engine, Model
from trtserve.cli.options import DryRunOption, Fields, JsonOption, QuietOption, models
from trtserve.cli.output import TerminalProgress, print_block, print_data, print_json, say
from trtserve.errors import UsageError
from trtserve.executor.loaders import is_embedded_runtime
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.specs.options import Spec, given_flags, option
from trtserve.specs.repository import PATHS, REPOSITORY
from trtserve.store import Store

if TYPE_CHECKING:
    from trtserve.repository.assembling import EngineRepositoryPlan
    from trtserve.repository.publishing import RepositoryPlan

TOKENIZER_HELP = "Hugging Face folder with the tokenizer, or the name of an imported model."


@dataclass(frozen=True, kw_only=True)
class RepositoryParts(Spec):
    """What a repository has besides the engine, and where it goes: options of `import`, too."""

    tokenizer: str | None = option(None, metavar="MODEL", help=TOKENIZER_HELP, completes=models)
    draft_engine: str | None = option(
        None,
        metavar="ENGINE",
        help="Engine of a smaller model that proposes tokens (speculative decoding): a folder, or an imported model.",
        completes=models,
        panel=REPOSITORY,
    )
    into: Path | None = option(
        None,
        metavar="REPOSITORY",
        help="Add the models to this repository instead of making a new one.",
        panel=PATHS,
    )
    out: Path | None = option(None, metavar="DIR", help="Folder of the result.", unset="a folder of the store")

    def require_one_place(self) -> None:
        """Raise UsageError when both a new folder and an existing repository are given."""
        if self.out is not None and self.into is not None:
            raise UsageError(
                "--out and --into contradict each other; give one.", hint="--into adds the models to a repository."
            )


_LLMAPI = "With --runtime llmapi and vllm"
_TEMPLATES = "With --from-template"


@dataclass(frozen=True, kw_only=True)
class TemplateOptions(Spec):
    """How NVIDIA's templates are filled."""

    from_template: Path | None = option(None, metavar="DIR", help="Fill NVIDIA's templates in DIR.", panel=_TEMPLATES)
    drop_unset: bool = option(False, help="Leave out optional parameters without a value.", panel=_TEMPLATES)
    in_place: bool = option(False, help="Overwrite the templates.", panel=_TEMPLATES)


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
    parts: RepositoryParts,
    spec: RepositorySpec,
    build: Annotated[BuildSpec, Fields("runtime")],
    convert: Annotated[ConvertSpec, Fields("tp_size", "pp_size", panel=_LLMAPI)],
    templates: TemplateOptions,
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
    call = _Call(engine=engine, parts=parts, spec=spec, json=json, dry_run=dry_run, quiet=quiet)
    if templates.from_template is not None:
        _fill(call, templates.from_template, templates, [*given_flags(build), *given_flags(convert)])
        return
    parts.require_one_place()
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


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What `repo` was called with."""

    engine: str
    parts: RepositoryParts
    spec: RepositorySpec
    json: bool
    dry_run: bool
    quiet: bool

    @property
    def progress(self) -> TerminalProgress:
        return TerminalProgress(quiet=self.quiet)

    def in_use(self) -> AbstractContextManager[None]:
        """Keep others from removing what is read and made here, unless nothing is made."""
        texts = () if self.dry_run else (self.engine, self.parts.tokenizer, self.parts.draft_engine, self.spec.name)
        return Store().in_use(*texts)


def _assemble(call: _Call) -> None:
    from trtserve.repository.adapters import find_adapters
    from trtserve.repository.assembling import default_name, plan_repository
    from trtserve.repository.draft import find_draft
    from trtserve.repository.publishing import assemble_repository

    store, progress = Store(), call.progress
    source = store.find(Engine, call.engine, progress=progress)
    if call.parts.tokenizer is None:
        raise UsageError("--tokenizer is missing.", hint="Give the Hugging Face folder of the model, or its name.")
    spec = replace(call.spec, name=call.spec.name or default_name(source), lora=find_adapters(call.spec, store))
    folder = store.find(Model, call.parts.tokenizer, progress=progress).path
    draft, draft_tokenizer = find_draft(call.parts.draft_engine, store, progress)
    more: dict[str, Any] = {
        "draft": draft,
        "draft_tokenizer": draft_tokenizer,
        "out": call.parts.out,
        "into": call.parts.into,
    }
    plan = plan_repository(source, folder, spec, **more)
    if is_embedded_runtime(plan.facts["runtime"]):
        say_version_is_unused(spec.trtllm_version, progress)
    if not call.dry_run:
        assemble_repository(plan, progress)
    _print_result(call, plan.path, _described(plan), _lines(plan))


def _assemble_vllm(call: _Call, convert: ConvertSpec) -> None:
    from trtserve.repository.adapters import find_adapters
    from trtserve.repository.assembling import EngineRepositoryPlan, default_name, plan_vllm_repository
    from trtserve.repository.publishing import assemble_repository

    if call.parts.draft_engine is not None:
        raise UsageError("--draft-engine has no meaning with --runtime vllm.")
    store, progress = Store(), call.progress
    model = store.find(Model, call.engine, progress=progress)
    spec = replace(call.spec, name=call.spec.name or default_name(model), lora=find_adapters(call.spec, store))
    tokenizer = (
        None if call.parts.tokenizer is None else store.find(Model, call.parts.tokenizer, progress=progress).path
    )
    plan = plan_vllm_repository(
        model,
        spec,
        convert=convert,
        build=BuildSpec(runtime="vllm"),
        tokenizer=tokenizer,
        out=call.parts.out,
        into=call.parts.into,
    )
    if not call.dry_run:
        assemble_repository(plan, progress)
    lines = _lines(plan) if isinstance(plan, EngineRepositoryPlan) else _first_lines(plan)
    _print_result(call, plan.path, _described(plan), lines)


def _assemble_llmapi(call: _Call, convert: ConvertSpec) -> None:
    from trtserve.repository.adapters import find_adapters
    from trtserve.repository.assembling import default_name
    from trtserve.repository.llmapi import plan_llmapi_repository
    from trtserve.repository.publishing import assemble_repository
    from trtserve.store.sources import parse_source

    for flag, value in (("--tokenizer", call.parts.tokenizer), ("--draft-engine", call.parts.draft_engine)):
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
        out=call.parts.out,
        into=call.parts.into,
        store=store,
        progress=progress,
    )
    if isinstance(model, str):
        progress.warn(f"The server loads {model} from the hub when it starts.")
    if not call.dry_run:
        assemble_repository(plan, progress)
    lines = [
        *_first_lines(plan),
        f"model     {model if isinstance(model, str) else model.path}",
        "ranks     tensor parallel {tp_size}, pipeline parallel {pp_size}".format_map(plan.manifest.facts),
    ]
    _print_result(call, plan.path, _described(plan), lines)


def _fill(call: _Call, folder: Path, templates: TemplateOptions, others: list[str]) -> None:
    """Fill NVIDIA's templates in `folder`. Raises UsageError for `others`, options of repositories."""
    from trtserve.repository.templates import fill_templates, write_filled

    others = [*given_flags(call.parts, ("tokenizer", "draft_engine", "into")), *others]
    others += [flag for flag in given_flags(call.spec) if flag not in ("--release", "--trtllm-version")]
    if others:
        raise UsageError(
            f"With --from-template these have no meaning: {', '.join(others)}.",
            hint="Give what the templates need as KEY:VALUE,…",
        )
    if call.parts.out is not None and templates.in_place:
        raise UsageError("--out and --in-place contradict each other; give one.")
    release = call.spec.release or call.spec.trtllm_version
    filled = fill_templates(
        folder, call.engine, release=release, drop_unset=templates.drop_unset, progress=call.progress
    )
    written = call.parts.out is not None or templates.in_place
    if written and not call.dry_run:
        write_filled(folder, filled, call.parts.out)
    if call.json:
        print_json(
            "repo", {"path": str(call.parts.out or folder), "files": {str(path): text for path, text in filled.items()}}
        )
    elif written:
        print_data(str(call.parts.out or folder))
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


def _described(plan: RepositoryPlan) -> dict[str, object]:
    return {
        "path": str(plan.path),
        "reused": plan.reused,
        "models": list(plan.models),
        "fingerprint": plan.fingerprint,
        **plan.facts,
    }


def _first_lines(plan: RepositoryPlan) -> list[str]:
    verb = "reuse" if plan.reused else "add to" if plan.added else "make"
    return [f"{verb:<9} {plan.path}", f"models    {', '.join(plan.models)}"]


def _lines(plan: EngineRepositoryPlan) -> list[str]:
    policy = "streaming (decoupled)" if plan.spec.streaming else "one response per request (not decoupled)"
    release = f"{plan.profile.release}, inputs of all releases" if plan.profile.union else plan.profile.release
    lines = [
        *_first_lines(plan),
        f"release   {release}",
        f"policy    {policy}",
        f"batch     at most {plan.options.max_batch_size} prompts per request",
    ]
    if plan.draft is not None:
        lines.append(f"draft     {plan.draft.engine.name}, at most {plan.draft.facts['max_draft_len']} tokens per step")
    if plan.adapters:
        lines.append(f"adapters  {', '.join(adapter.name for adapter in plan.adapters)}")
    return lines
