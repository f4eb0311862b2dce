"""Hugging Face model → TensorRT-LLM unified checkpoint: `config.json` and one `rankN.safetensors` per rank.

Streams: every source tensor is read once, cut for all ranks, and written to its known place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtserve.architectures.quantized import AWQ, FP8, GPTQ
from trtserve.architectures.streaming import carry_out, created, load_types
from trtserve.architectures.tensor_files import DTYPES, TensorFile
from trtserve.artifacts import Checkpoint, Manifest, Model
from trtserve.capacity.converting import convert_libraries
from trtserve.capacity.rates import timed
from trtserve.capacity.room import require_disk, require_memory, smaller_checkpoint, to_be_mapped
from trtserve.convert.config import checkpoint_config, resolve_dtype
from trtserve.convert.plan import Destination, Plan, destination_of, own_wishes, plan_conversion
from trtserve.errors import ConversionError, counted, listing
from trtserve.machine import gibibytes
from trtserve.progress import SILENT, Progress
from trtserve.releases import NEWEST, RELEASES
from trtserve.specs import CheckSpec, ConvertSpec
from trtserve.store import Store, publish

if TYPE_CHECKING:
    from trtserve.convert.proof import Proof

__all__ = [
    "Destination",
    "Plan",
    "checkpoint_config",
    "convert_model",
    "destination_of",
    "find_model",
    "plan_conversion",
    "resolve_dtype",
]

_ANY_RELEASE = f"{RELEASES[0]} … {NEWEST}"


def find_model(name_or_folder: str, store: Store | None = None, *, progress: Progress = SILENT) -> Model:
    """The model in a folder, or the one imported under a name; ModelNotFoundError when there is neither."""
    return (store or Store()).find(Model, name_or_folder, progress=progress)


def convert_model(
    model: Model,
    spec: ConvertSpec,
    *,
    name: str | None = None,
    out: Path | None = None,
    store: Store | None = None,
    verify: CheckSpec | None = None,
    plan: Plan | None = None,
    progress: Progress = SILENT,
) -> Checkpoint:
    """Convert a Hugging Face folder to a TensorRT-LLM checkpoint, or reuse the one that was made from it before.

    `plan` is what `plan_conversion` says of the same model and wishes, where that is known already. With `verify` the
    checkpoint is compared with the model before it is published, also one that is reused. Raises UnsupportedModelError,
    ConversionError, CorruptFileError, MemoryLimitError, DiskSpaceError, UsageError (sizes that do not divide), or what
    `plan_check` and `require_passed` raise; nothing is left behind then.
    """
    plan, name = plan or plan_conversion(model, spec), name or model.name
    place = destination_of(plan, name, out=out, store=store)
    _tell_useless_order(plan, spec, progress)
    if plan.toolkit is not None:
        from trtserve.convert.upstream import convert_upstream  # loads what launches processes and containers

        return convert_upstream(model, plan, plan.toolkit, name, place, store or Store(), verify, progress)
    _tell(plan, spec, place, progress)
    manifest = _manifest(model, plan, name)

    def write(folder: Path) -> None:
        _write(plan, folder, store or Store(), progress)

    if verify is None:
        return publish(Checkpoint, place.path, manifest, write)
    from trtserve.convert.proof import planned_proof  # the check loads the runtimes, a conversion without it does not

    return _proven(planned_proof(plan.config, model, verify, place, progress), place, manifest, write)


def _proven(proof: Proof, place: Destination, manifest: Manifest, write: Callable[[Path], None]) -> Checkpoint:
    """Publish what `write` writes when it passes, with what the check said in its manifest."""

    def prove(folder: Path) -> Manifest:
        write(folder)
        return replace(manifest, facts={**manifest.facts, "check": proof.require(folder)})

    return proof.of_published(publish(Checkpoint, place.path, manifest, prove))


def _manifest(model: Model, plan: Plan, name: str) -> Manifest:
    facts = {"model": str(model.path.absolute()), "bytes": plan.total_bytes, "largest_tensor": plan.largest_tensor}
    return Manifest(
        kind="checkpoint",
        name=name,
        fingerprint=plan.fingerprint,
        inputs={model.name: model.fingerprint},
        spec=own_wishes(plan.spec),
        tools={"checkpoint format": f"TensorRT-LLM {plan.spec.trtllm_version or _ANY_RELEASE}"},
        facts={**facts, **({"left_out": list(plan.left_out)} if plan.left_out else {})},
    )


def _tell_useless_order(plan: Plan, spec: ConvertSpec, progress: Progress) -> None:
    if spec.gpu_sm != ConvertSpec().gpu_sm and (plan.toolkit is not None or "trtserve" not in plan.config):
        progress.step("--gpu-sm makes no difference: it orders 4-bit weights (AWQ, GPTQ), and none are converted here")


def _tell(plan: Plan, spec: ConvertSpec, place: Destination, progress: Progress) -> None:
    """Say what a user may not expect."""
    if place.reused:
        progress.step(f"Checkpoint {place.path} is reused")
    elif spec.dtype == "auto":
        _tell_types(plan, progress)
    if plan.left_out:
        progress.step(f"Left out of the checkpoint, as the model does without: {listing(plan.left_out)}")
    if plan.vision_bytes:
        progress.step(f"The model's parts for images are left out ({gibibytes(plan.vision_bytes)}): it reads text only")
    if plan.narrow_cache:
        progress.step(f"The model's 8-bit KV cache is left out: keys and values of a GPU engine are {plan.spec.dtype}")


def _tell_types(plan: Plan, progress: Progress) -> None:
    """Say what becomes of weights whose type in the files is not the checkpoint's, which follows from config.json."""
    kinds = sorted({DTYPES[move.source.entry.code] for move in plan.moves if move.dtype is None})
    if not kinds or kinds == [plan.spec.dtype]:
        return
    wide = kinds[0] if len(kinds) == 1 else "float32"
    # Models that are quantised already have no float32 checkpoint.
    coded = plan.config["quantization"]["quant_algo"] in (GPTQ, AWQ, FP8)
    keeps = "" if coded and wide == "float32" else f" (--dtype {wide} keeps them)"
    progress.step(f"The model is {' and '.join(kinds)}: its weights become {plan.spec.dtype}{keeps}")


