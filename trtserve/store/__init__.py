"""Store artefacts and publish them atomically: stage in a sibling folder, write the manifest last, rename once.

$TRTSERVE_HOME (else $XDG_CACHE_HOME/trtserve, else ~/.cache/trtserve)
├── models/ checkpoints/ engines/ repositories/ adapters/     <name>-<first 12 digits of the fingerprint>/
├── names/<name>.json                               record of an import
├── servers/<name>.json  servers/<name>.log         servers
├── checksums.json                                 files whose content was compared with a manifest
└── locks/
"""

from __future__ import annotations

import glob
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from trtserve.artifacts import (
    KINDS,
    MANIFEST,
    Adapter,
    Artifact,
    Checkpoint,
    Checksums,
    Engine,
    Manifest,
    Model,
    ModelRepository,
    damages,
    load_artifact,
    looks_like,
    with_checksums,
)
from trtserve.errors import ArtifactError, ModelNotFoundError, TrtserveError, UsageError, did_you_mean, listing
from trtserve.files import abandoned, child, locked, read_as, read_json_object, write_json, writing
from trtserve.progress import SILENT, Progress

A = TypeVar("A", bound=Artifact)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

# Suffixes of hidden folders: an artefact that is being made, and the one that it replaces.
_STAGED = ".partial"
_REPLACED = ".old"

_FOLDERS: dict[type[Artifact], str] = {
    Model: "models",
    Checkpoint: "checkpoints",
    Engine: "engines",
    ModelRepository: "repositories",
    Adapter: "adapters",
}


# Kinds whose files are served as they are. The check of a checkpoint compares it with the model.
_CHECKED = (Engine, ModelRepository, Adapter)

_MADE_BY: dict[type[Artifact], str] = {
    Model: "import {name}",
    Checkpoint: "convert MODEL",
    Engine: "build CHECKPOINT",
    ModelRepository: "import MODEL",
    Adapter: "lora ADAPTER",
}


def publish(kind: type[A], destination: Path, manifest: Manifest, produce: Callable[[Path], Manifest | None]) -> A:
    """Make the artefact at `destination`, or reuse the one there if its fingerprint is equal.

    `produce` fills a staging folder, a sibling of the destination, and may return a manifest with more facts. An
    artefact of the same kind with another fingerprint is replaced. Raises ArtifactError for anything else at
    `destination`. An equal artefact under another name in the same folder is linked instead of being made again. Raises
    DiskSpaceError or ArtifactError when the file system refuses.
    """
    with writing(destination):
        # Keep a symbolic link and replace its target.
        destination = Path(os.path.realpath(destination)) if destination.is_symlink() else destination.absolute()
    with writing(destination), locked(artifact_lock(destination)):
        staging = destination.parent / f".{destination.name}{_STAGED}"
        _recover(staging, destination)
        existing = reusable(kind, destination, manifest.fingerprint)
        if existing is not None:
            return existing
        try:
            staging.mkdir()
            twin = _twin(destination, manifest)
            final = (produce(staging) or manifest) if twin is None else _link_twin(twin, staging, manifest)
            if kind in _CHECKED:
                final = with_checksums(final, staging, remembered_checksums())
            siblings = destination.parent.glob(f"{glob.escape(manifest.name)}-*/{MANIFEST}")
            final = replace(final, created=_after(final.created, (_created(each.parent) for each in siblings)))
            final.write(staging)
            _swap(staging, destination)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return kind(path=destination, manifest=final)


def _created(folder: Path) -> str:
    with suppress(ArtifactError, OSError):
        return Manifest.read(folder).created
    return ""


def _after(moment: str, others: Iterable[str]) -> str:
    """Return an ISO time, or one just after the last of the others: the newest counts, and clocks are set back too."""
    last = max(others, default="")
    with suppress(ValueError):  # a time that we did not write
        return max(moment, (datetime.fromisoformat(last) + timedelta(microseconds=1)).isoformat())
    return moment


def artifact_lock(folder: Path) -> Path:
    """Return the lock file for making or removing an artefact; `folder` may be the remains of a killed process."""
    return folder.parent / f".{_published(folder).name}.lock"


