"""Run what was made, for a comparison with its original, and derive the allowed differences.

A checkpoint runs with OpenVINO in float32 straight from its files, an engine in the arithmetic that serves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.checkpoint.architectures import checkpoint_targets, described, family
from trtserve.checkpoint.architectures.base import Target
from trtserve.checkpoint.quantized import AWQ, FP8, FP8_BY_TOKEN, GPTQ, is_excluded
from trtserve.checkpoint.quantized_tensors import is_packed
from trtserve.checkpoint.repacking import float_types, quantised_names
from trtserve.checkpoint.source import SourceTensor, read_hf_config, read_source, vision_tensors
from trtserve.checkpoint.supported import source_quantization
from trtserve.checkpoint.unified import CheckpointReader
from trtserve.errors import CheckError, MissingDependencyError, TrtserveError, UnsupportedModelError
from trtserve.executor.loaders import MODELS, embedded_runtime, load_model
from trtserve.executor.runtimes import RUNTIMES
from trtserve.host.machine import give_memory_back, install_command
from trtserve.pipeline.parity.comparison import Precision, PromptLogits
from trtserve.pipeline.parity.original import Rounding
from trtserve.progress import SILENT, Progress

if TYPE_CHECKING:
    from trtserve.executor.engine.model import StatefulModel
    from trtserve.pipeline.parity.comparison import Logits


# quant_algo → packed format, and the precision whose bounds apply.
_QUANTISED: Mapping[str, Literal["int8", "int4"]] = {"W8A16": "int8", "W4A16": "int4"}
# The same for checkpoints that store codes: bounds on the codes' difference from floats.
_FLOATS: tuple[Precision, ...] = ("float32", "float16", "bfloat16")
_CODES: Mapping[str, Precision] = {GPTQ: "int4", AWQ: "int4", FP8: "int8"}


def require_runtime() -> None:
    """Raise MissingDependencyError when OpenVINO is not installed."""
    if find_spec("openvino") is None:
        raise MissingDependencyError(
            "The check needs the openvino package, which is not installed.", hint=install_command("cpu")
        )


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The intended changes of a conversion to the weights' values.

    `precision` names the bounds on their cost and `reason` explains them; `rounding` is None when no weight is rounded,
    `quantised` means that the runtime rounds further. `conversion` names the bounds for equal weights: float32's,
    unless transformers itself rounds, or None when another tool chose the checkpoint's codes and no weight is equal.
    `rows` names the bounds for rows of embeddings and head. `experts` marks a model with routed experts.
    """

    precision: Precision
    reason: str
    rounding: Rounding | None
    quantised: bool
    conversion: Precision | None
    rows: Precision = "float32"
    experts: bool = False


def changes_of(config: CheckpointConfig, model: Path) -> Changes:
    """Return how a conversion to this config changes the weights of `model`.

    Weights that keep their type keep their values, so only the order of float32 sums can differ. Raises
    UnsupportedModelError for a quantisation that cannot run here.
    """
    algorithm, dtype = _algorithm(config), _dtype(config)
    known = (*_QUANTISED, *_CODES, *FP8_BY_TOKEN)
    if algorithm and algorithm not in known:
        raise UnsupportedModelError(
            f"The checkpoint is quantised with {algorithm}, which cannot run here; supported: float weights, "
            f"{', '.join(known)}.",
            hint="Compare its engine with the original on the target GPU.",
        )
    experts = config.moe.num_experts > 0
    if algorithm in _CODES:
        return _changes_of_codes(config, model, algorithm, experts=experts)
    targets = checkpoint_targets(described(read_hf_config(model), config))
    codes = frozenset[str]()
    if algorithm in FP8_BY_TOKEN:
        kept = (each for each in targets if is_packed(each) and not is_excluded(config, each))
        codes = frozenset(name for target in kept for name in target.sources)
    floats = {name: each for name, each in _sources(config, model, targets).items() if name not in codes}
    kinds = float_types(floats) or {"unknown"}
    products = any(target.factor for target in targets)
    rounding = _rounding(dtype, targets, kinds, codes) if dtype != "float32" else None
    reason = f"weights {'kept their values' if rounding is None else 'were rounded'}: {dtype} from {_listed(kinds)}"
    if codes:
        reason += f", beside FP8 codes that were kept ({algorithm})"
    elif algorithm:
        reason += f", and the runtime quantises them ({algorithm})"
    return Changes(
        precision=_QUANTISED.get(algorithm, "float32" if rounding is None else dtype),
        reason=reason,
        rounding=rounding,
        quantised=algorithm in _QUANTISED,
        conversion=_conversion_bounds(config, products=products),
        rows=dtype if products else "float32",
        experts=experts,
    )


