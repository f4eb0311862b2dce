"""The adapter cache: valid and invalid adapters, eviction, and batches of adapters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.adapters import random_adapter
from tests.support.tiny_decoders import tiny_decoder
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.executor.engine.limits import AdapterOptions
from trtserve.executor.engine.lora import AdapterCache, NotCachedError
from trtserve.executor.engine.requests import AdapterSource
from trtserve.executor.engine.shapes import LoraShape, lora_modules

MEMORY = 1 << 30
MODULES = lora_modules(CheckpointConfig.of(tiny_decoder().config), ["attn_q", "attn_k", "attn_v"])
SHAPE = LoraShape(modules=MODULES, layers=2, max_rank=8)
FULL = "Cache is full. There are no done tasks to evict"


def _cache(shape: LoraShape | None = SHAPE, **config: Any) -> AdapterCache:
    return AdapterCache(shape, AdapterOptions(**config), free_memory=MEMORY)


def _sent(task: int, *, rank: int = 4, **options: Any) -> AdapterSource:
    return AdapterSource(task, *random_adapter(SHAPE, seed=task, rank=rank, **options))


def _cached(cache: AdapterCache, *tasks: int) -> list[bool]:
    """Return the cached ones of `tasks`; this makes them the most recently used, so call it only once."""
    return [_is_cached(cache, task) for task in tasks]


def _is_cached(cache: AdapterCache, task: int) -> bool:
    try:
        cache.release(cache.resolve(AdapterSource(task)))
    except NotCachedError:
        return False
    return True


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("batch_axis", [True, False])
def test_rows_are_split_into_matrices(dtype: Any, batch_axis: bool) -> None:
    weights, config = random_adapter(SHAPE, seed=1, rank=3, dtype=dtype, batch_axis=batch_axis)
    adapter = _cache().resolve(AdapterSource(1, weights, config))
    rows = weights.reshape(-1, weights.shape[-1]).astype(np.float32)
    for row, (number, layer, rank) in zip(rows, config.reshape(-1, 3).tolist(), strict=True):
        module = next(module for module in MODULES if module.id == number)
        a, b = adapter.matrices[layer, number]
        np.testing.assert_array_equal(a.reshape(-1), row[: rank * module.inputs])
        np.testing.assert_array_equal(b.T.reshape(-1), row[rank * module.inputs : module.numbers(rank)])
    assert adapter.ranks == {1: 3, 2: 3, 3: 3}


def test_bfloat16_engines_keep_bfloat16() -> None:
    shape = LoraShape(modules=MODULES, layers=2, max_rank=8, bfloat16=True)
    adapter = _cache(shape).resolve(_sent(1))
    assert {array.dtype for pair in adapter.matrices.values() for array in pair} == {np.dtype(ml_dtypes.bfloat16)}


def test_weights_need_to_be_sent_only_once() -> None:
    cache = _cache()
    with pytest.raises(
        NotCachedError, match=r"^LoRA task 7 not found in cache\. Please send LoRA weights with request$"
    ):
        cache.resolve(AdapterSource(7))
    first = cache.resolve(_sent(7))
    assert cache.resolve(AdapterSource(7)) is first
    assert first.holders == 2


def test_known_task_id_keeps_its_weights() -> None:
    """Upstream ignores tensors sent with a cached id; KV blocks of that id stay correct."""
    cache = _cache()
    first = cache.resolve(_sent(7, rank=4))
    assert cache.resolve(AdapterSource(7, *random_adapter(SHAPE, seed=8, rank=2))) is first


def test_engine_without_adapters_refuses_them() -> None:
    cache = _cache(None)
    with pytest.raises(RuntimeError, match="the engine was built without adapters"):
        cache.resolve(_sent(1))
    assert cache.batch([(None, 3)]) is None
    assert cache.fits([None])


Tensors = tuple[npt.NDArray[Any], npt.NDArray[Any]]


def _described_as(place: int, number: int) -> Callable[[Tensors], Tensors]:
    """Change a number in the first row of lora_config."""

    def change(tensors: Tensors) -> Tensors:
        weights, config = tensors
        config[0, 0, place] = number
        return weights, config

    return change


def _with_nan(tensors: Tensors) -> Tensors:
    tensors[0][0, 0, 5] = np.nan
    return tensors


def _weights(change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: (change(tensors[0]), tensors[1])


def _config(change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: (tensors[0], change(tensors[1]))


def _both(change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: (change(tensors[0]), change(tensors[1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_described_as(1, 2), r"Expected layerId to be in the range \[0, 2\); lora_config has 2"),
        (_described_as(2, 0), "Expected adapterSize to be > 0"),
        (_described_as(2, 9), r"Invalid low_rank \(9\)\. low_rank must be smaller than mMaxLowRank \(8\)"),
        (_described_as(0, 4), "lora module attn_dense not enabled for this model"),
        (_described_as(0, 99), "lora module 99 not enabled for this model"),
        (
            _weights(lambda w: w[..., :-1]),
            "lora_weights has too few values for attn_q: rank 4 needs 512, a row has 511",
        ),
        (_config(lambda c: c[:, 1:]), "the same number of rows, 1 or more; they have 5 and 4"),
        (_config(lambda c: c[..., :2]), "Expected rows of lora_config to have 3 numbers; they have 2"),
        (_both(lambda t: np.concatenate([t, t])), "Expected batch dimension to be 1 .*; lora_weights has 2"),
        (_weights(lambda w: w.reshape(-1)), "Invalid shape for lora_weights tensor"),
        (_weights(lambda w: w.astype(np.int32)), "lora_weights has type int32; expected float16, bfloat16 or float32"),
        (_config(lambda c: c.astype(np.int64)), "Expected lora_config to have TYPE_INT32 but was int64"),
        (_with_nan, "lora_weights has values for attn_q that are not finite"),
        (_config(lambda c: np.concatenate([c, np.ones_like(c[..., :1])], axis=-1)), "DoRA"),
        (_both(lambda t: t[:, :0]), "1 or more; they have 0 and 0"),
    ],
)
def test_invalid_adapters_are_refused(change: Callable[[Tensors], Tensors], message: str) -> None:
    cache = _cache()
    with pytest.raises(RuntimeError, match=message):
        cache.resolve(AdapterSource(1, *change(random_adapter(SHAPE, seed=1, rank=4))))
    assert _cached(cache, 1) == [False]


def test_values_that_overflow_bfloat16_are_refused() -> None:
    shape = LoraShape(modules=MODULES, layers=2, max_rank=8, bfloat16=True)
    weights, config = random_adapter(SHAPE, seed=1, rank=4)
    weights[0, 0, 0] = np.float32(3.4e38)
    with pytest.raises(RuntimeError, match="not finite"):
        _cache(shape).resolve(AdapterSource(1, weights, config))


def test_max_adapter_size_limits_the_rank() -> None:
    with pytest.raises(RuntimeError, match=r"mMaxLowRank \(2\)"):
        _cache(max_rank=2).resolve(_sent(1, rank=3))


# Three adapters of rank 8 fill 24 ranks of 3 modules in 2 layers: rows of 128 numbers (q) and of 96 (k, v) in slots
# of 96 numbers make 8 · (2 + 1 + 1) · 2 = 64 slots, the size of one page at the optimal rank of 8.
ROOM_FOR_THREE: dict[str, Any] = {"host_bytes": 3 * 64 * 96 * 4}


def test_least_recently_used_adapter_is_evicted_first() -> None:
    cache = _cache(**ROOM_FOR_THREE)
    for task in (1, 2, 3):
        cache.release(cache.resolve(_sent(task, rank=8)))
    cache.release(cache.resolve(AdapterSource(1)))
    cache.release(cache.resolve(_sent(4, rank=8)))
    assert _cached(cache, 1, 2, 3, 4) == [True, False, True, True]


def test_adapters_in_use_are_not_evicted() -> None:
    cache = _cache(**ROOM_FOR_THREE)
    held = [cache.resolve(_sent(task, rank=8)) for task in (1, 2, 3)]
    with pytest.raises(RuntimeError, match=rf"Could not store taskId=4\. {FULL}"):
        cache.resolve(_sent(4, rank=8))
    assert _cached(cache, 1, 2, 3, 4) == [True, True, True, False]
    cache.release(held[1])
    cache.resolve(_sent(4, rank=8))
    assert _cached(cache, 1, 2, 3, 4) == [True, False, True, True]


def test_small_adapters_use_fewer_pages() -> None:
    cache = _cache(optimal_rank=1, **ROOM_FOR_THREE)
    for task in range(1, 8):
        cache.resolve(_sent(task, rank=2))
    assert all(_cached(cache, *range(1, 8)))


def test_module_layer_sizes_take_precedence_over_bytes() -> None:
    # One module and layer is a row of the largest module: 2 slots of 96 numbers.
    cache = _cache(host_module_layers=64, host_bytes=1)
    for task in (1, 2, 3):
        cache.release(cache.resolve(_sent(task, rank=8)))
    assert _cached(cache, 1, 2, 3) == [False, True, True]


@pytest.mark.parametrize(("place", "config"), [("host", {"host_bytes": 1000}), ("device", {"device_fraction": 1e-6})])
def test_cache_too_small_for_one_adapter_is_refused(place: str, config: dict[str, Any]) -> None:
    with pytest.raises(
        RuntimeError, match=f"Not enough space allocated to {place} LoRA cache to hold 1 max sized LoRA"
    ):
        _cache(**config)


def test_default_cache_holds_at_least_one_adapter() -> None:
    cache = AdapterCache(SHAPE, AdapterOptions(), free_memory=0)
    assert cache.fits([cache.resolve(_sent(1, rank=8))])


def test_device_cache_limits_adapters_per_step() -> None:
    cache = _cache(device_fraction=2 * 64 * 96 * 4 / MEMORY)
    adapters = [cache.resolve(_sent(task, rank=8)) for task in (1, 2, 3)]
    assert cache.fits([adapters[0], None, adapters[1], adapters[0]])
    assert not cache.fits(adapters)


def test_masks_select_the_columns_of_each_tokens_adapter() -> None:
    cache = _cache()
    one, two = cache.resolve(_sent(1, rank=1)), cache.resolve(_sent(2, rank=2))
    batch = cache.batch([(one, 1), (None, 2), (two, 1)])
    assert batch is not None
    mask = batch.masks["attention.qkv"]
    # q, k and v of the first adapter have one column each, those of the second two.
    np.testing.assert_array_equal(mask, [[1] * 3 + [0] * 6, [0] * 9, [0] * 9, [0] * 3 + [1] * 6])
    a, b = batch.stack.weights[0, "attention.qkv"]
    assert (a.shape, b.shape) == ((9, 64), (9, 128))
    query, key = one.matrices[0, 1], one.matrices[0, 2]
    np.testing.assert_array_equal(a[:2], np.concatenate([query[0], key[0]]))
    np.testing.assert_array_equal(b[0], np.concatenate([query[1][0], np.zeros(64)]))
    np.testing.assert_array_equal(b[1, 64:96], key[1][0])


def test_stack_is_rebuilt_only_for_other_adapters() -> None:
    cache = _cache()
    adapters = [cache.resolve(_sent(task)) for task in range(1, 7)]

    def stack(*places: int) -> Any:
        batch = cache.batch([(adapters[place], 1) for place in places])
        assert batch is not None
        return batch.stack

    first = stack(0, 1, 2, 3, 4)
    assert stack(3, 1, 3) is first
    narrow = stack(4)
    assert narrow is not first  # the first was five times as wide as needed
    assert stack(4, 5) is not narrow
    assert cache.batch([(None, 4)]) is None


def test_prefetched_adapters_are_cached_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("3", "11", "notes"):
        (tmp_path / name).mkdir()
        weights, config = random_adapter(SHAPE, seed=1, rank=2, dtype=np.float16)
        np.save(tmp_path / name / "model.lora_weights.npy", weights)
        np.save(tmp_path / name / "model.lora_config.npy", config)
    with caplog.at_level(logging.WARNING):
        cache = _cache(prefetch_dir=str(tmp_path))
        _cache(prefetch_dir=str(tmp_path / "absent"))
    assert _cached(cache, 3, 11, 12) == [True, True, False]
    assert "notes is not named by a task id" in caplog.text
    assert "absent is not a folder" in caplog.text
