"""Hugging Face model → TensorRT-LLM unified checkpoint: `config.json` and one `rankN.safetensors` per rank.

Streams: every source tensor is read once, cut for all ranks, and written to its known place.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trtserve import architectures
from trtserve.architectures.checkpoint import complete_config
from trtserve.architectures.kernel_layout import require_gpu_sm
from trtserve.architectures.placement import Placement, match, moves
from trtserve.architectures.quantized_source import SourceQuantization, source_quantization
from trtserve.architectures.repacking import Repack, repack, require_divisible, split_targets
from trtserve.architectures.sharding import check_parallel_sizes, moe_parallel_sizes
from trtserve.architectures.source import read_hf_config, read_source
from trtserve.architectures.streaming import Move, carry_out, created
from trtserve.architectures.tensor_files import TensorFile
from trtserve.artifacts import Checkpoint, Manifest, Model, fingerprint
from trtserve.capacity.needs import convert_memory
from trtserve.capacity.rates import timed
from trtserve.capacity.room import require_disk, require_memory
from trtserve.check import CheckPlan, Stage, plan_check, require_passed, run_check
from trtserve.errors import ConversionError, TrtserveError, UsageError
from trtserve.machine import gibibytes
from trtserve.progress import SILENT, Progress
from trtserve.specs import CheckSpec, ConvertSpec
from trtserve.store import Store, publish, reusable

SCHEMA = 2
# Weight-only quantisation is recorded, the weights stay floats: TensorRT-LLM's loader (preprocess_weights →
# weight_only_quantize_dict) quantises the qkv, dense, fc, gate and proj weights that are not int8 yet, and so does the
# builder of the openvino runtime.
_QUANT_ALGO = {"none": None, "int8": "W8A16"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A conversion before its first byte is written: what goes where, and how large it becomes.

    `headers` and `sizes` are the header bytes and file sizes in bytes by rank; `source_bytes` is what is read.
    """

    spec: ConvertSpec
    config: Mapping[str, Any]
    moves: Sequence[Move]
    headers: Sequence[bytes]
    sizes: Sequence[int]
    fingerprint: str
    repacks: Sequence[Repack] = ()
    placement: Placement

    @property
    def total_bytes(self) -> int:
        """Bytes of all rank files."""
        return sum(self.sizes)

    @property
    def source_bytes(self) -> int:
        """Bytes of all source tensors that are read."""
        return sum(move.source.entry.size for move in self.moves) + sum(work.source_bytes for work in self.repacks)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory at the peak of the conversion's process."""
        return convert_memory(self.moves, self.spec.dtype, repacking=[work.memory_bytes for work in self.repacks])

    @property
    def largest_tensor(self) -> int:
        """Bytes of the largest source tensor."""
        packed = (
            tensor.entry.size for work in self.repacks for part in work.sources.values() for tensor in part.values()
        )
        return max(itertools.chain((move.source.entry.size for move in self.moves), packed))


def find_model(name_or_folder: str, store: Store | None = None, *, progress: Progress = SILENT) -> Model:
    """The model in a folder, or the one imported under a name; ModelNotFoundError when there is neither."""
    return (store or Store()).find(Model, name_or_folder, progress=progress)


def resolve_dtype(spec: ConvertSpec, hf: Mapping[str, Any]) -> Literal["float32", "float16", "bfloat16"]:
    """The checkpoint's dtype: `auto` takes the model's own, float16 for float32 or none (as TensorRT-LLM does)."""
    if spec.dtype != "auto":
        return spec.dtype
    return "bfloat16" if _own_dtype(hf) == "bfloat16" else "float16"


def _own_dtype(hf: Mapping[str, Any]) -> str:
    return str(hf.get("dtype") or hf.get("torch_dtype") or "float16").removeprefix("torch.")


