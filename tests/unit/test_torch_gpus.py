"""What the torch runtime decides about GPUs, without one: which GPU, how much memory, which kernels to warm up."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtserve.artifacts.engine_config import EngineConfig
from trtserve.executor import api
from trtserve.executor.engine.limits import EngineOptions
from trtserve.executor.engine.shapes import Sizes
from trtserve.executor.interface.convert import warn_about_ignored

pytestmark = pytest.mark.needs("torch")

MIB = 1 << 20


def config(**model: Any) -> EngineConfig:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 320, "intermediate_size": 128}
    build = {"max_num_tokens": 1000, "max_seq_len": 512, "plugin_config": {"tokens_per_block": 32}}
    return EngineConfig.of({"pretrained_config": {**sizes, "num_hidden_layers": 2, **model}, "build_config": build})


def gpu_bytes(**model: Any) -> int:
    from trtserve.executor.torch.model import _gpu_bytes

    found = config(**model)
    return _gpu_bytes(found, Sizes.of(found.model), 2)


def test_memory_of_a_step_on_a_gpu() -> None:
    plain = gpu_bytes()
    assert plain == 128 * MIB
    assert gpu_bytes(quantization={"quant_algo": "FP8"}) == plain + 1000 * 128
    experts = gpu_bytes(moe={"num_experts": 8, "top_k": 2}, moe_intermediate_size=96)
    assert experts == plain + 2000 * (4 * 96 + 4 * 64 + 32) + 1000 * (12 * 8 + 8 * 64)


def test_graphs_share_their_logits() -> None:
    from trtserve.executor.torch.graphs import captured_bytes

    assert captured_bytes(1024, 128_000) == 12 * 1024 * 128_000
    assert captured_bytes(1024, 128_000) == 4 * captured_bytes(256, 128_000)


@pytest.mark.parametrize(
    ("moe", "lengths"),
    [({}, [16]), ({"num_experts": 128, "top_k": 8}, [16, 65, 512]), ({"num_experts": 4000, "top_k": 1}, [16, 512])],
)
def test_prompts_that_warm_up_experts(moe: dict[str, int], lengths: list[int]) -> None:
    from trtserve.executor.torch.model import _warm_lengths

    assert _warm_lengths(config(moe=moe)) == lengths


def test_prompts_that_warm_up_products_of_few_rows() -> None:
    from trtserve.executor.torch.model import _warm_lengths

    found = config()
    assert _warm_lengths(replace(found, trtserve=replace(found.trtserve, device="cuda"))) == [16, 32, 64, 80]


def test_one_rank_uses_the_gpu_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from trtserve.executor.torch import model, ranked_model

    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    model.use_gpu(1)
    for number in (2, -1):
        with pytest.raises(RuntimeError, match=f"gpu_device_ids names GPU {number}; this process sees 2"):
            model.use_gpu(number)
    with model.StepFaults("cuda", lambda: None, gpu=1):
        assert current == [1, 1]
    asked: list[int | None] = []
    content = SimpleNamespace(mapping=SimpleNamespace(tp_size=1, pp_size=1))
    monkeypatch.setattr(ranked_model, "read_engine_config", lambda _: content)
    monkeypatch.setattr(model, "load_model", lambda *_, gpu, **__: asked.append(gpu))
    ranked_model.load_model(Path("engine"), EngineOptions(device_ids=(1,)))
    ranked_model.load_model(Path("engine"), EngineOptions())
    assert asked == [1, None]


@pytest.mark.parametrize(
    ("settings", "device", "warning"),
    [
        ({"kv_cache_config": api.KvCacheConfig(host_cache_size=1 << 30)}, "cuda", "host_cache_size (Triton: kv_cache"),
        ({"gpu_weights_percent": 0.5}, "cuda", "gpu_weights_percent has no effect"),
        ({"parallel_config": api.ParallelConfig(device_ids=[1])}, "cpu", "gpu_device_ids) has no effect"),
        ({"parallel_config": api.ParallelConfig(device_ids=[1])}, "cuda", ""),
        ({}, "cpu", ""),
    ],
)
def test_settings_without_effect_are_named(
    settings: dict[str, Any], device: str, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_about_ignored(api.ExecutorConfig(**settings), device)
    assert warning in caplog.text
    assert bool(caplog.text) == bool(warning)
