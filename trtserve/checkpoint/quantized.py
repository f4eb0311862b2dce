"""Checkpoint matrices of 4-bit or FP8 codes, and the weights that the codes stand for.

Layouts: TensorRT-LLM's `postprocess_weight_only_groupwise` (W4A16_GPTQ) and `preprocess_perlayer_weights` (W4A16_AWQ,
FP8). The mixed-precision GEMM kernels have a memory layout of their own: a matrix goes through four steps, from signed
codes [in, out] to bytes [in, out / 2]:

1. within every 32 input rows, reorder the rows as a tensor core's threads read them;
2. transpose, so that the codes of one output are contiguous;
3. except on Hopper: interleave 64 inputs of one output with the same 64 of the next three outputs;
4. make codes unsigned (+ 8), put the even ones of every 8 first, and pack two per byte, low nibble first.

Source: `preprocess_weights_for_mixed_gemm` of TensorRT-LLM (quantization/functional.py from 0.17, C++ before)."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import Target
from trtserve.checkpoint.tensor_files import LazyModule
from trtserve.errors import CorruptFileError, UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = LazyModule("numpy")

# Inputs reordered together in step 1, and inputs per tile in step 3.
_ROWS, _TILE = 32, 64
_INTERLEAVED = 4
HOPPER = 90
EXPERTS_GPU_SM = 80  # the matrices of experts have the order of Ampere on every GPU
_OLDEST = 75
_LIKE_AMPERE = 120  # GPUs from this compute capability on use Ampere's layout again


def require_gpu_sm(gpu_sm: int) -> None:
    """Raise UnsupportedModelError for a compute capability (× 10) whose 4-bit layout is unknown.

    From 12.0 on it is Ampere's. 10.0 and 10.3 used Ampere's too, until their own kernels, which read codes in plain
    order, arrived with TensorRT-LLM's pull request 10190 (January 2026) in a release not yet known.
    """
    if not (_OLDEST <= gpu_sm <= HOPPER or gpu_sm >= _LIKE_AMPERE):
        raise UnsupportedModelError(
            f"The layout of 4-bit weights for compute capability {gpu_sm / 10:.1f} is unknown "
            f"(known: --gpu-sm {_OLDEST} … {HOPPER}, and from {_LIKE_AMPERE} on); for 10.0 and 10.3 "
            "it differs between releases.",
            hint="Convert on such a GPU with --converter upstream.",
        )


def _interleaves(gpu_sm: int) -> bool:
    """Return whether the GPU's kernels need step 3."""
    return gpu_sm < HOPPER or gpu_sm >= _LIKE_AMPERE