def _published(hidden: Path) -> Path:
    """Return the folder whose unfinished, replaced or leaving content `hidden` is, or whose lock."""
    if not hidden.name.startswith("."):
        return hidden
    return hidden.with_name(hidden.name[1:].removesuffix(_STAGED).removesuffix(_REPLACED).removesuffix(".lock"))


def reusable(kind: type[A], destination: Path, wanted: str) -> A | None:
    """Return the complete artefact at `destination` if its fingerprint is `wanted` and its files are undamaged.

    Returns None if nothing usable is there, so the artefact can be built.

    Raises ArtifactError for something that must not be replaced: files of the user, or an artefact of another kind.
    """
    with writing(destination):
        if not (destination / MANIFEST).exists():
            if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
                return None
            if not (destination / MANIFEST).exists():  # else another process has published it since the first look
                raise ArtifactError(
                    f"{destination} exists and was not made by trtserve; refusing to replace it.",
                    hint="Choose another place (--out, ENGINE_DEST_PATH), or remove it.",
                )
    manifest = Manifest.read(destination)
    if manifest.kind != KINDS[kind]:
        raise ArtifactError(
            f"{destination} holds {_article(manifest.kind)}; refusing to replace it with {_article(KINDS[kind])}.",
            hint="Choose another place (--out, ENGINE_DEST_PATH), or remove the folder.",
        )
    found = kind(path=destination, manifest=manifest)
    return found if manifest.fingerprint == wanted and not damages(found, remembered_checksums()) else None


def remembered_checksums() -> Checksums:
    """Return the checksums that this user's commands remember."""
    return Checksums(default_root() / "checksums.json")


def _twin(destination: Path, manifest: Manifest) -> Path | None:
    """Return the folder of an equal artefact with another name, next to `destination`."""
    for path in sorted(destination.parent.glob(f"[!.]*-{manifest.fingerprint[:12]}")):
        with suppress(ArtifactError):
            other = Manifest.read(path)
            same = (other.kind, other.fingerprint) == (manifest.kind, manifest.fingerprint)
            if same and not damages(Artifact(path=path, manifest=other), remembered_checksums()):
                return path
    return None


def _link_twin(twin: Path, staging: Path, manifest: Manifest) -> Manifest:
    """Fill `staging` with links to the files of `twin`; return the manifest with the facts that `twin` measured."""
    for path in sorted(twin.rglob("*")):
        target = staging / path.relative_to(twin)
        if path.is_symlink():
            target.symlink_to(path.readlink())
        elif path.is_file() and target != staging / MANIFEST:
            link_or_copy(path, target)
    return replace(manifest, facts={**Manifest.read(twin).facts, **manifest.facts})


def withdraw(artifact: Artifact) -> None:
    """Remove an artefact that was published just now, wherever it is. Raises ArtifactError for any other folder."""
    wanted, found = artifact.manifest, Manifest.read(artifact.path)
    if wanted is None or (found.kind, found.fingerprint) != (wanted.kind, wanted.fingerprint):
        raise ArtifactError(
            f"{artifact.path} is not the artefact that was made here; it is not removed.",
            hint="Another process has replaced it: run the command again.",
        )
    with writing(artifact.path):
        shutil.rmtree(artifact.path)


def _old(destination: Path) -> Path:
    return destination.parent / f".{destination.name}{_REPLACED}"


def _recover(staging: Path, destination: Path) -> None:
    """Remove the remains of a killed process, and put back the artefact that it was about to replace."""
    old = _old(destination)
    if (old / MANIFEST).exists() and not destination.exists():  # without a manifest it was being removed
        old.rename(destination)
    for leftover in (staging, old):
        shutil.rmtree(leftover, ignore_errors=True)


def _swap(staging: Path, destination: Path) -> None:
    """Put `staging` in the place of `destination`; a reader never sees a mixture of both.

    Between the two renames there is no folder, because a rename cannot replace a folder with files.
    """
    if not destination.exists():
        staging.rename(destination)
        return
    old = _old(destination)
    destination.rename(old)
    staging.rename(destination)
    shutil.rmtree(old)


