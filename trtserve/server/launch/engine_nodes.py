"""The number of GPUs per node that an engine's config.json must state.

TensorRT-LLM's executor gives rank i the GPU number i % `gpus_per_node` (or the i-th of gpu_device_ids, modulo their
number), and reads `gpus_per_node` from `pretrained_config.mapping` of the engine's config.json; the default is 8
(GptJsonConfig, WorldConfig). trtllm-build up to 1.1 writes the value of its own flag there, not the checkpoint's.
Nothing else in an engine depends on it, so it is set for the nodes that will serve, in the repository's own copy.
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
from trtserve.repository.core_models import CoreModel
from trtserve.store.integrity import accept_change

_DEFAULT = 8


@dataclass(frozen=True, kw_only=True)
class EngineNodes:
    """A change of the config.json of an engine in a repository."""

    config: Path
    gpus_per_node: int

    def write(self) -> None:
        """Write the number into a new file: the present one may be a link to that of the engine it came from."""
        content = json.loads(self.config.read_text(encoding="utf-8"))
        content["pretrained_config"].setdefault("mapping", {})["gpus_per_node"] = self.gpus_per_node
        made = self.config.with_name(f".{self.config.name}.{os.getpid()}")
        with writing(made):
            made.write_text(json.dumps(content, indent=4), encoding="utf-8")
            made.replace(self.config)
        accept_change(self.config)


def gpus_per_node(core: CoreModel) -> int:
    """Return the GPUs of a node that the engine states."""
    mapping: dict[str, Any] = (core.config.get("pretrained_config") or {}).get("mapping") or {}
    return int(mapping.get("gpus_per_node") or _DEFAULT)


def fit_engines(
    repository: Path, models: Sequence[CoreModel], progress: Progress, *, nodes: int = 1, gpus: int = 0
) -> Sequence[EngineNodes]:
    """Return the engines that must state another number before `gpus` on each of `nodes` can serve their models.

    On one node any number that is large enough will do. Raises RepositoryError when such an engine is outside the
    repository, where it is not changed.
    """
    found = []
    for core in models:
        stated = gpus_per_node(core)
        if nodes > 1:
            wanted = gpus
        else:
            wanted = max(stated, core.world_size, *(device + 1 for group in core.gpu_device_ids for device in group), 1)
        if core.engine is None or core.uses_llmapi or core.embedded or stated == wanted:
            continue
        config = core.engine / "config.json"
        text = f"The engine of {core.name} states gpus_per_node {stated}, from which a rank finds its GPU"
        if not config.absolute().is_relative_to(repository.absolute()):
            raise RepositoryError(
                f"{text}; these nodes need {wanted}. The engine is outside the repository: {config}.",
                hint=f"Write {wanted} for pretrained_config.mapping.gpus_per_node there, or make a repository with the "
                "engine inside: trtserve repo ENGINE",
            )
        progress.step(f"{text}; setting it to {wanted} in the repository.")
        found.append(EngineNodes(config=config, gpus_per_node=wanted))
    return found
