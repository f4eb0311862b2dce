"""Repeat an import for another number of ranks, with otherwise unchanged settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from trtserve.artifacts import Manifest, ModelRepository
from trtserve.errors import UsageError, counted
from trtserve.pipeline import StageSummary
from trtserve.pipeline.import_spec import ImportSpec, as_json, recorded_spec
from trtserve.pipeline.importing import import_to_repository, plan_import, warn_about_resources
from trtserve.progress import SILENT, Progress
from trtserve.repository.served import ServedRepository, inspect_repository
from trtserve.server.engine_fit import wants_rebuild
from trtserve.server.plan import plan_server
from trtserve.server.start import require_startable
from trtserve.specs import RuntimeName, ServerSpec
from trtserve.specs.command_line import import_command
from trtserve.store import NameRecord, Store

# Placeholder for the end of a folder's name, which depends on an engine that is not built yet.
_NOT_MADE = "FINGERPRINT"


@dataclass(frozen=True, kw_only=True)
class Rebuild:
    """An import to repeat for another number of ranks: its record, its changed settings, and what will be served."""

    record: NameRecord
    spec: ImportSpec
    ranks: int
    served: ServedRepository

    @property
    def reason(self) -> str:
        """Why the existing repository does not fit."""
        return f"{self.record.name} was imported for {counted(self.ranks, 'rank')}"

    @property
    def work(self) -> str:
        """What is repeated; where a Hugging Face model is served as it is, only the repository."""
        return "assembled" if self.served.uses_llmapi or self.served.starts_workers else "converted and built"

    def require_allowed(self, *, rebuild: bool) -> None:
        """Raise UsageError unless `rebuild`; the hint has the command that repeats the import."""
        if not rebuild:
            command = import_command(self.record.name, self.record.source, as_json(self.spec))
            raise UsageError(
                f"{self.reason}; --world-size {self.served.world_size} needs it {self.work} again ({self.size}).",
                hint=f"Leave --no-rebuild out, or do it by hand: {command}",
            )

    @property
    def size(self) -> str:
        """The new parallelism."""
        convert = self.spec.convert
        return f"tp {convert.tp_size}" + (f" × pp {convert.pp_size}" if convert.pp_size > 1 else "")


def plan_rebuild(repository: ModelRepository, served: ServedRepository, spec: ServerSpec) -> Rebuild | None:
    """Return the import to repeat for --world-size, or None where the repository fits, or was not made by an import."""
    if spec.world_size is None or not wants_rebuild(served, spec):
        return None
    record = next((each for each in Store().recorded() if Path(each.repository) == repository.path.absolute()), None)
    made = None if record is None else recorded_spec(record)
    # No single import makes a repository of several models.
    if record is None or made is None or (served.facts.get("members") or {}):
        return None
    changed = with_world_size(made, spec.world_size)
    # `auto` may choose another runtime today.
    changed = replace(changed, build=replace(changed.build, runtime=cast(RuntimeName, served.runtime)))
    first, *others = served.core_models  # a draft model keeps its ranks
    rebuilt = replace(served, core_models=(replace(first, world_size=spec.world_size), *others))
    return Rebuild(record=record, spec=changed, ranks=served.world_size, served=rebuilt)


def planned_stages(rebuild: Rebuild, progress: Progress) -> tuple[list[StageSummary], ModelRepository]:
    """Return the import's stages and its repository, with the expected path if it does not exist yet."""
    store = Store()
    plan = plan_import(rebuild.spec, store=store, progress=progress)
    warn_about_resources(plan, progress)
    name = rebuild.record.name
    path = store.folder(ModelRepository) / f"{name}-{_NOT_MADE}" if plan.repository is None else plan.repository.path
    return plan.stages(), ModelRepository(path=path, manifest=Manifest(kind="repository", name=name, fingerprint=""))


def repository_for(
    repository: ModelRepository,
    spec: ServerSpec,
    *,
    rebuild: bool = True,
    on_this_machine: bool = True,
    progress: Progress = SILENT,
) -> ModelRepository:
    """Return the repository if its engine fits `spec`, else one whose engine has --world-size ranks.

    The latter repeats the import with another tensor parallelism; stages that exist are reused, and the import's name
    keeps its meaning. Whatever would stop the launch is raised before the work, unless another machine runs the server.
    Raises UsageError when `rebuild` is False. A repository that no import made is returned as it is: `start` refuses
    it.
    """
    if spec.world_size is None:
        return repository
    wanted = plan_rebuild(repository, inspect_repository(repository), spec)
    if wanted is None:
        return repository
    wanted.require_allowed(rebuild=rebuild)
    if on_this_machine:
        require_startable(plan_server(repository, spec, served=wanted.served))
    progress.step(
        f"World size {spec.world_size}: {wanted.reason}, so it is {wanted.work} again with {wanted.size}; what exists "
        "is reused."
    )
    return import_to_repository(wanted.spec, record=False, progress=progress)


def with_world_size(spec: ImportSpec, world_size: int) -> ImportSpec:
    """Return the import with `world_size` ranks; pipeline stages stay if they divide it, tensor parallelism follows."""
    stages = spec.convert.pp_size if world_size % spec.convert.pp_size == 0 else 1
    convert = replace(spec.convert, tp_size=world_size // stages, pp_size=stages, moe_tp_size=None, moe_ep_size=None)
    # The folders that the user named keep the engine and the repository of the import.
    return replace(spec, convert=convert, engine_out=None, out=None, verify=None)
