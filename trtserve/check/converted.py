"""The converted model, run by OpenVINO in float32 straight from its checkpoint, and what its precision may explain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtserve.architectures import described, family
from trtserve.architectures.base import Target
from trtserve.architectures.checkpoint import CheckpointReader
from trtserve.architectures.dequantized import float_types, quantised_names
from trtserve.architectures.quantized import AWQ, FP8, GPTQ
from trtserve.architectures.quantized_source import source_quantization
from trtserve.architectures.source import SourceTensor, read_hf_config, read_source, vision_tensors
from trtserve.check.comparison import Answer, Precision
from trtserve.check.original import Rounding
from trtserve.errors import CheckError, MissingDependencyError, TrtserveError, UnsupportedModelError
from trtserve.machine import give_memory_back
from trtserve.progress import SILENT, Progress

if TYPE_CHECKING:
    from trtserve.check.comparison import Logits

# quant_algo → what the runtime packs the matrices as, and the precision whose bounds hold.
_QUANTISED: Mapping[str, Literal["int8", "int4"]] = {"W8A16": "int8", "W4A16": "int4"}
# The same for those whose checkpoints hold the codes: the bounds of what their codes may differ from floats.
_CODES: Mapping[str, Precision] = {GPTQ: "int4", AWQ: "int4", FP8: "int8"}


def require_runtime() -> None:
    """MissingDependencyError when OpenVINO is not installed."""
    if find_spec("openvino") is None:
        raise MissingDependencyError(
            "The check runs the checkpoint with the package openvino, which is not installed.",
            hint="pip install 'trtserve[cpu]'",
        )


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What a conversion does to the values of weights, on purpose.

    `precision` names the bounds of what that may cost and `reason` says why those; `rounding` is None when no weight
    is rounded, `quantised` tells that the runtime rounds them further. `conversion` names the bounds of what equal
    weights may differ: those of float32, unless transformers itself rounds; None where another tool chose the codes of
    the checkpoint, and no weight is equal. `rows` names the bounds of rows of embeddings and head. `experts` tells that
    tokens choose some.
    """

    precision: Precision
    reason: str
    rounding: Rounding | None
    quantised: bool
    conversion: Precision | None
    rows: Precision = "float32"
    experts: bool = False


def changes_of(config: Mapping[str, Any], model: Path) -> Changes:
    """What became of the weights of `model` in a checkpoint with this config.

    Weights that keep their type keep their values, whatever the type is: nothing but the order of float32 sums is
    left to explain a difference. UnsupportedModelError for a quantisation that cannot be run here.
    """
    algorithm, dtype = _algorithm(config), config["dtype"]
    known = (*_QUANTISED, *_CODES)
    if algorithm and algorithm not in known:
        raise UnsupportedModelError(
            f"The checkpoint is quantised with {algorithm}, which cannot be run here; these can: float weights, "
            f"{', '.join(known)}.",
            hint="Compare an engine of it with the original on the GPU it is for.",
        )
    experts = bool((config.get("moe") or {}).get("num_experts"))
    if algorithm in _CODES:
        return _changes_of_codes(config, model, algorithm, experts=experts)
    targets = family(config["architecture"]).targets(described(read_hf_config(model), config))
    kinds = float_types(_sources(config, model, targets)) or {"unknown"}
    products = any(target.factor for target in targets)
    rounding = _rounding(dtype, targets, kinds) if dtype != "float32" else None
    reason = f"weights {'kept their values' if rounding is None else 'were rounded'}: {dtype} from {_listed(kinds)}"
    if algorithm:
        reason += f", and the runtime quantises them ({algorithm})"
    return Changes(
        precision=_QUANTISED.get(algorithm, "float32" if rounding is None else dtype),
        reason=reason,
        rounding=rounding,
        quantised=bool(algorithm),
        conversion=_conversion_bounds(config, products=products),
        rows=dtype if products else "float32",
        experts=experts,
    )


def _changes_of_codes(config: Mapping[str, Any], model: Path, algorithm: str, *, experts: bool) -> Changes:
    """Of a checkpoint that holds codes: those of its original, or others that a tool made of the original's floats."""
    hf, dtype = read_hf_config(model), config["dtype"]
    if source_quantization(hf) is None:
        return Changes(
            precision=_CODES[algorithm],
            reason=f"a calibrating tool quantised the weights ({algorithm})",
            rounding=None,
            quantised=False,
            conversion=None,
            rows=dtype,
            experts=experts,
        )
    dtype, targets = config["dtype"], family(config["architecture"]).targets(described(hf, config))
    sources = _sources(config, model, targets)
    kinds = float_types(sources)
    rounding = _rounding(dtype, targets, kinds, quantised_names(sources))
    # Scales of 4-bit codes are of the checkpoint's type. Matrices that TensorRT-LLM holds as one share one scale of
    # FP8, so that those with smaller ones are rounded again.
    codes: Precision = "int8" if algorithm == FP8 else "float32" if kinds == {dtype} else dtype
    kept = "share scales" if algorithm == FP8 else "kept their values"
    return Changes(
        precision="float32" if rounding is None else dtype,
        reason=f"codes {kept} ({algorithm}); scales and floats: {dtype} from {_listed(kinds)}",
        rounding=rounding,
        quantised=False,
        conversion=codes,
        experts=experts,
    )


