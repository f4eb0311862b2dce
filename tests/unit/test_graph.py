"""The stateful graph computes the decoder, and its file keeps the weights in their own precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.support.tiny_decoders import DECODERS, LLAMA, TinyDecoder, tiny_decoder
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.errors import UnsupportedModelError, UsageError
from trtserve.executor.engine.shapes import Sizes
from trtserve.executor.openvino.graph import build_graph, save_graph
from trtserve.executor.openvino.weight_quantization import Packing


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_weights_keep_their_precision_in_the_file(tmp_path: Path, dtype: type[np.generic]) -> None:
    tiny = tiny_decoder(dtype=dtype)
    save_graph(build_graph(tiny.decoder, tiny.sizes, tiny), tmp_path / "rank0.xml")
    weights = sum(tensor.nbytes for tensor in tiny.tensors.values())
    extra = (tmp_path / "rank0.bin").stat().st_size - weights
    assert 0 <= extra < 4096


@pytest.mark.parametrize("packing", ["int8", "int4"])
def test_packed_matrices_use_one_byte_or_half_a_byte_per_weight(tmp_path: Path, packing: Packing) -> None:
    tiny = tiny_decoder(packing=packing)
    save_graph(build_graph(tiny.decoder, tiny.sizes, tiny, packing=packing), tmp_path / "rank0.xml")
    matrices = {name: t for name, t in tiny.tensors.items() if ".layers." in name and t.ndim == 2}
    head = tiny.tensors["lm_head.weight"]
    others = sum(t.nbytes for name, t in tiny.tensors.items() if name not in matrices and name != "lm_head.weight")
    halves = 1 if packing == "int4" else 2
    # The inputs are 64 or 96: one group of 64, or three of 32.
    groups = sum(
        t.shape[0] * (1 if packing == "int8" else t.shape[1] // (64 if t.shape[1] == 64 else 32)) * 4
        for t in matrices.values()
    )
    expected = sum(t.size for t in matrices.values()) * halves // 2 + groups + head.size + head.shape[0] * 4 + others
    extra = (tmp_path / "rank0.bin").stat().st_size - expected
    assert 0 <= extra < 4096


def test_missing_sizes_of_old_configs_are_derived() -> None:
    keys = {"vocab_size": 10, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes = Sizes.of(CheckpointConfig.of(keys))
    assert sizes == Sizes(vocab=10, hidden=64, layers=3, heads=4, kv_heads=4, head=16, epsilon=1e-5)


def test_rotation_larger_than_the_head_is_refused() -> None:
    tiny = tiny_decoder(replace(LLAMA, rope_inv_freq=(1.0,) * 9))
    with pytest.raises(UnsupportedModelError, match="covers 18 numbers of a head, which has 16"):
        build_graph(tiny.decoder, tiny.sizes, tiny)


def test_a_failed_write_says_why(tmp_path: Path) -> None:
    tiny: TinyDecoder = DECODERS["llama"]
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="it is a file, not a folder"):
        save_graph(build_graph(tiny.decoder, tiny.sizes, tiny), tmp_path / "file" / "rank0.xml")
