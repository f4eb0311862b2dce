"""PEFT adapter → Adapter: `model.lora_weights.npy` and `model.lora_config.npy`, the tensors of TensorRT-LLM's LoRA.

The files have the format of NVIDIA's hf_lora_convert; clients send them unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, get_args

from trtserve.artifacts import Adapter, Manifest, fingerprint
from trtserve.checkpoint.lora_adapter import (
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    AdapterConfig,
    Pair,
    StorageType,
    peft_arrays,
    peft_config,
    peft_pairs,
)
from trtserve.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError, UsageError
from trtserve.files import LARGEST_TEXT
from trtserve.host.machine import format_bytes
from trtserve.pipeline import destination
from trtserve.pipeline.model import download_folder
from trtserve.progress import SILENT, Progress
from trtserve.store import Store, hub, publish
from trtserve.store.sources import Source, parse_source

SCHEMA = 1
WEIGHTS = "model.lora_weights.npy"
CONFIG = "model.lora_config.npy"

_OLD_WEIGHTS = "adapter_model.bin"


@dataclass(frozen=True, kw_only=True)
class AdapterPlan:
    """The conversion of an adapter before it begins."""

    source: Source
    config: AdapterConfig
    storage_type: StorageType
    store: Store
    folder: Path | None  # of the adapter; None until it is pulled
    revision: hub.Revision | None  # of the hub
    pairs: tuple[Pair, ...]  # the adapter's modules; empty until it is pulled
    fingerprint: str
    path: Path  # of the result
    reused: bool  # it exists

    @property
    def targets(self) -> list[str]:
        """Values for `build --lora-target-modules`, in the order of the adapter."""
        return list(dict.fromkeys(pair.target for pair in self.pairs))


def plan_adapter(
    adapter: str | Path, *, name: str | None = None, out: Path | None = None, storage_type: str = "float16"
) -> AdapterPlan:
    """Plan the conversion of an adapter in a folder or on the hub (`org/name[@revision]`).

    From the hub only its configuration is pulled. Raises UnsupportedModelError for an adapter that is more than LoRA
    matrices and CorruptFileError for a damaged one.
    """
    if storage_type not in get_args(StorageType):
        raise UsageError(f"--storage-type is {storage_type!r}; expected one of {', '.join(get_args(StorageType))}.")
    store = Store()
    try:
        source = parse_source(str(adapter), name=name)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            error.message.replace("a model", "an adapter"), hint="Give a PEFT folder, or org/name of the hub."
        ) from None
    if source.kind == "demo":
        raise ModelNotFoundError("demo is a model, not an adapter.", hint="Give a PEFT folder, or org/name of the hub.")
    if source.kind == "bucket":
        raise UsageError(f"{source.location}: adapters come from a folder or the hub.", hint="Copy the folder first.")
    revision = hub.resolve(source.location, source.revision) if source.kind == "hub" else None
    folder = Path(source.location) if revision is None else None
    inputs = _folder_inputs(Path(source.location)) if revision is None else _hub_inputs(revision)
    digest = fingerprint(stage="lora", schema=SCHEMA, storage_type=storage_type, **inputs)
    path, reused = destination(Adapter, source.name, digest, out=out, store=store)
    config = _source_config(folder, revision, store)
    pairs = [] if folder is None else peft_pairs(folder)
    config = config.with_modules([pair.path for pair in pairs])
    return AdapterPlan(
        source=source,
        config=config,
        storage_type=cast(StorageType, storage_type),
        store=store,
        folder=folder,
        revision=revision,
        pairs=tuple(pairs),
        fingerprint=digest,
        path=path,
        reused=reused,
    )


def run_adapter_conversion(plan: AdapterPlan, *, progress: Progress = SILENT) -> Adapter:
    """Convert the adapter of `plan`, or reuse the one that exists.

    Raises ConversionError for values that the storage type (float16, float32, bfloat16) cannot hold.
    """
    if plan.reused:
        progress.step(f"Adapter {plan.path} is reused")
    if plan.revision is None:
        return publish(Adapter, plan.path, _manifest(plan), lambda staging: _write(plan, staging, progress))
    with download_folder(plan.store, plan.revision, progress) as folder:
        pulled = plan if plan.reused else _pulled(plan, plan.revision, folder, progress)
        adapter = publish(Adapter, plan.path, _manifest(pulled), lambda staging: _write(pulled, staging, progress))
        plan.store.remove_folder(folder)
    return adapter


def _folder_inputs(folder: Path) -> dict[str, str]:
    """Return what identifies the adapter in a folder.

    Raises ModelNotFoundError if there is none and UnsupportedModelError if it cannot be converted.
    """
    if not (folder / PEFT_CONFIG).is_file():
        raise ModelNotFoundError(
            f"{folder} has no {PEFT_CONFIG}: it is not a PEFT adapter.",
            hint="Give the folder that PEFT's save_pretrained wrote.",
        )
    if not (folder / PEFT_WEIGHTS).is_file():
        raise _no_weights(str(folder), old=(folder / _OLD_WEIGHTS).is_file())
    return {file: hub.digest_of(folder / file, "sha256") for file in (PEFT_CONFIG, PEFT_WEIGHTS)}


def _hub_inputs(revision: hub.Revision) -> dict[str, str]:
    digests = {file.name: file.digest for file in revision.files}
    if large := next((f for f in revision.files if f.name == PEFT_CONFIG and f.size > LARGEST_TEXT), None):
        raise CorruptFileError(
            f"{PEFT_CONFIG} of {revision.repository} has {format_bytes(large.size)}; at most "
            f"{format_bytes(LARGEST_TEXT)} are read."
        )
    if PEFT_CONFIG not in digests:
        raise ModelNotFoundError(
            f"{revision.repository} has no {PEFT_CONFIG}: it is not a PEFT adapter.",
            hint="To import a model: trtserve import MODEL",
        )
    if PEFT_WEIGHTS not in digests:
        raise _no_weights(revision.repository, old=_OLD_WEIGHTS in digests)
    return {name: digests[name] for name in (PEFT_CONFIG, PEFT_WEIGHTS)}


def _no_weights(where: str, *, old: bool) -> UnsupportedModelError:
    if not old:
        return UnsupportedModelError(f"{where} has no {PEFT_WEIGHTS}.", hint="Save the adapter again with PEFT.")
    return UnsupportedModelError(
        f"{where} has its weights in {_OLD_WEIGHTS} only, a pickle that takes PyTorch to read (and may run any code).",
        hint=f"With PyTorch: safetensors.torch.save_file(torch.load('{_OLD_WEIGHTS}', weights_only=True), "
        f"'{PEFT_WEIGHTS}')",
    )


def _source_config(folder: Path | None, revision: hub.Revision | None, store: Store) -> AdapterConfig:
    if revision is None:
        assert folder is not None  # an adapter is in a folder or on the hub
        return peft_config(folder)
    # The conversion removes the folder under this lock.
    with download_folder(store, revision) as download:
        return peft_config(hub.pull(revision, _file(revision, PEFT_CONFIG), download).parent)


def _pulled(plan: AdapterPlan, revision: hub.Revision, folder: Path, progress: Progress) -> AdapterPlan:
    file = _file(revision, PEFT_WEIGHTS)
    text = f"Pulling {revision.repository} at {revision.commit[:12]}, {format_bytes(file.size)}"
    done = hub.pulled_bytes(file, folder)
    with progress.task(text, total=file.size, unit="bytes", done=done) as task:
        hub.pull(revision, file, folder, task=task)
    pairs = peft_pairs(folder)
    config = plan.config.with_modules([pair.path for pair in pairs])
    return replace(plan, folder=folder, config=config, pairs=tuple(pairs))


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
        },
    )


def _write(plan: AdapterPlan, staging: Path, progress: Progress) -> Manifest:
    """Write both files; return the manifest with the largest rank."""
    import numpy as np

    assert plan.folder is not None  # the adapter was pulled
    progress.step(f"Convert {len(plan.pairs)} modules of {plan.source.text} to {plan.storage_type}")
    weights, config = peft_arrays(plan.folder, plan.pairs, plan.config, plan.storage_type)
    np.save(staging / WEIGHTS, weights)
    np.save(staging / CONFIG, config)
    manifest = _manifest(plan)
    return replace(manifest, facts={**manifest.facts, "max_rank": int(config[..., 2].max())})


def build_options(adapter: Adapter) -> str:
    """Return the options of `trtserve build` for an engine that takes `adapter`."""
    facts = adapter.manifest.facts if adapter.manifest is not None else {}
    targets = ",".join(facts.get("targets", ()))
    return f"--lora-plugin auto --lora-target-modules {targets} --max-lora-rank {facts.get('max_rank')}"
