"""What the tables say of each release, in short: a release that is out stays as it is.

The tables were compared with NVIDIA's files, row by row and by two authors, when they were written; the sources are at
their heads. From then on a digest per release and table tells that a row was changed by mistake. Where one was wrong:
correct it, say where it was read, and run `python -m tests.golden.release_facts` in the repository root.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from trtserve.nvidia.releases import RELEASES, order
from trtserve.nvidia.releases.containers import (
    Container,
    containers_of,
    cuda_of,
    driver_of,
    kernels,
    minor_version_drivers,
)
from trtserve.nvidia.releases.converters import converters, launcher_facts
from trtserve.nvidia.releases.options import build_flags
from trtserve.repository.profiles import LLMAPI_SINCE, ModelProfile, llmapi_model, profile

FILE = Path(__file__).with_suffix(".json")
Facts = dict[str, list[tuple[Any, ...]]]
"""Table → its rows."""


def facts_of(release: str) -> Facts:
    """Every row of a release that the tables have, as NVIDIA's files of that release have it."""
    models = dict(profile(release).models)
    if order(release) >= order(LLMAPI_SINCE):
        models["llmapi"] = llmapi_model(release, own=False)
    return {
        **{name: _model(model) for name, model in models.items()},
        "build flags": [
            (name, flag.kind, flag.default, flag.plugin, *flag.choices, *flag.also)
            for name, flag in build_flags(release).items()
        ],
        "containers": [
            (each.tag, each.tensorrt_llm, each.tensorrt, each.cuda, each.python, driver_of(each), _oldest_driver(each))
            for each in containers_of(release)
        ],
        "launcher": [(repr(launcher_facts(release)),)],
        "kernels": [(row.capability, row.architecture) for row in kernels() if row.within(release)],
        "converters": [(name, row.folder) for name, row in converters().items() if order(row.since) <= order(release)],
    }


def _oldest_driver(of: Container) -> str:
    return minor_version_drivers()[cuda_of(of)[0]]


def _model(model: ModelProfile) -> list[tuple[Any, ...]]:
    tensors = [
        (side, row.name, row.type, row.dims, row.optional, row.ragged, row.scalar)
        for side, rows in (("in", model.inputs), ("out", model.outputs))
        for row in rows
    ]
    links = [
        (step.model, side, link.name, link.ensemble_tensor)
        for step in model.steps
        for side, rows in (("in", step.inputs), ("out", step.outputs))
        for link in rows
    ]
    parameters = [(row.name, row.unset, row.required, row.needs_key) for row in model.parameters]
    return [*tensors, *links, *parameters]


def digests(facts: Facts) -> dict[str, str]:
    """Table → the first digits of a hash of its rows, in whatever order."""
    return {
        table: hashlib.sha256("\n".join(sorted(map(repr, rows))).encode()).hexdigest()[:12]
        for table, rows in facts.items()
    }


if __name__ == "__main__":
    found = {release: digests(facts_of(release)) for release in RELEASES}
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
