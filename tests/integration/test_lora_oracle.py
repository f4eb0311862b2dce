"""Adapters mixed in one batch of a float32 engine equal PEFT, from the layout that a client sends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.paged_steps import PagedSteps
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Model
from trtserve.build import build_engine
from trtserve.convert import convert_model
from trtserve.executor.configs import PeftCacheConfig
from trtserve.executor.lora import AdapterCache
from trtserve.executor.lora_modules import MODULE_IDS
from trtserve.executor.paged_model import PagedModel
from trtserve.executor.requests import LoraConfig
from trtserve.lora import CONFIG, WEIGHTS, convert_adapter
from trtserve.specs import BuildSpec, ConvertSpec

pytestmark = [
    pytest.mark.oracle,
    # PEFT 0.21 asks transformers 5 for it.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

Array = npt.NDArray[Any]

LENGTHS = {"a": 50, "b": 40, "c": 33, "d": 21}
SCHEDULE = [
    {"a": 20},
    {"a": 25, "b": 33, "d": 20},
    {"c": 30, "d": 1, "a": 1},
    *[dict.fromkeys("abc", 1)] * 3,
    {"a": 1, "b": 4},
]
# Which adapter each sequence has; c has none.
ADAPTERS = {"a": 1, "b": 2, "d": 1}
RANKS = {1: 4, 2: 8}

# family → PEFT's names of the modules and TensorRT-LLM's.
MODULES = {
    "llama": {
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_dense",
        "gate_proj": "mlp_h_to_4h",
        "down_proj": "mlp_4h_to_h",
        "up_proj": "mlp_gate",
    },
    "gpt2": {"c_attn": "attn_qkv", "attn.c_proj": "attn_dense", "c_fc": "mlp_h_to_4h", "mlp.c_proj": "mlp_4h_to_h"},
}


def _peft_models(folder: Path, family: str) -> Iterator[tuple[int, Any]]:
    """The model with each adapter, whose out-weights are random: PEFT starts them at zero."""
    import torch
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    for number, rank in RANKS.items():
        torch.manual_seed(number)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        config = PeftConfig(
            r=rank, lora_alpha=2 * rank + number, target_modules=list(MODULES[family]), fan_in_fan_out=family == "gpt2"
        )
        model = get_peft_model(base, config).eval()
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.2)
        yield number, model


def _sent(model: Any, family: str, folder: Path) -> tuple[Array, Array]:
    """What a client sends of `model`'s adapter: by `trtserve lora` where it knows the names, by hand for GPT-2."""
    if family == "gpt2":
        return _layout(model, family)
    model.save_pretrained(folder / "peft")
    made = convert_adapter(folder / "peft", storage_type="float32", out=folder / "made").path
    return np.load(made / WEIGHTS), np.load(made / CONFIG)


def _layout(model: Any, family: str) -> tuple[Array, Array]:
    """`lora_weights` and `lora_config` of TensorRT-LLM's conversion: out-weights times alpha / rank."""
    rows: list[Array] = []
    config: list[list[int]] = []
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        word = next(ours for theirs, ours in MODULES[family].items() if name.endswith(theirs))
        layer = next(int(part) for part in name.split(".") if part.isdecimal())
        a, b = (getattr(module, f"lora_{side}")["default"].weight.detach().numpy() for side in "AB")
        rows.append(np.concatenate([a.reshape(-1), (b * module.scaling["default"]).reshape(-1)]))
        config.append([MODULE_IDS[word], layer, len(a)])
    most = max(len(row) for row in rows)
    weights = np.stack([np.pad(row, (0, most - len(row))) for row in rows]).astype(np.float32)
    return weights[None], np.array([config], dtype=np.int32)


def _run(model: PagedModel, sequences: dict[str, list[int]], sent: dict[int, tuple[Array, Array]]) -> dict[str, Array]:
    """Logits of all sequences, each with its adapter."""
    cache = AdapterCache(model.lora, PeftCacheConfig(), free_memory=1 << 30)
    held = {number: cache.resolve(LoraConfig(number, *tensors)) for number, tensors in sent.items()}
    steps = PagedSteps(model, sequences)
    parts: dict[str, list[Array]] = {key: [] for key in sequences}
    for new in SCHEDULE:
        spans = [(held.get(ADAPTERS.get(key, 0)), count) for key, count in new.items()]
        for key, logits in steps.step(new, adapters=cache.batch(spans)).items():
            parts[key].append(logits)
    return {key: np.concatenate(logits) for key, logits in parts.items()}


def _logits(oracle: Any, ids: list[int], *, adapted: bool) -> Array:
    import torch

    with torch.no_grad(), contextlib.nullcontext() if adapted else oracle.disable_adapter():
        logits: Array = oracle(torch.tensor([ids])).logits[0].numpy()
    return logits


@pytest.mark.parametrize("family", MODULES)
def test_adapters_mixed_in_one_batch_equal_peft(family: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("peft")
    folder = write_tiny_model(tmp_path / "model", family)
    checkpoint = convert_model(Model(path=folder), ConvertSpec(dtype="float32"), out=tmp_path / "made")
    spec = BuildSpec(lora_plugin="auto", lora_target_modules=list(MODULES[family].values()), max_lora_rank=8)
    model = PagedModel(build_engine(checkpoint, spec, out=tmp_path / "engine").path, threads=1)
    oracles = dict(_peft_models(folder, family))
    sent = {number: _sent(oracle, family, tmp_path / str(number)) for number, oracle in oracles.items()}
    random = np.random.default_rng(11)
    sequences = {key: [int(token) for token in random.integers(3, 259, length)] for key, length in LENGTHS.items()}
    ours = _run(model, sequences, sent)
    for key, ids in sequences.items():
        theirs = _logits(oracles[ADAPTERS.get(key, 1)], ids, adapted=key in ADAPTERS)
        np.testing.assert_allclose(ours[key], theirs, atol=2e-4)
    assert float(np.abs(ours["a"] - _logits(oracles[1], sequences["a"], adapted=False)).max()) > 0.1
