"""Features that ranks share on PyTorch, adapters, prompt tables and split embeddings, equal those of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.adapters import ADAPTER_MODULES, random_adapter
from tests.support.paged_steps import PagedSteps
from tests.support.tiny_models import write_tiny_model
from tests.support.transformers_oracle import ENGINES, engine_of
from trtserve.executor.engine.limits import AdapterOptions
from trtserve.executor.engine.lora import AdapterCache
from trtserve.executor.engine.requests import AdapterSource
from trtserve.specs import BuildSpec, ConvertSpec

pytestmark = pytest.mark.needs("torch")

BUILD = BuildSpec(
    max_seq_len=128,
    max_prompt_embedding_table_size=8,
    lora_plugin="auto",
    lora_target_modules=ADAPTER_MODULES,
    max_lora_rank=8,
    **ENGINES["torch"],
)
SEQUENCES = {name: list(range(first, first + 30)) for name, first in {"a": 3, "b": 90, "c": 200}.items()}
STEPS: list[dict[str, int]] = [
    {"a": 20, "b": 7},
    {"a": 1, "b": 1, "c": 25},
    {"a": 1, "b": 1, "c": 1},
    {"b": 12, "c": 4},
]
SPLITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "vocabulary": {"use_parallel_embedding": True},
    "hidden": {"use_parallel_embedding": True, "embedding_sharding_dim": 1},
}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_ranks_equal_one_rank(family: str, split: dict[str, Any], tmp_path: Path) -> None:
    from tests.support.torch_ranks import ThreadRanks

    folder = write_tiny_model(tmp_path / "model", family, seed=3)
    modules = [name for name in ADAPTER_MODULES if family == "llama" or name != "mlp_gate"]
    build = replace(BUILD, lora_target_modules=modules)
    logits = []
    for tp_size, pp_size in ((1, 1), (2, 2)):
        convert = ConvertSpec(dtype="float32", tp_size=tp_size, pp_size=pp_size, **(split if tp_size > 1 else {}))
        model: Any = ThreadRanks(engine_of(folder, tmp_path / f"{tp_size}", convert, build).path, tp_size, pp_size)
        logits.append(_with_adapters(model) + _with_a_prompt_table(model))
    for one, several in zip(*logits, strict=True):
        np.testing.assert_allclose(several, one, atol=2e-5)
    assert not np.allclose(logits[0][0], logits[0][3], atol=0.01)


def _with_adapters(model: Any) -> list[Any]:
    """Return the logits of each sequence, two of them with adapters, and those of the first without."""
    shape = model.ranks[0].lora
    cache = AdapterCache(shape, AdapterOptions(), free_memory=1 << 33)
    sent = {task: AdapterSource(task, *random_adapter(shape, seed=task, rank=2 + task)) for task in (1, 2)}
    adapters = {"a": cache.resolve(sent[1]), "b": cache.resolve(sent[2])}
    found = []
    for active in (adapters, {}):
        steps = PagedSteps(model, SEQUENCES)
        parts: dict[str, list[Any]] = {name: [] for name in SEQUENCES}
        for new in STEPS:
            batch = cache.batch([(active.get(name), count) for name, count in new.items()])
            for name, logits in steps.step(new, adapters=batch).items():
                parts[name].append(logits)
        found += [np.concatenate(each) for each in parts.values()]
    return found


def _with_a_prompt_table(model: Any) -> list[Any]:
    table = np.random.default_rng(5).normal(0, 0.3, (3, 64)).astype(np.float32)
    ids = [*SEQUENCES["a"][:5], 320, 322, 321, 7]
    return [PagedSteps(model, {"a": ids}).step({"a": len(ids)}, prompt_table=table)["a"]]
