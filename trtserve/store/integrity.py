"""Checksums of an artefact's files: recorded when it is made, compared when it is checked, reused or served.

Reading is what costs time, so a checksum is remembered with the file's device, inode, size and time of change. Hard
links share it: the engine in a repository is the engine in its own folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trtserve.artifacts import MANIFEST, Artifact, Manifest
from trtserve.errors import ArtifactError, TrtserveError
from trtserve.files import open_file, read_json_object, write_json

_CHUNK = 1 << 20
# What Triton reads as a configuration may be edited by hand.
EDITABLE = "config.pbtxt"
_MOST_REMEMBERED = 20_000


class Checksums:
    """SHA-256 of files."""

    def __init__(self, memory: Path | None = None) -> None:
        """Remember them in the file `memory`; None: read every file."""
        self._memory = memory
        self._known: dict[str, str] = {}
        if memory is not None:
            with suppress(OSError, ArtifactError):
                self._known = read_json_object(memory)

    def of(self, files: Collection[Path]) -> dict[Path, str]:
        """Return the checksum of each file that can be read; several are read at once."""
        before = len(self._known)
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            found = dict(zip(files, pool.map(self._checksum, files), strict=True))
        if self._memory is not None and len(self._known) != before:
            with suppress(TrtserveError, OSError):  # what cannot be remembered is read again
                self._memory.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._memory, dict(list(self._known.items())[-_MOST_REMEMBERED:]))
        return {path: checksum for path, checksum in found.items() if checksum is not None}

    def _checksum(self, path: Path) -> str | None:
        try:
            with open_file(path) as handle:
                status = os.fstat(handle.fileno())
                key = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
                if key not in self._known:
                    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
                    while size := handle.readinto(buffer):
                        digest.update(buffer[:size])
                    self._known[key] = digest.hexdigest()
                return self._known[key]
        except (OSError, ArtifactError):
            return None


def with_checksums(manifest: Manifest, folder: Path, checksums: Checksums) -> Manifest:
    """Return the manifest with the checksums of all files in `folder`."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST]
    return replace(manifest, files={str(path.relative_to(folder)): text for path, text in checksums.of(files).items()})


def damages(artifact: Artifact, checksums: Checksums) -> Mapping[Path, str]:
    """Return the files that are not as they were when the artefact was made → what is wrong with them.

    Empty without a manifest, and for artefacts whose manifest has no checksums.
    """
    if artifact.manifest is None:
        return {}
    recorded = {artifact.path / name: text for name, text in artifact.manifest.files.items()}
    recorded = {path: text for path, text in recorded.items() if path.name != EDITABLE}
    present = checksums.of(list(recorded))
    found = {path: "is missing, or cannot be read" for path in recorded if path not in present}
    changed = [path for path, text in present.items() if text != recorded[path]]
    return found | dict.fromkeys(changed, "has another content than when it was made")


def accept_change(path: Path) -> None:
    """Record the checksum of a file of an artefact that trtserve itself has changed."""
    for folder in path.parents:
        if not (folder / MANIFEST).is_file():
            continue
        manifest, name = Manifest.read(folder), str(path.relative_to(folder))
        if name in manifest.files:
            replace(manifest, files={**manifest.files, name: Checksums().of([path])[path]}).write(folder)
        return
