"""`trtserve import`: turn a model of the hub, a folder or the package into a model repository."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from trtserve.cli.options import VERIFY_HELP, DryRunOption, JsonOption, QuietOption, models, sources
from trtserve.cli.output import TerminalProgress, print_commands, print_data, print_json, print_stages, say
from trtserve.cli.repo import TOKENIZER_HELP, RepositoryParts, say_version_is_unused
from trtserve.host.machine import format_bytes
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.specs.options import option
from trtserve.specs.repository import REPOSITORY
from trtserve.store import Store

if TYPE_CHECKING:
    from trtserve.pipeline.import_spec import ImportSpec


_SOURCE_HELP = (
    "demo, an alias (`trtserve models`), org/name[@revision][:GGUF] of the hub, a folder, a GGUF file, or s3://… or "
    "gs://…"
)


@dataclass(frozen=True, kw_only=True)
class ImportOptions(RepositoryParts):
    """What an import makes, from what, and what it leaves."""

    tokenizer: str | None = option(
        None, metavar="MODEL", help=TOKENIZER_HELP, unset="the model's own", completes=models, panel=REPOSITORY
    )
    verify: bool = option(False, help=VERIFY_HELP)
    download_only: bool = option(False, help="Stop after the download.")
    discard_intermediate: bool = option(False, help="Remove the checkpoint once the repository exists.")
    install_vllm: str | None = option(
        None,
        metavar="VERSION",
        help="Install this vLLM, or the newest, into an environment of its own, for --runtime vllm.",
        panel=REPOSITORY,
    )


def import_(
    source: Annotated[str, typer.Argument(metavar="MODEL", help=_SOURCE_HELP, autocompletion=sources)],
    *,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Name of the model.",
            show_default="the alias, the last part of the id, or the folder",
        ),
    ] = None,
    convert: ConvertSpec,
    build: BuildSpec,
    repository: RepositorySpec,
    wanted: ImportOptions,
    json: JsonOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
) -> None:
    """Download a model and make it ready to serve; finished stages are reused.

    The model is converted, its engine is built and its Triton repository assembled, as `convert`, `build` and `repo` do
    one by one. The engine goes to $ENGINE_DEST_PATH/NAME if that variable is set.

    Examples:
        trtserve import demo
        trtserve import llama-2-7b --quantize int8 --max-batch-size 8
        trtserve import meta-llama/Llama-3.1-8B-Instruct --tp-size 2 --name llama
    """
    from trtserve.pipeline.import_spec import resolve_import

    wanted.require_one_place()
    progress = TerminalProgress(quiet=quiet)
    if wanted.install_vllm is not None:
        from trtserve.executor.vllm.installation import ANY, install_vllm

        python = ANY if dry_run else str(install_vllm(wanted.install_vllm, progress))
        repository = replace(repository, vllm_python=python)
    spec = resolve_import(
        source,
        name=name,
        convert=convert,
        build=build,
        repository=repository,
        tokenizer=wanted.tokenizer,
        draft=wanted.draft_engine,
        out=wanted.out,
        into=wanted.into,
        discard_intermediate=wanted.discard_intermediate,
        verify=wanted.verify,
        progress=progress,
    )
    if spec.convert.trtllm_version != convert.trtllm_version:
        # The version may come from the environment of a whole machine; the embedded runtime does not use it.
        say_version_is_unused(convert.trtllm_version, progress)
    if wanted.download_only:
        _download(spec, progress, json=json, dry_run=dry_run)
    elif dry_run:
        _print_plan(spec, progress, json=json)
    else:
        _run(spec, progress, json=json, quiet=quiet)


def _run(spec: ImportSpec, progress: TerminalProgress, *, json: bool, quiet: bool) -> None:
    from trtserve.pipeline.importing import import_to_repository
    from trtserve.repository.programs import tree

    repository = import_to_repository(spec, progress=progress)
    if json:
        record = next(record for record in Store().recorded() if record.name == spec.name)
        print_json("import", {"path": str(repository.path), **asdict(record)})
    elif quiet:
        print_data(str(repository.path))
    else:
        print_data(str(repository.path))
        for line in tree(repository.path).splitlines()[1:]:
            say(line)
        say(f"Next: trtserve start {spec.name}")


def _download(spec: ImportSpec, progress: TerminalProgress, *, json: bool, dry_run: bool) -> None:
    from trtserve.pipeline.model import plan_model

    plan = plan_model(
        spec.source,
        name=spec.name,
        out=spec.out,
        own_tokenizer=spec.tokenizer is None,
        any_architecture=spec.any_architecture,
        progress=progress,
    )
    if not dry_run:
        model = plan.run(progress)
        facts = model.manifest.spec if model.manifest else {}
        if json:
            print_json("import", {"path": str(model.path), "name": model.name, **facts})
        else:
            print_data(str(model.path))
    elif json:
        print_json("import", {"path": str(plan.path), "name": plan.name, "missing_bytes": plan.missing_bytes})
    else:
        print_data(f"pull      {format_bytes(plan.missing_bytes)} of {format_bytes(plan.total_bytes)} to {plan.path}")


def _print_plan(spec: ImportSpec, progress: TerminalProgress, *, json: bool) -> None:
    from trtserve.pipeline.importing import plan_import, warn_about_resources

    plan = plan_import(spec, progress=progress)
    warn_about_resources(plan, progress)
    stages, memory = plan.stages(), plan.memory_bytes
    if json:
        print_json("import", {"name": spec.name, "memory_bytes": memory, "stages": stages})
        return
    print_stages(stages)
    if memory is not None:
        run = "" if any(stage["command"] for stage in stages) else "; no external command is run"
        print_data(f"memory    needs  {format_bytes(memory):>9}  to build and serve{run}")
    print_commands(stages)
