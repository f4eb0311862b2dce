"""The tensors of one rank of an engine, copied from its memory-mapped file to the device one by one."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import checkpoint_targets
from trtserve.checkpoint.architectures.base import Split, Target
from trtserve.checkpoint.quantized import (
    AWQ,
    FP8_BLOCK,
    FP8_BLOCKS,
    FP8_BY_TOKEN,
    GPTQ,
    is_excluded,
    is_quantised,
    unpack_int4,
)
from trtserve.checkpoint.sharding import Shard, name_in_stage, older_name, shard, stage_layers, stage_of
from trtserve.checkpoint.tensor_files import CODES, TensorFile
from trtserve.errors import CorruptFileError
from trtserve.executor.torch.packed import PackedWeight, pack, quantize
from trtserve.executor.torch.rank_group import RankGroup
from trtserve.specs.runtime import WEIGHT_ONLY_INT4, WEIGHT_ONLY_INT8

# Bits of the codes that float matrices get here, by the algorithm of the checkpoint.
_MADE_HERE: Mapping[str, Literal[8, 4]] = {WEIGHT_ONLY_INT8: 8, WEIGHT_ONLY_INT4: 4}
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}


class EngineWeights:
    """The tensors of one rank by their names in the whole model, in the rank's file.

    On the CPU tensors stay mapped, so that processes share their memory.
    """

    def __init__(self, engine: Path, config: CheckpointConfig, group: RankGroup, device: str) -> None:
        """Map the rank's file; `config` is the checkpoint's. Raises CorruptFileError when it is damaged."""
        self._group = group
        self._device = device
        self._ep_size = config.mapping.moe_ep_size
        self._stages = stage_layers(config.num_hidden_layers, group.stages)
        self._file = TensorFile(engine / f"rank{group.stage * group.tp_size + group.tp_rank}.safetensors")
        with self._file.path.open("rb") as handle:
            # Copy on write: PyTorch takes writable buffers only, and nothing is ever written.
            self._bytes = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        targets = checkpoint_targets(config)
        self._targets = {target.name: target for target in targets}
        self._config = config

    @property
    def dtype(self) -> Any:
        """The type of the tensors that are not quantised."""
        return getattr(torch, self._config.dtype)

    @property
    def layers(self) -> range:
        """The layers of this rank's pipeline stage."""
        return self._stages[self._group.stage]

    def __contains__(self, name: object) -> bool:
        """Return whether this rank holds the tensor."""
        target = self._targets.get(str(name))
        return target is not None and self._stored_name(target) is not None

    def split(self, name: str) -> Split:
        """Return how ranks share the tensor."""
        return self._targets[name].split

    def shard(self, name: str) -> Shard:
        """Return which part of the tensor this rank holds."""
        return shard(self._targets[name], self._group.tp_size, self._group.tp_rank, self._ep_size)

    def tensor(self, name: str) -> Tensor:
        """Return the rank's part of a tensor, on the device.

        Raises CorruptFileError when the file lacks it or holds another shape.
        """
        stored = self._stored_name(self._targets[name])
        if stored is None:
            raise CorruptFileError(f"{self._file.path} lacks the tensor {name}.", hint="Convert the model again.")
        self._require_shape(name, stored, self._file.entries[stored].shape)
        return self._mapped(stored).to(self._device)

    def fp8_scales(self, name: str) -> tuple[Tensor, Tensor | None] | None:
        """Return the scales of an FP8 matrix, see `Fp8Codes`, and of its inputs; None for a tensor of floats.

        A matrix of experts has a scale for each.
        """
        stored = self._stored_name(self._targets[name])
        if stored is None or self._file.entries[stored].code != CODES["float8_e4m3"]:
            return None
        algorithm = self._config.quantization.algorithm
        static = algorithm not in FP8_BY_TOKEN
        prefix = stored.removesuffix("weight")
        kinds = ("weights", "activation") if static else ("weights",)
        names = [f"{prefix}{kind}_scaling_factor" for kind in kinds]
        if missing := [each for each in names if each not in self._file.entries]:
            raise CorruptFileError(f"{self._file.path} lacks the tensor {missing[0]}.", hint="Convert the model again.")
        scales = [self._mapped(each).float().to(self._device) for each in names]
        if static:
            scales = [each.reshape(-1) for each in scales]
        *experts, outputs, columns = self.shard(name).shape
        blocks = (-(-outputs // FP8_BLOCK), -(-columns // FP8_BLOCK))
        expected = (math.prod(experts),) if static else blocks if algorithm == FP8_BLOCKS else (outputs,)
        if scales[0].shape != expected or any(each.shape != (1,) for each in scales[1:]):
            raise CorruptFileError(
                f"{self._file.path}: the scales of {stored} have shape {list(scales[0].shape)}; its config requires "
                f"{list(expected)}."
            )
        return scales[0], scales[1] if static else None

    def cache_scale(self, attention: str) -> float:
        """Return what a layer's codes in an FP8 cache are times: 1 where the model was not calibrated for one.

        Raises CorruptFileError when the file lacks the number or holds something else.
        """
        if self._config.quantization.kv_cache_quant_algo is None:
            return 1.0
        stored = self._stored_name(self._targets[f"{attention}.qkv.weight"])
        name = f"{str(stored).removesuffix('qkv.weight')}kv_cache_scaling_factor"
        if name not in self._file.entries:
            raise CorruptFileError(f"{self._file.path} lacks the tensor {name}.", hint="Convert the model again.")
        found = self._mapped(name).flatten().tolist()
        if len(found) != 1 or not 0 < found[0] < math.inf:
            raise CorruptFileError(f"{self._file.path}: {name} is {found}; expected one positive number.")
        return float(found[0])

    def packed(self, name: str) -> tuple[PackedWeight, Tensor | None] | None:
        """Return a matrix of int8 or int4 codes and the factors f32[in] of its inputs, or None for other tensors.

        Floats of a weight-only checkpoint are quantised here.
        """
        target = self._targets[name]
        bits = _MADE_HERE.get(self._config.quantization.algorithm or "")
        if bits is not None and is_quantised(target) and not is_excluded(self._config, target):
            return quantize(self.tensor(name), bits), None
        stored = self._stored_name(target)
        if stored is None or not self._has_codes(stored):
            return None
        prefix = stored.removesuffix(".weight")
        entries = {each: entry for each, entry in self._file.entries.items() if each.rpartition(".")[0] == prefix}
        weight = unpack_int4({each: self._file.stored(entry) for each, entry in entries.items()}, prefix, self._config)
        self._require_shape(name, stored, weight.codes.shape)
        factors = weight.input_scales
        return pack(weight, self._device), None if factors is None else torch.from_numpy(factors).to(self._device)

    def check(self) -> None:
        """Raise CorruptFileError when the file lacks a tensor or holds one of another shape."""
        optional = {"lm_head.weight"} if "transformer.vocab_embedding.weight" in self else set()
        for name, target in self._targets.items():
            if stage_of(target, self._stages) == self._group.stage and name not in optional:
                stored = self._stored_name(target)
                if stored is None or not self._has_codes(stored):
                    self.tensor(name)
                    self.fp8_scales(name)
                elif 2 * self._file.entries[stored].size != math.prod(self.shard(name).shape):
                    self._require_shape(name, stored, self._file.entries[stored].shape)
                if name.endswith(".attention.qkv.weight"):
                    self.cache_scale(name.removesuffix(".qkv.weight"))

    def _require_shape(self, name: str, stored: str, shape: tuple[int, ...]) -> None:
        if shape != (expected := self.shard(name).shape):
            raise CorruptFileError(
                f"{self._file.path}: {stored} has shape {list(shape)}; its config requires {list(expected)}."
            )

    def _has_codes(self, stored: str) -> bool:
        """Return whether a matrix is stored as codes of 4 bits."""
        scales = f"{stored.removesuffix('weight')}weights_scaling_factor"
        return self._config.quantization.algorithm in (GPTQ, AWQ) and scales in self._file.entries

    def _mapped(self, stored: str) -> Tensor:
        entry = self._file.entries[stored]
        dtype = _DTYPES[entry.code]
        flat = torch.frombuffer(self._bytes, dtype=dtype, count=entry.size // dtype.itemsize, offset=entry.begin)
        return flat.view(entry.shape)

    def _stored_name(self, target: Target) -> str | None:
        """Return a tensor's name in the file, which may be that of an older release, or None when it is not there."""
        if stage_of(target, self._stages) != self._group.stage:
            return None
        older = replace(target, name=older_name(target.name))
        names: Sequence[str] = [name_in_stage(each, self._stages) for each in (target, older)]
        return next((name for name in names if name in self._file.entries), None)
