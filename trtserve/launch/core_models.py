"""What the configuration of a core model says about where its ranks run."""

from __future__ import annotations

from dataclasses import dataclass

from trtserve.errors import RepositoryError
from trtserve.releases.launcher import EXECUTOR_WORKER


@dataclass(frozen=True, kw_only=True)
class CoreModel:
    """A model with an engine, in the words of its config.pbtxt; empty texts are parameters that are not set.

    `world_size` is that of its engine, `instances` the count of its instance_group.
    """

    world_size: int
    backend: str = "tensorrtllm"
    instances: int = 1
    gpu_device_ids: str = ""
    participant_ids: str = ""
    executor_worker_path: str = EXECUTOR_WORKER

    @property
    def processes(self) -> int:
        """Ranks of all instances."""
        return self.world_size * self.instances

    @property
    def device_groups(self) -> tuple[tuple[int, ...], ...]:
        """GPUs of each instance."""
        return numbers(self.gpu_device_ids, "gpu_device_ids")

    @property
    def participant_groups(self) -> tuple[tuple[int, ...], ...]:
        """MPI ranks of each instance."""
        return numbers(self.participant_ids, "participant_ids")


def numbers(text: str, key: str) -> tuple[tuple[int, ...], ...]:
    """`0,1;2,3` → ((0, 1), (2, 3)); RepositoryError for anything else that is not empty."""
    if not text.strip():
        return ()
    try:
        groups = tuple(tuple(int(part) for part in group.split(",")) for group in text.split(";"))
    except ValueError:
        groups = ((-1,),)
    if any(number < 0 for group in groups for number in group):
        raise RepositoryError(
            f"{key} is {text!r}; expected numbers such as 0,1 or 0,1;2,3.",
            hint="A comma separates the ranks of one instance, a semicolon the instances.",
        )
    return groups
