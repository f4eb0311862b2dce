"""Rules about LoRA adapters and draft models: their files, and whether they fit the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trtserve.errors import RepositoryError
from trtserve.files import parse_json
from trtserve.repository.adapters import CONFIG, WEIGHTS, resolve_adapters
from trtserve.repository.check.findings import Finding, Rule, refusal
from trtserve.repository.check.repository import Repository
from trtserve.repository.draft import require_pair
from trtserve.repository.names import model_names
from trtserve.repository.profiles import BLS, CORE

_MAKE_AGAIN = "Make the repository again: trtserve repo --lora NAME=FOLDER"


def invalid_tables(repository: Repository) -> Iterator[Finding]:
    for file, entries in _tables(repository):
        if isinstance(entries, Exception):
            yield Finding(file=file, what=f"{file.name} is not a table of adapters: {entries!r}.", fix=_MAKE_AGAIN)


def missing_files(repository: Repository) -> Iterator[Finding]:
    for file, name, entry in _adapters(repository):
        folder = repository.path / entry["folder"]
        missing = [each for each in (WEIGHTS, CONFIG) if not (folder / each).is_file()]
        if missing:
            what = f"The adapter {name} has no {' and no '.join(missing)} in {entry['folder']}."
            yield Finding(file=file, what=what, fix=_MAKE_AGAIN)


def unfit_adapters(repository: Repository) -> Iterator[Finding]:
    for file, name, entry in _adapters(repository):
        core = repository.models.get(model_names(file.stem.removeprefix("lora"))[CORE])
        folder = repository.path / entry["folder"]
        if core is None or not core.build or not all((folder / each).is_file() for each in (WEIGHTS, CONFIG)):
            continue
        try:
            (found,) = resolve_adapters({name: folder}, core.engine)
        except RepositoryError as error:
            yield core.finding(error.message, error.hint or _MAKE_AGAIN, folder)
            continue
        if found.task_id != entry["task_id"]:
            yield core.finding(
                f"The files of the adapter {name} have changed: its task id is {entry['task_id']}, and the server "
                "would use a cached adapter with that id.",
                _MAKE_AGAIN,
                folder,
            )


def small_pages(repository: Repository) -> Iterator[Finding]:
    for model, _ in repository.gpu_engines:
        built = int((model.build.get("lora_config") or {}).get("max_lora_rank") or 0)
        largest = model.parameters.get("lora_cache_max_adapter_size") or "64"
        if model.plugins.get("lora_plugin") and largest.isdigit() and int(largest) < built:
            yield model.finding(
                f"lora_cache_max_adapter_size is {largest}; the engine takes ranks up to {built}.",
                f"Set it to {built}.",
            )


def unfit_drafts(repository: Repository) -> Iterator[Finding]:
    for bls in repository.of(BLS):
        target = repository.core_of(bls)
        draft = repository.models.get(bls.parameters.get("tensorrt_llm_draft_model_name", ""))
        if target is None or draft is None or not all(each.build and each.pretrained for each in (target, draft)):
            continue
        if (error := refusal(partial(require_pair, target.engine, draft.engine, draft.name))) is not None:
            yield draft.finding(error.message, error.hint or "", bls.file)


def _tables(repository: Repository) -> Iterator[tuple[Path, dict[str, Mapping[str, Any]] | Exception]]:
    """Every table of adapters: name → entry, or why it is not one."""
    yield from ((file, _read_table(file)) for file in sorted(repository.path.glob("lora*.json")))


def _read_table(file: Path) -> dict[str, Mapping[str, Any]] | Exception:
    try:
        entries = parse_json(file.read_text(encoding="utf-8"))["adapters"].items()
        return {str(name): {"task_id": int(each["task_id"]), "folder": str(each["folder"])} for name, each in entries}
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        return error


def _adapters(repository: Repository) -> Iterator[tuple[Path, str, Mapping[str, Any]]]:
    for file, entries in _tables(repository):
        if not isinstance(entries, Exception):
            yield from ((file, name, entry) for name, entry in sorted(entries.items()))


RULES = (
    Rule("lora-table", invalid_tables, "lora.json can be read"),
    Rule("lora-files", missing_files, "adapters have their files"),
    Rule("lora-fit", unfit_adapters, "adapters fit the engine: plugin, modules, layers, ranks, content"),
    Rule("lora-cache", small_pages, "cache pages hold the engine's ranks", severity="warning"),
    Rule("draft", unfit_drafts, "draft and target fit each other"),
)
