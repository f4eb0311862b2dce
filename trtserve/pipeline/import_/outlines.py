"""The tensors of a model without its weights: headers in sparse files, read by range request or made from shapes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from trtserve.checkpoint.source import INDEX
from trtserve.errors import CorruptFileError, UnsupportedModelError
from trtserve.files import is_weights
from trtserve.pipeline.import_.known_models import tensor_table
from trtserve.pipeline.import_.model_plan import CONFIG, SINGLE, ModelPlan
from trtserve.progress import SILENT, Progress
from trtserve.store import hub


def outline_model(plan: ModelPlan, folder: Path, *, token: str | None = None, progress: Progress = SILENT) -> None:
    """Fill `folder` with what `plan_conversion` reads from a model that is not here: config, index, and headers.

    The weight files have their full size but are sparse, so that they use no disk.
    """
    (folder / CONFIG).write_text(json.dumps(dict(plan.config)), encoding="utf-8")
    if (revision := plan.revision) is None:
        _write_outline(folder / SINGLE, tensor_table(plan.config))
        return
    places: dict[str, str] = {}
    weights = [file for file in plan.files if is_weights(file.name)]
    if any(file.name.endswith(".bin") for file in weights):
        raise UnsupportedModelError(
            f"The weights of {revision.repository} are .bin files; their tensors cannot be listed without a download.",
            hint="Pull the model first (import --download-only), then plan it by its name.",
        )
    with progress.task(f"Reading {len(weights)} headers of {revision.repository}", total=len(weights)) as task:
        for file in weights:
            table = hub.tensor_table(revision, file, token=token)
            places |= dict.fromkeys(table, file.name)
            _write_outline(folder / file.name, table)
            task.advance(1)
    if any(file.name == INDEX for file in plan.files):
        (folder / INDEX).write_text(json.dumps({"weight_map": places}), encoding="utf-8")


def _write_outline(path: Path, table: dict[str, dict[str, Any]]) -> None:
    text = json.dumps(table).encode()
    size = max((int(entry["data_offsets"][1]) for entry in table.values()), default=0)
    if size < 0:
        raise CorruptFileError(f"The header of {path.name} names negative offsets.")
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        handle.truncate(8 + len(text) + size)
