"""Hugging Face model → TensorRT-LLM unified checkpoint: `config.json` and one `rankN.safetensors` per rank.

The conversion streams: every source tensor is read once, cut for all ranks, and written to its place.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from trtserve.artifacts import Checkpoint, Manifest, Model
from trtserve.checkpoint.quantized import AWQ, FP8, GPTQ
from trtserve.checkpoint.source import same_values
from trtserve.checkpoint.streaming import carry_out, created, load_types
from trtserve.checkpoint.tensor_files import DTYPES, TensorFile
from trtserve.errors import ConversionError, counted, listing
from trtserve.host.machine import format_bytes
from trtserve.host.resources import require_disk, require_memory, to_be_mapped
from trtserve.nvidia.releases import NEWEST, RELEASES
from trtserve.nvidia.releases.loaders import loading_releases, problems
from trtserve.pipeline.convert.conversion_plan import (
    ConversionPlan,
    convert_libraries,
    plan_conversion,
    smaller_checkpoint,
)
from trtserve.progress import SILENT, Progress
from trtserve.specs import CheckSpec, ConvertSpec
from trtserve.store import Store, publish
from trtserve.store.rates import timed

__all__ = [
    "ConversionPlan",
    "convert_model",
    "find_model",
    "plan_conversion",
    "run_conversion",
]


def find_model(name_or_folder: str, store: Store | None = None, *, progress: Progress = SILENT) -> Model:
    """Return the model in a folder, or the one imported under a name.

    Raises ModelNotFoundError when there is neither.
    """
    return (store or Store()).find(Model, name_or_folder, progress=progress)


def convert_model(
    model: Model,
    spec: ConvertSpec,
    *,
    name: str | None = None,
    out: Path | None = None,
    store: Store | None = None,
    verify: CheckSpec | None = None,
    progress: Progress = SILENT,
) -> Checkpoint:
    """Plan a conversion and run it."""
    return run_conversion(plan_conversion(model, spec, name=name, out=out, store=store, verify=verify), progress)


def run_conversion(plan: ConversionPlan, progress: Progress = SILENT) -> Checkpoint:
    """Write the checkpoint of `plan`, or reuse the one that exists; with `plan.verify` compare it with the model.

    Raises ConversionError, CorruptFileError, MemoryLimitError or DiskSpaceError, and with `plan.verify` what
    `plan_check` and `require_passed` raise; nothing is left behind then.
    """
    if plan.asked.gpu_sm != ConvertSpec().gpu_sm and (plan.toolkit is not None or "trtserve" not in plan.config):
        progress.step("--gpu-sm makes no difference: it orders 4-bit weights (AWQ, GPTQ), and this model has none")
    if plan.reused:
        progress.step(f"Checkpoint {plan.path} is reused")
    if plan.toolkit is not None:
        from trtserve.pipeline.convert.nvidia import (
            run_nvidia_conversion,  # loads what launches processes and containers
        )

        return run_nvidia_conversion(plan, plan.toolkit, progress)
    _report(plan, progress)
    manifest = plan.manifest
    if plan.verify is None:
        return publish(Checkpoint, plan.path, manifest, lambda folder: _write(plan, folder, progress))
    from trtserve.pipeline.convert.verification import Verification  # loads the runtimes

    verification = Verification(plan, plan.config, plan.verify, progress)

    def write_and_verify(folder: Path) -> Manifest:
        _write(plan, folder, progress)
        return replace(manifest, facts={**manifest.facts, "check": verification.figures(folder)})

    return verification.published(publish(Checkpoint, plan.path, manifest, write_and_verify))


def _report(plan: ConversionPlan, progress: Progress) -> None:
    """Report what a user may not expect."""
    if plan.asked.dtype == "auto" and not plan.reused:
        _report_cast(plan, progress)
    if plan.left_out:
        progress.step(f"Left out of the checkpoint, as the model works without them: {listing(plan.left_out)}")
    if plan.vision_bytes:
        progress.step(
            f"The model's vision tensors are left out ({format_bytes(plan.vision_bytes)}): it reads text only"
        )
    if plan.spec.trtllm_version is None and plan.toolkit is None:
        _report_releases(plan, progress)
    if plan.tied is not None and not plan.reused and not same_values(*plan.tied):
        embedding, head = (tensor.name for tensor in plan.tied)
        progress.warn(
            f"{head} differs from {embedding}, but config.json ties them: {embedding} is used for both, as in "
            "transformers. If the model has a head of its own, set tie_word_embeddings to false in its config.json."
        )
    if plan.narrow_cache:
        progress.step(f"The model's 8-bit KV cache is left out: keys and values of a GPU engine are {plan.spec.dtype}")


def _report_releases(plan: ConversionPlan, progress: Progress) -> None:
    """Report releases of TensorRT-LLM that do not load a checkpoint which is made for all of them."""
    served, others = loading_releases(plan.config), loading_releases(plan.config, named_in=RELEASES[0])
    if not served:
        problem = problems(plan.config, NEWEST)[0]
        progress.warn(f"No release of TensorRT-LLM loads this checkpoint: {problem.what}. {problem.fix}")
    elif others and others != served:
        progress.step(
            f"This checkpoint loads in TensorRT-LLM {served[0]} … {served[-1]}; {others[0]} … {others[-1]} name "
            "some tensors otherwise: add --trtllm-version for one of these"
        )


def _report_cast(plan: ConversionPlan, progress: Progress) -> None:
    """Report weights whose type changes because config.json names another one."""
    types = sorted({DTYPES[move.source.entry.code] for move in plan.moves if move.dtype is None})
    if not types or types == [plan.spec.dtype]:
        return
    wide = types[0] if len(types) == 1 else "float32"
    # Models that are quantised already have no float32 checkpoint.
    quantised = plan.config.quantization.quant_algo in (GPTQ, AWQ, FP8)
    keeps = "" if quantised and wide == "float32" else f" (--dtype {wide} keeps them)"
    progress.step(f"The model is {' and '.join(types)}: its weights become {plan.spec.dtype}{keeps}")


def _write(plan: ConversionPlan, folder: Path, progress: Progress) -> None:
    require_memory(
        plan.memory_bytes,
        "This conversion needs",
        lambda _: "Free some memory: no setting needs less.",
        mapped=to_be_mapped(*convert_libraries(plan.moves)),
    )
    require_disk(folder.parent, plan.total_bytes, "The checkpoint", smaller=smaller_checkpoint(plan.spec.dtype))
    ranks = counted(len(plan.sizes), "rank")
    text = f"Converting to {plan.spec.dtype}, {ranks}, {format_bytes(plan.total_bytes)}"
    if plan.spec.quantize != "none":
        progress.step(f"The {plan.spec.quantize} weights are made when the engine is built")
    load_types(plan.moves, plan.spec.dtype)
    with (
        timed(plan.store, "convert", plan.source_bytes),
        created(folder, plan.headers, plan.sizes) as files,
        progress.task(text, total=plan.source_bytes, unit="bytes") as task,
    ):
        carry_out(plan.moves, files, plan.spec.dtype, task.advance)
        if plan.placement is not None:
            for work in plan.packed:
                work.write(plan.placement, files)
                task.advance(work.source_bytes)
    (folder / "config.json").write_text(json.dumps(plan.config.content, indent=4) + "\n", encoding="utf-8")
    # Read the headers back as a loader would, before the checkpoint counts as complete.
    for rank, size in enumerate(plan.sizes):
        path = folder / f"rank{rank}.safetensors"
        if path.stat().st_size != size or not TensorFile(path).entries:
            raise ConversionError(f"{path.name} has {path.stat().st_size} bytes after writing; expected {size}.")
