"""LoRA adapters that clients choose by name: `lora.json` and the adapters' files."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtserve.artifacts import Adapter, looks_like
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.checkpoint.lora_adapter import (
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    peft_arrays,
    peft_config,
    peft_pairs,
    require_plain,
)
from trtserve.errors import CorruptFileError, RepositoryError, TrtserveError, UsageError
from trtserve.executor.engine.shapes import MODULE_IDS, LoraModule, lora_modules
from trtserve.executor.loaders import embedded_runtime, read_engine_config
from trtserve.executor.runtimes import RUNTIMES
from trtserve.executor.vllm.arguments import ADAPTER_FOLDER, ADAPTERS_FILE
from trtserve.files import child, is_below, locked, read_json_object, write_json, writing
from trtserve.repository.engines import own_files
from trtserve.repository.profiles import CORE
from trtserve.repository.programs import VERSION, lora_table, model_names
from trtserve.specs import RepositorySpec
from trtserve.store import Store, link_or_copy

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.generic]

WEIGHTS, CONFIG = "model.lora_weights.npy", "model.lora_config.npy"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class NamedAdapter:
    name: str
    folder: Path
    task_id: int  # the core model caches the adapter under it; a hash of the content


def find_adapters(spec: RepositorySpec, store: Store) -> dict[str, Path]:
    """Return name → folder of the adapters; `--lora poet=poet` may name one that `trtserve lora` made."""
    # After `trtserve lora ./poet`, `--lora poet=poet` means the converted adapter and not the PEFT folder.
    return {
        name: (
            folder.absolute()
            if folder.is_dir() and (looks_like(Adapter, folder) or str(folder) not in store.by_name(Adapter))
            else store.find(Adapter, str(folder)).path
        )
        for name, folder in spec.lora.items()
    }


def resolve_adapters(folders: Mapping[str, Path], config: EngineConfig) -> tuple[NamedAdapter, ...]:
    """Return the adapters of `folders` (name → folder) in order of their names, checked against the engine's `config`.

    Raises UsageError for a name that cannot be one. Raises RepositoryError for a folder without an adapter in
    TensorRT-LLM's or PEFT's format, and for an adapter that does not fit the engine; see `match_names` and
    `adapter_config` for those of PEFT that cannot be converted.
    """
    if not folders:
        return ()
    if takes_peft(config):
        return _resolve_peft(folders, config)
    if not config.build.plugin_config.lora_plugin:
        raise RepositoryError(
            "The engine was built without adapters, so --lora cannot work with it.",
            hint="Build it again with --lora-plugin auto --lora-target-modules attn_q,attn_k,attn_v --max-lora-rank 8.",
        )
    names = [name for name in config.build.lora_config.lora_target_modules if name in MODULE_IDS]
    modules = {module.id: module for module in lora_modules(config.model, names)}
    adapters = []
    for name, folder in sorted(folders.items()):
        _require_name(name, folder)
        weights, rows = _read(name, folder)
        _require_fit(name, weights, rows, modules, config)
        adapters.append(_named(name, folder, rows.tobytes() + weights.tobytes()))
    return tuple(adapters)


def _require_name(name: str, folder: Path) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(f"--lora {name}={folder}: {name!r} cannot be a name; use letters, digits, '.', '_' and '-'.")


def _named(name: str, folder: Path, content: bytes) -> NamedAdapter:
    """Return the adapter with an id of 63 bits, never 0, so that a changed one never hits the cache."""
    digest = hashlib.sha256(content).digest()
    return NamedAdapter(name=name, folder=folder, task_id=int.from_bytes(digest[:8], "big") >> 1 or 1)


def takes_peft(config: EngineConfig) -> bool:
    """Return whether the engine's runtime loads adapters in PEFT's format as they are."""
    runtime = embedded_runtime(config)
    return runtime is not None and RUNTIMES[runtime].folder_as_engine


def adapter_files(config: EngineConfig) -> tuple[str, str]:
    """Return the names of an adapter's files, in the format that the engine's runtime takes."""
    return (PEFT_WEIGHTS, PEFT_CONFIG) if takes_peft(config) else (WEIGHTS, CONFIG)


def _resolve_peft(folders: Mapping[str, Path], config: EngineConfig) -> tuple[NamedAdapter, ...]:
    """Return the adapters of PEFT folders. Raises RepositoryError for another folder and a rank above the limit."""
    adapters = []
    for name, folder in sorted(folders.items()):
        _require_name(name, folder)
        files = [path for path in own_files(folder) if path.name.startswith("adapter_")]
        if not {PEFT_CONFIG, PEFT_WEIGHTS} <= {path.name for path in files}:
            raise RepositoryError(
                f"--lora {name}={folder}: the folder has no adapter in PEFT's format ({PEFT_CONFIG} and "
                f"{PEFT_WEIGHTS}), which vLLM loads."
            )
        content = read_json_object(folder / PEFT_CONFIG, CorruptFileError)
        if missing := [key for key in ("r", "lora_alpha", "target_modules") if key not in content]:
            raise RepositoryError(f"--lora {name}={folder}: {PEFT_CONFIG} has no {' and no '.join(missing)}.")
        try:
            require_plain(content)
        except CorruptFileError as error:
            raise CorruptFileError(f"--lora {name}={folder}: {error.message}", hint=error.hint) from None
        rank = max([content["r"], *(content.get("rank_pattern") or {}).values()])
        most = config.build.lora_config.max_lora_rank
        if rank > most:
            raise RepositoryError(
                f"The adapter {name} has rank {rank}; the model is served with ranks up to {most}.",
                hint=f"Raise the limit: --max-lora-rank {rank}",
            )
        adapters.append(_named(name, folder, b"".join(path.read_bytes() for path in files)))
    return tuple(adapters)


def add_adapter(repository: Path, core: str, table: str, name: str, folder: Path, *, replacing: bool = False) -> None:
    """Add an adapter to a repository that is being served; its models find it in their table.

    One of the same name is only replaced if `replacing`, and stays as it was when the new one is refused. Raises
    UsageError for a name that is taken or cannot be one; RepositoryError for an adapter that does not fit the engine,
    and for engines that read adapters only when they start.
    """
    import numpy as np

    config = _changeable(repository, core, name)
    place = f"{core}/{VERSION}/{ADAPTER_FOLDER}"
    with locked(repository / f".{table}.change"):
        adapters = _table(repository / table)
        if name in adapters and not replacing:
            raise UsageError(f"The adapter {name} is there already.", hint="Unload it first.")
        (adapter,) = resolve_adapters({name: folder}, config)
        weights, rows = _read(name, folder)
        target = child(repository / place, name)
        new = target.with_name(f".{name}.new")  # no adapter's name begins with a dot
        shutil.rmtree(new, ignore_errors=True)  # left by an interrupted call
        with writing(new):
            new.mkdir(parents=True)
            np.save(new / WEIGHTS, weights)
            np.save(new / CONFIG, rows)
            shutil.rmtree(target, ignore_errors=True)
            new.rename(target)
        entry = {"task_id": adapter.task_id, "folder": f"{place}/{name}"}
        write_json(repository / table, {"adapters": {**adapters, name: entry}})


def remove_adapter(repository: Path, core: str, table: str, name: str) -> None:
    """Remove an adapter from a repository that is being served.

    Raises UsageError if it is not there; RepositoryError for engines that read adapters only when they start.
    """
    _changeable(repository, core, name)
    with locked(repository / f".{table}.change"):
        adapters = _table(repository / table)
        if name not in adapters:
            raise UsageError(f"There is no adapter {name}; there are: {', '.join(adapters) or 'none'}.")
        entry = adapters.pop(name)
        write_json(repository / table, {"adapters": adapters})
        folder = (repository / str(entry["folder"])).resolve()
        if is_below(entry["folder"]) and folder.is_relative_to(repository.resolve()) and folder.name == name:
            shutil.rmtree(folder, ignore_errors=True)


def _changeable(repository: Path, core: str, name: str) -> EngineConfig:
    """Return the config of an engine that takes other adapters while it runs; raises RepositoryError for another."""
    config = read_engine_config(repository / core / VERSION)
    if takes_peft(config):
        raise RepositoryError(
            f"vLLM gets its adapters when it starts: {name} cannot be loaded or removed while it runs.",
            hint="Make the repository again, with --lora NAME=FOLDER for each adapter that it should have.",
        )
    return config


def _table(path: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = read_json_object(path)["adapters"] if path.exists() else {}
    return dict(found)


def write_adapters(
    adapters: tuple[NamedAdapter, ...], repository: Path, suffix: str = "", *, peft: bool = False
) -> None:
    """Write the adapters and their table into a repository, for the models with `suffix`.

    Those in PEFT's format stay as they are, and the executor gets a table of its own.
    """
    if not adapters:
        return
    import numpy as np

    # Triton takes every top-level folder for a model, so the adapters are stored in the core model's.
    place, table = f"{model_names(suffix)[CORE]}/{VERSION}/{ADAPTER_FOLDER}", {}
    for adapter in adapters:
        target = repository / place / adapter.name
        target.mkdir(parents=True)
        if peft:
            for path in own_files(adapter.folder):
                link_or_copy(path, target / path.name, copy=True)
        else:
            weights, rows = _read(adapter.name, adapter.folder)
            np.save(target / WEIGHTS, weights)
            np.save(target / CONFIG, rows)
        table[adapter.name] = {"task_id": adapter.task_id, "folder": f"{place}/{adapter.name}"}
    if peft:
        folders = {each.task_id: each.name for each in adapters}
        (repository / place / ADAPTERS_FILE).write_text(json.dumps(folders, indent=2) + "\n", encoding="utf-8")
    text = json.dumps({"adapters": table}, indent=2) + "\n"
    (repository / lora_table(suffix)).write_text(text, encoding="utf-8")


def _of_peft(name: str, folder: Path) -> tuple[Array, Array]:
    """Convert the adapter of a PEFT folder, which takes less than a second for each 100 MB."""
    try:
        pairs = peft_pairs(folder)
        config = peft_config(folder).with_modules([pair.path for pair in pairs])
        return peft_arrays(folder, pairs, config, "float16")
    except FileNotFoundError:
        raise RepositoryError(
            f"--lora {name}={folder}: the folder has no {PEFT_WEIGHTS}.",
            hint=f"Save the adapter again with PEFT. What else may be wrong with it says: trtserve lora {folder}",
        ) from None
    except TrtserveError as error:
        raise type(error)(f"--lora {name}={folder}: {error.message}", hint=error.hint) from None


def _read(name: str, folder: Path) -> tuple[Array, Array]:
    """Return weights FP16 [1, rows, width], as Triton's input has them, and config INT32 [1, rows, 3]."""
    import numpy as np

    from trtserve.programs.shared.arrays import read_array

    if missing := [file for file in (WEIGHTS, CONFIG) if not (folder / file).is_file()]:
        if (folder / PEFT_CONFIG).is_file():
            return _of_peft(name, folder)
        raise RepositoryError(f"--lora {name}={folder}: the folder has no {' and no '.join(missing)}.")
    try:
        weights, rows = read_array(folder / WEIGHTS), read_array(folder / CONFIG)
    except ValueError as error:
        raise RepositoryError(
            f"The adapter {name} cannot be read: {error}.", hint="Convert it again: trtserve lora ADAPTER"
        ) from error
    if rows.ndim == 2 and weights.ndim == 2:
        weights, rows = weights[np.newaxis], rows[np.newaxis]
    if rows.ndim != 3 or rows.shape[2] != 3 or weights.ndim != 3 or weights.shape[:2] != rows.shape[:2]:
        raise RepositoryError(
            f"The adapter {name} in {folder} has weights {list(weights.shape)} and config {list(rows.shape)}; expected "
            "[1, rows, width] and [1, rows, 3]."
        )
    if weights.dtype.kind != "f" or rows.dtype.kind not in "iu":
        raise RepositoryError(
            f"The adapter {name} in {folder} is of type {weights.dtype}; the input lora_weights is float16.",
            hint="Convert it again with --storage-type float16.",
        )
    with np.errstate(over="ignore"):
        narrowed = weights.astype(np.float16)
    if np.isfinite(weights).all() and not np.isfinite(narrowed).all():
        raise RepositoryError(f"The adapter {name} has weights beyond float16, the type of the input lora_weights.")
    return narrowed, rows.astype(np.int32)


