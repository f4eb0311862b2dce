"""The KV cache in FP8 of the torch runtime: answers, memory, scales of calibrated checkpoints, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import convert_tiny
from tests.support.executors import collect
from tests.support.paged_steps import PagedSteps
from tests.support.reference_decoder import ReferenceDecoder
from tests.support.stages import build_engine
from tests.support.tiny_decoders import DECODERS
from tests.support.tiny_models import read_safetensors, write_safetensors
from trtserve.artifacts import Checkpoint
from trtserve.checkpoint.unified import read_config
from trtserve.errors import CorruptFileError, UnsupportedModelError, UsageError
from trtserve.executor import api
from trtserve.executor.engine.limits import resolve_limits
from trtserve.executor.interface.convert import engine_options
from trtserve.executor.loaders import load_model, read_engine_config
from trtserve.executor.torch import runtime
from trtserve.pipeline.build import plan_build
from trtserve.pipeline.gpu_fit import GPUS, fit_gpu
from trtserve.pipeline.inspect import describe
from trtserve.specs import BuildSpec

pytestmark = pytest.mark.needs("torch")

SPEC = BuildSpec(max_batch_size=4, max_seq_len=128, runtime="torch", device="cpu")
NARROW = replace(SPEC, kv_precision="fp8")
SCALES = [0.02, 0.05]  # of the two layers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A float32 Llama checkpoint."""
    return convert_tiny(tmp_path_factory.mktemp("llama"))


def _calibrated(folder: Path, scales: list[Any], **options: Any) -> Checkpoint:
    """Return a checkpoint as NVIDIA's tools make it: every rank has the scale of each of its layers."""
    made = convert_tiny(folder, **options)
    config = json.loads((made.path / "config.json").read_text(encoding="utf-8"))
    config["quantization"] = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (made.path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (made.path / "manifest.json").unlink()
    stages = config["mapping"]["pp_size"]
    for rank, path in enumerate(sorted(made.path.glob("rank*.safetensors"))):
        own = np.split(np.array(scales, dtype=object), stages)[rank // config["mapping"]["tp_size"]]
        name = "transformer.layers.{}.attention.kv_cache_scaling_factor"
        found = {name.format(layer): np.float32(scale) for layer, scale in enumerate(own) if scale is not None}
        write_safetensors(path, {**read_safetensors(path), **{key: value.reshape(-1) for key, value in found.items()}})
    return Checkpoint(path=made.path)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama, window over blocks",
        "falcon, alibi, one key head",
        "gemma4, heads of two sizes, shared keys, inputs of layers",
        "gpt-oss, sinks, clamped gates, biases of experts",
        "qwen3-next, delta nets, gated attention",
    ],
)
def test_logits_are_those_of_rounded_keys_and_values(name: str) -> None:
    """Prompts in chunks, then decode steps, against full attention over the same codes in float64."""
    from tests.support.torch_models import CACHE_SCALE, torch_model

    tiny = DECODERS[name]
    sequences = {key: np.random.default_rng(3).integers(3, 259, size).tolist() for key, size in (("a", 40), ("b", 5))}
    model = torch_model(tiny, kv_precision="fp8")
    assert 4 * model.bytes_per_block == torch_model(tiny).bytes_per_block
    found = PagedSteps(model, sequences).run([{"a": 20}, {"a": 19, "b": 4}, {"a": 1, "b": 1}])
    exact, rounded = (
        ReferenceDecoder(tiny.decoder, tiny.sizes, tiny.tensors, cache_scale=scale) for scale in (None, CACHE_SCALE)
    )
    for key, tokens in sequences.items():
        wanted = rounded.logits(tokens)
        np.testing.assert_allclose(found[key], wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max())
        assert np.abs(exact.logits(tokens) - wanted).max() > 5e-3 * np.abs(wanted).max()


def test_an_engine_counts_a_byte_for_each_number(checkpoint: Checkpoint, tmp_path: Path) -> None:
    before, plan = (plan_build(checkpoint, spec) for spec in (SPEC, NARROW))
    assert 4 * plan.engine.kv_bytes_per_token == before.engine.kv_bytes_per_token
    assert plan.fingerprint != before.fingerprint
    engine = build_engine(checkpoint, NARROW, out=tmp_path / "engine")
    assert engine.manifest is not None
    assert engine.manifest.facts["kv_bytes_per_token"] == plan.engine.kv_bytes_per_token == 2 * 2 * 2 * 16
    (found,) = describe(str(engine.path))
    assert found.precision == "float32 weights, f32 arithmetic, fp8 KV cache"
    assert found.kv_cache["bytes_per_token"] == 2 * 2 * 2 * 16