def _rounding(
    dtype: str, targets: Sequence[Target], kinds: set[str], codes: frozenset[str] = frozenset()
) -> Rounding | None:
    """How weights of these types become `dtype`; None when every one keeps its value."""
    offsets = {name: target.offset for target in targets if target.offset for name in target.sources}
    if kinds == {dtype} and not offsets and not any(target.factor for target in targets):
        return None
    return Rounding(dtype=dtype, offsets=offsets, kept=_kept(targets) | codes)


def _conversion_bounds(config: Mapping[str, Any], *, products: bool) -> Precision:
    """transformers multiplies slopes and positions of Falcon's alibi in bfloat16; TensorRT-LLM and we do not.

    And products of tensors (OPT-350m) are rounded, where transformers goes on with float32.
    """
    if config["position_embedding_type"] == "alibi_with_scale":
        return "bfloat16"
    return config["dtype"] if products else "float32"


def _kept(targets: Sequence[Target]) -> frozenset[str]:
    """Weights that are float32 in every checkpoint, as transformers calls them: from 5 on it renames Mixtral's."""
    names = {name for target in targets if target.dtype == "float32" for name in target.sources}
    return frozenset(names | {name.replace(".block_sparse_moe.", ".mlp.") for name in names})


def _sources(config: Mapping[str, Any], model: Path, targets: Sequence[Target]) -> Mapping[str, SourceTensor]:
    """The original's weights, without masks and position tables."""
    sources = _stored(config, model)
    used = {name for target in targets for name in target.sources}
    used |= {target.factor.name for target in targets if target.factor}
    modules = {name.rpartition(".")[0] for name in used}
    return {name: tensor for name, tensor in sources.items() if name.rpartition(".")[0] in modules}


def _stored(config: Mapping[str, Any], model: Path) -> Mapping[str, SourceTensor]:
    """The original's tensors; none where they lie in no file that is read here."""
    try:
        return read_source(model, family(config["architecture"]).BASE_PREFIX)
    except TrtserveError:
        return {}


def numbers_beside(config: Mapping[str, Any], model: Path) -> int:
    """How many numbers of the original are for images."""
    return sum(math.prod(tensor.entry.shape) for tensor in vision_tensors(_stored(config, model)))


def _listed(kinds: set[str]) -> str:
    return ", ".join(sorted(kinds))


def _algorithm(config: Mapping[str, Any]) -> str:
    """How the checkpoint says that it is quantised; "" for not at all."""
    return str((config.get("quantization") or {}).get("quant_algo") or "").replace("NO_QUANT", "")


def logits_of(
    folder: Path, originals: Sequence[Answer], *, quantised: bool = False, progress: Progress = SILENT
) -> list[Logits]:
    """Logits of the checkpoint in `folder` for the tokens of the original's answers.

    `quantised`: with the weights that a runtime makes of them, else as they are stored.
    CorruptFileError for files that are not what config.json says, CheckError when the vocabulary is another one.
    """
    model = _load(folder, quantised, progress)
    expected = originals[0].logits.shape[1]
    if model.vocab_size != expected:
        raise CheckError(
            f"The checkpoint has logits of {model.vocab_size} tokens and the original of {expected}.",
            hint="It was converted from another model: give that one with --against.",
        )
    found = []
    with progress.task("Running the checkpoint", total=len(originals)) as task:
        for answer in originals:
            found.append(model.logits(answer.tokens))
            task.advance(1)
    del model
    give_memory_back()
    return found


def _load(folder: Path, quantised: bool, progress: Progress) -> Any:
    from trtserve.executor.graph import Sizes
    from trtserve.executor.whole_model import WholeModel

    reader = CheckpointReader(folder)
    config = reader.config
    progress.step(f"Loading the checkpoint of {folder} (OpenVINO{f', {_algorithm(config)}' if quantised else ''})")
    decoder = family(config["architecture"]).decoder(config)
    return WholeModel(decoder, Sizes.of(config), reader, packing=_QUANTISED[_algorithm(config)] if quantised else None)
