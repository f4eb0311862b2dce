"""Windows, prompt tables and adapters of models, compared with NumPy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.adapters import ADAPTER_MODULES, merged, random_adapter
from tests.support.paged_steps import MODEL_RUNTIMES, PagedSteps, tiny_model, write_engine
from tests.support.reference_decoder import ReferenceDecoder
from tests.support.tiny_decoders import DECODERS, LLAMA, TinyDecoder, tiny_decoder
from trtserve.executor.engine.limits import AdapterOptions
from trtserve.executor.engine.lora import AdapterCache, LoraAdapter
from trtserve.executor.engine.model import ModelRunner, StepInputs
from trtserve.executor.engine.requests import AdapterSource
from trtserve.executor.openvino.paged_model import PagedModel

SEQUENCES = {
    name: [int(token) for token in np.random.default_rng(seed).integers(0, 320, length)]
    for seed, (name, length) in enumerate({"a": 40, "b": 9, "c": 70, "d": 21}.items())
}
MIXED: list[dict[str, int]] = [
    {"a": 17, "d": 3},
    {"a": 1, "c": 30},
    {"b": 7, "a": 1, "c": 33, "d": 17},
    *[{"a": 1, "b": 1, "c": 1}] * 2,
    {"c": 5, "a": 19, "d": 1},
]


def _reference(tiny: TinyDecoder, **weights: npt.NDArray[Any]) -> ReferenceDecoder:
    return ReferenceDecoder(tiny.decoder, tiny.sizes, {**tiny.tensors, **weights}, packing=tiny.packing)


class _Adapted:
    """Running sequences, each with an adapter or none."""

    def __init__(self, model: ModelRunner, adapters: dict[str, int]) -> None:
        self.cache = AdapterCache(model.lora, AdapterOptions(), free_memory=1 << 33)
        self.numbers = adapters
        assert model.lora is not None
        self.sent = {n: random_adapter(model.lora, seed=n, rank=1 + n) for n in set(adapters.values())}
        self.adapters: dict[str, LoraAdapter | None] = {
            name: self.cache.resolve(AdapterSource(n, *self.sent[n])) for name, n in adapters.items()
        }
        self.steps = PagedSteps(model, SEQUENCES)

    def run(self) -> dict[str, npt.NDArray[np.float32]]:
        parts: dict[str, list[npt.NDArray[np.float32]]] = {name: [] for name in SEQUENCES}
        for new in MIXED:
            batch = self.cache.batch([(self.adapters.get(name), count) for name, count in new.items()])
            for name, logits in self.steps.step(new, adapters=batch).items():
                parts[name].append(logits)
        return {name: np.concatenate(logits) for name, logits in parts.items()}


_UNGATED = tuple(name for name in ADAPTER_MODULES if name != "mlp_gate")
MODULES = {
    "llama": ADAPTER_MODULES,
    "llama, biases": ADAPTER_MODULES,
    "llama, int8": ("attn_qkv", "attn_q", "mlp_4h_to_h"),
    "llama, int4": ("attn_qkv", "attn_q", "mlp_4h_to_h"),
    "llama, float16": ("attn_q", "attn_k", "attn_v"),
    "llama, norms on both sides": ADAPTER_MODULES,
    "llama, normed queries and keys": ADAPTER_MODULES,
    "gpt2": _UNGATED,
    "falcon, alibi, one key head": _UNGATED,
    "phi3, fused halves": _UNGATED,
}


# PyTorch computes in float16 where the weights are, and has no packed weights.
_ON_TORCH = [name for name in MODULES if DECODERS[name].packing is None and "float16" not in name]


@pytest.mark.parametrize(
    ("runtime", "name"),
    [
        *(("openvino", name) for name in MODULES),
        *(pytest.param("torch", name, marks=pytest.mark.needs("torch")) for name in _ON_TORCH),
    ],
)
def test_adapters_mixed_in_one_batch_equal_merged_weights(runtime: str, name: str, tmp_path: Path) -> None:
    tiny = DECODERS[name]
    model = tiny_model(runtime, tmp_path, tiny, lora=MODULES[name])
    mixed = _Adapted(model, {"a": 1, "b": 2, "d": 1})
    logits = mixed.run()
    assert model.lora is not None
    for sequence, ids in SEQUENCES.items():
        number = mixed.numbers.get(sequence)
        weights = {} if number is None else merged(tiny, model.lora, *mixed.sent[number])
        decoder = _reference(tiny, **weights) if tiny.packing is None else _merged_packed(tiny, weights)
        np.testing.assert_allclose(logits[sequence], decoder.logits(ids), atol=3e-4)
    plain = _reference(tiny).logits(SEQUENCES["a"])
    assert float(np.abs(logits["a"] - plain).max()) > 0.05


def _merged_packed(tiny: TinyDecoder, weights: dict[str, npt.NDArray[Any]]) -> ReferenceDecoder:
    """The matrices are rounded before the adapter is added, so the expected sum uses the rounded ones."""
    rounded = _reference(tiny)
    for name, weight in weights.items():
        rounded._weights[name] += weight - tiny.tensors[name]
    return rounded


@pytest.mark.parametrize("runtime", MODEL_RUNTIMES)
def test_last_layer_applies_adapters_to_the_requested_rows(runtime: str, tmp_path: Path) -> None:
    """After the last attention only the requested rows are computed; the masks must be gathered too."""
    tiny = DECODERS["llama"]
    model = tiny_model(runtime, tmp_path, tiny, lora=("mlp_h_to_4h", "mlp_4h_to_h"))
    mixed = _Adapted(model, {"a": 1, "c": 2})
    assert model.lora is not None
    blocks = -(-40 // model.tokens_per_block)
    model.allocate(2 * blocks)
    spans = [(mixed.adapters["a"], 40), (None, 40)]
    tokens = np.array(SEQUENCES["a"] * 2)
    rows = np.array([79, 39, 3, 43], dtype=np.int32)
    step = StepInputs(
        token_ids=tokens,
        positions=np.tile(np.arange(40), 2),
        past_lens=np.zeros(2, np.int32),
        subsequence_begins=np.array([0, 40, 80], np.int32),
        block_indices=np.arange(2 * blocks, dtype=np.int32),
        block_indices_begins=np.array([0, blocks, 2 * blocks], np.int32),
        max_context_len=40,
        rows=rows,
        adapters=mixed.cache.batch(spans),
    )
    logits = model.forward(step)
    plain = _reference(tiny).logits(SEQUENCES["a"])
    changed = _reference(tiny, **merged(tiny, model.lora, *mixed.sent[1])).logits(SEQUENCES["a"])
    expected = np.stack([plain[39], changed[39], changed[3], plain[3]])
    np.testing.assert_allclose(logits, expected, atol=3e-4)


def test_adapters_in_bfloat16_stay_within_bounds(tmp_path: Path) -> None:
    tiny = tiny_decoder(dtype=ml_dtypes.bfloat16)
    model = PagedModel(write_engine(tmp_path, tiny, compute="bf16", kv="f16", lora=("attn_q", "attn_v")), threads=1)
    assert model.lora is not None
    assert model.lora.bfloat16
    mixed = _Adapted(model, {"a": 3})
    logits = mixed.run()
    weights = merged(tiny, model.lora, *mixed.sent[3])
    for sequence, decoder in (("a", _reference(tiny, **weights)), ("c", _reference(tiny))):
        assert float(np.abs(logits[sequence] - decoder.logits(SEQUENCES[sequence])).max()) < 0.4


@pytest.mark.parametrize("runtime", MODEL_RUNTIMES)
def test_lora_engine_without_adapters_equals_a_plain_one(runtime: str, tmp_path: Path) -> None:
    tiny = DECODERS["llama"]
    model = tiny_model(runtime, tmp_path, tiny, lora=ADAPTER_MODULES)
    first = _Adapted(model, {}).run()
    _Adapted(model, {"a": 1}).run()
    again = _Adapted(model, {}).run()
    for sequence, ids in SEQUENCES.items():
        np.testing.assert_allclose(first[sequence], _reference(tiny).logits(ids), atol=2e-4)
        np.testing.assert_array_equal(again[sequence], first[sequence])


@pytest.mark.parametrize("runtime", MODEL_RUNTIMES)
@pytest.mark.parametrize("name", ["llama", "llama, float16", "llama, scaled embeddings", "gpt2"])
def test_ids_above_the_vocabulary_use_the_prompt_table(runtime: str, name: str, tmp_path: Path) -> None:
    """A table of the vocabulary's own embeddings must not change the result."""
    tiny = DECODERS[name]
    model = tiny_model(runtime, tmp_path, tiny, prompt_table=16)
    ids = SEQUENCES["a"]
    expected = PagedSteps(model, {"a": ids}).run([{"a": 40}])["a"]
    copied = [5, 9, 5]
    table = tiny.tensors["transformer.vocab_embedding.weight"][[ids[place] for place in copied]].astype(np.float32)
    virtual = list(ids)
    for row, place in enumerate(copied):
        virtual[place] = 320 + row
    logits = PagedSteps(model, {"a": virtual}).step({"a": 40}, prompt_table=table)["a"]
    np.testing.assert_array_equal(logits, expected)
    np.testing.assert_array_equal(PagedSteps(model, {"a": ids}).run([{"a": 40}])["a"], expected)


