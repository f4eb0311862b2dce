"""The content of the store: what is imported, its size on disk, and its removal."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from trtserve.artifacts import KINDS, MANIFEST, Adapter, Artifact, Checkpoint, Engine, Manifest, Model, ModelRepository
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import ArtifactError, LockedError, ModelNotFoundError, did_you_mean
from trtserve.files import locked, read_json_object
from trtserve.server.state import Server, list_servers, recorded_servers
from trtserve.specs.runtime import weights_precision
from trtserve.store import NameRecord, Store

_KINDS: tuple[type[Artifact], ...] = (Model, Checkpoint, Engine, ModelRepository, Adapter)
_OWN = re.compile(r"[A-Za-z0-9._-]+")  # what a folder that the store makes is called


@dataclass(frozen=True, kw_only=True)
class StoredName:
    name: str
    source: str
    size: int  # bytes on disk, including older builds; a file with several hard links counts once
    precision: str  # of the engine
    repository: str  # empty without one
    imported: str  # empty when no import made a repository
    server: str | None  # name of the running server
    other_build: bool = False  # the server runs an older build, or one for another --world-size


@dataclass(frozen=True, kw_only=True)
class Removal:
    names: tuple[str, ...]
    folders: tuple[Path, ...]  # to be removed
    kept: tuple[Path, ...]  # used by other names, or outside the store
    size: int  # bytes that become free
    others: frozenset[str] = frozenset()  # names that stay, but may not be in use meanwhile


def list_imported() -> list[StoredName]:
    """Return all names in the store: imported ones first, newest at the top."""
    store = Store()
    records = store.recorded()
    servers = list_servers(store)
    folders = _names_in_store(store)
    entries = [_recorded_entry(record, folders.pop(record.name, []), servers) for record in records]
    return entries + [_loose_entry(name, folders[name], servers) for name in sorted(folders)]


def plan_removal(names: Collection[str], *, everything: bool = False) -> Removal:
    """Plan the removal of `names`, or of `everything`.

    Raises ModelNotFoundError for an unknown name and LockedError while a server uses one of the repositories.
    """
    store = Store()
    known = {record.name: record for record in store.recorded()}
    by_name = _names_in_store(store)
    chosen = sorted(known.keys() | by_name.keys()) if everything else list(dict.fromkeys(names))
    for name in chosen:
        if name not in known and name not in by_name:
            here = f"Names here: {', '.join(sorted(known)) or 'none'}."
            hint = did_you_mean(name, known.keys() | by_name.keys(), here, most=3, cutoff=0.5)
            raise ModelNotFoundError(f"There is no import called {name!r}.", hint=hint)
    others = {path for name, record in known.items() if name not in chosen for path in _artifacts_of(record)}
    wanted = {path for name in chosen for path in by_name.get(name, [])}
    wanted |= {path for name in chosen if name in known for path in _artifacts_of(known[name])}
    going = {path for path in wanted - others if store.owns(path) and path.is_dir()}
    going |= {*_unfinished(store), *_of_servers(store)} if everything else set()
    _require_unused(going, list_servers(store))
    return Removal(
        names=tuple(chosen),
        folders=tuple(sorted(going)),
        kept=tuple(sorted(path for path in wanted - going if path.exists())),
        size=freed_bytes(going),
    )


def plan_prune(store: Store | None = None) -> Removal:
    """Plan the removal of artefacts that no name reaches, of unfinished downloads and of what killed processes left.

    A name reaches what its import recorded, else its newest artefact of each kind. What a server runs stays, and so do
    artefacts that links in those lead to.
    """
    store = store or Store()
    kept = {path for record in store.recorded() for path in _artifacts_of(record)}
    kept |= {artefact.path for kind in _KINDS for artefact in store.by_name(kind).values()}
    # Not the store itself, which a port for many models names: their imports are recorded.
    kept |= {server.repository for server in list_servers(store)} - {store.root}
    links = {Path(os.path.realpath(path)) for folder in kept for path in folder.rglob("*") if path.is_symlink()}
    resolved = {folder.resolve() for folder in kept} | {above for link in links for above in link.parents}
    made = [artefact.path for kind in _KINDS for artefact in store.complete(kind)]
    going = {path for path in made if path.resolve() not in resolved and _OWN.fullmatch(path.name)}
    going |= set(_unfinished(store))
    # The names that an import may just be filling.
    others = {folder.name.rpartition("-")[0] for folder in going if not folder.name.startswith(".")} - {""}
    size = freed_bytes(going)
    return Removal(names=(), folders=tuple(sorted(going)), kept=(), size=size, others=frozenset(others))


def remove(removal: Removal, *, store: Store | None = None) -> None:
    """Run `removal`; after a kill the same names can be removed again.

    Raises LockedError, before anything is removed, while another process uses a name, or fills or removes a folder.
    """
    store = store or Store()
    with ExitStack() as held:
        for name in sorted({*removal.names, *removal.others}):
            held.enter_context(locked(store.name_lock(name), wait=False))
        for lock in sorted({store.lock_of(folder) for folder in removal.folders}):
            held.enter_context(locked(lock, wait=False))
        for name in removal.names:
            store.record_file(name).unlink(missing_ok=True)
        for folder in removal.folders:
            if folder.exists():  # an unfinished one may have been published since
                store.remove_folder(folder)
    store.sweep()


def disk_usage(folders: Iterable[Path]) -> int:
    """Return the bytes of all files below `folders`; hard links count once, symbolic links do not count."""
    return sum({(s.st_dev, s.st_ino): s.st_size for s in _stats(folders)}.values())


def freed_bytes(folders: Iterable[Path]) -> int:
    """Return the bytes that removing `folders` frees: files with other hard links do not count."""
    links: dict[tuple[int, int], int] = {}
    sizes: dict[tuple[int, int], tuple[int, int]] = {}
    for stat in _stats(folders):
        inode = (stat.st_dev, stat.st_ino)
        links[inode] = links.get(inode, 0) + 1
        sizes[inode] = (stat.st_size, stat.st_nlink)
    return sum(size for inode, (size, total) in sizes.items() if links[inode] == total)


def _stats(folders: Iterable[Path]) -> Iterator[os.stat_result]:
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                yield path.stat()


def _artifacts_of(record: NameRecord) -> list[Path]:
    # An import for the LLM API has no checkpoint and no engine.
    return [Path(path) for path in (record.model, record.checkpoint, record.engine, record.repository) if path]


def _names_in_store(store: Store) -> dict[str, list[Path]]:
    """Return name → folders of complete artefacts."""
    found: dict[str, list[Path]] = {}
    for kind in _KINDS:
        for artefact in store.complete(kind):
            found.setdefault(artefact.name, []).append(artefact.path)
    return found


def _unfinished(store: Store) -> Iterator[Path]:
    """Yield the remains of killed processes: downloads, and artefacts that were being made, replaced or removed.

    A folder whose name no command makes is not the store's, and stays.
    """
    yield from (path for path in store.downloads.glob("*") if path.is_dir() and _OWN.fullmatch(path.name))
    for kind in _KINDS:
        folders = (path for path in store.folder(kind).glob("*") if path.is_dir() and _OWN.fullmatch(path.name))
        yield from (path for path in folders if path.name.startswith(".") or not (path / MANIFEST).exists())


def _of_servers(store: Store) -> Iterator[Path]:
    """Yield folders of servers once none is recorded: logs, Triton's backends, results of `doctor`.

    The measured speed of this machine (rates.json) is kept.
    """
    if not recorded_servers(store):
        yield from (path for path in (store.servers, store.root / "backends", store.root / "doctor") if path.is_dir())


def _recorded_entry(record: NameRecord, folders: list[Path], servers: list[Server]) -> StoredName:
    server, other = _server_of(record.name, record.repository, servers)
    return StoredName(
        name=record.name,
        source=record.source,
        size=disk_usage({*folders, *_artifacts_of(record)}),
        precision=engine_precision(Path(record.engine)) if record.engine else "",
        repository=record.repository,
        imported=record.imported,
        server=server,
        other_build=other,
    )


def _server_of(name: str, repository: str, servers: Iterable[Server]) -> tuple[str | None, bool]:
    """Return the server of a name, preferably of this repository, and whether it serves another build."""
    other = None
    for server in servers:
        if server.repository.resolve() == Path(repository).resolve():
            return server.name, False
        with suppress(ArtifactError):
            if Manifest.read(server.repository).name == name:
                other = server.name
    return other, other is not None


def _loose_entry(name: str, folders: list[Path], servers: Iterable[Server]) -> StoredName:
    manifests: dict[Path, Manifest] = {}
    for folder in folders:
        with suppress(ArtifactError):  # it may have been removed meanwhile
            manifests[folder] = Manifest.read(folder)
    specs = [manifest.spec for manifest in manifests.values()]
    # A folder may have been given relative to another working directory.
    keys = [(spec, "location" if spec.get("kind") == "folder" else "source") for spec in specs]
    source = next((str(spec[key]) for spec, key in keys if spec.get(key)), "")
    repositories = [folder for folder, manifest in manifests.items() if manifest.kind == KINDS[ModelRepository]]
    repository = max(repositories, key=lambda folder: manifests[folder].created, default=None)
    server, other = (None, False) if repository is None else _server_of(name, str(repository), servers)
    return StoredName(
        name=name,
        source=source,
        size=disk_usage(folders),
        precision="",
        repository=str(repository or ""),
        imported="",
        server=server,
        other_build=other,
    )


def engine_precision(engine: Path) -> str:
    """Return an engine's precision in words, such as `bfloat16, KV u8` or `float16 int8 weights`.

    Returns "" without an engine.
    """
    try:
        config = EngineConfig.of(read_json_object(engine / "config.json"))
    except (FileNotFoundError, ArtifactError):
        return ""
    words, packed, own = config.model.dtype, weights_precision(config.model), config.trtserve
    if packed != words:
        words += f" {packed} weights"
    if own.compute_precision:
        words += f", compute {own.compute_precision}, KV {own.kv_precision}"
    return words


def _require_unused(folders: Collection[Path], servers: Iterable[Server]) -> None:
    resolved = {folder.resolve() for folder in folders}
    for server in servers:
        if server.repository.resolve() in resolved:
            raise LockedError(
                f"The server {server.name} (pid {server.instances[0].process.pid}) serves {server.repository}; nothing "
                "was removed.",
                hint=f"Stop it first: trtserve stop {server.name}",
            )
