"""GPUs by their names, and what fits them: by estimate, and with which sizes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.large_models import llama_2_7b
from trtserve.errors import UsageError
from trtserve.pipeline.gpu_fit import (
    GPUS,
    RESERVE,
    Gpu,
    find_gpu,
    fit_gpu,
    fitting_step,
    parse_size,
    shorter_fit,
    smallest_fit,
)
from trtserve.specs import BuildSpec


def test_gpus_by_name_and_size() -> None:
    assert find_gpu("H100-80GB").memory == 81559 * 2**20
    assert find_gpu("l40s") == GPUS["l40s-48gb"]
    assert find_gpu("H100_80GB") == GPUS["h100-80gb"]
    assert find_gpu("NVIDIA GeForce RTX 4090") == GPUS["rtx4090-24gb"]
    with pytest.raises(UsageError, match="not a known GPU") as wrong:
        find_gpu("h300")
    assert "h100-80gb? Or give its memory" in str(wrong.value.hint)
    with pytest.raises(UsageError, match="the name of several GPUs") as caught:
        find_gpu("a100")
    assert "a100-40gb or a100-80gb" in str(caught.value.hint)
    assert parse_size("80GB", "--gpu-memory") == 80 * 10**9
    assert parse_size("1.5 GiB", "--gpu-memory") == 3 * 2**29
    for text in ("80 boxes", "0GB", "-1", "", "80"):
        with pytest.raises(UsageError, match="--gpu-memory"):
            parse_size(text, "--gpu-memory")


def test_llama_2_7b_on_gpus() -> None:
    config = llama_2_7b()
    fit = fit_gpu(config, BuildSpec(), find_gpu("h100-80gb"))
    assert fit.weights == pytest.approx(2 * 6.74e9, rel=0.01)
    assert fit.kv_per_token == 2 * 32 * 32 * 128 * 2
    assert fit.fits
    assert fit.tokens % 32 == 0
    small = find_gpu("t4")
    assert not fit_gpu(config, BuildSpec(), small).fits
    smallest = smallest_fit(config, BuildSpec(), small)
    assert smallest is not None
    assert (smallest.tp_size, smallest.pp_size) == (2, 1)
    assert smallest.weights == pytest.approx(6.74e9 + 0.13e9, rel=0.01)  # the embedding is whole on both ranks
    assert fit_gpu(llama_2_7b(quantize="int8"), BuildSpec(), small).weights == pytest.approx(7e9, rel=0.02)
    assert smallest_fit(config, BuildSpec(), Gpu(name="tiny", memory=2**30)) is None


def test_adapters_take_of_what_the_cache_leaves() -> None:
    config, gpu = llama_2_7b(), find_gpu("h100-80gb")
    plain = fit_gpu(config, BuildSpec(), gpu)
    adapted = fit_gpu(config, BuildSpec(lora_plugin="auto"), gpu)
    assert (plain.adapter_memory, adapted.tokens) == (0, plain.tokens)
    free = gpu.memory - RESERVE - adapted.weights - adapted.activations
    assert adapted.adapter_memory == int(0.05 * free)
    assert adapted.tokens * adapted.kv_per_token + adapted.adapter_memory < free


def test_gpu_counts_other_than_powers_of_two_are_tried() -> None:
    """Weights that three or six GPUs hold need no fourth or eighth; ten key/value heads divide by 10, 5 and 2."""
    sizes_of_phi = {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 10}
    config = llama_2_7b().changed(**sizes_of_phi)
    found = {
        (fit.tp_size, fit.pp_size)
        for gib in range(3, 24)
        if (fit := smallest_fit(config, BuildSpec(max_seq_len=512), Gpu(name="", memory=gib * 2**30))) is not None
    }
    assert {(1, 3), (2, 3)} <= found
    assert all(10 % tp_size == 0 for tp_size, _ in found)


@pytest.mark.parametrize(
    ("asked", "flags"),
    [
        ({"max_batch_size": 10**8}, "--max-batch-size 262144 --max-num-tokens 262144"),
        ({"max_num_tokens": 10**7}, "--max-num-tokens 1048576"),
    ],
)
def test_oversized_step_is_named(asked: dict[str, Any], flags: str) -> None:
    config, gpu = llama_2_7b(), find_gpu("h100-80gb")
    assert not fit_gpu(config, BuildSpec(**asked), gpu).fits
    assert fitting_step(config, BuildSpec(**asked), gpu) == flags
    assert fitting_step(config, BuildSpec(**asked), Gpu(name="tiny", memory=2**30)) is None


def test_longest_fitting_sequence_is_suggested() -> None:
    config = llama_2_7b()
    gpu = Gpu(name="16GB", memory=16_700_000_000)
    longest = shorter_fit(config, BuildSpec(max_batch_size=8), gpu)
    assert longest is not None
    assert 32 <= longest < 4096
    assert fit_gpu(config, BuildSpec(max_batch_size=8, max_seq_len=longest), gpu).fits
    assert not fit_gpu(config, BuildSpec(max_batch_size=8, max_seq_len=longest + 32), gpu).fits