@pytest.mark.parametrize("runtime", MODEL_RUNTIMES)
def test_rows_of_a_prompt_table_are_embeddings(runtime: str, tmp_path: Path) -> None:
    tiny = DECODERS["llama"]
    model = tiny_model(runtime, tmp_path, tiny, prompt_table=4)
    table = np.random.default_rng(3).normal(0, 0.3, (2, 64)).astype(np.float32)
    ids = [3, 321, 7, 320, 321]
    logits = PagedSteps(model, {"a": ids}).step({"a": 5}, prompt_table=table)["a"]
    widened = np.concatenate([tiny.tensors["transformer.vocab_embedding.weight"], table])
    expected = _reference(tiny, **{"transformer.vocab_embedding.weight": widened}).logits(ids)
    np.testing.assert_allclose(logits, expected, atol=2e-4)


@pytest.mark.parametrize("runtime", MODEL_RUNTIMES)
@pytest.mark.parametrize("windows", [[7], [33], [7, 1], [5, 100], [128], [500]], ids=str)
@pytest.mark.parametrize("own", [None, 20])
def test_attention_windows_per_layer(runtime: str, windows: list[int], own: int | None, tmp_path: Path) -> None:
    """The list is repeated over the layers; shorter windows of the model stay."""
    tiny = tiny_decoder(replace(LLAMA, windows=(own,)))
    model = tiny_model(runtime, tmp_path, tiny, windows=windows)
    logits = PagedSteps(model, SEQUENCES).run(MIXED)
    effective = [min(window, own or window) for window in windows]
    reference = ReferenceDecoder(tiny.decoder, tiny.sizes, tiny.tensors, windows=effective)
    for sequence, ids in SEQUENCES.items():
        np.testing.assert_allclose(logits[sequence], reference.logits(ids), atol=2e-4)