def _require_fit(
    name: str, weights: Array, rows: Array, modules: Mapping[int, LoraModule], config: EngineConfig
) -> None:
    """Raise RepositoryError for the first row that the core model would refuse in a request."""
    rank_limit = config.build.lora_config.max_lora_rank
    layers, width = config.model.num_hidden_layers, weights.shape[-1]
    names = {number: module for module, number in MODULE_IDS.items()}
    for module, layer, rank in rows.reshape(-1, 3).tolist():
        if module not in modules:
            what = names.get(module, f"module {module}")
            built = ", ".join(each.name for each in modules.values())
            reason = f"it changes {what}; the engine was built for {built}"
        elif not 0 <= layer < layers:
            reason = f"it changes layer {layer}; the engine has {layers} layers"
        elif rank < 1:
            reason = f"its rank is {rank}; expected 1 or more"
        elif rank > rank_limit:
            reason = f"its rank is {rank}; the engine was built for ranks up to {rank_limit} (--max-lora-rank)"
        elif modules[module].numbers(rank) > width:
            reason = f"{names[module]} has {modules[module].numbers(rank)} weights at rank {rank}, a row holds {width}"
        else:
            continue
        raise RepositoryError(
            f"The adapter {name} does not fit the engine: {reason}.",
            hint="Use an adapter of this model, or build the engine for the adapter.",
        )
