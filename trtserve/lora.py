"""PEFT adapter → Adapter: `model.lora_weights.npy` and `model.lora_config.npy`, the tensors of TensorRT-LLM's LoRA.

The files are those of NVIDIA's hf_lora_convert: clients send them as they are.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, get_args

from trtserve import hub
from trtserve.architectures.adapter import (
    AdapterConfig,
    Pair,
    StorageType,
    adapter_arrays,
    adapter_config,
    match_names,
    module_row,
)
from trtserve.architectures.tensor_files import TensorFile
from trtserve.artifacts import Adapter, Manifest, fingerprint
from trtserve.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError, UsageError
from trtserve.files import read_json_object
from trtserve.import_.downloads import download_folder
from trtserve.import_.sources import Source, parse_source
from trtserve.machine import gibibytes
from trtserve.progress import SILENT, Progress
from trtserve.store import Store, publish, reusable

SCHEMA = 1
WEIGHTS = "model.lora_weights.npy"
CONFIG = "model.lora_config.npy"

_SOURCE_CONFIG = "adapter_config.json"
_SOURCE_WEIGHTS = "adapter_model.safetensors"
_OLD_WEIGHTS = "adapter_model.bin"


@dataclass(frozen=True, kw_only=True)
class AdapterPlan:
    """A conversion before it begins.

    `folder` holds the adapter; None while it is on the hub only, as `revision` there. `pairs` are its modules, and
    `unmatched` the names of its tensors that are no module's; both are empty as long as it is on the hub.
    """

    source: Source
    config: AdapterConfig
    storage_type: StorageType
    folder: Path | None
    revision: hub.Revision | None
    pairs: tuple[Pair, ...]
    unmatched: tuple[str, ...]
    fingerprint: str
    path: Path
    reused: bool

    @property
    def targets(self) -> list[str]:
        """Words for `build --lora-target-modules`, in the order of the adapter."""
        return list(dict.fromkeys(pair.target for pair in self.pairs))


def convert_adapter(
    adapter: str | Path,
    *,
    name: str | None = None,
    out: Path | None = None,
    storage_type: str = "float16",
    store: Store | None = None,
    token: str | None = None,
    progress: Progress = SILENT,
) -> Adapter:
    """Convert the PEFT adapter in a folder, or of the hub (`org/name[@revision]`), or reuse what was made of it.

    UnsupportedModelError for an adapter that is more than LoRA matrices, CorruptFileError for a damaged one,
    ConversionError for values that `storage_type` (float16, float32, bfloat16) cannot hold.
    """
    plan = plan_adapter(adapter, name=name, out=out, storage_type=storage_type, store=store, token=token)
    return carry_out(plan, store=store, token=token, progress=progress)


def plan_adapter(
    adapter: str | Path,
    *,
    name: str | None = None,
    out: Path | None = None,
    storage_type: str = "float16",
    store: Store | None = None,
    token: str | None = None,
) -> AdapterPlan:
    """Everything that can be known without the values; of an adapter on the hub only its configuration is pulled."""
    if storage_type not in get_args(StorageType):
        raise UsageError(f"--storage-type is {storage_type!r}; expected one of {', '.join(get_args(StorageType))}.")
    store = store or Store()
    source = parse_source(str(adapter), name=name)
    if source.kind == "demo":
        raise ModelNotFoundError("demo is a model, not an adapter.", hint="Give a PEFT folder, or org/name of the hub.")
    revision = hub.resolve(source.location, source.revision, token=token) if source.kind == "hub" else None
    folder = Path(source.location) if revision is None else None
    inputs = _folder_inputs(Path(source.location)) if revision is None else _hub_inputs(revision)
    digest = fingerprint(stage="lora", schema=SCHEMA, storage_type=storage_type, **inputs)
    path = (out or store.destination(Adapter, source.name, digest)).absolute()
    config = _source_config(folder, revision, store, token)
    pairs, unmatched = ([], []) if folder is None else match_names(_names(folder))
    return AdapterPlan(
        source=source,
        config=config,
        storage_type=cast(StorageType, storage_type),
        folder=folder,
        revision=revision,
        pairs=tuple(pairs),
        unmatched=tuple(unmatched),
        fingerprint=digest,
        path=path,
        reused=reusable(Adapter, path, digest) is not None,
    )


def carry_out(
    plan: AdapterPlan, *, store: Store | None = None, token: str | None = None, progress: Progress = SILENT
) -> Adapter:
    """Make the adapter of `plan`; names that are no module's are told to `progress`."""
    if plan.reused:
        progress.step(f"Adapter {plan.path} is reused")
    if plan.revision is None:
        return _publish(plan, progress)
    with download_folder(store or Store(), plan.revision, progress) as folder:
        adapter = _publish(plan if plan.reused else _pulled(plan, plan.revision, folder, token, progress), progress)
        shutil.rmtree(folder)
    return adapter


def _publish(plan: AdapterPlan, progress: Progress) -> Adapter:
    return publish(Adapter, plan.path, _manifest(plan), lambda staging: _write(plan, staging, progress))


def _folder_inputs(folder: Path) -> dict[str, str]:
    """What identifies an adapter in a folder; ModelNotFoundError or UnsupportedModelError when it is none."""
    if not (folder / _SOURCE_CONFIG).is_file():
        raise ModelNotFoundError(
            f"{folder} has no {_SOURCE_CONFIG}: it is not a PEFT adapter.",
            hint="Give the folder that PEFT's save_pretrained wrote.",
        )
    if not (folder / _SOURCE_WEIGHTS).is_file():
        raise _no_weights(str(folder), old=(folder / _OLD_WEIGHTS).is_file())
    return {file: hub.digest_of(folder / file, "sha256") for file in (_SOURCE_CONFIG, _SOURCE_WEIGHTS)}


