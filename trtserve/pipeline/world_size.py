"""Another number of ranks for an imported model: convert, build and repo again with the same settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from trtserve.artifacts import Manifest, ModelRepository
from trtserve.errors import UsageError, counted
from trtserve.pipeline import ImportPlan, ImportSpec, import_to_repository, plan_import
from trtserve.pipeline.llmapi import LlmapiImportPlan, for_llmapi, plan_llmapi_import
from trtserve.pipeline.recorded import as_json, recorded_spec
from trtserve.pipeline.stages import Stage
from trtserve.progress import SILENT, Progress
from trtserve.specs import RuntimeName, ServerSpec
from trtserve.start import require_startable, wants_rebuild
from trtserve.store import NameRecord, Store
from trtserve.triton.preflight import Served, inspect_repository
from trtserve.wording import import_command

# What stands for the rest of a folder's name where that follows from an engine that is not built.
_NOT_MADE = "FINGERPRINT"


@dataclass(frozen=True, kw_only=True)
class Rebuild:
    """An import done again for another number of ranks: its record, its changed settings, and what will be served."""

    record: NameRecord
    spec: ImportSpec
    ranks: int
    served: Served

    @property
    def reason(self) -> str:
        """Why the repository that is there does not do."""
        return f"{self.record.name} was imported for {counted(self.ranks, 'rank')}"

    @property
    def work(self) -> str:
        """What is done again: the LLM API has only a repository."""
        return "assembled" if self.served.runtime == "llmapi" else "converted and built"

    @property
    def size(self) -> str:
        """The parallelism that is to be made."""
        convert = self.spec.convert
        return f"tp {convert.tp_size}" + (f" × pp {convert.pp_size}" if convert.pp_size > 1 else "")


def plan_rebuild(repository: ModelRepository, spec: ServerSpec, *, store: Store | None = None) -> Rebuild | None:
    """What has to be imported again for --world-size; None where the repository fits or no import made it."""
    store = store or Store()
    if spec.world_size is None or not wants_rebuild(served := inspect_repository(repository), spec):
        return None
    record = next((each for each in store.recorded() if Path(each.repository) == repository.path.absolute()), None)
    made = None if record is None else recorded_spec(record)
    # A repository to which several models were added is nothing that one import makes.
    if record is None or made is None or (served.facts.get("members") or {}):
        return None
    changed = with_world_size(made, spec.world_size)
    # `auto` may mean another runtime now than it did then.
    changed = replace(changed, build=replace(changed.build, runtime=cast(RuntimeName, served.runtime)))
    return Rebuild(record=record, spec=changed, ranks=served.world_size, served=with_ranks(served, spec.world_size))


def planned_stages(
    rebuild: Rebuild, *, store: Store | None = None, progress: Progress = SILENT
) -> tuple[list[Stage], ModelRepository]:
    """The stages of the import, and its repository: where it is, or where it will be as far as that is known."""
    store, spec = store or Store(), rebuild.spec
    if for_llmapi(spec):
        plan: LlmapiImportPlan | ImportPlan = plan_llmapi_import(spec, store=store, progress=progress)
    else:
        plan = plan_import(spec, store=store, progress=progress)
    name = rebuild.record.name
    path = store.folder(ModelRepository) / f"{name}-{_NOT_MADE}" if plan.repository is None else plan.repository.path
    return plan.stages(), ModelRepository(path=path, manifest=Manifest(kind="repository", name=name, fingerprint=""))


def repository_for(
    repository: ModelRepository,
    spec: ServerSpec,
    *,
    rebuild: bool = True,
    elsewhere: bool = False,
    store: Store | None = None,
    progress: Progress = SILENT,
) -> ModelRepository:
    """The repository itself where its engine fits `spec`; else the one of an engine with --world-size ranks.

    That needs a repository that `import` made: its settings are taken again, with another tensor parallelism. What
    exists is reused, and the import's name keeps its meaning. What would stop the launch here, unless it is
    `elsewhere`, is raised before the work. UsageError when `rebuild` is False. Every other repository is returned as
    it is, for `start` to refuse it.
    """
    store = store or Store()
    wanted = plan_rebuild(repository, spec, store=store)
    if wanted is None:
        return repository
    if not rebuild:
        command = import_command(wanted.record.name, wanted.record.source, as_json(wanted.spec))
        raise UsageError(
            f"{wanted.reason}; --world-size {spec.world_size} needs it {wanted.work} again ({wanted.size}).",
            hint=f"Leave --no-rebuild out, or do it by hand: {command}",
        )
    if not elsewhere:
        require_startable(repository, spec, wanted.served, store=store)
    progress.step(
        f"World size {spec.world_size}: {wanted.reason}, so it is {wanted.work} again with {wanted.size}; what exists "
        "is reused."
    )
    return import_to_repository(wanted.spec, store=store, record=False, progress=progress)


def with_world_size(spec: ImportSpec, world_size: int) -> ImportSpec:
    """The import with `world_size` ranks: pipeline stages stay where they divide it, tensor parallelism follows."""
    stages = spec.convert.pp_size if world_size % spec.convert.pp_size == 0 else 1
    convert = replace(spec.convert, tp_size=world_size // stages, pp_size=stages, moe_tp_size=None, moe_ep_size=None)
    # The folders that the user named hold the engine and repository of the import.
    return replace(spec, convert=convert, engine_out=None, out=None, verify=None)


def with_ranks(served: Served, world_size: int) -> Served:
    """What the repository will hold: its first core model has other ranks, a draft model keeps its own."""
    first, *others = served.core_models
    return replace(served, core_models=(replace(first, world_size=world_size), *others))
