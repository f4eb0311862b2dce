"""How a model comes into the store: planned from its small files, pulled or linked, published with a manifest."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trtserve import hub
from trtserve.artifacts import Manifest, Model
from trtserve.capacity.rates import timed
from trtserve.capacity.room import require_disk
from trtserve.errors import CorruptFileError, NetworkError
from trtserve.import_.downloads import download_folder
from trtserve.import_.plan import ModelPlan, folder_plan, is_weights, planned_files, stored_plan
from trtserve.import_.sources import Source, other_meaning, parse_source
from trtserve.machine import gibibytes
from trtserve.progress import SILENT, Progress, Task
from trtserve.store import Store, link_or_copy, publish, reusable

__all__ = ["ModelPlan", "import_model", "plan_model", "pull_model"]


def import_model(
    source: str,
    *,
    name: str | None = None,
    out: Path | None = None,
    store: Store | None = None,
    token: str | None = None,
    own_tokenizer: bool = True,
    any_architecture: bool = False,
    progress: Progress = SILENT,
) -> Model:
    """Bring a model into the store: `demo`, an alias, a hub id `org/name[@revision]` or a folder.

    The hub's revision is pinned to a commit; only config, tokenizer and safetensors are pulled. `token` None takes
    the usual places of huggingface_hub. A local folder is referred to, never changed and its weights never copied.
    `own_tokenizer` False: the model needs none, since another one is served with it. `any_architecture`: it is not
    our converter that will read it.
    """
    plan = plan_model(
        source,
        name=name,
        store=store,
        token=token,
        own_tokenizer=own_tokenizer,
        any_architecture=any_architecture,
        progress=progress,
    )
    return pull_model(plan, out=out, store=store, token=token, progress=progress)


def plan_model(
    source: str,
    *,
    name: str | None = None,
    store: Store | None = None,
    token: str | None = None,
    own_tokenizer: bool = True,
    any_architecture: bool = False,
    progress: Progress = SILENT,
) -> ModelPlan:
    """Learn everything about a model that needs no weights: commit, files, sizes, architecture.

    From the hub only `config.json` and the index of the weights are pulled. UnsupportedModelError when the model
    cannot be converted here (and not `any_architecture` will do), or has no tokenizer although it needs its own.
    """
    parsed = parse_source(source, name=name)
    if (other := other_meaning(parsed)) is not None:
        progress.warn(other)
    if parsed.kind != "hub":
        return folder_plan(parsed, own_tokenizer=own_tokenizer, any_architecture=any_architecture)
    needs = {"own_tokenizer": own_tokenizer, "any_architecture": any_architecture}
    return _plan_from_hub(parsed, store or Store(), token, progress, needs)


def pull_model(
    plan: ModelPlan,
    *,
    out: Path | None = None,
    store: Store | None = None,
    token: str | None = None,
    progress: Progress = SILENT,
) -> Model:
    """Bring what `plan` names, and publish it as a Model artefact; reused when it is there already."""
    store = store or Store()
    destination = model_destination(plan, out, store)
    if (existing := reusable(Model, destination, plan.fingerprint)) is not None:
        progress.step(f"Model {existing.path} is reused")
        return existing
    if plan.revision is None or plan.folder is not None:
        return _publish_folder(plan, destination)
    with download_folder(store, plan.revision, progress) as folder:
        # Another process may have published it while this one waited for the folder.
        if reusable(Model, destination, plan.fingerprint) is None:
            with timed(store, "pull", missing_bytes(plan, out=out, store=store)):
                _pull_all(plan, plan.revision, folder, token, progress)
        model = publish(Model, destination, plan.manifest(), lambda staging: _link_all(plan, folder, staging))
        shutil.rmtree(folder)
    return model


def model_destination(plan: ModelPlan, out: Path | None, store: Store) -> Path:
    """Where the Model artefact of `plan` goes."""
    return (out or store.destination(Model, plan.name, plan.fingerprint)).absolute()


def missing_bytes(plan: ModelPlan, *, out: Path | None = None, store: Store | None = None) -> int:
    """Bytes that `pull_model` would still bring over the network."""
    store = store or Store()
    if plan.revision is None or plan.folder is not None:
        return 0
    if reusable(Model, model_destination(plan, out, store), plan.fingerprint) is not None:
        return 0
    folder = store.download(plan.revision.repository, plan.revision.commit)
    return sum(file.size - hub.pulled_bytes(file, folder) for file in plan.files)


def _plan_from_hub(
    source: Source, store: Store, token: str | None, progress: Progress, needs: Mapping[str, bool]
) -> ModelPlan:
    if (stored := stored_plan(source, store, offline=hub.is_offline())) is not None:
        return stored
    progress.step(f"Looking up {source.location} on {hub.endpoint()}")
    revision = _pinned_revision(source, token)
    # Under another name, or as the answer to a branch, the commit may have been pulled before.
    if (stored := stored_plan(replace(source, revision=revision.commit), store, offline=False)) is not None:
        return replace(stored, source=source)
    with download_folder(store, revision, progress) as folder:

        def read(file: hub.RemoteFile) -> Path:
            return _bring(revision, file, folder, token, progress)

        files, config = planned_files(source.location, revision.files, read, **needs)
    hub.require_pullable(source.location, files)
    return ModelPlan(source=source, revision=revision, files=files, config=config)


def _pinned_revision(source: Source, token: str | None) -> hub.Revision:
    if hub.is_offline() and (cached := hub.cached_revision(source.location, source.revision)) is not None:
        return cached
    return hub.resolve(source.location, source.revision, token=token)


def _pull_all(plan: ModelPlan, revision: hub.Revision, folder: Path, token: str | None, progress: Progress) -> None:
    done = sum(hub.pulled_bytes(file, folder) for file in plan.files)
    require_disk(folder, plan.total_bytes - done, f"The files of {revision.repository}", elsewhere="TRTSERVE_HOME")
    text = f"Pulling {revision.repository} at {revision.commit[:12]}, {gibibytes(plan.total_bytes - done)}"
    with progress.task(text, total=plan.total_bytes, unit="bytes", done=done) as task:
        for file in plan.files:
            _bring(revision, file, folder, token, progress, task)


def _bring(
    revision: hub.Revision,
    file: hub.RemoteFile,
    folder: Path,
    token: str | None,
    progress: Progress,
    task: Task | None = None,
) -> Path:
    """One verified file in `folder`: from the cache of the hub's client where it has it, else from the hub."""
    cached = hub.cached_file(revision, file)
    if cached is not None and hub.pulled_bytes(file, folder) == 0:
        try:
            target = hub.take(cached, file, folder)
        except CorruptFileError as error:
            progress.warn(f"The copy in the cache of huggingface_hub is damaged and not used: {error.message}")
        else:
            if task is not None:
                task.advance(file.size)
            return target
    return hub.pull(revision, file, folder, token=token, task=task)


def _link_all(plan: ModelPlan, folder: Path, staging: Path) -> None:
    for file in plan.files:
        link_or_copy(folder / file.name, staging / file.name)


def _publish_folder(plan: ModelPlan, destination: Path) -> Model:
    folder = plan.folder
    if folder is None:
        raise NetworkError(f"{plan.source.location} has no folder on this machine.")

    def produce(staging: Path) -> Manifest | None:
        for file in plan.files:
            _take(folder / file.name, staging / file.name, refer=plan.source.kind == "folder" and is_weights(file.name))
        return None

    return publish(Model, destination, plan.manifest(), produce)


def _take(source: Path, target: Path, *, refer: bool) -> None:
    # Small files are copied, so that an edit of the original cannot change a published artefact. Weights of a user's
    # folder are referred to: their size and time are in the fingerprint.
    target.parent.mkdir(parents=True, exist_ok=True)
    if refer:
        target.symlink_to(source.resolve())
    else:
        link_or_copy(source, target, copy=not is_weights(source.name))
