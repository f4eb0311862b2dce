"""Models on PyTorch made of tiny decoders, without files; also split over ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.tiny_decoders import POSITIONS, TinyDecoder
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.checkpoint.architectures.base import Split
from trtserve.checkpoint.sharding import Piece, Shard, matrix
from trtserve.executor.torch.model import TorchModel

TOKENS_PER_BLOCK = 16
CACHE_SCALE = 0.03
"""Of an FP8 cache in every layer."""


class TinyWeights:
    """The tensors of a tiny decoder as `Weights` of a rank that holds all of them."""

    def __init__(self, tiny: TinyDecoder) -> None:
        self._tensors = tiny.tensors

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Any:
        import ml_dtypes
        import numpy as np
        import torch

        values = self._tensors[name].copy()
        if values.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)

    @property
    def dtype(self) -> Any:
        return self.tensor("transformer.vocab_embedding.weight").dtype

    def fp8_scales(self, name: str) -> None:
        assert name in self._tensors

    def cache_scale(self, attention: str) -> float:
        assert f"{attention}.qkv.weight" in self._tensors
        return CACHE_SCALE

    def packed(self, name: str) -> None:
        assert name in self._tensors

    def split(self, name: str) -> Split:
        assert name in self._tensors
        return "replicated"

    def shard(self, name: str) -> Shard:
        shape = self._tensors[name].shape
        rows, columns = matrix(shape)
        return Shard(shape=shape, pieces=(Piece(first_row=0, rows=rows, first_column=0, columns=columns),))


def torch_model(
    tiny: TinyDecoder,
    *,
    prompt_table: int = 0,
    lora: Sequence[str] = (),
    batch: int = 8,
    kv_precision: str = "f32",
    model_class: type[TorchModel] = TorchModel,
    **options: Any,
) -> TorchModel:
    """Return the model of `tiny` on the CPU; `prompt_table` and `lora` as in `paged_steps.write_engine`."""
    config = {
        "pretrained_config": tiny.config,
        "build_config": {
            "max_seq_len": POSITIONS,
            "max_num_tokens": POSITIONS,
            "max_batch_size": batch,
            "max_prompt_embedding_table_size": prompt_table,
            "lora_config": {"lora_target_modules": list(lora), "max_lora_rank": 8},
            "plugin_config": {"lora_plugin": "float32" if lora else None, "tokens_per_block": TOKENS_PER_BLOCK},
        },
        "trtserve": {"compute_precision": "f32", "kv_precision": kv_precision, "mlp": tiny.decoder.mlp},
    }
    weights: Any = TinyWeights(tiny)
    return model_class(EngineConfig.of(config), tiny.decoder, weights, layers=range(tiny.sizes.layers), **options)
