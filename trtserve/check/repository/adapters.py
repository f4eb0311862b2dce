"""Rules about LoRA adapters and draft models: their files, and whether they fit the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trtserve.check.repository.findings import Fault, refusal
from trtserve.check.repository.subject import ModelFolder, Subject
from trtserve.errors import RepositoryError
from trtserve.repo.adapters import CONFIG, WEIGHTS, resolve_adapters
from trtserve.repo.draft import require_pair
from trtserve.repo.placement import model_names
from trtserve.triton.profiles import BLS, CORE

_AGAIN = "Make the repository again: trtserve repo --lora NAME=FOLDER"


def broken_tables(subject: Subject) -> Iterator[Fault]:
    """lora.json is a table of adapters."""
    for file in _tables(subject):
        found = _read(file)
        if isinstance(found, Exception):
            yield Fault(file=file, what=f"{file.name} is no table of LoRA adapters: {found!r}.", fix=_AGAIN)


def lacking_files(subject: Subject) -> Iterator[Fault]:
    """The files of every adapter are there."""
    for file, name, entry in _adapters(subject):
        folder = subject.path / str(entry["folder"])
        lacking = [each for each in (WEIGHTS, CONFIG) if not (folder / each).is_file()]
        if lacking:
            yield Fault(
                file=file,
                what=f"The adapter {name} has no {' and no '.join(lacking)} in {entry['folder']}.",
                fix=_AGAIN,
            )


def not_fitting(subject: Subject) -> Iterator[Fault]:
    """Every adapter fits the engine, and is the one that its number was made of."""
    for file, name, entry in _adapters(subject):
        core, folder = _core(subject, file), subject.path / str(entry["folder"])
        if core is None or not core.build or not (folder / WEIGHTS).is_file() or not (folder / CONFIG).is_file():
            continue
        try:
            (found,) = resolve_adapters({name: folder}, core.engine)
        except RepositoryError as error:
            yield Fault(model=core.name, file=folder, what=error.message, fix=error.hint or _AGAIN)
            continue
        if found.task_id != int(entry["task_id"]):
            yield Fault(
                model=core.name,
                file=folder,
                what=f"The files of the adapter {name} have changed: its task id is {entry['task_id']}, and a cached "
                "adapter of that id would be taken for it.",
                fix=_AGAIN,
            )


def small_pages(subject: Subject) -> Iterator[Fault]:
    """Pages of the adapters' cache take the ranks that the engine takes."""
    for model in subject.gpu_engines:
        if not (model.build.get("plugin_config") or {}).get("lora_plugin"):
            continue
        built = int((model.build.get("lora_config") or {}).get("max_lora_rank") or 0)
        largest = model.parameters.get("lora_cache_max_adapter_size") or "64"
        if largest.isdigit() and int(largest) < built:
            yield Fault(
                model=model.name,
                file=model.file,
                what=f"lora_cache_max_adapter_size is {largest}; the engine takes ranks up to {built}.",
                fix=f"Set it to {built}.",
            )


def wrong_drafts(subject: Subject) -> Iterator[Fault]:
    """A draft model and its target were built for each other."""
    for bls in subject.of(BLS):
        name = bls.parameters.get("tensorrt_llm_draft_model_name", "")
        target = subject.models.get(subject.inner(bls, "tensorrt_llm_model_name", CORE))
        draft = subject.models.get(name)
        if target is None or draft is None or not target.build or not draft.build:
            continue
        if not target.pretrained or not draft.pretrained:
            continue
        if (error := refusal(partial(require_pair, target.engine, draft.engine, draft.name))) is not None:
            yield Fault(model=draft.name, file=bls.file, what=error.message, fix=error.hint or "")


def _tables(subject: Subject) -> list[Path]:
    return sorted(subject.path.glob("lora*.json"))


def _adapters(subject: Subject) -> Iterator[tuple[Path, str, Mapping[str, Any]]]:
    for file in _tables(subject):
        entries = _read(file)
        if not isinstance(entries, Exception):
            yield from ((file, name, entry) for name, entry in sorted(entries.items()))


def _read(file: Path) -> dict[str, Mapping[str, Any]] | Exception:
    """Name → entry of a table of adapters, or why it is none."""
    try:
        adapters = json.loads(file.read_text(encoding="utf-8"))["adapters"]
        return {
            str(name): {"task_id": int(entry["task_id"]), "folder": str(entry["folder"])}
            for name, entry in adapters.items()
        }
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        return error


def _core(subject: Subject, file: Path) -> ModelFolder | None:
    return subject.models.get(model_names(file.stem.removeprefix("lora"))[CORE])
