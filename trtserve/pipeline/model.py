"""The model stage: plan a model from its small files, pull or link the weights, and publish it in the store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from trtserve.artifacts import Model
from trtserve.checkpoint.gguf import GgufFile
from trtserve.checkpoint.gguf_model import config_of
from trtserve.checkpoint.gguf_tokenizer import tokenizer_of
from trtserve.errors import CorruptFileError, LockedError, UnsupportedModelError, listing
from trtserve.files import is_weights, locked
from trtserve.host.machine import format_bytes, require_disk
from trtserve.pipeline import MANIFEST_BYTES, StageNeeds, StageSummary, destination, summary
from trtserve.pipeline.model_files import (
    CONFIG,
    GGUF,
    ModelFiles,
    chosen_gguf,
    folder_files,
    planned_files,
    stored_files,
)
from trtserve.progress import SILENT, Progress, Task
from trtserve.store import Store, expected_seconds, hub, link_or_copy, publish, read_rates, remote, reusable, timed
from trtserve.store.sources import Source, other_meaning, parse_source


@dataclass(frozen=True, kw_only=True)
class ModelPlan(ModelFiles):
    """A model before its weights are here, and where they go."""

    store: Store
    path: Path
    reused: bool  # the artefact exists
    missing_bytes: int  # still to be pulled over the network
    token: str | None = field(default=None, repr=False)  # of the hub; None: the usual places of huggingface_hub

    @property
    def artifact(self) -> Model:
        """The Model that `run` returns; it need not exist yet."""
        return Model(path=self.path, manifest=self.manifest)

    @property
    def needs(self) -> StageNeeds:
        """Disk and time of the download."""
        seconds = expected_seconds(read_rates(self.store), "pull", self.missing_bytes)
        return StageNeeds(stage="import", disk=self.missing_bytes + MANIFEST_BYTES, memory=None, seconds=seconds)

    def describe(self) -> StageSummary:
        """Return the stage as a dry run shows it."""
        return summary("model", self.path, self.missing_bytes, done=self.reused)

    def run(self, progress: Progress = SILENT) -> Model:
        """Pull or link the files and publish them as a Model; an existing one is reused.

        A local folder is linked, never changed, and its weights are never copied.
        """
        if (existing := reusable(Model, self.path, self.fingerprint)) is not None:
            progress.step(f"Model {existing.path.name} is reused")
            return existing
        if self.folder is not None or self.revision is None:
            model = publish(Model, self.path, self.manifest, lambda staging: _link_folder(self, staging))
            if self.folder is not None and self.folder.parent == self.store.downloads:  # made of a GGUF file
                self.store.remove_folder(self.folder)
            return model
        with download_folder(self.store, self.revision, progress) as folder:
            # Another process may have published it while this one waited for the folder.
            if reusable(Model, self.path, self.fingerprint) is None:
                with timed(self.store, "pull", self.missing_bytes):
                    _pull_all(self, self.revision, folder, progress)

            def link(staging: Path) -> None:
                for name, content in self.made.items():
                    (staging / name).write_bytes(content)
                for file in self.pulled:
                    link_or_copy(folder / file.name, staging / (GGUF if file.name == self.gguf else file.name))

            model = publish(Model, self.path, self.manifest, link)
            self.store.remove_folder(folder)
        return model


def plan_model(
    source: str,
    *,
    name: str | None = None,
    out: Path | None = None,
    store: Store | None = None,
    token: str | None = None,
    own_tokenizer: bool = True,
    any_architecture: bool = False,
    progress: Progress = SILENT,
) -> ModelPlan:
    """Plan a model without its weights: commit, files, sizes, architecture, destination.

    `source` is `demo`, an alias, a hub id `org/name[@revision][:GGUF]`, a folder or a GGUF file. From the hub only
    `config.json` and the index of the weights are pulled, or the beginning of a GGUF file; its revision is pinned
    to a commit. `token` None uses the usual places of huggingface_hub. `own_tokenizer` False: another tokenizer is
    served with the model. `any_architecture`: NVIDIA's tools convert or load the model, so ours need not know it.
    Raises UnsupportedModelError for a model that cannot be converted here, or without the tokenizer that it needs.
    """
    store, parsed = store or Store(), parse_source(source, name=name)
    if (other := other_meaning(parsed)) is not None:
        progress.warn(other)
    needs = {"own_tokenizer": own_tokenizer, "any_architecture": any_architecture}
    if parsed.kind in ("hub", "bucket"):
        found = _remote_files(parsed, store, token, progress, needs)
    else:
        if (file := gguf_file(parsed)) is not None:
            parsed = replace(parsed, location=str(unfolded(file, store, tokenizer=own_tokenizer)))
        found = folder_files(parsed, **needs)
    path, reused = destination(Model, found.name, found.fingerprint, out=out, store=store)
    missing = 0
    if found.revision is not None and found.folder is None and not reused:
        downloads = store.download(found.revision.repository, found.revision.commit)
        missing = sum(file.size - hub.pulled_bytes(file, downloads) for file in found.pulled)
    return ModelPlan(**vars(found), store=store, path=path, reused=reused, missing_bytes=missing, token=token)


def _remote_files(
    source: Source, store: Store, token: str | None, progress: Progress, needs: Mapping[str, bool]
) -> ModelFiles:
    if source.kind == "bucket":
        progress.step(f"Looking up {source.location}")
        revision = remote.resolve(source.location)
    else:
        if (stored := stored_files(source, store, offline=hub.is_offline())) is not None:
            return stored
        progress.step(f"Looking up {source.location} on {hub.endpoint()}")
        cached = hub.cached_revision(source.location, source.revision) if hub.is_offline() else None
        revision = cached or hub.resolve(source.location, source.revision, token=token)
    # The commit may have been pulled before, under another name or from another branch.
    if (stored := stored_files(replace(source, revision=revision.commit), store, offline=False)) is not None:
        return replace(stored, source=source)
    chosen = chosen_gguf(source.location, revision.files, source.gguf) if source.kind == "hub" else None
    listed, made = revision.files, dict[str, bytes]()
    with download_folder(store, revision, progress) as folder, TemporaryDirectory() as unfolded:
        if chosen is not None:
            begun = hub.cached_file(revision, chosen) or hub.pull_beginning(revision, chosen, folder, token=token)
            made = _unfold(GgufFile(begun, chosen.size), tokenizer=needs["own_tokenizer"])
            listed = (replace(chosen, name=GGUF), *(_made_file(*each) for each in made.items()))

        def read(file: hub.RemoteFile) -> Path:
            if file.name not in made:
                return _fetch(revision, file, folder, token, progress)
            (path := Path(unfolded) / file.name).write_bytes(made[file.name])
            return path

        files, config = planned_files(source.location, listed, read, **needs)
    if source.kind == "hub":
        hub.require_pullable(source.location, files)
    gguf = chosen.name if chosen else None
    return ModelFiles(source=source, revision=revision, files=files, config=config, gguf=gguf, made=made)


def _made_file(name: str, content: bytes) -> hub.RemoteFile:
    return hub.RemoteFile(name=name, size=len(content), digest=f"sha256:{hashlib.sha256(content).hexdigest()}")


def _pull_all(plan: ModelPlan, revision: hub.Revision, folder: Path, progress: Progress) -> None:
    done, total = sum(hub.pulled_bytes(file, folder) for file in plan.pulled), sum(file.size for file in plan.pulled)
    require_disk(folder, total - done, f"The files of {revision.repository}", option="TRTSERVE_HOME")
    text = f"Pulling {revision.repository} at {revision.commit[:12]}, {format_bytes(total - done)}"
    with progress.task(text, total=total, unit="bytes", done=done) as task:
        for file in plan.pulled:
            _fetch(revision, file, folder, plan.token, progress, task)


def _fetch(
    revision: hub.Revision,
    file: hub.RemoteFile,
    folder: Path,
    token: str | None,
    progress: Progress,
    task: Task | None = None,
) -> Path:
    """Put one verified file into `folder`: from the cache of the hub's client, the hub, or an object store."""
    if remote.is_url(revision.repository):
        return remote.pull(revision, file, folder, task)
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