def _write(plan: Plan, folder: Path, store: Store, progress: Progress) -> None:
    require_memory(
        plan.memory_bytes,
        "This conversion needs",
        lambda _: "Free some memory: no setting needs less.",
        mapped=to_be_mapped(*convert_libraries(plan.moves)),
    )
    require_disk(folder.parent, plan.total_bytes, "The checkpoint", smaller=smaller_checkpoint(plan.spec.dtype))
    ranks = counted(len(plan.sizes), "rank")
    text = f"Converting to {plan.spec.dtype}, {ranks}, {gibibytes(plan.total_bytes)}"
    if plan.spec.quantize != "none":
        progress.step(f"The {plan.spec.quantize} weights are made when the engine is built")
    load_types(plan.moves, plan.spec.dtype)
    with (
        timed(store, "convert", plan.source_bytes),
        created(folder, plan.headers, plan.sizes) as files,
        progress.task(text, total=plan.source_bytes, unit="bytes") as task,
    ):
        carry_out(plan.moves, files, plan.spec.dtype, task.advance)
        if plan.placement is not None:
            for work in plan.packed:
                work.write(plan.placement, files)
                task.advance(work.source_bytes)
    (folder / "config.json").write_text(json.dumps(plan.config, indent=4) + "\n", encoding="utf-8")
    _verify(plan, folder)


def _verify(plan: Plan, folder: Path) -> None:
    """Read the rank files' headers as a loader would, before the checkpoint is declared complete."""
    for rank, size in enumerate(plan.sizes):
        path = folder / f"rank{rank}.safetensors"
        if path.stat().st_size != size or not TensorFile(path).entries:
            raise ConversionError(f"{path.name} has {path.stat().st_size} bytes after writing; expected {size}.")
