"""Paths in a container of the docker and Slurm doubles: mounts, and paths of the image.

There is no container: commands run on this machine. Mounted paths in a command line are replaced by the host's, and a
path that is neither mounted nor of the image is refused as it would be missing inside.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Folders of NVIDIA's image.
_IMAGE = ("/opt/tritonserver", "/app", "/usr", "/bin", "/lib", "/etc", "/proc", "/sys", "/dev", "/tmp", "/root", "/opt")
VARIABLE = "TRTSERVE_CONTAINER_MOUNTS"
_PATH = re.compile(r"(?<![\w.@:/-])/[\w.@+-]+(?:/[\w.@+-]+)*/?")


class MountError(Exception):
    """A mount or a path that the real tool would refuse or not find."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One folder of the host inside a container."""

    source: str
    target: str
    read_only: bool = False


def parse_mount(text: str) -> Mount:
    """`source:target[:options]` as docker's -v and pyxis's --container-mounts take it, source checked."""
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise MountError(f"invalid volume specification: '{text}'")
    source, target = parts[0], parts[1]
    if not source.startswith("/"):
        raise MountError(f"(strict double) '{source}' is no absolute path and would name a volume")
    if not target.startswith("/"):
        raise MountError(
            f"invalid volume specification: '{text}': invalid mount path: '{target}' mount path must be absolute"
        )
    if not Path(source).exists():
        raise MountError(f"(strict double) '{source}' does not exist and would be made as an empty folder of root")
    options = parts[2].split(",") if len(parts) == 3 else []
    if set(options) - {"ro", "rw", "z", "Z"}:
        raise MountError(f"invalid mode: {parts[2]}")
    return Mount(source=source.rstrip("/"), target=target.rstrip("/"), read_only="ro" in options)


def check_mounts(mounts: Sequence[Mount]) -> None:
    """Refuse two mounts of one target, and mounts that hide the image's own paths."""
    targets = [mount.target for mount in mounts]
    for target in targets:
        if targets.count(target) > 1:
            raise MountError(f"Duplicate mount point: {target}")
        if target in {"/opt/tritonserver", "/usr", "/bin", "/lib", "/opt", "/"}:
            raise MountError(f"(strict double) the mount {target} hides the image's own")


def host_path(path: str, mounts: Iterable[Mount]) -> str | None:
    """Return the host's path of a container's path; the path itself for the image's; None if it does not exist."""
    for mount in sorted(mounts, key=lambda mount: -len(mount.target)):
        if path == mount.target or path.startswith(mount.target + "/"):
            return mount.source + path.removeprefix(mount.target)
    return path if any(path == folder or path.startswith(folder + "/") for folder in _IMAGE) else None


def translate(text: str, mounts: Sequence[Mount], *, known: str = "\0") -> str:
    """A word of a command line with the host's paths; MountError for an absolute path that is not in the container.

    Paths below `known` are the doubles', which stand for files of the image.
    """

    def replace(match: re.Match[str]) -> str:
        if match.group().startswith(known):
            return match.group()
        found = host_path(match.group().rstrip("/") or "/", mounts)
        if found is None:
            raise MountError(f"{match.group()}: No such file or directory (strict double: neither mounted nor image)")
        return found

    return _PATH.sub(replace, text)


def export(mounts: Sequence[Mount]) -> str:
    """Value of the variable through which doubles inside learn of the mounts."""
    return json.dumps([[mount.source, mount.target, mount.read_only] for mount in mounts])


def resolve(text: str) -> Path:
    """A path written in a file (config.pbtxt, model.yaml) as this process finds it, in a container or not."""
    mounts = os.environ.get(VARIABLE)
    if mounts is None or not PurePosixPath(text).is_absolute():
        return Path(text)
    table = [Mount(source=source, target=target, read_only=bool(flag)) for source, target, flag in json.loads(mounts)]
    found = host_path(text, table)
    return Path(found) if found is not None else Path("/nonexistent") / text.lstrip("/")