def checkpoint_config(hf: Mapping[str, Any], spec: ConvertSpec) -> dict[str, Any]:
    """`config.json` of the checkpoint that `spec` makes of a model with this Hugging Face config; needs no weights."""
    own = architectures.supported(hf).checkpoint_config(hf)
    stored = source_quantization(hf)
    ep_size = _expert_parallel_size(own, spec)
    config = complete_config(
        own,
        architecture=architectures.architecture_of(hf),
        dtype=resolve_dtype(spec, hf),
        tp_size=spec.tp_size,
        pp_size=spec.pp_size,
        quantization=_quantization(stored, spec, hf),
        ep_size=ep_size,
    )
    if stored is not None and stored.method != "fp8":
        # TensorRT-LLM takes keys that it does not know; here is no other place for what the order of the bytes means.
        config["trtserve"] = {"gpu_sm": spec.gpu_sm}
    check_parallel_sizes(config, spec.tp_size, spec.pp_size, ep_size)
    return config


def _quantization(stored: SourceQuantization | None, spec: ConvertSpec, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `quantization` in config.json: of a model that is quantised already, else what is asked for."""
    if stored is None:
        return {"quant_algo": _QUANT_ALGO[spec.quantize]}
    if spec.quantize != "none":
        raise UsageError(
            f"The model is quantised already ({stored.method}): --quantize {spec.quantize} cannot be applied to it.",
            hint="Leave --quantize out, or choose the original model.",
        )
    if resolve_dtype(spec, hf) == "float32":
        raise UsageError(
            "A model that is quantised already has no float32 checkpoint: TensorRT-LLM computes with such weights in "
            "16 bits.",
            hint="Leave --dtype out, or give float16 or bfloat16.",
        )
    if stored.method != "fp8":
        require_gpu_sm(spec.gpu_sm)
    return stored.checkpoint_keys()


def _expert_parallel_size(config: Mapping[str, Any], spec: ConvertSpec) -> int:
    has_experts = bool((config.get("moe") or {}).get("num_experts"))
    if not has_experts and (spec.moe_tp_size, spec.moe_ep_size) != (None, None):
        raise UsageError("--moe-tp-size and --moe-ep-size are for models with experts, which this one has not.")
    return moe_parallel_sizes(spec.tp_size, spec.moe_tp_size, spec.moe_ep_size)[1]


def plan_conversion(model: Model, spec: ConvertSpec) -> Plan:
    """Everything that can be known from configs and headers; all errors but those in the values come from here."""
    hf = read_hf_config(model.path)
    family = architectures.supported(hf)
    spec = replace(spec, dtype=resolve_dtype(spec, hf))
    config = checkpoint_config(hf, spec)
    sources = read_source(model.path, family.BASE_PREFIX)
    described = {**config, "tie_word_embeddings": architectures.tied(hf)}
    targets, repacks = family.targets(described), list[Repack]()
    if (stored := source_quantization(hf)) is not None:
        targets, repacks, sources = split_targets(targets, sources, stored)
        require_divisible(repacks, spec.tp_size)
    placement = Placement(
        targets,
        layers=config["num_hidden_layers"],
        tp_size=spec.tp_size,
        pp_size=spec.pp_size,
        dtype=spec.dtype,
        ep_size=config["mapping"]["moe_ep_size"],
        packed=repacks,
    )
    uses = match(targets, sources, family.unused(described))
    return Plan(
        spec=spec,
        config=config,
        moves=moves(uses, placement, sources),
        headers=placement.headers,
        sizes=placement.sizes,
        repacks=repacks,
        placement=placement,
        fingerprint=fingerprint(stage="convert", schema=SCHEMA, spec=asdict(spec), model=model.fingerprint),
    )


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where a checkpoint goes, and whether it lies there already."""

    path: Path
    reused: bool


def destination_of(plan: Plan, name: str, *, out: Path | None = None, store: Store | None = None) -> Destination:
    """Place of the checkpoint that `plan` makes."""
    path = (out or (store or Store()).destination(Checkpoint, name, plan.fingerprint)).absolute()
    return Destination(path=path, reused=reusable(Checkpoint, path, plan.fingerprint) is not None)


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
    """Convert a Hugging Face folder to a TensorRT-LLM checkpoint, or reuse the one that was made from it before.

    With `verify` it is compared with the model before it is published, also one that is reused. Raises
    UnsupportedModelError, ConversionError, CorruptFileError, MemoryLimitError, DiskSpaceError, UsageError (sizes that
    do not divide), or what `plan_check` and `require_passed` raise; nothing is left behind then.
    """
    plan = plan_conversion(model, spec)
    name = name or model.name
    place = destination_of(plan, name, out=out, store=store)
    if place.reused:
        progress.step(f"Checkpoint {place.path} is reused")
    elif spec.dtype == "auto" and (own := _own_dtype(read_hf_config(model.path))) != plan.spec.dtype:
        progress.step(f"The model is {own}: its weights become {plan.spec.dtype} (--dtype {own} keeps them)")
    manifest = Manifest(
        kind="checkpoint",
        name=name,
        fingerprint=plan.fingerprint,
        inputs={model.name: model.fingerprint},
        spec=asdict(plan.spec),
        tools={"checkpoint format": "TensorRT-LLM 1.2"},
        facts={"model": str(model.path.absolute()), "bytes": plan.total_bytes, "largest_tensor": plan.largest_tensor},
    )
    if verify is None:
        return publish(
            Checkpoint, place.path, manifest, lambda folder: _write(plan, folder, store or Store(), progress)
        )
    proof = _Proof(plan_check(plan.config, model.path, verify, progress=progress), place, progress)

    def produce(folder: Path) -> Manifest:
        _write(plan, folder, store or Store(), progress)
        return replace(manifest, facts={**manifest.facts, "check": proof.require(folder)})

    return proof.of_published(publish(Checkpoint, place.path, manifest, produce))


class _Proof:
    """A check that is carried out once, wherever the checkpoint comes from."""

    def __init__(self, plan: CheckPlan, place: Destination, progress: Progress) -> None:
        self._plan = plan
        self._place = place
        self._progress = progress
        self._given = False

    def require(self, folder: Path) -> dict[str, Any]:
        """The figures of the checkpoint in `folder`; CheckError when they are beyond their bounds."""
        report = replace(run_check(self._plan, folder, progress=self._progress), path=self._place.path)
        require_passed(report)
        self._given = True
        figures = report.described()
        self._progress.step(f"The checkpoint is the model ({', '.join(map(_outcome, report.stages))})")
        return {key: value for key, value in figures.items() if key not in ("path", "against")}

    def of_published(self, checkpoint: Checkpoint) -> Checkpoint:
        """`checkpoint`, proven if it was not made just now; a folder of links that fails is taken away again."""
        if not self._given:
            try:
                self.require(checkpoint.path)
            except TrtserveError:
                if not self._place.reused:
                    shutil.rmtree(checkpoint.path)
                raise
        return checkpoint


def _outcome(stage: Stage) -> str:
    return f"{stage.name}: difference {stage.differences.relative:.2g}"


def _write(plan: Plan, folder: Path, store: Store, progress: Progress) -> None:
    require_memory(plan.memory_bytes, "This conversion needs", lambda _: "Free some memory: no setting needs less.")
    require_disk(folder.parent, plan.total_bytes, "The checkpoint")
    text = f"Converting to {plan.spec.dtype}, {len(plan.sizes)} rank(s), {gibibytes(plan.total_bytes)}"
    if plan.spec.quantize != "none":
        text += f" ({plan.spec.quantize} weights are made when the engine is built)"
    with (
        timed(store, "convert", plan.source_bytes),
        created(folder, plan.headers, plan.sizes) as files,
        progress.task(text, total=plan.source_bytes, unit="bytes") as task,
    ):
        carry_out(plan.moves, files, plan.spec.dtype, task.advance)
        for work in plan.repacks:
            spec = plan.spec
            repack(work, plan.placement, files, tp_size=spec.tp_size, dtype=spec.dtype, gpu_sm=spec.gpu_sm)
            task.advance(work.source_bytes)
    (folder / "config.json").write_text(json.dumps(plan.config, indent=4) + "\n", encoding="utf-8")
    _verify(plan, folder)


def _verify(plan: Plan, folder: Path) -> None:
    """Read the rank files' headers as a loader would, before the checkpoint is declared complete."""
    for rank, size in enumerate(plan.sizes):
        path = folder / f"rank{rank}.safetensors"
        if path.stat().st_size != size or not TensorFile(path).entries:
            raise ConversionError(f"{path.name} has {path.stat().st_size} bytes after writing; expected {size}.")