def _changes_of_codes(config: CheckpointConfig, model: Path, algorithm: str, *, experts: bool) -> Changes:
    """Return the changes for a checkpoint with codes, either the original's or made by another tool from floats."""
    hf, dtype = read_hf_config(model), _dtype(config)
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
    targets = checkpoint_targets(described(hf, config))
    sources = _sources(config, model, targets)
    kinds = float_types(sources)
    rounding = _rounding(dtype, targets, kinds, quantised_names(sources))
    # Scales of 4-bit codes have the checkpoint's type. Matrices that TensorRT-LLM fuses share one FP8 scale, so those
    # with smaller scales are requantised.
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
    """Return how weights of these types become `dtype`, or None when all keep their values."""
    offsets = {name: target.offset for target in targets if target.offset for name in target.sources}
    if kinds == {dtype} and not offsets and not any(target.factor for target in targets):
        return None
    # Float32 in every checkpoint, by their names in files and in transformers.
    names = {name for target in targets if target.dtype == "float32" for name in target.sources}
    renamed = {name.replace(old, new) for name in names for old, new in _RENAMED}
    return Rounding(dtype=dtype, offsets=offsets, kept=frozenset(names | renamed) | codes)


_RENAMED = (
    (".block_sparse_moe.", ".mlp."),
    (".router.layer.", ".router."),
    (".router.gate.", ".gate."),
    ("backbone.", "model."),
)
"""Parts of names that transformers 5 renames when it loads a file: those of Mixtral, Granite, Hunyuan 3, Nemotron-H."""


def _conversion_bounds(config: CheckpointConfig, *, products: bool) -> Precision:
    """Return the bounds for equal weights: transformers, unlike TensorRT-LLM, computes Falcon's ALiBi in bfloat16.

    Products of tensors (OPT-350m) are rounded, where transformers keeps float32.
    """
    if config.position_embedding_type == "alibi_with_scale":
        return "bfloat16"
    return _dtype(config) if products else "float32"


def _sources(config: CheckpointConfig, model: Path, targets: Sequence[Target]) -> Mapping[str, SourceTensor]:
    """Return the original's weights, without masks and position tables."""
    sources = _stored(config, model)
    used = {name for target in targets for name in target.sources}
    used |= {target.factor.name for target in targets if target.factor}
    modules = {name.rpartition(".")[0] for name in used}
    return {name: tensor for name, tensor in sources.items() if name.rpartition(".")[0] in modules}


def _stored(config: CheckpointConfig, model: Path) -> Mapping[str, SourceTensor]:
    """Return the original's tensors; none when its file format cannot be read."""
    try:
        return read_source(model, family(config.architecture).prefix)
    except TrtserveError:
        return {}


def numbers_beside(config: CheckpointConfig, model: Path) -> int:
    """Return the number of vision weights of the original."""
    return sum(math.prod(tensor.entry.shape) for tensor in vision_tensors(_stored(config, model)))


def _listed(kinds: set[str]) -> str:
    return ", ".join(sorted(kinds))


def _dtype(config: CheckpointConfig) -> Precision:
    for known in _FLOATS:
        if config.dtype == known:
            return known
    raise UnsupportedModelError(f"The checkpoint's weights are {config.dtype}; supported: {', '.join(_FLOATS)}.")


def _algorithm(config: CheckpointConfig) -> str:
    """Return the checkpoint's quantisation, "" without one."""
    return config.quantization.algorithm or ""


