"""Families with names of their own: logits of engines, through convert and build, against those of transformers."""

from __future__ import annotations

from datetime import timedelta
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
from trtserve.executor import api
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


def engine_of(folder: Path, out: Path, *, build: BuildSpec, **spec: Any) -> Path:
    checkpoint = convert_model(Model(path=folder), ConvertSpec(**spec), out=out / "checkpoint")
    return build_engine(checkpoint, build, out=out / "engine").path


class Oracle:
    """The model of a folder in transformers, float32."""

    def __init__(self, folder: Path) -> None:
        self._torch = pytest.importorskip("torch")
        from transformers import AutoModelForCausalLM

        self._torch.set_num_threads(1)
        # The eager attention of its Falcon adds alibi twice.
        kind = "sdpa" if "falcon" in (folder / "config.json").read_text() else "eager"
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=self._torch.float32, attn_implementation=kind)
        self._model = loaded.eval()

    def logits(self, ids: list[int]) -> npt.NDArray[np.float32]:
        with self._torch.inference_mode():
            values: npt.NDArray[np.float32] = self._model(self._torch.tensor([ids]), use_cache=False).logits[0].numpy()
        return values

    def continuation(self, prompt: list[int], count: int) -> list[int]:
        """The most probable tokens, each from the whole sequence before it."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]


def generate(engine: Path, requests: list[tuple[str, int]], **config: Any) -> list[list[int]]:
    """New tokens of the requests (sequence, count), all enqueued at once."""
    output = api.OutputConfig(exclude_input_from_output=True)
    with api.Executor(engine, api.ModelType.DECODER_ONLY, api.ExecutorConfig(**config)) as executor:
        answers = []
        queued = [api.Request(SEQUENCES[key], count, output_config=output) for key, count in requests]
        for number in executor.enqueue_requests(queued):
            (answer,) = executor.await_responses(number, timedelta(seconds=60))
            assert isinstance(answer, api.Response)
            answers.append(answer.result.output_token_ids[0])
    return answers


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = MODELS[name]
    folder = write_tiny_model(tmp_path / "model", family, **overrides)
    engine = engine_of(folder, tmp_path, build=BuildSpec(), dtype="float32", tp_size=2)
    ours = PagedSteps(PagedModel(engine, threads=1), SEQUENCES).run(SCHEDULE)
    oracle = Oracle(folder)
    for key, ids in SEQUENCES.items():
        theirs = oracle.logits(ids)
        assert np.ptp(theirs) > 1
        np.testing.assert_allclose(ours[key], theirs, atol=2e-4)
    requests = [("a", 4), ("b", 12)]
    expected = [oracle.continuation(SEQUENCES[key], count) for key, count in requests]
    assert generate(engine, requests, max_num_tokens=64, enable_chunked_context=True) == expected


def test_long_sequences_have_their_own_rotation(tmp_path: Path) -> None:
    """LongRoPE: one sequence beyond the original positions and one within them, mixed in steps."""
    folder = write_tiny_model(tmp_path / "model", "phi3_long", partial_rotary_factor=1.0)
    model = PagedModel(engine_of(folder, tmp_path, build=BuildSpec(), dtype="float32"), threads=1)
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
    engine = engine_of(folder, tmp_path, build=BuildSpec(max_seq_len=64), dtype="float32")
    model = PagedModel(engine, threads=1)
    assert model.long_beyond is None
    ours = PagedSteps(model, {"b": SEQUENCES["b"]}).run([{"b": 30}, {"b": 10}])["b"]
    np.testing.assert_allclose(ours, Oracle(folder).logits(SEQUENCES["b"]), atol=2e-4)


@pytest.mark.parametrize("chunked", [True, False])
def test_requests_are_rotated_by_their_length(chunked: bool, tmp_path: Path) -> None:
    """Greedy tokens of requests with a long prompt, a short one, and one that becomes long, mixed in a batch."""
    folder = write_tiny_model(tmp_path / "model", "phi3_long", seed=5)
    engine = engine_of(folder, tmp_path, build=BuildSpec(max_num_tokens=160, max_seq_len=256), dtype="float32")
    requests = [("a", 10), ("b", 20), ("b", 40), ("b", 25)]
    answers = generate(engine, requests, enable_chunked_context=chunked, max_num_tokens=50 if chunked else None)
    oracle = Oracle(folder)
    assert answers == [oracle.continuation(SEQUENCES[key], count) for key, count in requests]


# Largest and mean difference of logits, which span 25 to 35, by checkpoint dtype and quantisation.
BOUNDS = {
    ("float16", "none"): (0.5, 0.05),
    ("bfloat16", "none"): (0.5, 0.05),
    ("float16", "int8"): (0.9, 0.1),
}


@pytest.mark.parametrize(("dtype", "quantize"), BOUNDS)
@pytest.mark.parametrize("name", ["gptj", "gpt_neox", "opt", "phi", "phi3", "starcoder2", "bloom", "falcon, new"])
def test_logits_of_narrow_engines_stay_within_bounds(name: str, dtype: str, quantize: str, tmp_path: Path) -> None:
    family, overrides = MODELS[name]
    folder = write_tiny_model(tmp_path / "model", family, gain=1.0, **overrides)
    engine = engine_of(folder, tmp_path, build=BuildSpec(), dtype=dtype, quantize=quantize)
    ours = PagedSteps(PagedModel(engine, threads=1), SEQUENCES).run(SCHEDULE)
    largest, mean = BOUNDS[dtype, quantize]
    oracle = Oracle(folder)
    for key, ids in SEQUENCES.items():
        difference = np.abs(ours[key] - oracle.logits(ids))
        assert difference.max() < largest
        assert difference.mean() < mean
