"""Push an artefact to a registry, an object store or a folder, and pull it on another machine.

An artefact is an OCI manifest: its `manifest.json` is the config, each file a layer, or several where it is large.
Both directions continue where they were interrupted, by pieces of at most 256 MiB.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtserve.artifacts import EDITABLE, KINDS, MANIFEST, Artifact, Manifest, ModelRepository, damages, load_artifact
from trtserve.errors import ArtifactError, CorruptFileError, UsageError
from trtserve.files import is_below, is_weights, locked, open_file, parse_json, writing
from trtserve.host.gpus import count_gpus, list_gpus, require_gpus
from trtserve.host.machine import format_bytes, require_disk
from trtserve.progress import SILENT, Progress, Task
from trtserve.repository.programs import warning_of_programs
from trtserve.repository.served import inspect_repository
from trtserve.server.engine_fit import require_fitting_engine, require_servable
from trtserve.specs import ServerSpec
from trtserve.store import NameRecord, Store, link_or_copy, publish, remembered_checksums, reusable
from trtserve.store.remote import LARGEST_MANIFEST, MANIFEST_TYPE, Blob, Shelf, parse_target

PIECE = 256 << 20  # bytes of the pieces that large files travel in
_TYPE = "application/vnd.trtserve.artifact.v1+json"
_FILE = "org.opencontainers.image.title"
_OFFSET = "trtserve.offset"
_LARGEST_CONFIG = 16 << 20
_MOST_PIECES = 100_000
_DONE = ".done"  # the pieces that a download has, one a line
_HINT = "Push it again."


@dataclass(frozen=True)
class FilePiece:
    """A part of a file, from `offset` on."""

    name: str
    offset: int
    blob: Blob


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What a push or a pull moves."""

    artifact: Artifact  # a pull makes it
    total: int  # bytes of all files
    missing: int  # bytes that still have to move
    digest: str  # of the OCI manifest


def push(
    text: str,
    target: str,
    *,
    kind: type[Artifact] = ModelRepository,
    dry_run: bool = False,
    store: Store | None = None,
    progress: Progress = SILENT,
) -> Transfer:
    """Copy an artefact, by its name or its folder, to `target`; what is there already is not sent again.

    Raises CorruptFileError for an artefact whose files have changed since it was made.
    """
    store, (place, reference) = store or Store(), parse_target(target)
    artifact = _found(text, kind, store, progress)
    assert artifact.manifest is not None, "_found refuses artefacts without one"
    pieces = list(_pieces(artifact.path, progress))
    config = (artifact.path / MANIFEST).read_bytes()
    manifest = json.dumps(_oci_manifest(artifact.manifest, config, pieces)).encode()
    if len(manifest) > LARGEST_MANIFEST:
        raise UsageError(f"{artifact.path} has too many files to travel: its list takes {format_bytes(len(manifest))}.")
    missing = {piece.blob.digest: piece for piece in pieces if not place.has(piece.blob)}
    transfer = Transfer(
        artifact=artifact,
        total=sum(piece.blob.size for piece in pieces),
        missing=sum(piece.blob.size for piece in missing.values()),
        digest=_digest(manifest),
    )
    if dry_run:
        return transfer
    with (
        store.in_use(artifact.path),
        progress.task(
            f"Pushing {artifact.name} to {target}",
            total=transfer.total,
            unit="bytes",
            done=transfer.total - transfer.missing,
        ) as task,
    ):
        for piece in missing.values():
            place.send(piece.blob, functools.partial(_content, artifact.path, piece))
            task.advance(piece.blob.size)
        place.send(Blob(_digest(config), len(config)), lambda: iter([config]))
        place.publish(reference, manifest)
    return transfer


