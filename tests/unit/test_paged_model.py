"""The paged model equals a reference decoder for any distribution of tokens over steps and blocks."""

from __future__ import annotations

import gc
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.paged_steps import MODEL_RUNTIMES, PagedSteps, tiny_model, write_engine
from tests.support.reference_decoder import ReferenceDecoder
from tests.support.tiny_decoders import DECODERS, LLAMA, TinyDecoder, tiny_decoder
from trtserve.errors import ArtifactError, BuildError, CorruptFileError
from trtserve.executor.engine.model import ModelRunner, single_sequence
from trtserve.executor.loaders import read_engine_config
from trtserve.executor.openvino import paged_model
from trtserve.executor.openvino.paged_model import SIZES, PagedModel, openvino_core

# Prompts of 40, 9 and 70 tokens: whole, in chunks, token by token, and mixed with each other.
SEQUENCES = {
    name: [int(token) for token in np.random.default_rng(seed).integers(0, 320, length)]
    for seed, (name, length) in enumerate({"a": 40, "b": 9, "c": 70}.items())
}
MIXED: list[dict[str, int]] = [
    {"a": 17},
    {"a": 1, "c": 30},
    {"b": 7, "a": 1, "c": 33},
    *[{"a": 1, "b": 1, "c": 1}] * 2,
    {"c": 5, "a": 19},
]


# PyTorch has no packed weights.
TORCH_DECODERS = {name: tiny for name, tiny in DECODERS.items() if tiny.packing is None}


def _expected(tiny: TinyDecoder) -> dict[str, npt.NDArray[Any]]:
    """The logits of each sequence by a reference."""
    reference = ReferenceDecoder(tiny.decoder, tiny.sizes, tiny.tensors, packing=tiny.packing)
    return {name: reference.logits(ids) for name, ids in SEQUENCES.items()}


def _model(folder: Path, tiny: TinyDecoder, **precision: Any) -> PagedModel:
    return PagedModel(write_engine(folder, tiny, **precision), threads=1)


class Compiled(NamedTuple):
    tiny: TinyDecoder
    model: PagedModel
    expected: dict[str, npt.NDArray[Any]]


