"""Source tensors of each quantised matrix, checked against the model's quantisation config."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trtserve.checkpoint.architectures.base import Target
from trtserve.checkpoint.placement import runs
from trtserve.checkpoint.quantized import module_of
from trtserve.checkpoint.repacking import Repack
from trtserve.checkpoint.sharding import shard
from trtserve.checkpoint.source import SourceTensor
from trtserve.checkpoint.supported import SourceQuantization
from trtserve.errors import ConversionError, UnsupportedModelError, UsageError, listing

# TensorRT-LLM quantises these matrices; it leaves embeddings, output head and routers as floats.
_MATRIX = re.compile(r"\.(qkv|dense|fc|gate|proj)\.weight$")
# TensorRT-LLM's default for `exclude_modules` (`quantize_layers`); a list in the config replaces it.
_NEVER_QUANTISED = (
    *("*lm_head", "*router", "*vocab_embedding", "*position_embedding", "*block_embedding", "*shared_expert_gate"),
)
# TensorRT-LLM pads matrices whose sizes per rank are not a multiple of this, or of the group size if larger.
_MULTIPLE = 64
_FLOATS = frozenset({"F32", "F16", "BF16"})
_PART_TYPES = {
    "qweight": frozenset({"I32"}),
    "qzeros": frozenset({"I32"}),
    "scales": _FLOATS,
    "weight": frozenset({"F8_E4M3"}),
    "weight_scale": _FLOATS,
    "input_scale": _FLOATS,
}
# Scales of an 8-bit KV cache, stored next to the key or value matrix, or once for all.
_CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale")
_KEY_VALUE_SCALES = (".k_scale", ".v_scale", ".kv_scale")
_OTHER_WEIGHTS = "Fetch the model again, or choose another copy of it."


def split_targets(
    targets: Sequence[Target],
    sources: Mapping[str, SourceTensor],
    quantization: SourceQuantization,
    *,
    gpu_sm: int,
    headers_only: bool = False,
) -> tuple[list[Target], list[Repack], dict[str, SourceTensor]]:
    """Return the float targets, the quantised matrices, and the sources left for the former.

    With `headers_only` there are no values to check. ConversionError lists missing tensors; UnsupportedModelError names
    a partially quantised matrix.
    """
    floats, repacks, left = [], [], dict(sources)
    missing: list[str] = []
    for target in targets:
        if not is_packed(target) or not _is_stored_quantised(target, left, quantization):
            floats.append(target)
            continue
        parts = {name: _parts(name, left, quantization, missing) for name in target.sources}
        repacks.append(Repack(target=target, sources=parts, quantization=quantization, gpu_sm=gpu_sm))
    if missing:
        raise ConversionError(
            f"The weights do not match config.json ({len(missing)}): missing: {listing(missing, '; missing: ')}.",
            hint="Use config.json and weights from the same revision of the model.",
        )
    if not repacks:
        raise ConversionError(
            f"config.json says that the model is quantised ({quantization.method}), but none of its layers is.",
            hint=_OTHER_WEIGHTS,
        )
    _require_whole_experts(floats, repacks)
    for repack in repacks:
        _require_types(repack)
        _require_shapes(repack)
    _drop_needless(left, repacks, floats, headers_only=headers_only)
    _require_float_rest(floats, left)
    return floats, repacks, left


def _is_stored_quantised(target: Target, sources: Mapping[str, SourceTensor], quantization: SourceQuantization) -> bool:
    """Return whether the model stores the matrix as codes. Raises UnsupportedModelError when only parts of it are."""
    plain = [name for name in target.sources if _is_plain(name, sources, quantization)]
    if plain and len(plain) < len(target.sources):
        packed = next(name for name in target.sources if name not in plain)
        raise UnsupportedModelError(
            f"{packed} is quantised ({quantization.method}) but {plain[0]} is not; TensorRT-LLM fuses both into "
            f"{module_of(target)}, which must be quantised or not as one.",
            hint="Choose a copy of the model with another quantisation.",
        )
    return not plain


def _is_plain(name: str, sources: Mapping[str, SourceTensor], quantization: SourceQuantization) -> bool:
    stem, others = name.removesuffix("weight"), (part for part in quantization.parts if part != "weight")
    stored = name in sources and sources[name].entry.code in _FLOATS
    return stored and not any(f"{stem}{part}" in sources for part in others)


def _require_whole_experts(floats: Sequence[Target], repacks: Sequence[Repack]) -> None:
    """Require all experts of a layer to be quantised alike; TensorRT-LLM treats them as one module."""
    plain = {module_of(target) for target in floats if is_packed(target)}
    for repack in repacks:
        if (module := module_of(repack.target)) in plain:
            raise UnsupportedModelError(
                f"Only some expert matrices of {module} are quantised; TensorRT-LLM quantises "
                "all experts of a layer or none.",
                hint="Choose a copy of the model with another quantisation.",
            )


def excluded_modules(floats: Iterable[Target], layers: int, pp_size: int) -> list[str] | None:
    """Return `exclude_modules` for these float targets, or None when everything that can be is quantised.

    There TensorRT-LLM counts the layers of a pipeline stage from 0. Raises UsageError when a module is quantised in
    only some layers and there are several stages.
    """
    held: dict[str, set[int]] = {}
    for target in floats:
        if is_packed(target) and target.layer is not None:
            prefix = f"transformer.layers.{target.layer}."
            held.setdefault(module_of(target).removeprefix(prefix), set()).add(target.layer)
    if not held:
        return None
    names = list(_NEVER_QUANTISED)
    for module, numbers in held.items():
        if len(numbers) == layers:
            names.append(f"transformer.layers.*.{module}")
        elif pp_size > 1:
            raise UsageError(
                f"{module} is quantised in some layers but not in {len(numbers)} others; a checkpoint names "
                "excluded modules once for all pipeline stages.",
                hint="Use --tp-size instead of --pp-size.",
            )
        else:
            names += [f"transformer.layers.{number}.{module}" for number in sorted(numbers)]
    return names


def _require_float_rest(floats: Sequence[Target], left: Mapping[str, SourceTensor]) -> None:
    """Raise UnsupportedModelError when a module that TensorRT-LLM keeps as floats is quantised."""
    for name in (source for target in floats for source in target.sources if source.endswith(".weight")):
        packed = f"{name.removesuffix('weight')}qweight"
        if packed in left or (name in left and left[name].entry.code == "F8_E4M3"):
            raise UnsupportedModelError(
                f"{packed if packed in left else name} is quantised; TensorRT-LLM keeps this tensor as floats.",
                hint="Choose a copy of the model that keeps it as floats.",
            )


def _require_types(repack: Repack) -> None:
    for parts in repack.sources.values():
        for part, tensor in parts.items():
            if tensor.entry.code not in _PART_TYPES[part]:
                raise UnsupportedModelError(
                    f"{tensor.name} is {tensor.entry.code}; expected {', '.join(sorted(_PART_TYPES[part]))} in a model "
                    f"quantised with {repack.quantization.method}.",
                    hint=_OTHER_WEIGHTS,
                )


def _parts(
    name: str, left: dict[str, SourceTensor], quantization: SourceQuantization, missing: list[str]
) -> dict[str, SourceTensor]:
    """Take one source matrix's tensors out of `left`."""
    stem = name.removesuffix("weight")
    missing += [f"{stem}{part}" for part in quantization.parts if f"{stem}{part}" not in left]
    return {part: left.pop(f"{stem}{part}") for part in quantization.parts if f"{stem}{part}" in left}