def test_plans_for_gpus_count_a_byte_too(checkpoint: Checkpoint) -> None:
    spec, config = BuildSpec(runtime="torch"), read_config(checkpoint.path)
    wide, narrow = (fit_gpu(config, each, GPUS["l4-24gb"]) for each in (spec, replace(spec, kv_precision="fp8")))
    assert wide.kv_per_token == 4 * narrow.kv_per_token
    assert narrow.tokens > 3.9 * wide.tokens


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (1, 2)])
def test_the_scales_of_a_calibrated_checkpoint_count(tp_size: int, pp_size: int, tmp_path: Path) -> None:
    from tests.support.torch_ranks import ThreadRanks
    from trtserve.executor.torch.mixers import keys_of

    source = _calibrated(tmp_path, SCALES, tp_size=tp_size, pp_size=pp_size)
    engine = build_engine(source, SPEC, out=tmp_path / "engine")
    ranks = ThreadRanks(engine.path, tp_size, pp_size)
    scales = [layer.scores.cache_scale for rank in ranks.ranks[::tp_size] for layer in rank.decoder._layers]
    assert scales == pytest.approx(SCALES)
    ranks.allocate(1)
    caches = [keys_of(cache) for rank in ranks.ranks for cache in rank.caches]
    assert {str(keys.dtype) for keys in caches if keys is not None} == {"torch.float8_e4m3fn"}


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ([0.02, None], r"lacks the tensor transformer\.layers\.1\.attention\.kv_cache_scaling_factor"),
        ([0.02, 0.0], r"layers\.1\.attention\.kv_cache_scaling_factor is \[0\.0\]; expected one positive number"),
        ([0.02, float("nan")], r"is \[nan\]; expected one positive number"),
        ([0.02, [0.1, 0.1]], r"is \[0\.1.*, 0\.1.*\]; expected one positive number"),
    ],
)
def test_a_scale_that_is_missing_or_none_is_named(scales: list[Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match=words):
        build_engine(_calibrated(tmp_path, scales), SPEC, out=tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_what_has_no_such_cache_is_refused_by_name(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--kv-precision fp8 is for the torch runtime; openvino keeps"):
        plan_build(checkpoint, replace(NARROW, runtime="openvino", device=None))
    int8 = read_config(checkpoint.path).changed(quantization={"kv_cache_quant_algo": "INT8"})
    with pytest.raises(UnsupportedModelError, match="scales for a INT8 KV cache"):
        plan_build(checkpoint, SPEC, config=int8)
    with pytest.raises(UsageError, match="in the type of the weights, f32, or in fp8"):
        plan_build(checkpoint, replace(SPEC, kv_precision="u8"))
    latent = SimpleNamespace(decoder=lambda config: SimpleNamespace(latent=object()))
    monkeypatch.setattr(runtime, "family", lambda name: latent)
    with pytest.raises(UnsupportedModelError, match="has latent attention, whose cache the torch runtime keeps in f32"):
        plan_build(checkpoint, NARROW)


@pytest.mark.parametrize(("capability", "fits"), [("8.6", False), ("8.9", True)])
def test_it_needs_a_gpu_with_fp8(
    checkpoint: Checkpoint, capability: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "count_gpus", lambda: 1)
    monkeypatch.setattr(runtime, "visible_gpu", lambda: SimpleNamespace(name="a GPU", capability=capability))
    spec = BuildSpec(runtime="torch", kv_precision="fp8")
    if fits:
        assert plan_build(checkpoint, spec).engine.precision == "float32 weights, f32 arithmetic, fp8 KV cache"
    else:
        with pytest.raises(UnsupportedModelError, match=r"An FP8 KV cache needs a GPU of compute capability 8\.9"):
            plan_build(checkpoint, spec)


def test_reused_blocks_and_beams_give_the_same_answers_again(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The second round finds the blocks of the first; beams copy blocks."""
    spec = replace(NARROW, max_beam_width=2)
    engine = build_engine(checkpoint, spec, out=tmp_path / "engine")
    cache = api.KvCacheConfig(max_tokens=1024, enable_block_reuse=True)
    config = api.ExecutorConfig(max_beam_width=2, enable_chunked_context=True, kv_cache_config=cache)
    options = engine_options(config)
    model: Any = load_model(engine.path, options)
    limits = resolve_limits(read_engine_config(engine.path), options)
    rounds = []
    with api.Executor.from_model(model, limits, config) as executor:
        assert executor.kv_cache_bytes == 1024 * 2 * 2 * 2 * 16
        for _ in range(2):
            ids = executor.enqueue_requests(
                [
                    api.Request(
                        [3 + (7 * number + 5 * place) % 250 for place in range(70)],
                        12,
                        sampling_config=api.SamplingConfig(beam_width=1 + number % 2),
                        end_id=2,
                    )
                    for number in range(3)
                ]
            )
            answers = collect(executor, ids)
            rounds.append([answers[number][-1].result.output_token_ids for number in ids])
        (*_, last) = executor.get_latest_iteration_stats()
    assert rounds[0] == rounds[1]
    assert last.kv_cache_stats is not None
    assert last.kv_cache_stats.reused_blocks > 0