def link_or_copy(source: Path, target: Path, *, copy: bool = False) -> None:
    """Hard-link `source` to `target`, or copy it if `copy` is set or they are on different file systems.

    A symbolic link is followed: a relative one would lead nowhere from its new place.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if not copy:
        try:
            os.link(source.resolve(), target)
        except OSError:
            pass
        else:
            return
    shutil.copy2(source, target)


@dataclass(frozen=True, kw_only=True)
class NameRecord:
    """The record of an import: the absolute paths of its artefacts, and its spec as JSON."""

    name: str
    source: str
    model: str
    checkpoint: str  # empty for the LLM API, as is `engine`
    engine: str
    repository: str
    imported: str  # time, in ISO format
    spec: dict[str, Any] = field(default_factory=dict)


def require_name(name: str) -> None:
    """Raise UsageError for a text that cannot name an artefact."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name an artefact.", hint="Use at most 100 letters, digits, '.', '_' and '-': --name NAME"
        )


class Store:
    """The folder of all artefacts of a user."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root if root is not None else default_root()).absolute()

    def destination(self, kind: type[Artifact], name: str, fingerprint: str) -> Path:
        """Return the folder of an artefact. Raises UsageError for a name that cannot be one."""
        require_name(name)
        return child(self.folder(kind), f"{name}-{fingerprint[:12]}")

    def folder(self, kind: type[Artifact]) -> Path:
        return self.root / _FOLDERS[kind]

    @contextmanager
    def in_use(self, *texts: str | Path | None) -> Iterator[None]:
        """Keep `remove` from taking away, during the block, what has these names or lies in these folders.

        What killed processes left half done is removed first.
        """
        self.sweep()
        with ExitStack() as held:
            for name in sorted({name for text in texts if text and (name := self._name_of(str(text)))}):
                with suppress(ArtifactError):  # from a store that is read-only nothing is removed
                    held.enter_context(locked(self.name_lock(name), shared=True))
            yield

    def sweep(self) -> None:
        """Remove what killed processes left half done, with their locks, and put back what they were replacing.

        What a process that is alive fills is locked, and stays. So do unfinished downloads, which the next one
        continues, and what belongs to another user.
        """
        for folder in (self.folder(kind) for kind in _FOLDERS):
            for destination in {_published(hidden) for hidden in folder.glob(".*")}:
                with suppress(PermissionError), abandoned(artifact_lock(destination)) as free:
                    if free:
                        _recover(destination.with_name(f".{destination.name}{_STAGED}"), destination)
        for folder in (self.root, self.names, self.servers, self.root / "locks", self.root / "locks" / "names"):
            for lock in folder.glob("*.lock"):  # pathlib finds hidden files too
                with suppress(PermissionError), abandoned(lock) as free:
                    if free:  # `write_json` writes there
                        lock.with_suffix(_STAGED).unlink(missing_ok=True)

    def name_lock(self, name: str) -> Path:
        """Return the lock file that commands share while they use artefacts of this name."""
        return child(self.root / "locks" / "names", f"{name}.lock")

    def _name_of(self, text: str) -> str:
        """Return the name that a text is, or that an artefact of this store in the folder `text` has, else no text."""
        folder = Path(text).expanduser().absolute()
        if folder.is_relative_to(self.root):
            return folder.name.rpartition("-")[0]
        return text if _NAME.fullmatch(text) else ""

    def find(self, kind: type[A], text: str, *, progress: Progress = SILENT) -> A:
        """Return the artefact in the folder `text`, or the one with that name.

        Of several with the name, the one that `import` recorded counts, otherwise the newest. Raises
        ModelNotFoundError with similar names when there is none.

        A name wins over a folder that holds another kind; `progress` reports which of the two is used.
        """
        folder = Path(text).expanduser()
        # A path is never treated as a name.
        made = {} if folder.is_dir() and folder.name != text else self.by_name(kind)
        if folder.is_dir() and (text not in made or looks_like(kind, folder)):
            if text in made:
                progress.warn(
                    f"The folder {folder.absolute()} is used for {text}; {made[text].path} has that name too."
                )
            return load_artifact(kind, folder.absolute())
        if folder.is_dir():
            progress.warn(
                f"The folder {folder.absolute()} is not {_article(KINDS[kind])}; {made[text].path} is used for {text}."
            )
        if text in made:
            return made[text]
        raise self.not_found_error(text, kind)

    def not_found_error(self, text: str, *kinds: type[Artifact]) -> ModelNotFoundError:
        """Return the error for a `text` that is neither a folder nor the name of an artefact of `kinds`."""
        *others, last = (_article(KINDS[kind]) for kind in kinds)
        nouns = f"{', '.join(others)} or {last}" if others else last
        made = sorted({name for kind in kinds for name in self.by_name(kind)})
        if text.startswith(("/", ".", "~")) or text.endswith("/"):
            return ModelNotFoundError(
                f"{text} is not a folder on this machine.",
                hint=f"Give the folder of {nouns}, or one of these names: {listing(made) or 'none yet'}.",
            )
        known = did_you_mean(
            text, made, f"Names here (trtserve list): {', '.join(made) or 'none'}.", most=3, cutoff=0.5
        )
        commands = (f"trtserve {_MADE_BY[kind].format(name=text)}" for kind in kinds)
        return ModelNotFoundError(
            f"{text} is neither a folder nor the name of {nouns} in the store.",
            hint=f"{known} To make one: {', '.join(commands)}",
        )

    def by_name(self, kind: type[A]) -> dict[str, A]:
        """Return complete artefacts by name: the one that `import` recorded, else the newest."""
        found = [(each.manifest.created if each.manifest else "", each.name, each) for each in self.complete(kind)]
        made = {name: artefact for _, name, artefact in sorted(found, key=lambda entry: entry[0])}
        for record in self.recorded():
            path = Path(getattr(record, KINDS[kind], ""))  # a record has no adapter
            if path.is_absolute():
                with suppress(ArtifactError):
                    made[record.name] = load_artifact(kind, path)
        return made

    def complete(self, kind: type[A]) -> Iterator[A]:
        """Yield complete artefacts of `kind` in the order of their folders' names, older builds included."""
        # Hidden folders are being made, replaced or removed.
        for path in sorted(self.folder(kind).glob(f"[!.]*/{MANIFEST}")):
            with suppress(ArtifactError):
                yield kind(path=path.parent, manifest=Manifest.read(path.parent))

    @property
    def downloads(self) -> Path:
        """Folder of unfinished downloads."""
        return self.root / "downloads"

    def download(self, repository: str, commit: str) -> Path:
        """Return the folder that collects the files of a revision; it survives a killed process.

        Raises ArtifactError for a repository or a commit that leads to any other place, and for a link.
        """
        folder = child(self.downloads, f"{repository.replace('/', '--')}-{commit[:12]}")
        if folder.name.startswith(".") or folder.is_symlink():
            raise ArtifactError(
                f"{folder} is hidden or a link; downloads are collected in folders of the store only.",
                hint="Remove it, then run the command again. To keep the store on another disk, set TRTSERVE_HOME.",
            )
        return folder

    def lock_of(self, folder: Path) -> Path:
        """Return the lock file that is held while an artefact's or a download's folder is filled or removed."""
        if folder.parent == self.downloads:
            return self.root / "locks" / f"{_published(folder).name}.lock"
        return artifact_lock(folder)

    def owns(self, folder: Path) -> bool:
        """Return whether `folder` is an artefact or a download of this store, or a folder of its own next to them."""
        if folder.name in ("", ".", ".."):
            return False
        homes = {self.downloads, *(self.folder(kind) for kind in _FOLDERS)}
        return folder.parent in homes or folder in {self.servers, self.root / "backends", self.root / "doctor"}

    def remove_folder(self, folder: Path) -> None:
        """Remove a folder that the store owns, its contents too; of a link the link alone.

        It is hidden first, so that a kill leaves nothing at its place. This is the only way in which downloads and
        artefacts of a store are removed: it raises ArtifactError for every other folder.
        """
        if not self.owns(folder):
            raise ArtifactError(
                f"{folder} is not a folder of an artefact or a download in {self.root}; it is not removed.",
                hint="Remove it yourself, if nothing needs it.",
            )
        with writing(folder):
            if folder.is_symlink():
                folder.unlink()
                return
            leaving = folder
            if not folder.name.startswith("."):
                leaving = folder.with_name(f".{folder.name}{_REPLACED}")
                shutil.rmtree(leaving, ignore_errors=True)
                folder.rename(leaving)
            (leaving / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(leaving)

    @property
    def servers(self) -> Path:
        """Folder of the servers' state files and logs."""
        return self.root / "servers"

    @property
    def names(self) -> Path:
        """Folder of the records of imports."""
        return self.root / "names"

    def record_file(self, name: str) -> Path:
        return child(self.names, f"{name}.json")

    def record(self, record: NameRecord) -> None:
        """Save the record of an import; the newest record is the default of `start`."""
        with suppress(ArtifactError):  # one that cannot be read is nobody's default
            record = replace(record, imported=_after(record.imported, (each.imported for each in self.recorded())))
        write_json(self.record_file(record.name), record.__dict__)

    def recorded(self) -> list[NameRecord]:
        """Return the records of all imports, newest first."""
        records = (_read_record(path) for path in self.names.glob("[!.]*.json"))
        return sorted(filter(None, records), key=lambda record: record.imported, reverse=True)


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _read_record(path: Path) -> NameRecord | None:
    """Return the record at `path`, or None if it was removed in the meantime."""
    hint = "Remove the file and import again."
    try:
        return read_as(path, NameRecord, "the record of an import", hint=hint)
    except FileNotFoundError:
        return None


def default_root() -> Path:
    """Return $TRTSERVE_HOME, else $XDG_CACHE_HOME/trtserve, else ~/.cache/trtserve.

    Raises UsageError for a TRTSERVE_HOME that can never be a folder: below a file, or on a file system of the kernel.
    """
    if home := os.environ.get("TRTSERVE_HOME"):
        root = Path(home).expanduser()
        existing = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.exists())
        if not existing.is_dir() or (existing.absolute() != root.absolute() and os.statvfs(existing).f_blocks == 0):
            raise UsageError(
                f"TRTSERVE_HOME is {root}, where no folder can be made.", hint="Set it to a folder that you own."
            )
        return root
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache") / "trtserve"


