"""TensorRT-LLM's unified checkpoint, read back unsharded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import checkpoint_targets
from trtserve.checkpoint.architectures.base import Target, require_sizes
from trtserve.checkpoint.memory import ITEM_SIZE
from trtserve.checkpoint.quantized import AWQ, FP8, FP8_BY_TOKEN, GPTQ, Int4Weight, unpack_fp8, unpack_int4
from trtserve.checkpoint.sharding import matrix, name_in_stage, older_name, shard, stage_layers, stage_of
from trtserve.checkpoint.tensor_files import LazyModule, TensorFile
from trtserve.errors import ArtifactError, CorruptFileError
from trtserve.files import read_json_object

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    T = TypeVar("T", bound=np.generic)
else:
    np = LazyModule("numpy")

_EMBEDDING = "transformer.vocab_embedding.weight"
HEAD = "lm_head.weight"


def read_config(folder: Path) -> CheckpointConfig:
    """Read `config.json` of a checkpoint folder. Raises ArtifactError when it is missing or not a checkpoint's."""
    path = folder / "config.json"
    try:
        content = read_json_object(path, CorruptFileError, hint="Convert the model again.")
    except FileNotFoundError:
        raise ArtifactError(
            f"{folder} has no config.json: it is not a checkpoint.",
            hint="Expected a folder written by `trtserve convert` or TensorRT-LLM's convert_checkpoint.py.",
        ) from None
    if "architecture" not in content:
        raise ArtifactError(
            f"{path} has no `architecture`: it is not a TensorRT-LLM checkpoint's config.",
            hint="A Hugging Face folder must be converted first: trtserve convert FOLDER.",
        )
    require_sizes(content, "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    config = CheckpointConfig.of(content, path)
    if config.dtype not in ITEM_SIZE:
        found = f"has dtype = {config.dtype!r:.60}" if config.dtype else "lacks dtype"
        raise CorruptFileError(f"{path} {found}; expected {', '.join(ITEM_SIZE)}.", hint="Convert the model again.")
    return config


def require_files(folder: Path, config: CheckpointConfig) -> None:
    """Require every rank's file: ArtifactError when one is missing, CorruptFileError when it does not match its header.

    Only headers are read.
    """
    for rank in range(config.mapping.ranks):
        _rank_file(folder, rank, config.mapping.ranks)


def _rank_file(folder: Path, rank: int, ranks: int) -> TensorFile:
    path = folder / f"rank{rank}.safetensors"
    if not path.is_file():
        raise ArtifactError(
            f"{path} is missing; the checkpoint has {ranks} ranks.",
            hint="Copy every file of the checkpoint, or convert the model again.",
        )
    return TensorFile(path)


class CheckpointReader:
    """The unsharded tensors of a checkpoint folder from any tool; ranks are merged on read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_config(folder)
        mapping = self.config.mapping
        self.tp_size, self.pp_size, self._ep_size = mapping.tp_size, mapping.pp_size, mapping.moe_ep_size
        self._stages = stage_layers(self.config.num_hidden_layers, self.pp_size)
        listed = checkpoint_targets(self.config)
        self._files: dict[int, TensorFile] = {}
        self._targets = {target.name: target for target in listed}
        for target in listed:  # its name in this checkpoint may be that of an older release
            older = replace(target, name=older_name(target.name))
            if older.name != target.name and self._holds(older):
                self._targets[target.name] = older

    def names(self) -> list[str]:
        """Names of all unsharded tensors; layers are numbered over all pipeline stages."""
        return list(self._targets)

    def merged(self, name: str) -> npt.NDArray[Any]:
        """Return one unsharded tensor without vocabulary padding; bfloat16 as ml_dtypes'.

        Quantised matrices are returned as float32 weights. Raises CorruptFileError when a rank lacks the tensor or
        holds another shape.
        """
        target = self._targets[name]
        if name == HEAD and not self._holds(target):
            # TensorRT-LLM's loader uses the embedding when the output head is absent (tied embeddings).
            return self.merged(_EMBEDDING)
        if (kind := self.kind(name)) != "float":
            floats = self.int4(name).dequantized() if kind == "int4" else self._fp8(target)
            return floats.reshape(target.shape)
        if self.tp_size == 1 or target.split == "replicated":
            return self._floats(target, 0)
        return self._merge(target, (self._floats(target, rank) for rank in range(self.tp_size))).reshape(target.shape)

    def kind(self, name: str) -> Literal["float", "int4", "fp8"]:
        """Return how a tensor is stored: as floats, 4-bit codes (see `int4`), or FP8."""
        algorithm = self.config.quantization.algorithm
        if algorithm not in (GPTQ, AWQ, FP8, *FP8_BY_TOKEN) or not name.endswith(".weight"):
            return "float"
        target = self._targets[name]
        scales = replace(target, name=f"{target.name.removesuffix('weight')}weights_scaling_factor")
        return ("int4" if algorithm in (GPTQ, AWQ) else "fp8") if self._holds(scales) else "float"

    def int4(self, name: str) -> Int4Weight:
        """Return an unsharded 4-bit matrix; experts as one [experts · out, in]."""
        target = self._targets[name]
        shards = [unpack_int4(*self._shard(target, rank), self.config) for rank in range(self.tp_size)]
        groups = shards[0].group_size
        zeros = None
        if any(part.zero_points is not None for part in shards):
            zeros = self._merge(target, [part.all_zero_points() for part in shards], groups)
        inputs = [part.input_scales for part in shards if part.input_scales is not None]
        return Int4Weight(
            codes=self._merge(target, [part.codes for part in shards]),
            scales=self._merge(target, [part.scales for part in shards], groups),
            zero_points=zeros,
            group_size=groups,
            # When inputs are split, each rank has its own factors.
            input_scales=(np.concatenate(inputs) if target.split == "row" else inputs[0]) if inputs else None,
        )

    def _fp8(self, target: Target) -> npt.NDArray[np.float32]:
        """Return an unsharded FP8 matrix. Raises CorruptFileError when ranks have different scales."""
        algorithm = str(self.config.quantization.algorithm)
        shards = [unpack_fp8(*self._shard(target, rank), algorithm) for rank in range(self.tp_size)]
        if algorithm == FP8 and len(target.shape) == 2 and len({float(part.scales[0, 0]) for part in shards}) > 1:
            raise CorruptFileError(
                f"{target.name} has different scales on different ranks.", hint="Convert the model again."
            )
        return self._merge(target, [part.dequantized() for part in shards])

    def _shard(self, target: Target, tp_rank: int) -> tuple[dict[str, npt.NDArray[Any]], str]:
        """Return all tensors of a matrix on one rank, and their common prefix."""
        file = self._file(target, tp_rank)
        prefix = name_in_stage(target, self._stages).removesuffix(".weight")
        names = (name for name in file.entries if name.rpartition(".")[0] == prefix)
        return {name: file.stored(file.entries[name]) for name in names}, prefix

    def _merge(self, target: Target, shards: Iterable[npt.NDArray[T]], group: int = 1) -> npt.NDArray[T]:
        """Merge the ranks' matrices [out, in / group] into the unsharded one; repeated heads are written again."""
        rows, columns = matrix(target.shape)
        whole: npt.NDArray[T] | None = None
        for tp_rank, values in enumerate(shards):
            whole = np.empty((rows, columns // group), dtype=values.dtype) if whole is None else whole
            part, row = shard(target, self.tp_size, tp_rank, self._ep_size), 0
            held, width = matrix(part.shape)
            if matrix(values.shape) != (held, width // group):
                raise CorruptFileError(
                    f"{target.name} of rank {tp_rank} has the wrong shape {list(values.shape)} as [out, in]."
                )
            values = values.reshape(held, -1)  # noqa: PLW2901
            for piece in part.pieces:
                low, high = piece.first_column // group, (piece.first_column + piece.columns) // group
                whole[piece.first_row : piece.first_row + piece.rows, low:high] = values[row : row + piece.rows]
                row += piece.rows
        assert whole is not None
        return whole

    def _floats(self, target: Target, tp_rank: int) -> npt.NDArray[Any]:
        """Return a rank's part of a tensor of floats."""
        file, name = self._file(target, tp_rank), name_in_stage(target, self._stages)
        if name not in file.entries:
            raise CorruptFileError(f"{file.path} lacks the tensor {name}.", hint="Convert the model again.")
        shape, expected = file.entries[name].shape, shard(target, self.tp_size, tp_rank, self._ep_size).shape
        if shape != expected:
            raise CorruptFileError(
                f"{file.path}: {name} has shape {list(shape)}; its config requires {list(expected)}."
            )
        return file.tensor(name)

    def _holds(self, target: Target) -> bool:
        return name_in_stage(target, self._stages) in self._file(target, 0).entries

    def _file(self, target: Target, tp_rank: int) -> TensorFile:
        rank = stage_of(target, self._stages) * self.tp_size + tp_rank
        if rank not in self._files:
            self._files[rank] = _rank_file(self.folder, rank, self.config.mapping.ranks)
        return self._files[rank]
