"""Matrices of integer or FP8 codes on the device, made from the floats or the codes of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trtserve.checkpoint.quantized import FP8_BLOCK as BLOCK
from trtserve.checkpoint.quantized import Int4Weight, group_size
from trtserve.errors import UnsupportedModelError

_ZERO = {8: 128, 4: 8}
_WORD = 32
# The most words of a row that share their inputs: what a product of the kernels takes at a time.
_MOST_WORDS = 32
# Fractions of the scale that a group's largest number needs; the one with the smallest squared error is used.
_FRACTIONS = (0.94, 0.88, 0.82)
# Rows are quantised in pieces of this many weights to keep the float32 copies small.
_PIECE = 2**25


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A matrix [out, in]: weight = (code - zero point) × scale.

    The `codes` i32[out, in · bits / 32] are words with 32 / bits codes each, lowest bits first, in blocks of `words`
    words: code i of word w of a block belongs to input i · words + w of the block. So a kernel takes the same bits of
    neighbouring words together with neighbouring inputs.
    """

    bits: Literal[8, 4]
    words: int
    codes: Tensor
    scales: Tensor
    """f32[out, groups]; the inputs of a group are neighbours."""
    zeros: Tensor | None = None
    """u8[out, groups] of int4, 0 … 16; None when all are 8 (of int8: 128)."""

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        outputs, width = self.codes.shape
        return outputs, width * _WORD // self.bits

    def all_zeros(self) -> Tensor:
        """Zero points u8[out, groups], filled in when all are the same."""
        return torch.full_like(self.scales, _ZERO[self.bits], dtype=torch.uint8) if self.zeros is None else self.zeros

    def floats(self, dtype: Any) -> Tensor:
        """Return the weights [out, in]."""
        outputs, groups = self.scales.shape
        blocks = self.codes.view(outputs, -1, 1, self.words)
        shifts = torch.arange(0, _WORD, self.bits, dtype=torch.int32, device=self.codes.device).view(-1, 1)
        codes = ((blocks >> shifts) & ((1 << self.bits) - 1)).view(outputs, groups, -1)
        weights = (codes - self.all_zeros().unsqueeze(-1).int()).float() * self.scales.unsqueeze(-1)
        return weights.view(self.shape).to(dtype)


FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max


@dataclass(frozen=True, kw_only=True)
class Fp8Codes:
    """A matrix [out, in] of FP8 codes: weight = code × scale. Its inputs are rounded to FP8 with scales too."""

    codes: Tensor
    """f8e4m3[out, in]."""
    scale: Tensor
    """f32[1], f32[out], or for blocks f32[⌈out / BLOCK⌉, ⌈in / BLOCK⌉]."""
    input_scale: Tensor | None = None
    """f32[1], that the model was calibrated with; None: tokens have scales of their own, see `group`."""
    dtype: Any
    """Of the products."""

    @property
    def group(self) -> int:
        """How many inputs of a token share a scale; 0 if all tokens have the same one."""
        if self.input_scale is not None:
            return 0
        return BLOCK if self.scale.ndim > 1 else self.codes.shape[1]

    def floats(self, dtype: Any) -> Tensor:
        """Return the weights [out, in]."""
        return (self.codes.float() * spread(self.scale, self.codes.shape)).to(dtype)


