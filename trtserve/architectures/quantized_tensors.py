"""Which tensors of a quantised model make which matrix of the checkpoint, and whether they are what its config says."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trtserve.architectures.base import Target
from trtserve.architectures.placement import runs
from trtserve.architectures.quantized import module_of
from trtserve.architectures.quantized_source import SourceQuantization
from trtserve.architectures.repacking import Repack
from trtserve.architectures.sharding import shard
from trtserve.architectures.source import SourceTensor
from trtserve.errors import ConversionError, UnsupportedModelError, UsageError, listing

# The matrices that TensorRT-LLM quantises; it leaves embeddings, output head and routers alone.
_MATRIX = re.compile(r"\.(qkv|dense|fc|gate|proj)\.weight$")
# What TensorRT-LLM excludes when a checkpoint does not say what (`quantize_layers`); a list replaces this one.
_NEVER_QUANTISED = (
    *("*lm_head", "*router", "*vocab_embedding", "*position_embedding", "*block_embedding", "*shared_expert_gate"),
)
# TensorRT-LLM pads matrices whose sizes do not divide by this (per rank), or by the group size where that is larger.
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
# Scales of an 8-bit KV cache, beside the matrix that makes keys or values, or beside all of them.
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
    """Targets of floats, quantised matrices, and the sources that are left for the former.

    With `headers_only` no values are here, and nothing is said about them. ConversionError lists missing tensors;
    UnsupportedModelError names a matrix of which a part alone is quantised.
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
            f"The weights are not those of the model that config.json describes ({len(missing)}): "
            f"missing: {listing(missing, '; missing: ')}.",
            hint="Take config.json and weights from one revision of the model's own repository.",
        )
    if not repacks:
        raise ConversionError(
            f"config.json says that the model is quantised ({quantization.method}), and no matrix of its layers is.",
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
    """False for a matrix that the model keeps as floats; UnsupportedModelError when it does so with a part of it."""
    plain = [name for name in target.sources if _is_plain(name, sources, quantization)]
    if plain and len(plain) < len(target.sources):
        packed = next(name for name in target.sources if name not in plain)
        raise UnsupportedModelError(
            f"{packed} is quantised ({quantization.method}) and {plain[0]} is not; TensorRT-LLM holds both in one "
            f"matrix ({module_of(target)}), which is quantised or not.",
            hint="Choose a copy of the model that was quantised otherwise.",
        )
    return not plain


def _is_plain(name: str, sources: Mapping[str, SourceTensor], quantization: SourceQuantization) -> bool:
    stem, others = name.removesuffix("weight"), (part for part in quantization.parts if part != "weight")
    stored = name in sources and sources[name].entry.code in _FLOATS
    return stored and not any(f"{stem}{part}" in sources for part in others)


def _require_whole_experts(floats: Sequence[Target], repacks: Sequence[Repack]) -> None:
    """All experts of a layer are one module of TensorRT-LLM."""
    plain = {module_of(target) for target in floats if is_packed(target)}
    for repack in repacks:
        if (module := module_of(repack.target)) in plain:
            raise UnsupportedModelError(
                f"Some matrices of the experts of {module} are quantised and others are not; TensorRT-LLM quantises "
                "experts as a whole.",
                hint="Choose a copy of the model that was quantised otherwise.",
            )


def excluded_modules(floats: Iterable[Target], layers: int, pp_size: int) -> list[str] | None:
    """`exclude_modules` of a checkpoint with these targets of floats; None when it quantises all that it can.

    TensorRT-LLM counts layers within a pipeline stage there: UsageError when a module is quantised in some layers only
    and there are several stages.
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
                f"{module} is quantised in some layers and not in {len(numbers)} others; the names by which a "
                "checkpoint says so are those within a pipeline stage, the same for all stages.",
                hint="Use --tp-size instead of --pp-size.",
            )
        else:
            names += [f"transformer.layers.{number}.{module}" for number in sorted(numbers)]
    return names


def _require_float_rest(floats: Sequence[Target], left: Mapping[str, SourceTensor]) -> None:
    """UnsupportedModelError when what TensorRT-LLM keeps as floats, such as the output head, is quantised."""
    for name in (source for target in floats for source in target.sources if source.endswith(".weight")):
        packed = f"{name.removesuffix('weight')}qweight"
        if packed in left or (name in left and left[name].entry.code == "F8_E4M3"):
            raise UnsupportedModelError(
                f"{packed if packed in left else name} is quantised; TensorRT-LLM keeps this tensor as floats.",
                hint="Choose a copy of the model that was quantised without it.",
            )


def _require_types(repack: Repack) -> None:
    for parts in repack.sources.values():
        for part, tensor in parts.items():
            if tensor.entry.code not in _PART_TYPES[part]:
                raise UnsupportedModelError(
                    f"{tensor.name} is {tensor.entry.code}; expected {', '.join(sorted(_PART_TYPES[part]))} in a model "
                    f"that is quantised ({repack.quantization.method}).",
                    hint=_OTHER_WEIGHTS,
                )


def _parts(
    name: str, left: dict[str, SourceTensor], quantization: SourceQuantization, missing: list[str]
) -> dict[str, SourceTensor]:
    """The tensors of one source matrix, taken out of `left`."""
    stem = name.removesuffix("weight")
    missing += [f"{stem}{part}" for part in quantization.parts if f"{stem}{part}" not in left]
    return {part: left.pop(f"{stem}{part}") for part in quantization.parts if f"{stem}{part}" in left}


def _drop_needless(
    left: dict[str, SourceTensor], repacks: Sequence[Repack], floats: Sequence[Target], *, headers_only: bool
) -> None:
    """Take out what goes with quantised matrices and says nothing: orders of groups, zero biases, KV cache scales."""
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
            f"{order.name} takes inputs in an order of its own (desc_act), which TensorRT-LLM does not implement.",
            hint="Choose a model that was quantised without desc_act.",
        )


def _require_shapes(repack: Repack) -> None:
    quantization, problems = repack.quantization, []
    for name, (rows, columns) in _source_sizes(repack.target).items():
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
            f"Tensors have other shapes than config.json calls for ({len(problems)}): {'; '.join(problems)}.",
            hint="Take config.json and weights from one revision of the model's own repository.",
        )


def _source_sizes(target: Target) -> dict[str, tuple[int, int]]:
    rows: dict[str, int] = {}
    for name, start, count in runs(target):
        rows[name] = max(rows.get(name, 0), start + count)
    return {name: (count, target.shape[-1]) for name, count in rows.items()}


def require_divisible(targets: Iterable[Target], group_size: int, tp_size: int, ep_size: int = 1) -> None:
    """UsageError when one of these 4-bit matrices has a size that TensorRT-LLM would pad for `tp_size` ranks.

    `ep_size` of them share out experts, and split each of these among the fewer others.
    """
    for target in targets:
        ranks = tp_size // ep_size if len(target.shape) > 2 else tp_size
        multiple = math.lcm(_MULTIPLE, group_size) * ranks
        held = shard(target, tp_size, 0, ep_size).shape[-2]
        outputs = held if target.split in ("row", "expert_row") else held * ranks
        for size in (outputs, target.shape[-1]):
            if size % multiple:
                raise UsageError(
                    f"{target.name} has a size of {size}, which does not divide by {multiple} (groups of "
                    f"{group_size}, --tp-size {tp_size}): TensorRT-LLM pads such a matrix.",
                    hint="Choose a smaller --tp-size, or convert with --converter upstream.",
                )


def is_cache_scale(name: str) -> bool:
    """Whether a tensor is a scale of an 8-bit KV cache."""
    return name.endswith(_KEY_VALUE_SCALES)


def is_packed(target: Target) -> bool:
    """Whether a model that is quantised already holds codes for this tensor of the checkpoint."""
    return target.layer is not None and _MATRIX.search(target.name) is not None
