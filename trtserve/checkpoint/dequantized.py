"""Float weights of AWQ, GPTQ and FP8 models, computed from their own tensors.

The numerical check compares a converted checkpoint with these, so they do not pass through a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trtserve.checkpoint.quantized_source import SourceQuantization
from trtserve.checkpoint.repacking import unpacked_awq, unpacked_gptq
from trtserve.checkpoint.source import SourceTensor
from trtserve.checkpoint.tensor_files import DTYPES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]

# Companions of a quantised matrix that are not weights.
_FP8_SCALES = ("weight_scale", "input_scale", "q_scale", "k_scale", "v_scale", "kv_scale", "output_scale")
_MASKS = ("BOOL", "U8")
_BESIDE = ("qzeros", "scales", "g_idx", *_FP8_SCALES)


def quantised_names(sources: Mapping[str, SourceTensor]) -> frozenset[str]:
    """Return the names (`….weight`) of the matrices stored as codes."""
    packed = {name.removesuffix("qweight") + "weight" for name in sources if name.endswith(".qweight")}
    return frozenset(packed | {name for name, tensor in sources.items() if tensor.entry.code == "F8_E4M3"})


def float_types(sources: Mapping[str, SourceTensor]) -> set[str]:
    """Return the model's float types, including scales of 4-bit codes but not of FP8, which are always float32."""
    return {
        DTYPES.get(tensor.entry.code, tensor.entry.code)
        for name, tensor in sources.items()
        if tensor.entry.code not in ("I32", "I64", "F8_E4M3") and name.rpartition(".")[2] not in _FP8_SCALES
    }


def dequantized(
    sources: Mapping[str, SourceTensor], quantization: SourceQuantization
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Yield every weight of the model as float32."""
    import numpy as np

    for name, tensor in sources.items():
        stem, _, ending = name.rpartition(".")
        if ending in _BESIDE or tensor.entry.code in _MASKS:
            continue
        if ending == "qweight":
            yield f"{stem}.weight", _int4(sources, stem, quantization)
        elif tensor.entry.code == "F8_E4M3":
            yield name, _fp8(tensor, sources[f"{stem}.weight_scale"])
        else:
            yield name, tensor.file.stored(tensor.entry).astype(np.float32)


def _int4(sources: Mapping[str, SourceTensor], stem: str, quantization: SourceQuantization) -> Array:
    """Return (codes − zero points) × scales as [out, in] from codes [in, out] and the rest [in / group, out]."""
    import numpy as np

    weight, zeros, scales = (_stored(sources[f"{stem}.{part}"]) for part in ("qweight", "qzeros", "scales"))
    outputs = slice(0, scales.shape[1])
    if quantization.method == "awq":
        codes, points = unpacked_awq(weight, outputs), unpacked_awq(zeros, outputs)
    else:
        codes, points = unpacked_gptq(weight.T).T, unpacked_gptq(zeros)
    groups = codes.reshape(len(scales), quantization.group_size, -1).astype(np.float32)
    steps = groups - (points.astype(np.float32) + quantization.stored_zero)[:, None]
    whole: Array = (steps * scales.astype(np.float32)[:, None]).reshape(codes.shape)
    return np.ascontiguousarray(whole.T)


def _fp8(codes: SourceTensor, scale: SourceTensor) -> Array:
    import ml_dtypes
    import numpy as np

    step = _stored(scale).astype(np.float32).reshape(-1)[0]
    whole: Array = _stored(codes).view(ml_dtypes.float8_e4m3fn).astype(np.float32) * step
    return whole


def _stored(tensor: SourceTensor) -> Array:
    return tensor.file.stored(tensor.entry)