def spread(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the scales of an FP8 matrix [out, in] so that they multiply its codes."""
    if scale.ndim < 2:
        return scale.view(-1, 1)
    return scale.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]


@dataclass(frozen=True)
class Fp8Rows:
    """Tokens [t, in], rounded to FP8 with scales of their own: number = code × scale."""

    codes: Tensor
    """f8e4m3[t, in]."""
    scales: Tensor
    """f32[groups, t]; the numbers of a group are neighbours."""

    def __len__(self) -> int:
        return len(self.codes)

    def floats(self) -> Tensor:
        """Return the numbers f32[t, in]."""
        columns = self.codes.shape[1]
        each = BLOCK if len(self.scales) > 1 else columns
        return self.codes.float() * self.scales.T.repeat_interleave(each, 1)[:, :columns]


def join_packed(parts: list[PackedWeight]) -> PackedWeight:
    """Return matrices of the same kind and inputs as one, their outputs one after another."""
    first = parts[0]
    if len(parts) == 1:
        return first
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([part.all_zeros() for part in parts])
    codes, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
    return PackedWeight(bits=first.bits, words=first.words, codes=codes, scales=scales, zeros=zeros)


def pack(weight: Int4Weight, device: str) -> PackedWeight:
    """Copy a matrix of 4-bit codes to the device; its `input_scales` are the caller's."""
    zeros, words = weight.zero_points, _words(weight.codes.shape[1], weight.group_size, 4)
    return PackedWeight(
        bits=4,
        words=words,
        codes=_in_words(torch.from_numpy(weight.codes).to(device), words, 4),
        scales=torch.from_numpy(weight.scales).to(device),
        zeros=None if zeros is None else torch.from_numpy(zeros).to(device),
    )


def quantize(weight: Tensor, bits: Literal[8, 4]) -> PackedWeight:
    """Quantise floats [out, in], int8 with a scale for each output, int4 with one for each group of inputs.

    The numbers are those of the OpenVINO runtime's `weight_quantization`.
    """
    outputs, inputs = weight.shape
    group = inputs if bits == 8 else group_size(inputs)
    words = _words(inputs, group, bits)
    codes = torch.empty((outputs, inputs * bits // _WORD), dtype=torch.int32, device=weight.device)
    scales = torch.empty((outputs, inputs // group), device=weight.device)
    rows = max(1, _PIECE // inputs)
    for first in range(0, outputs, rows):
        piece = slice(first, first + rows)
        groups = weight[piece].float().view(-1, inputs // group, group)
        if bits == 8:
            # By a tensor: CUDA multiplies by the reciprocal of a number, which rounds differently.
            best = groups.abs().amax(-1, keepdim=True) / torch.tensor(127.0, device=weight.device)
            best[best == 0] = 1
            numbers = (groups / best).round()
        else:
            best = _best_scales(groups)
            numbers = _rounded(groups, best)
        codes[piece] = _in_words((numbers + _ZERO[bits]).to(torch.uint8).flatten(1), words, bits)
        scales[piece] = best[..., 0]
    return PackedWeight(bits=bits, words=words, codes=codes, scales=scales)


def _words(inputs: int, group: int, bits: int) -> int:
    """Return the words of a block: a power of two that divides a group, in blocks that divide a row.

    Raises UnsupportedModelError when a row does not fill its words.
    """
    if inputs * bits % _WORD:
        raise UnsupportedModelError(
            f"A matrix with {inputs} inputs cannot be packed in {bits} bits: they do not fill words of {_WORD} bits."
        )
    both = math.gcd(group, inputs * bits // _WORD)
    return min(_MOST_WORDS, both & -both)


def _in_words(codes: Tensor, words: int, bits: int) -> Tensor:
    """Pack codes u8[out, in]: i32[out, in · bits / 32]."""
    blocks = codes.view(len(codes), -1, _WORD // bits, words)
    packed = torch.zeros((len(codes), blocks.shape[1], words), dtype=torch.int32, device=codes.device)
    for place, part in enumerate(blocks.unbind(2)):
        packed |= part.int() << place * bits
    return packed.flatten(1)


def _best_scales(groups: Tensor) -> Tensor:
    """Return the scales [out, groups, 1] of `groups` [out, groups, size] with the smallest squared error."""
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    widest = largest / -8
    widest[widest == 0] = 1
    best, least = widest, _error(groups, widest)
    for fraction in _FRACTIONS:
        scales = widest * fraction
        error = _error(groups, scales)
        best = scales.where(error < least, best)
        least = torch.minimum(error, least)
    return best


def _error(groups: Tensor, scales: Tensor) -> Tensor:
    return (groups - _rounded(groups, scales) * scales).square().sum(-1, keepdim=True)


def _rounded(groups: Tensor, scales: Tensor) -> Tensor:
    return (groups / scales).round().clamp(-8, 7)