@pytest.fixture(scope="module", params=DECODERS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """A decoder, its model, compiled once, and the logits that are expected of it."""
    tiny = DECODERS[request.param]
    return Compiled(tiny, _model(tmp_path_factory.mktemp("decoder"), tiny), _expected(tiny))


def test_mixed_batches_equal_reference(compiled: Compiled) -> None:
    _require_reference(*compiled)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("tiny", TORCH_DECODERS.values(), ids=TORCH_DECODERS)
def test_mixed_batches_on_torch_equal_reference(tiny: TinyDecoder, tmp_path: Path) -> None:
    _require_reference(tiny, tiny_model("torch", tmp_path, tiny), _expected(tiny))


def _require_reference(tiny: TinyDecoder, model: ModelRunner, expected: dict[str, npt.NDArray[Any]]) -> None:
    logits = PagedSteps(model, SEQUENCES).run(MIXED)
    # Only half of the numbers' digits are kept where float16 is also the type of arithmetic.
    narrow = not isinstance(model, PagedModel) and tiny.tensors["lm_head.weight"].dtype == np.float16
    for sequence, found in logits.items():
        np.testing.assert_allclose(found, expected[sequence][: len(found)], atol=0.05 if narrow else 2e-4)
    assert [len(logits[sequence]) for sequence in SEQUENCES] == [40, 9, 70]


@pytest.mark.parametrize(
    ("compute", "kv", "bound"), [("f32", "f16", 0.01), ("f32", "u8", 0.15), ("bf16", "f16", 0.4), ("bf16", "u8", 0.4)]
)
def test_lower_precisions_stay_within_bounds(compute: str, kv: str, bound: float, tmp_path: Path) -> None:
    tiny = tiny_decoder(dtype=ml_dtypes.bfloat16)
    model = _model(tmp_path, tiny, compute=compute, kv=kv)
    logits = PagedSteps(model, SEQUENCES).run(MIXED)
    error = max(float(np.abs(logits[name] - expected).max()) for name, expected in _expected(tiny).items())
    assert 0 < error < bound


def test_positions_stay_exact_in_bfloat16(tmp_path: Path) -> None:
    """bfloat16 is exact only up to 256: angles must be computed in float32."""
    tiny = tiny_decoder(dtype=ml_dtypes.bfloat16)
    ids = [int(token) for token in np.random.default_rng(5).integers(0, 320, 600)]
    model = _model(tmp_path, tiny, compute="bf16", kv="f16")
    logits = PagedSteps(model, {"a": ids}).run([{"a": 500}, {"a": 100}])["a"]
    expected = ReferenceDecoder(tiny.decoder, tiny.sizes, tiny.tensors).logits(ids)
    assert float(np.abs(logits[500:] - expected[500:]).max()) < 0.4


def test_padded_decode_step_equals_the_reference(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.model, "_padded_sizes", [6, 6, 3, 6])
    steps = PagedSteps(compiled.model, {"a": SEQUENCES["a"], "b": SEQUENCES["b"]})
    logits = steps.run([{"a": 1}, {"a": 20, "b": 3}, *[{"a": 1}] * 15, {"a": 2, "b": 1}, {"b": 1}, {"a": 1}])
    for sequence, found in logits.items():
        np.testing.assert_allclose(found, compiled.expected[sequence][: len(found)], atol=2e-4)


@pytest.mark.parametrize(
    ("bytes_of_a_large_model", "compute", "padded"), [(1, "bf16", True), (1, "f32", False), (1 << 30, "bf16", False)]
)
def test_large_models_without_exact_arithmetic_are_padded(
    bytes_of_a_large_model: int, compute: str, padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(run: Callable[[int], object]) -> list[dict[int, float]]:
        for size in SIZES:
            run(size)
        return [dict.fromkeys(SIZES, 2.0) | {SIZES[-1]: 1.0}]

    monkeypatch.setattr(paged_model, "_BOUND_BY_MEMORY", bytes_of_a_large_model)
    monkeypatch.setattr(paged_model, "measure_steps", measure)
    model = _model(tmp_path, tiny_decoder(dtype=ml_dtypes.bfloat16), compute=compute, kv="f16")
    model.allocate(2)
    model.warm_up()
    assert model._padded_sizes == ([SIZES[-1]] * SIZES[-1] if padded else [])
    assert (model.step_costs[0], model.step_costs[-1]) == (1.0 if padded else 2.0, 1.0)
    assert len(model.step_costs) == SIZES[-1]


@pytest.mark.parametrize("runtime", MODEL_RUNTIMES)
def test_logits_are_returned_in_the_order_of_rows(runtime: str, tmp_path: Path) -> None:
    model = tiny_model(runtime, tmp_path, DECODERS["llama"])
    whole = PagedSteps(model, {"a": SEQUENCES["a"]}).run([{"a": 40}])["a"]
    chosen = [39, 0, 7, 7]
    np.testing.assert_allclose(_forward(model, SEQUENCES["a"], rows=chosen), whole[chosen], atol=1e-5)


@pytest.mark.parametrize("runtime", MODEL_RUNTIMES)
def test_copied_block_equals_its_source(runtime: str, tmp_path: Path) -> None:
    model = tiny_model(runtime, tmp_path, DECODERS["llama"])
    ids = SEQUENCES["a"][:12]
    model.allocate(3)
    _forward(model, ids, rows=[11], block=1)
    followed = _forward(model, [5], rows=[0], block=1, past=12).copy()
    model.copy_block(1, 2)
    copied = _forward(model, [5], rows=[0], block=2, past=12)
    np.testing.assert_allclose(copied, followed, atol=1e-6)
    assert not np.allclose(_forward(model, [5], rows=[0], block=0, past=12), followed, atol=1e-2)


def _forward(
    model: ModelRunner, ids: list[int], *, rows: list[int], block: int = 0, past: int = 0
) -> npt.NDArray[np.float32]:
    """One sequence with the blocks from `block` on."""
    count = -(-(past + len(ids)) // model.tokens_per_block)
    blocks = range(block, block + count)
    return model.forward(single_sequence(ids, blocks, past=past, rows=rows))


def test_sizes_come_from_the_engine(tmp_path: Path) -> None:
    tiny = DECODERS["llama"]
    model = _model(tmp_path, tiny)
    assert (model.vocab_size, model.max_position) == (320, 128)
    assert (model.compute_precision, model.kv_precision) == ("f32", "f32")
    per_token = 2 * tiny.sizes.layers * tiny.sizes.kv_heads * tiny.sizes.head * 4
    assert model.bytes_per_block == model.tokens_per_block * per_token
    small = _model(tmp_path / "u8", tiny, kv="u8")
    assert small.bytes_per_block < model.bytes_per_block / 2


def test_rotation_and_norms_are_fused(tmp_path: Path) -> None:
    """A quarter of the speed depends on OpenVINO recognising them; see `Rotation._swap_halves`."""
    model = _model(tmp_path, DECODERS["llama"])
    compiled = model._request.get_compiled_model()
    kinds = [node.get_rt_info()["layerType"].astype(str) for node in compiled.get_runtime_model().get_ordered_ops()]
    assert kinds.count("RoPE") == 4
    assert kinds.count("RMS") == 5
    assert kinds.count("PagedAttention") == 2


def test_16_bit_weights_are_not_widened_in_memory(tmp_path: Path) -> None:
    """Every Convert after a weight has the decompression mark; see `graph_parts.decompressed`."""
    write_engine(tmp_path, DECODERS["llama, float16"])
    text = (tmp_path / "rank0.xml").read_text(encoding="utf-8")
    weights = len(DECODERS["llama, float16"].tensors)
    assert text.count('name="decompression"') == weights
    assert openvino_core().read_model(tmp_path / "rank0.xml").get_friendly_name() == "decoder"


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not an engine folder"):
        PagedModel(tmp_path)


def test_damaged_engines_are_named(tmp_path: Path) -> None:
    write_engine(tmp_path, DECODERS["llama"])
    (tmp_path / "rank0.xml").write_text("<net", encoding="utf-8")
    with pytest.raises(CorruptFileError, match=r"rank0\.xml cannot be read"):
        PagedModel(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CorruptFileError, match="is not JSON"):
        PagedModel(tmp_path)


@pytest.mark.parametrize("length", [0, 4096])
def test_truncated_weights_are_named(length: int, tmp_path: Path) -> None:
    write_engine(tmp_path, DECODERS["llama"])
    with (tmp_path / "rank0.bin").open("r+b") as file:
        file.truncate(length)
    with pytest.raises(CorruptFileError, match=r"rank0\.xml cannot be read"):
        PagedModel(tmp_path)


def test_unsupported_precision_is_explained(tmp_path: Path) -> None:
    write_engine(tmp_path, DECODERS["llama"], kv="f64")
    with pytest.raises(BuildError, match="cannot compile the engine"):
        PagedModel(tmp_path)


def test_engines_of_other_runtimes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_config": {}, "build_config": {}}), encoding="utf-8")
    with pytest.raises(ArtifactError, match="not an engine of the openvino, torch, vllm runtimes"):
        read_engine_config(tmp_path)


def test_signal_handlers_survive_models_that_end_in_another_order(tmp_path: Path) -> None:
    write_engine(tmp_path, tiny_decoder(LLAMA))
    first, second = PagedModel(tmp_path), PagedModel(tmp_path)
    del first
    gc.collect()
    del second
    gc.collect()
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: received.append(number))
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