def _hub_inputs(revision: hub.Revision) -> dict[str, str]:
    digests = {file.name: file.digest for file in revision.files}
    if _SOURCE_CONFIG not in digests:
        raise ModelNotFoundError(
            f"{revision.repository} has no {_SOURCE_CONFIG}: it is not a PEFT adapter.",
            hint="To import a model: trtserve import MODEL",
        )
    if _SOURCE_WEIGHTS not in digests:
        raise _no_weights(revision.repository, old=_OLD_WEIGHTS in digests)
    return {name: digests[name] for name in (_SOURCE_CONFIG, _SOURCE_WEIGHTS)}


def _no_weights(where: str, *, old: bool) -> UnsupportedModelError:
    if not old:
        return UnsupportedModelError(f"{where} has no {_SOURCE_WEIGHTS}.", hint="Save the adapter again with PEFT.")
    return UnsupportedModelError(
        f"{where} has its weights in {_OLD_WEIGHTS} only, a pickle that takes PyTorch to read (and may run any code).",
        hint=f"With PyTorch: safetensors.torch.save_file(torch.load('{_OLD_WEIGHTS}', weights_only=True), "
        f"'{_SOURCE_WEIGHTS}')",
    )


def _source_config(
    folder: Path | None, revision: hub.Revision | None, store: Store, token: str | None
) -> AdapterConfig:
    if revision is None:
        assert folder is not None  # an adapter is in a folder or on the hub
        return _read_config(folder / _SOURCE_CONFIG)
    # Whoever carries out such a plan removes the folder under this lock.
    with download_folder(store, revision) as download:
        return _read_config(hub.pull(revision, _file(revision, _SOURCE_CONFIG), download, token=token))


def _read_config(path: Path) -> AdapterConfig:
    return adapter_config(read_json_object(path, CorruptFileError))


def _names(folder: Path) -> list[str]:
    """Names of the tensors in the order of their bytes, in which NVIDIA's converter meets them."""
    entries = TensorFile(folder / _SOURCE_WEIGHTS).entries
    return sorted(entries, key=lambda name: entries[name].begin)


def _pulled(
    plan: AdapterPlan, revision: hub.Revision, folder: Path, token: str | None, progress: Progress
) -> AdapterPlan:
    """The plan with the adapter in `folder`."""
    file = _file(revision, _SOURCE_WEIGHTS)
    text = f"Pulling {revision.repository} at {revision.commit[:12]}, {gibibytes(file.size)}"
    done = hub.pulled_bytes(file, folder)
    with progress.task(text, total=file.size, unit="bytes", done=done) as task:
        hub.pull(revision, file, folder, token=token, task=task)
    pairs, unmatched = match_names(_names(folder))
    return replace(plan, folder=folder, pairs=tuple(pairs), unmatched=tuple(unmatched))


def _file(revision: hub.Revision, name: str) -> hub.RemoteFile:
    return next(file for file in revision.files if file.name == name)


def _manifest(plan: AdapterPlan) -> Manifest:
    return Manifest(
        kind="adapter",
        name=plan.source.name,
        fingerprint=plan.fingerprint,
        spec={"source": plan.source.text, "storage_type": plan.storage_type},
        facts={
            "commit": plan.revision.commit if plan.revision is not None else None,
            "base_model": plan.config.base_model,
            "targets": plan.targets,
            "rows": len(plan.pairs),
            "unmatched": list(plan.unmatched),
        },
    )


def _write(plan: AdapterPlan, staging: Path, progress: Progress) -> Manifest:
    """Write both files; the manifest learns the ranks."""
    import numpy as np

    if plan.unmatched:
        progress.warn(f"No LoRA module of TensorRT-LLM matches, left out: {_some(plan.unmatched)}")
    if not plan.pairs:
        raise UnsupportedModelError(
            f"No tensor of {plan.source.text} belongs to a module of self_attn or mlp: {_some(plan.unmatched)}.",
            hint="Only names such as …layers.0.self_attn.q_proj.lora_A.weight can be converted.",
        )
    assert plan.folder is not None  # the adapter was pulled
    source = TensorFile(plan.folder / _SOURCE_WEIGHTS)
    progress.step(f"Convert {len(plan.pairs)} modules of {plan.source.text} to {plan.storage_type}")
    rows = []
    for pair in plan.pairs:
        matrices = source.tensor(pair.first), source.tensor(pair.second)
        rows.append((pair, *module_row(pair, *matrices, plan.config, plan.storage_type)))
    weights, config = adapter_arrays(rows, plan.storage_type)
    np.save(staging / WEIGHTS, weights)
    np.save(staging / CONFIG, config)
    manifest = _manifest(plan)
    return replace(manifest, facts={**manifest.facts, "max_rank": int(config[..., 2].max())})


def _some(names: tuple[str, ...], count: int = 4) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more or "it has none"


def build_options(adapter: Adapter) -> str:
    """The options of `trtserve build` that make an engine which takes `adapter`."""
    facts = adapter.manifest.facts if adapter.manifest is not None else {}
    targets = ",".join(facts.get("targets", ()))
    return f"--lora-plugin auto --lora-target-modules {targets} --max-lora-rank {facts.get('max_rank')}"
