"""What the ranks of one launch share: who has loaded, who has ended, and names of shared-memory regions.

Real ranks meet in MPI's collectives; these meet in files of `scratch/<launch>`. A region is a real file in /dev/shm,
named like those of Triton's python backend (prefix + a random part): removed by an orderly end, left by a kill.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_REGION_BYTES = 4096


class RegionError(Exception):
    """A prefix that a living rank uses already."""


def launch_name() -> str:
    """A name that all ranks of one launch see and no other launch: the PMIx namespace, else the Slurm step."""
    if name := os.environ.get("PMIX_NAMESPACE"):
        return name.replace("/", "_")
    if job := os.environ.get("SLURM_JOB_ID"):
        return f"slurm-{job}-{os.environ.get('SLURM_STEP_ID', '0')}"
    return f"single-{os.getpid()}"


def _is_server(pid: str) -> bool:
    """Whether a process is a living double: a killed one may wait for its parent, or its number be used again."""
    try:
        return b"tritonserver" in Path("/proc", pid, "cmdline").read_bytes()  # empty for a dead one
    except OSError:
        return False


class Meeting:
    """Files through which the ranks of one launch know of each other."""

    def __init__(self, folder: Path, size: int) -> None:
        """Join the launch of `size` ranks below a double's folder."""
        self.size = size
        self.folder = folder / "scratch" / launch_name()
        self.folder.mkdir(parents=True, exist_ok=True)

    def tell(self, rank: int, word: str) -> None:
        """Record that this rank has `loaded` or `ended`."""
        (self.folder / f"{word}-{rank}").touch()

    def told(self, rank: int, word: str) -> bool:
        """Return whether a rank has recorded it."""
        return (self.folder / f"{word}-{rank}").exists()

    def all_told(self, word: str) -> bool:
        """Return whether every rank of the launch has recorded it."""
        return all(self.told(rank, word) for rank in range(self.size))


class Region:
    """The shared-memory region of one rank's python backend."""

    def __init__(self, folder: Path, prefix: str) -> None:
        """Create the region; RegionError when a living process of these doubles has the same prefix."""
        self.owner = folder / "scratch" / f"prefix-{prefix}"
        self._claim(prefix)
        self.path = SHARED_MEMORY / f"{prefix}{uuid.uuid4()}"
        self.path.write_bytes(bytes(_REGION_BYTES))

    def _claim(self, prefix: str) -> None:
        if self.owner.exists():
            pid = self.owner.read_text(encoding="utf-8")
            if _is_server(pid):
                raise RegionError(
                    f"Unable to initialize shared memory key '{prefix}' to requested size (1048576 bytes). "
                    f"(strict double) process {pid} uses this prefix."
                )
            self.owner.unlink(missing_ok=True)
        # Linked with its content: an empty file would look to another rank like that of a process that is gone.
        own = self.owner.with_name(f"{self.owner.name}.{os.getpid()}")
        own.write_text(str(os.getpid()), encoding="utf-8")
        try:
            os.link(own, self.owner)
        except FileExistsError:
            raise RegionError(f"Unable to initialize shared memory key '{prefix}': another rank was quicker") from None
        finally:
            own.unlink()

    def close(self) -> None:
        """Remove the region, as an orderly end does."""
        self.path.unlink(missing_ok=True)
        self.owner.unlink(missing_ok=True)