def _drop_needless(
    left: dict[str, SourceTensor], repacks: Sequence[Repack], floats: Sequence[Target], *, headers_only: bool
) -> None:
    """Drop companions without effect: group orders, zero biases, KV cache scales."""
    wanted = {name for target in floats for name in target.sources}
    stems = {name.removesuffix("weight"): repack for repack in repacks for name in repack.sources}
    for stem, repack in stems.items():
        if (order := left.pop(f"{stem}g_idx", None)) is not None and not headers_only:
            _require_plain_order(order, repack)
        name = f"{stem}bias"
        if name in left and name not in wanted and repack.quantization.method == "gptq":
            bias = left[name]
            if headers_only or not bias.file.stored(bias.entry).any():
                del left[name]
        for scale in _CACHE_SCALES:
            left.pop(f"{stem}{scale}", None)
            left.pop(f"{stem.removesuffix('.').rpartition('.')[0]}.{scale}", None)


def _require_plain_order(order: SourceTensor, repack: Repack) -> None:
    import numpy as np

    if order.entry.code not in ("I32", "I64"):
        raise UnsupportedModelError(f"{order.name} is {order.entry.code}; expected I32 or I64.", hint=_OTHER_WEIGHTS)
    values = order.file.stored(order.entry)
    if values.size and values.shape != repack.target.shape[-1:]:
        raise ConversionError(
            f"{order.name} is {list(values.shape)}, expected {list(repack.target.shape[-1:])}.", hint=_OTHER_WEIGHTS
        )
    if (values != np.arange(len(values)) // repack.quantization.group_size).any():
        raise UnsupportedModelError(
            f"{order.name} reorders its inputs (desc_act), which TensorRT-LLM does not support.",
            hint="Choose a model that was quantised without desc_act.",
        )


def _require_shapes(repack: Repack) -> None:
    quantization, problems = repack.quantization, []
    columns, sizes = repack.target.shape[-1], dict[str, int]()
    for name, start, count in runs(repack.target):
        sizes[name] = max(sizes.get(name, 0), start + count)
    for name, rows in sizes.items():
        group = quantization.group_size or 1
        expected: dict[str, Any] = {
            "awq": {"qweight": (columns, rows // 8)},
            "gptq": {"qweight": (columns // 8, rows)},
            "fp8": {"weight": (rows, columns)},
        }[quantization.method]
        if quantization.method != "fp8":
            expected |= {"qzeros": (columns // group, rows // 8), "scales": (columns // group, rows)}
        for part, shape in expected.items():
            tensor = repack.sources[name][part]
            if tensor.entry.shape != shape:
                problems.append(f"{tensor.name} is {list(tensor.entry.shape)}, expected {list(shape)}")
    if problems:
        raise ConversionError(
            f"Tensor shapes do not match config.json ({len(problems)}): {'; '.join(problems)}.",
            hint="Use config.json and weights from the same revision of the model.",
        )


def require_divisible(targets: Iterable[Target], group_size: int, tp_size: int, ep_size: int = 1) -> None:
    """Raise UsageError when TensorRT-LLM would pad one of these 4-bit matrices for `tp_size` ranks.

    `ep_size` of the ranks divide the experts; the remaining factor splits each expert.
    """
    for target in targets:
        ranks = tp_size // ep_size if len(target.shape) > 2 else tp_size
        multiple = math.lcm(_MULTIPLE, group_size) * ranks
        held = shard(target, tp_size, 0, ep_size).shape[-2]
        outputs = held if target.split in ("row", "expert_row") else held * ranks
        for size in (outputs, target.shape[-1]):
            if size % multiple:
                raise UsageError(
                    f"{target.name} has size {size}, which is not a multiple of {multiple} (group size "
                    f"{group_size}, --tp-size {tp_size}): TensorRT-LLM pads such a matrix.",
                    hint="Choose a smaller --tp-size, or convert with --converter upstream.",
                )


def is_cache_scale(name: str) -> bool:
    """Return whether a tensor is a scale of an 8-bit KV cache."""
    return name.endswith(_KEY_VALUE_SCALES)


def is_packed(target: Target) -> bool:
    """Return whether a quantised model already stores this checkpoint tensor as codes."""
    return target.layer is not None and _MATRIX.search(target.name) is not None