def to_kernel(codes: npt.NDArray[np.int8], gpu_sm: int) -> npt.NDArray[np.uint8]:
    """Convert signed codes −8 … 7 [in, out] to the kernels' bytes [in, out / 2]."""
    require_gpu_sm(gpu_sm)
    inputs, outputs = codes.shape
    ordered = codes.reshape(-1, _ROWS, outputs)[:, _row_order()].reshape(inputs, outputs)
    columns = np.ascontiguousarray(ordered.T)
    if _interleaves(gpu_sm):
        columns = columns.reshape(outputs // _INTERLEAVED, _INTERLEAVED, inputs // _TILE, _TILE).swapaxes(1, 2)
    unsigned = (columns + 8).astype(np.uint8).reshape(-1, 4, 2)
    even_first = np.ascontiguousarray(unsigned.swapaxes(1, 2)).reshape(-1, 2)
    packed: npt.NDArray[np.uint8] = even_first[:, 0] | (even_first[:, 1] << 4)
    return packed.reshape(inputs, outputs // 2)


def from_kernel(packed: npt.NDArray[np.uint8], gpu_sm: int) -> npt.NDArray[np.uint8]:
    """Convert the result of `to_kernel` back to codes 0 … 15 (8 means zero) [out, in]."""
    require_gpu_sm(gpu_sm)
    inputs, outputs = packed.shape[0], packed.shape[1] * 2
    pairs = nibbles(packed.reshape(-1)).reshape(-1, 2, 4).swapaxes(1, 2)
    if _interleaves(gpu_sm):
        pairs = pairs.reshape(outputs // _INTERLEAVED, inputs // _TILE, _INTERLEAVED, _TILE).swapaxes(1, 2)
    columns = pairs.reshape(outputs, -1, _ROWS)
    codes: npt.NDArray[np.uint8] = np.empty((outputs, inputs // _ROWS, _ROWS), dtype=np.uint8)
    codes[:, :, _row_order()] = columns
    return codes.reshape(outputs, inputs)


def nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Unpack the two 4-bit codes of each byte, low first: [..., n] becomes [..., 2 n]."""
    halves: npt.NDArray[np.uint8] = np.stack([packed & 15, packed >> 4], axis=-1)
    return halves.reshape(*packed.shape[:-1], -1)


def _row_order() -> Any:
    """Return the order of 32 rows: 0 1 8 9 16 17 24 25, 2 3 10 11 …"""
    return (np.arange(0, 8, 2)[:, None, None] + np.arange(0, 32, 8)[:, None] + np.arange(2)).reshape(-1)


GPTQ, AWQ, FP8 = "W4A16_GPTQ", "W4A16_AWQ", "FP8"
FP8_ROWS, FP8_BLOCKS = "FP8_PER_CHANNEL_PER_TOKEN", "FP8_BLOCK_SCALES"
FP8_BY_TOKEN = (FP8_ROWS, FP8_BLOCKS)
"""FP8 whose inputs are rounded with scales of each token: a scale for each output, or for blocks of FP8_BLOCK²."""
FP8_BLOCK = 128  # outputs and inputs of a block with a scale

# Layout of 4-bit weights when the checkpoint does not name one: Ampere's and Ada's.
_DEFAULT_GPU_SM = 80
_ZERO = 8
INT4_GROUPS = (256, 128, 64, 32)  # group sizes for int4 made from floats: the first that divides the inputs
# Routers, shared-expert gates and norms with a row for each head stay unquantised.
_NEVER_QUANTISED = (
    "mlp.router.weight", "mlp.shared_expert_gate.weight", "attention.kv_b.weight", "mixer.conv.weight",
    "mixer.gates.weight", "streams.router.weight", "streams.prediction.weight", "streams.correction.weight",
    "q_layernorm.weight", "k_layernorm.weight",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Int4Weight:
    """A matrix [out, in], quantised in groups along the inputs: weight = (codes − zero_points) × scales.

    `codes` u8[out, in] are 0 … 15; `scales` are f32[out, in / group_size]; `zero_points` u8[out, in / group_size] are 0
    … 16 (GPTQ stores them minus one, so 16 occurs), None when all are 8. `input_scales` f32[in] multiply the matrix's
    input (ModelOpt's AWQ), None without.
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    zero_points: npt.NDArray[np.uint8] | None
    group_size: int
    input_scales: npt.NDArray[np.float32] | None = None

    def all_zero_points(self) -> npt.NDArray[np.uint8]:
        """Zero points u8[out, in / group_size], filled in when all are 8."""
        return np.full(self.scales.shape, _ZERO, dtype=np.uint8) if self.zero_points is None else self.zero_points

    def dequantized(self) -> npt.NDArray[np.float32]:
        """Return the weights f32[out, in], including `input_scales`."""
        groups = self.codes.reshape(len(self.codes), -1, self.group_size).astype(np.float32)
        zeros = _ZERO if self.zero_points is None else self.zero_points[:, :, None].astype(np.float32)
        whole: npt.NDArray[np.float32] = ((groups - zeros) * self.scales[:, :, None]).reshape(self.codes.shape)
        return whole if self.input_scales is None else whole * self.input_scales


@dataclass(frozen=True, kw_only=True)
class Fp8Weight:
    """FP8 (e4m3) matrix [out, in], or experts [experts, out, in]: weight = codes × scales.

    `codes` holds the bits; `scales` is f32[1, 1], f32[experts, 1, 1], f32[out, 1], or f32[out, in] for blocks.
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]

    def dequantized(self) -> npt.NDArray[np.float32]:
        """Return the weights as f32 in the shape of the codes."""
        import ml_dtypes

        whole: npt.NDArray[np.float32] = self.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return whole * self.scales


def group_size(inputs: int) -> int:
    """Return the inputs per scale of an int4 matrix made from floats; all inputs when no group size divides them."""
    return next((size for size in INT4_GROUPS if inputs % size == 0), inputs)


def is_quantised(target: Target) -> bool:
    """Return whether weight-only quantisation applies: the layers' matrices, except routers."""
    matrix = len(target.shape) > 1 and target.name.endswith(".weight")
    return target.layer is not None and matrix and not target.name.endswith(_NEVER_QUANTISED)


def module_of(target: Target) -> str:
    """Return TensorRT-LLM's module name for a matrix; all experts of a layer are one module."""
    module = target.name.removesuffix(".weight")
    return module.rpartition(".")[0] if len(target.shape) > 2 else module


def is_excluded(config: CheckpointConfig, target: Target) -> bool:
    """Return whether a quantised checkpoint keeps this matrix as floats (`exclude_modules`)."""
    excluded = config.quantization.exclude_modules
    return any(fnmatch.fnmatchcase(module_of(target), pattern) for pattern in excluded)


def gpu_sm(config: CheckpointConfig) -> int:
    """Return the compute capability (× 10) whose layout the checkpoint's 4-bit weights have."""
    return config.trtserve.gpu_sm or _DEFAULT_GPU_SM


def unpack_int4(tensors: Mapping[str, npt.NDArray[Any]], prefix: str, config: CheckpointConfig) -> Int4Weight:
    """Unpack one rank's matrix `prefix` (`transformer.layers.0.attention.qkv`) from its `tensors`.

    Experts become one matrix [experts · out, in]. Raises CorruptFileError when a tensor is absent or sizes disagree and
    UnsupportedModelError for ModelOpt's experts.
    """
    weight = _bytes(_tensor(tensors, f"{prefix}.weight"))
    scales = _tensor(tensors, f"{prefix}.weights_scaling_factor")
    if config.quantization.algorithm == AWQ:
        if weight.ndim > 2:
            raise UnsupportedModelError(
                f"{prefix} holds experts quantised by ModelOpt ({AWQ}), whose layout is not supported."
            )
        return _modelopt(tensors, prefix, weight, scales)
    zeros = _tensor(tensors, f"{prefix}.zero")
    if weight.ndim == 2:
        return _gptq(prefix, weight, scales, zeros, gpu_sm(config))
    sm = EXPERTS_GPU_SM
    return _stacked([_gptq(prefix, *parts, sm) for parts in zip(weight, scales, zeros, strict=True)])


def unpack_fp8(tensors: Mapping[str, npt.NDArray[Any]], prefix: str, algorithm: str) -> Fp8Weight:
    """Unpack one rank's matrix `prefix`, in one of the FP8 algorithms, from its `tensors`.

    Raises CorruptFileError when one is absent or has the wrong shape.
    """
    weight = _bytes(_tensor(tensors, f"{prefix}.weight"))
    scales = _tensor(tensors, f"{prefix}.weights_scaling_factor").astype(np.float32)
    if algorithm in FP8_BY_TOKEN:
        outputs, inputs = weight.shape
        shape = (-(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK)) if algorithm == FP8_BLOCKS else (outputs,)
        if scales.shape != shape:
            raise CorruptFileError(f"{prefix}.weights_scaling_factor is {list(scales.shape)}; expected {list(shape)}.")
        if algorithm == FP8_ROWS:
            return Fp8Weight(codes=weight, scales=scales[:, None])
        tall = np.repeat(scales, FP8_BLOCK, 0)[:outputs]
        return Fp8Weight(codes=weight, scales=np.repeat(tall, FP8_BLOCK, 1)[:, :inputs])
    _tensor(tensors, f"{prefix}.activation_scaling_factor")  # inputs are not rounded to 8 bits here
    return Fp8Weight(
        codes=weight, scales=scales.reshape(*weight.shape[:-2], 1, 1) if scales.size > 1 else scales.reshape(1, 1)
    )


def _stacked(experts: Sequence[Int4Weight]) -> Int4Weight:
    """Stack the experts' matrices vertically."""
    zeros = None
    if any(expert.zero_points is not None for expert in experts):
        zeros = np.concatenate([expert.all_zero_points() for expert in experts])
    return Int4Weight(
        codes=np.concatenate([expert.codes for expert in experts]),
        scales=np.concatenate([expert.scales for expert in experts]),
        zero_points=zeros,
        group_size=experts[0].group_size,
    )


def _gptq(
    prefix: str, weight: npt.NDArray[np.uint8], scales: npt.NDArray[Any], zeros: npt.NDArray[Any], sm: int
) -> Int4Weight:
    """Unpack codes in kernel layout; `zero` is (8 − zero point) × scale."""
    codes = from_kernel(weight, sm)
    wide = np.ascontiguousarray(scales.T.astype(np.float32))
    products = zeros.T.astype(np.float32)
    steps = np.divide(products, wide, out=np.zeros_like(wide), where=wide != 0)
    points = np.rint(_ZERO - steps).astype(np.uint8)
    return Int4Weight(
        codes=codes,
        scales=wide,
        zero_points=None if (points == _ZERO).all() else points,
        group_size=_group_size(prefix, codes, wide),
    )


def _modelopt(
    tensors: Mapping[str, npt.NDArray[Any]], prefix: str, weight: npt.NDArray[np.uint8], scales: npt.NDArray[Any]
) -> Int4Weight:
    """Unpack signed codes [out / 2, in], two outputs per byte (low first), with scales [out, in / group]."""
    signed = np.ascontiguousarray(nibbles(np.ascontiguousarray(weight.T)).T)
    codes = signed ^ np.uint8(_ZERO)
    wide = np.ascontiguousarray(scales.astype(np.float32))
    inputs = _tensor(tensors, f"{prefix}.prequant_scaling_factor").reshape(-1).astype(np.float32)
    return Int4Weight(
        codes=codes,
        scales=wide,
        zero_points=None,
        group_size=_group_size(prefix, codes, wide),
        input_scales=None if (inputs == 1).all() else inputs,
    )


def _group_size(prefix: str, codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]) -> int:
    outputs, inputs = codes.shape
    if scales.shape[0] != outputs or inputs % scales.shape[1]:
        raise CorruptFileError(
            f"{prefix}: {list(scales.shape)} scales do not fit {outputs} outputs and {inputs} inputs.",
            hint="Convert the model again.",
        )
    return inputs // scales.shape[1]


def _tensor(tensors: Mapping[str, npt.NDArray[Any]], name: str) -> npt.NDArray[Any]:
    if name not in tensors:
        raise CorruptFileError(f"The checkpoint lacks the tensor {name}.", hint="Convert the model again.")
    return tensors[name]


def _bytes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the bytes of each row; packed codes are stored in types of various widths."""
    return np.ascontiguousarray(values).view(np.uint8)