def _link_folder(plan: ModelPlan, staging: Path) -> None:
    """Copy small files, so that editing the originals cannot change the artefact, and link to the weights.

    Weights in a user's folder become symbolic links: their size and time are part of the fingerprint.
    """
    assert plan.folder is not None, "only files on this machine are linked"
    for file in plan.files:
        source, target = plan.folder / file.name, staging / file.name
        if plan.source.kind == "folder" and is_weights(file.name):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source.resolve())
        else:
            link_or_copy(source, target, copy=not is_weights(file.name))


@contextmanager
def download_folder(store: Store, revision: hub.Revision, progress: Progress = SILENT) -> Iterator[Path]:
    """Yield the folder that collects files of a revision, locked for this process; waits for another one to end."""
    folder = store.download(revision.repository, revision.commit)
    lock = store.lock_of(folder)
    with ExitStack() as held:
        try:
            held.enter_context(locked(lock, wait=False))
        except LockedError:
            progress.step(f"Waiting for another process that pulls {revision.repository}")
            held.enter_context(locked(lock))
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def gguf_file(source: Source) -> Path | None:
    """Return the GGUF file that a source is, or the only one of a folder without config.json; None for others.

    Raises UnsupportedModelError for a folder with several.
    """
    place = Path(source.location)
    if place.is_file():
        return place
    found = sorted(place.glob("*.gguf")) if place.is_dir() and not (place / CONFIG).is_file() else []
    if len(found) > 1:
        raise UnsupportedModelError(
            f"{place} has several GGUF files: {listing([path.name for path in found])}.",
            hint=f"Name one of them: {found[0]}",
        )
    return found[0].resolve() if found else None


def _unfold(content: GgufFile, *, tokenizer: bool) -> dict[str, bytes]:
    """Return the small files of a Hugging Face folder, by their names."""
    made = {CONFIG: config_of(content)} | (tokenizer_of(content) if tokenizer else {})
    return {name: (json.dumps(value, ensure_ascii=False) + "\n").encode() for name, value in made.items()}


def unfolded(file: Path, store: Store, *, tokenizer: bool) -> Path:
    """Make the folder of a GGUF file among the store's downloads, and return it. It holds no weights of its own.

    Without `tokenizer` another one is served. Raises what reading the file raises.
    """
    made = _unfold(GgufFile(file), tokenizer=tokenizer)
    folder = store.download("gguf", hashlib.sha256(str(file).encode()).hexdigest())
    with locked(store.lock_of(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in made.items():
            (folder / name).write_bytes(content)
        link = folder / GGUF
        link.unlink(missing_ok=True)
        link.symlink_to(file)
    return folder
