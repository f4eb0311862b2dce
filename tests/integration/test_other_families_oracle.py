"""Families with names of their own: logits of engines, through convert and build, against those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.paged_steps import PagedSteps
from tests.support.tiny_models import write_tiny_model
from tests.support.transformers_oracle import Oracle, engine_of, greedy_tokens
from trtserve.executor.paged_model import PagedModel
from trtserve.specs import BuildSpec, ConvertSpec

pytestmark = pytest.mark.oracle

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("gptj", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, tied": ("gpt_neox", {"tie_word_embeddings": True, "rotary_pct": 1.0}),
    "opt": ("opt", {}),
    "opt, norms behind": ("opt", {"do_layer_norm_before": False, "activation_function": "gelu"}),
    "opt, projected, as 350m": ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {}),
    "phi3, part of a head, window": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 24}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2, untied, no biases": ("starcoder2", {"tie_word_embeddings": False, "use_bias": False}),
    "bloom": ("bloom", {}),
    "bloom, six heads": ("bloom", {"n_embed": 96, "num_attention_heads": 6}),
    "falcon": ("falcon", {}),
    "falcon, new": ("falcon_new", {}),
    "falcon, new, one norm": ("falcon_new", {"num_ln_in_parallel_attn": 1, "tie_word_embeddings": False}),
    "falcon, alibi": ("falcon_rw", {}),
}
LENGTHS = {"a": 150, "b": 40}
SCHEDULE = [{"a": 64}, {"a": 70, "b": 33}, *[{"a": 1, "b": 1}] * 4, {"b": 3, "a": 12}]
SEQUENCES = {
    key: [int(token) for token in np.random.default_rng(11 + length).integers(3, 259, length)]
    for key, length in LENGTHS.items()
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = MODELS[name]
    folder = write_tiny_model(tmp_path / "model", family, **overrides)
    engine = engine_of(folder, tmp_path, ConvertSpec(dtype="float32", tp_size=2), BuildSpec()).path
    ours = PagedSteps(PagedModel(engine, threads=1), SEQUENCES).run(SCHEDULE)
    oracle = Oracle(folder)
    for key, ids in SEQUENCES.items():
        theirs = oracle.logits(ids)
        assert np.ptp(theirs) > 1
        np.testing.assert_allclose(ours[key], theirs, atol=2e-4)
    requests = [(SEQUENCES["a"], 4), (SEQUENCES["b"], 12)]
    expected = [oracle.continuation(prompt, count) for prompt, count in requests]
    assert greedy_tokens(engine, requests, max_num_tokens=64, enable_chunked_context=True) == expected


def test_long_sequences_have_their_own_rotation(tmp_path: Path) -> None:
    """LongRoPE: one sequence beyond the original positions and one within them, mixed in steps."""
    folder = write_tiny_model(tmp_path / "model", "phi3_long", partial_rotary_factor=1.0)
    model = PagedModel(engine_of(folder, tmp_path, ConvertSpec(dtype="float32"), BuildSpec()).path, threads=1)
    assert model.long_beyond == 64
    steps = PagedSteps(model, SEQUENCES)
    parts: dict[str, list[npt.NDArray[np.float32]]] = {key: [] for key in SEQUENCES}
    for new in SCHEDULE:
        flags = np.array([len(SEQUENCES[key]) > 64 for key in new])
        for key, logits in steps.step(new, long_sequences=flags).items():
            parts[key].append(logits)
    oracle = Oracle(folder)
    expected = {key: oracle.logits(ids) for key, ids in SEQUENCES.items()}
    for key, theirs in expected.items():
        np.testing.assert_allclose(np.concatenate(parts[key]), theirs, atol=2e-4)
    short = PagedSteps(model, {"a": SEQUENCES["a"]}).run([{"a": 150}])["a"]
    assert float(np.abs(short - expected["a"]).max()) > 0.1


def test_an_engine_for_original_positions_needs_no_flags(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "phi3_long")
    engine = engine_of(folder, tmp_path, ConvertSpec(dtype="float32"), BuildSpec(max_seq_len=64)).path
    model = PagedModel(engine, threads=1)
    assert model.long_beyond is None
    ours = PagedSteps(model, {"b": SEQUENCES["b"]}).run([{"b": 30}, {"b": 10}])["b"]
    np.testing.assert_allclose(ours, Oracle(folder).logits(SEQUENCES["b"]), atol=2e-4)


@pytest.mark.parametrize("chunked", [True, False])
def test_requests_are_rotated_by_their_length(chunked: bool, tmp_path: Path) -> None:
    """Greedy tokens of requests with a long prompt, a short one, and one that becomes long, mixed in a batch."""
    folder = write_tiny_model(tmp_path / "model", "phi3_long", seed=5)
    engine = engine_of(
        folder, tmp_path, ConvertSpec(dtype="float32"), BuildSpec(max_num_tokens=160, max_seq_len=256)
    ).path
    requests = [(SEQUENCES[key], count) for key, count in (("a", 10), ("b", 20), ("b", 40), ("b", 25))]
    answers = greedy_tokens(engine, requests, enable_chunked_context=chunked, max_num_tokens=50 if chunked else None)
    oracle = Oracle(folder)
    assert answers == [oracle.continuation(prompt, count) for prompt, count in requests]


# Largest and mean difference of logits, which span 25 to 35, by precision.
BOUNDS = {
    "float16": (ConvertSpec(dtype="float16"), 0.5, 0.05),
    "bfloat16": (ConvertSpec(dtype="bfloat16"), 0.5, 0.05),
    "int8": (ConvertSpec(dtype="float16", quantize="int8"), 0.9, 0.1),
}


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("name", ["gptj", "gpt_neox", "opt", "phi", "phi3", "starcoder2", "bloom", "falcon, new"])
def test_logits_of_narrow_engines_stay_within_bounds(name: str, precision: str, tmp_path: Path) -> None:
    family, overrides = MODELS[name]
    folder = write_tiny_model(tmp_path / "model", family, gain=1.0, **overrides)
    spec, largest, mean = BOUNDS[precision]
    engine = engine_of(folder, tmp_path, spec, BuildSpec()).path
    ours = PagedSteps(PagedModel(engine, threads=1), SEQUENCES).run(SCHEDULE)
    oracle = Oracle(folder)
    for key, ids in SEQUENCES.items():
        difference = np.abs(ours[key] - oracle.logits(ids))
        assert difference.max() < largest
        assert difference.mean() < mean
