"""Engines of AWQ, GPTQ and FP8 models answer as transformers does with the weights that their codes stand for.

Both calculate in float32: what is compared is the reading, splitting, packing, merging and unpacking of the codes.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from tests.support.quantised_models import EXPERT_SIZES, ROUTERS, QuantisedModel, write_quantised_model
from trtserve.artifacts import Model
from trtserve.build import build_engine
from trtserve.convert import convert_model
from trtserve.executor import api
from trtserve.specs import BuildSpec, ConvertSpec

pytestmark = pytest.mark.oracle

PROMPT_LENGTHS = (3, 17, 40)
NEW_TOKENS = 12


@pytest.mark.parametrize(
    ("scheme", "spec"),
    [
        ("awq", ConvertSpec(tp_size=2)),
        ("gptq", ConvertSpec(gpu_sm=90)),
        ("gptq_asym", ConvertSpec(tp_size=4, pp_size=2)),
        ("fp8", ConvertSpec(tp_size=2)),
    ],
)
def test_greedy_tokens_equal_transformers(scheme: str, spec: ConvertSpec, tmp_path: Path) -> None:
    model = write_quantised_model(tmp_path, scheme, gain=1.0)
    require_equal_tokens(model, spec, tmp_path)


@pytest.mark.parametrize(
    ("family", "scheme", "spec"),
    [
        ("mixtral", "awq", ConvertSpec(tp_size=4, moe_ep_size=2, gpu_sm=90)),
        ("qwen2_moe", "gptq_asym", ConvertSpec(tp_size=2, moe_ep_size=2)),
        ("qwen3_moe", "fp8", ConvertSpec(tp_size=2)),
    ],
)
def test_quantised_experts(family: str, scheme: str, spec: ConvertSpec, tmp_path: Path) -> None:
    require_equal_tokens(write_quantised_model(tmp_path, scheme, family, gain=1.0, **EXPERT_SIZES), spec, tmp_path)


@pytest.mark.parametrize(
    ("family", "scheme", "kept", "spec"),
    [
        ("llama", "awq", "down_proj", ConvertSpec(pp_size=2)),
        ("llama", "fp8", r"layers\.0\.self_attn|layers\.1\.mlp", ConvertSpec(tp_size=2)),
        ("mixtral", "gptq", f"{ROUTERS}|experts", ConvertSpec()),
    ],
)
def test_models_quantised_in_part(family: str, scheme: str, kept: str, spec: ConvertSpec, tmp_path: Path) -> None:
    model = write_quantised_model(tmp_path, scheme, family, gain=1.0, kept=kept, head_dim=64)
    require_equal_tokens(model, spec, tmp_path)


def require_equal_tokens(model: QuantisedModel, spec: ConvertSpec, tmp_path: Path) -> None:
    checkpoint = convert_model(Model(path=model.folder), spec, out=tmp_path / "checkpoint")
    limits = BuildSpec(max_batch_size=4, max_seq_len=128, kv_precision="f32", runtime="openvino")
    engine = build_engine(checkpoint, limits, out=tmp_path / "engine")
    random = np.random.default_rng(11)
    prompts = [random.integers(3, 320, size=length).tolist() for length in PROMPT_LENGTHS]
    assert engine_answers(engine.path, prompts) == transformers_answers(model.dequantised, prompts)


def engine_answers(engine: Path, prompts: list[list[int]]) -> list[list[int]]:
    """New greedy tokens of the engine, all prompts in one batch."""
    config = api.ExecutorConfig(kv_cache_config=api.KvCacheConfig(max_tokens=512))
    output = api.OutputConfig(exclude_input_from_output=True)
    requests = [api.Request(input_token_ids=prompt, max_tokens=NEW_TOKENS, output_config=output) for prompt in prompts]
    answers = []
    with api.Executor(engine, api.ModelType.DECODER_ONLY, config) as executor:
        for identifier in executor.enqueue_requests(requests):
            last = executor.await_responses(identifier, timedelta(seconds=60))[-1]
            assert isinstance(last, api.Response)
            answers.append(list(last.result.output_token_ids[0]))
    return answers


def transformers_answers(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """New greedy tokens of transformers in float32, each prompt alone."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(NEW_TOKENS):
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers
