"""Which GPU of its node each rank takes, and what the engine's config.json must say for it.

TensorRT-LLM's executor gives rank i the GPU number i % `gpus_per_node` (or the i-th of gpu_device_ids, counted round),
and reads `gpus_per_node` in `pretrained_config.mapping` of the engine's config.json, 8 where it is not said
(GptJsonConfig, WorldConfig). trtllm-build up to 1.1 writes there what its own flag says, whatever the checkpoint has;
nothing else in an engine depends on it. So it is set for the nodes that are to serve, in the repository's own copy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve.errors import RepositoryError
from trtserve.files import writing
from trtserve.progress import Progress
from trtserve.triton.core_models import CoreModel

_DEFAULT = 8


@dataclass(frozen=True, kw_only=True)
class EngineNodes:
    """The config.json of an engine in a repository, and the GPUs of a node that it is to say."""

    config: Path
    gpus_per_node: int

    def write(self) -> None:
        """Say it. The file is made anew: the one that is there may be a link to that of the engine it came from."""
        content = json.loads(self.config.read_text(encoding="utf-8"))
        content["pretrained_config"].setdefault("mapping", {})["gpus_per_node"] = self.gpus_per_node
        made = self.config.with_name(f".{self.config.name}.{os.getpid()}")
        with writing(made):
            made.write_text(json.dumps(content, indent=4), encoding="utf-8")
            made.replace(self.config)


def gpus_per_node(core: CoreModel) -> int:
    """GPUs of a node as the engine says."""
    mapping: dict[str, Any] = (core.config.get("pretrained_config") or {}).get("mapping") or {}
    return int(mapping.get("gpus_per_node") or _DEFAULT)


def fit_engines(
    repository: Path, models: Sequence[CoreModel], progress: Progress, *, nodes: int = 1, gpus: int = 0
) -> Sequence[EngineNodes]:
    """The engines that must say another number of GPUs before `gpus` on each of `nodes` can serve their models.

    On one node any number does that is large enough. RepositoryError for such an engine that is not in the repository:
    it is not ours to change.
    """
    found = []
    for core in models:
        said, wanted = gpus_per_node(core), _wanted(core, nodes, gpus)
        if core.engine is None or core.backend == "llmapi" or said == wanted:
            continue
        config = core.engine / "config.json"
        text = f"The engine of {core.name} says gpus_per_node {said}, by which a rank finds its GPU"
        if not config.absolute().is_relative_to(repository.absolute()):
            raise RepositoryError(
                f"{text}; {wanted} would fit. It is not in the repository: {config}.",
                hint=f"Write {wanted} for pretrained_config.mapping.gpus_per_node there, or make a repository with the "
                "engine inside: trtserve repo ENGINE",
            )
        progress.step(f"{text}: {wanted} in the repository.")
        found.append(EngineNodes(config=config, gpus_per_node=wanted))
    return found


def _wanted(core: CoreModel, nodes: int, gpus: int) -> int:
    if nodes > 1:
        return gpus
    named = [device + 1 for group in core.gpu_device_ids for device in group]
    return max(gpus_per_node(core), core.world_size, *named, 1)