_FILE = "rates.json"
# Starting processes and loading libraries takes a second regardless of size, so a small run cannot predict a model
# several times larger.
_TELLING_BYTES = 128 * 2**20
_FEW_TIMES = 4
_MOST = 1 << 60  # bytes or seconds; a float does not hold every number of JSON

Runs = Mapping[str, Sequence[Mapping[str, Any]]]


@contextmanager
def timed(store: Store, stage: str, size: int) -> Iterator[None]:
    """Record how long the block took for `size` bytes of `stage` unless it raises; an unwritable store is ignored.

    The newest run per power of two of bytes is kept.
    """
    began = time.monotonic()
    yield
    seconds = time.monotonic() - began
    runs = {key: list(value) for key, value in read_rates(store).items()}
    others = [run for run in runs.get(stage, []) if run["bytes"].bit_length() != size.bit_length()]
    runs[stage] = [*others, {"bytes": size, "seconds": round(seconds, 3)}]
    with suppress(TrtserveError, OSError):
        write_json(store.root / _FILE, runs)


def read_rates(store: Store) -> Runs:
    """Return the runs of each stage, oldest first."""
    with suppress(FileNotFoundError, ArtifactError):
        content = read_json_object(store.root / _FILE)
        return {stage: [run for run in runs if _is_run(run)] for stage, runs in content.items() if type(runs) is list}
    return {}


def _is_run(content: object) -> bool:
    """Return whether a record is valid; other versions or users may have written anything."""
    return (
        isinstance(content, dict)
        and type(content.get("bytes")) is int
        and 0 < content["bytes"] < _MOST
        and isinstance(content.get("seconds"), (int, float))
        and 0 <= content["seconds"] < _MOST
    )


def expected_seconds(runs: Runs, stage: str, size: int) -> float | None:
    """Predict a stage's seconds for `size` bytes, in proportion to the measured run of the closest size.

    The newest run counts among equal sizes. Returns None without a comparable run: small ones mostly measure start-up.
    """
    measured = [
        run
        for run in runs.get(stage, [])
        if run["seconds"] > 0 and (run["bytes"] >= _TELLING_BYTES or 0 < size <= _FEW_TIMES * run["bytes"])
    ]
    if not measured or size <= 0:
        return None
    nearest = min(reversed(measured), key=lambda run: abs(math.log(run["bytes"] / size)))
    return float(nearest["seconds"]) * size / int(nearest["bytes"])