def logits_of(
    folder: Path, originals: Sequence[PromptLogits], *, quantised: bool = False, progress: Progress = SILENT
) -> list[Logits]:
    """Return the logits of the checkpoint in `folder` for the original's answers.

    `quantised` uses the weights as a runtime would quantise them. Raises CorruptFileError for files that do not match
    config.json and CheckError when the vocabulary differs.
    """
    model = _load(folder, quantised, progress)
    expected = originals[0].logits.shape[1]
    if model.vocab_size != expected:
        raise CheckError(
            f"The checkpoint has a vocabulary of {model.vocab_size} tokens, the original one of {expected}.",
            hint="The checkpoint was made from another model; name that one with --against.",
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
    from trtserve.executor.engine.shapes import Sizes
    from trtserve.executor.reference_model import ReferenceModel

    reader = CheckpointReader(folder)
    config = reader.config
    progress.step(f"Loading the checkpoint of {folder} (OpenVINO{f', {_algorithm(config)}' if quantised else ''})")
    decoder = family(config.architecture).decoder(config)
    return ReferenceModel(
        decoder, Sizes.of(config), reader, packing=_QUANTISED[_algorithm(config)] if quantised else None
    )


_NAMES: Mapping[str, Precision] = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "u8": "int8"}
_PRECISIONS: tuple[Precision, ...] = get_args(Precision)  # the exact ones first


def obstacle(config: EngineConfig) -> str | None:
    """Return why the engine cannot be compared by one process, or None."""
    runtime = embedded_runtime(config)
    if runtime is None or config.trtserve.weights_bytes:
        return "another program computes its logits"
    if MODELS[runtime].ranks and config.mapping.ranks > 1:
        return f"it has {config.mapping.ranks} ranks, each a process of its own"
    return None


def require_comparable(engine: Path, config: EngineConfig) -> None:
    """Raise UnsupportedModelError for an engine that one process of ours does not run."""
    if (why := obstacle(config)) is not None:
        raise UnsupportedModelError(
            f"The engine {engine} cannot be compared with its original: {why}.", hint="Check its checkpoint."
        )


def bounds_of(config: EngineConfig, weights: Precision) -> Precision:
    """Return the coarsest precision of an engine: of its weights, its arithmetic and its KV cache."""
    own = (config.trtserve.compute_precision, config.trtserve.kv_precision)
    found = [weights, *(_NAMES.get(name, "int8") for name in own if name)]
    if RUNTIMES[str(embedded_runtime(config))].rounds_fp8_inputs and config.model.quantization.quant_algo in (
        FP8,
        *FP8_BY_TOKEN,
    ):
        found.append("int8")
    return max(found, key=_PRECISIONS.index)


def logits_of_engine(
    engine: Path, config: EngineConfig, answers: Sequence[PromptLogits], *, progress: Progress = SILENT
) -> list[Logits]:
    """Return the engine's logits for the tokens of the original's answers, in steps that the engine allows."""
    import numpy as np

    from trtserve.executor.engine.limits import EngineOptions
    from trtserve.executor.engine.model import single_sequence

    progress.step(f"Loading the engine of {engine} ({embedded_runtime(config)})")
    model = cast("StatefulModel", load_model(engine, EngineOptions()))  # `obstacle` has found no other kind
    longest = max(len(answer.tokens) for answer in answers)
    blocks = range(-(-longest // model.tokens_per_block))
    model.allocate(len(blocks))
    stateful = bool(getattr(model, "bytes_per_state", 0))
    if stateful:
        model.allocate_states(1)
    size, found = config.build.max_num_tokens or longest, []
    with progress.task("Running the engine", total=len(answers)) as task:
        for answer in answers:
            parts = []
            for past in range(0, len(answer.tokens), size):
                new = answer.tokens[past : past + size]
                step = single_sequence(new, blocks[: -(-(past + len(new)) // model.tokens_per_block)], past=past)
                step = replace(step, states=np.zeros(1, np.int32)) if stateful else step
                parts.append(model.forward(step).copy())
            found.append(np.concatenate(parts))
            task.advance(1)
    del model
    give_memory_back()
    return found