def pull(
    target: str,
    *,
    any_machine: bool = False,
    dry_run: bool = False,
    store: Store | None = None,
    progress: Progress = SILENT,
) -> Transfer:
    """Copy an artefact from `target` into the store, and record a model repository under its name.

    The small files come first: when they show that this machine cannot serve the repository (TensorRT-LLM, TensorRT,
    GPUs, memory), no weights are moved, unless `any_machine`. Raises CorruptFileError for content that differs from
    its digest or from the checksums in the artefact's manifest.
    """
    store, (place, reference) = store or Store(), parse_target(target)
    raw = place.manifest(reference)
    if reference.startswith("sha256:") and _digest(raw) != reference:
        raise CorruptFileError(f"{target} is another manifest than its digest says.", hint="Do not use it.")
    manifest, pieces = _understood(raw, place, target)
    kind = next(kind for kind, name in KINDS.items() if name == manifest.kind)
    path = store.destination(kind, manifest.name, manifest.fingerprint)
    there = reusable(kind, path, manifest.fingerprint)
    folder = store.download(f"pull-{manifest.name}", manifest.fingerprint)
    with locked(store.lock_of(folder)):
        done = _done(folder)
        missing = [] if there else [piece for piece in pieces if _line(piece) not in done]
        transfer = Transfer(
            artifact=kind(path=path, manifest=manifest),
            total=sum(piece.blob.size for piece in pieces),
            missing=sum(piece.blob.size for piece in missing),
            digest=_digest(raw),
        )
        require_disk(store.root, transfer.missing, f"The files of {manifest.name}", option="TRTSERVE_HOME")
        if dry_run:
            return transfer
        if there is None:
            _download(place, folder, missing, transfer, target, progress, any_machine=any_machine, store=store)
            _require_recorded(folder, manifest)

            def produce(staging: Path) -> None:
                for name in {piece.name: None for piece in pieces}:
                    link_or_copy(folder / name, staging / name)

            publish(kind, path, manifest, produce)
            store.remove_folder(folder)
    if kind is ModelRepository:
        if (warning := warning_of_programs(path)) is not None:
            progress.warn(warning)
        now = Manifest(kind="repository", name="", fingerprint="").created
        pulled = NameRecord(
            name=manifest.name, source=target, model="", checkpoint="", engine="", repository=str(path), imported=now
        )
        # What was made here came from its model, not from the place where a copy of it is.
        known = {record.repository: record for record in store.recorded() if record.name == manifest.name}
        store.record(replace(known.get(str(path), pulled), imported=now))
    return transfer


def _found(text: str, kind: type[Artifact], store: Store, progress: Progress) -> Artifact:
    if (Path(text).expanduser() / MANIFEST).is_file():
        found = Path(text).expanduser().absolute()
        kind = next(each for each, name in KINDS.items() if name == Manifest.read(found).kind)
        artifact = load_artifact(kind, found)
    else:
        artifact = store.find(kind, text, progress=progress)
    if artifact.manifest is None:
        raise ArtifactError(
            f"{artifact.path} was not made by trtserve: nothing says what its files should be.",
            hint="Make it with `trtserve import`, or copy it with another program.",
        )
    if artifact.manifest.spec.get("absolute_paths"):
        raise UsageError(
            f"{artifact.path} names folders of this machine (--absolute-paths).", hint="Make it again without them."
        )
    if damaged := damages(artifact, remembered_checksums()):
        first, what = next(iter(damaged.items()))
        raise CorruptFileError(f"{first} {what}.", hint="Make the artefact again: nothing was pushed.")
    return artifact


def _pieces(folder: Path, progress: Progress) -> Iterator[FilePiece]:
    """Yield the pieces of all files of an artefact except its manifest, those that links lead to included."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST]
    small = remembered_checksums().of([path for path in files if path.stat().st_size <= PIECE])
    with progress.task("Hashing", total=sum(path.stat().st_size for path in files), unit="bytes") as task:
        for path in files:
            name, size = path.relative_to(folder).as_posix(), path.stat().st_size
            if path in small:
                task.advance(size)
                yield FilePiece(name, 0, Blob(f"sha256:{small[path]}", size))
                continue
            for offset in range(0, size, PIECE):
                digest, length = hashlib.sha256(), min(PIECE, size - offset)
                for block in _content(folder, FilePiece(name, offset, Blob(_digest(b""), length))):
                    digest.update(block)
                    task.advance(len(block))
                yield FilePiece(name, offset, Blob(f"sha256:{digest.hexdigest()}", length))


def _content(folder: Path, piece: FilePiece) -> Iterator[bytes]:
    with open_file(folder / piece.name) as handle:
        handle.seek(piece.offset)
        left = piece.blob.size
        while left and (block := handle.read(min(1 << 20, left))):
            left -= len(block)
            yield block


def _oci_manifest(manifest: Manifest, config: bytes, pieces: Collection[FilePiece]) -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": _TYPE,
        "config": {"mediaType": _TYPE, "digest": _digest(config), "size": len(config)},
        "layers": [
            {
                "mediaType": "application/octet-stream",
                "digest": piece.blob.digest,
                "size": piece.blob.size,
                "annotations": {_FILE: piece.name, _OFFSET: str(piece.offset)},
            }
            for piece in pieces
        ],
        "annotations": {
            "org.opencontainers.image.title": manifest.name,
            "org.opencontainers.image.created": manifest.created,
            "trtserve.kind": manifest.kind,
            "trtserve.fingerprint": manifest.fingerprint,
        },
    }


def _understood(raw: bytes, place: Shelf, target: str) -> tuple[Manifest, list[FilePiece]]:
    """Return the artefact's manifest, and the pieces of its files in order. Raises CorruptFileError for a lie."""
    try:
        found = parse_json(raw)
        config, layers = found["config"], found["layers"]
        if config["mediaType"] != _TYPE:
            raise UsageError(f"{target} is not an artefact of trtserve but {config['mediaType']!r}.")
        blob = Blob(config["digest"], config["size"])
        pieces = [
            FilePiece(
                each["annotations"][_FILE],
                int(each["annotations"][_OFFSET]),
                Blob(each.get("digest"), each.get("size")),
            )
            for each in layers[:_MOST_PIECES]
        ]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorruptFileError(
            f"{target} has a manifest that trtserve did not write: {type(error).__name__}: {error}.", hint=_HINT
        ) from None
    ends: dict[str, int] = {}
    for piece in pieces:
        own = is_below(piece.name) and piece.name.split("/")[0] not in (MANIFEST, _DONE)
        if not own or piece.offset != ends.get(piece.name, 0):
            raise CorruptFileError(f"{target} lists {str(piece.name)[:200]!r} wrongly.", hint=_HINT)
        ends[piece.name] = piece.offset + piece.blob.size
    content = b"".join(place.receive(Blob(blob.digest, min(blob.size, _LARGEST_CONFIG))))
    if _digest(content) != blob.digest:
        raise CorruptFileError(f"The manifest.json in {target} differs from its digest.", hint=_HINT)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / MANIFEST).write_bytes(content)
        manifest = Manifest.read(Path(folder))
    if manifest.files and manifest.files.keys() != ends.keys():
        raise CorruptFileError(f"{target} has other files than its manifest.json lists.", hint=_HINT)
    return manifest, pieces


def _download(
    place: Shelf,
    folder: Path,
    missing: Collection[FilePiece],
    transfer: Transfer,
    target: str,
    progress: Progress,
    *,
    any_machine: bool,
    store: Store,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    small = [piece for piece in missing if not is_weights(piece.name)]
    text, had = f"Pulling {transfer.artifact.name} from {target}", transfer.total - transfer.missing
    with progress.task(text, total=transfer.total, unit="bytes", done=had) as task:
        for piece in small:
            _receive(place, folder, piece, target, task)
        if isinstance(transfer.artifact, ModelRepository) and not any_machine:
            _require_fit(ModelRepository(path=folder, manifest=transfer.artifact.manifest), store, progress)
        for piece in missing:
            if is_weights(piece.name):
                _receive(place, folder, piece, target, task)


def _receive(place: Shelf, folder: Path, piece: FilePiece, target: str, task: Task) -> None:
    """Write a piece to its place in its file, and note that it is there when its digest is right."""
    path, digest = folder / piece.name, hashlib.sha256()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "wb") as handle:
            handle.seek(piece.offset)
            for block in place.receive(piece.blob):
                handle.write(block)
                digest.update(block)
                task.advance(len(block))
            handle.truncate()  # an earlier attempt may have left more; pieces come in order
    if f"sha256:{digest.hexdigest()}" != piece.blob.digest:
        raise CorruptFileError(
            f"{piece.name} of {target} differs from its digest, from byte {piece.offset} on.",
            hint="Pull again: only this piece is fetched once more. If that fails too, push it again.",
        )
    with writing(path), (folder / _DONE).open("a", encoding="utf-8") as handle:
        handle.write(_line(piece) + "\n")


def _require_fit(repository: ModelRepository, store: Store, progress: Progress) -> None:
    """Raise what `start` would raise for the engine, the GPUs or the memory of this machine."""
    served, spec = inspect_repository(repository), ServerSpec()
    if served.needs_gpus:
        require_gpus(max((core.world_size for core in served.core_models), default=1), count_gpus())
        require_fitting_engine(served, spec, progress, repository=repository.path, store=store, gpus=list_gpus())
    else:
        require_servable(served, repository.name, progress)


def _require_recorded(folder: Path, manifest: Manifest) -> None:
    """Raise CorruptFileError for a file that is not the one that the artefact was made with."""
    recorded: Mapping[Path, str] = {
        folder / name: text for name, text in manifest.files.items() if Path(name).name != EDITABLE
    }
    present = remembered_checksums().of(list(recorded))
    for path, text in recorded.items():
        if present.get(path) != text:
            (folder / _DONE).unlink()
            raise CorruptFileError(
                f"{path.relative_to(folder)} is not the file that {manifest.name} was made with.", hint=_HINT
            )


def _done(folder: Path) -> set[str]:
    try:
        return set((folder / _DONE).read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:
        return set()


def _line(piece: FilePiece) -> str:
    return f"{piece.blob.digest} {piece.offset} {piece.name}"


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
