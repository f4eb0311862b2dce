"""Engines of AWQ, GPTQ and FP8 models answer as transformers does with the dequantised weights.

Both calculate in float32: what is compared is the reading, splitting, packing, merging and unpacking of the codes.
"""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.gguf_files import DELTA_NET, EXPERT_WIDTHS, LATENT, SCOUT, YARN, write_gguf_model
from tests.support.paged_steps import PagedSteps
from tests.support.quantised_models import (
    EXPERT_SIZES,
    ROUTERS,
    SIZES,
    QuantisedModel,
    write_any_safetensors,
    write_quantised_model,
)
from tests.support.stages import build_engine, convert_model
from tests.support.tiny_models import read_safetensors, write_tiny_model
from tests.support.transformers_oracle import ENGINES, Oracle, engine_of
from trtserve.artifacts import Model
from trtserve.checkpoint.quantized import FP8_ROWS
from trtserve.errors import CorruptFileError
from trtserve.executor import api
from trtserve.pipeline.model import unfolded
from trtserve.specs import BuildSpec, ConvertSpec
from trtserve.store import Store

pytestmark = pytest.mark.needs("torch")

PROMPT_LENGTHS = (3, 17, 40)
NEW_TOKENS = 12


@pytest.mark.parametrize(
    ("scheme", "spec"),
    [
        ("awq", ConvertSpec(tp_size=2)),
        ("gptq", ConvertSpec(gpu_sm=90)),
        ("gptq_asym", ConvertSpec(tp_size=4, pp_size=2)),
        ("fp8", ConvertSpec(tp_size=2)),
        ("fp8, blocks of 128", ConvertSpec(keep_fp8=True, pp_size=2)),
        ("fbgemm_fp8", ConvertSpec(keep_fp8=True, tp_size=2)),
    ],
)
def test_greedy_tokens_equal_transformers(scheme: str, spec: ConvertSpec, tmp_path: Path) -> None:
    model = write_quantised_model(tmp_path, scheme, gain=1.0)
    require_equal_tokens(model, spec, tmp_path)


@pytest.mark.parametrize(
    ("kind", "family", "sizes"),
    [
        ("Q4_0", "llama", {}),
        ("Q8_0", "qwen3", {}),
        ("Q8_0", "gpt_oss", {"swiglu_limit": 7.0, "rope_theta": 150000.0, "rope_parameters": None}),
        ("Q8_0", "lfm2", {"full_attn_idxs": None, "layer_types": ["conv", "full_attention"]}),
        ("Q4_0", "granite", {}),
        ("Q8_0", "glm4", {"head_dim": 32}),
        ("Q8_0", "bamba", {"num_hidden_layers": 3, "attn_layer_indices": [0, 2]}),
        ("Q4_0", "llama4", SCOUT),
        ("Q8_0", "qwen3_next", DELTA_NET | EXPERT_WIDTHS),
        ("Q4_0", "qwen3_5", DELTA_NET),
        ("Q8_0", "qwen3_5_moe", DELTA_NET | EXPERT_WIDTHS),
        ("Q8_0", "deepseek_v3", LATENT | {"rope_scaling": YARN}),
        ("Q4_0", "deepseek_v2", LATENT | {"topk_method": "group_limited_greedy"}),
        ("Q8_0", "glm4_moe_lite", LATENT),
    ],
    ids=str,
)
def test_gguf_files_answer_as_transformers(kind: str, family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    """In float32, with the weights that the blocks of the file stand for."""
    of_llama_cpp = {
        "bamba": "granitehybrid",
        **dict.fromkeys(("deepseek_v3", "deepseek_v2", "glm4_moe_lite"), "deepseek2"),
        "qwen3_next": "qwen3next",
        "qwen3_5": "qwen35",
        "qwen3_5_moe": "qwen35moe",
    }
    architecture = of_llama_cpp.get(family, family.replace("_", "-"))
    file, plain = write_gguf_model(tmp_path, family, architecture, kind, gain=1.0, **SIZES | sizes)
    folder = unfolded(file, Store(tmp_path / "store"), tokenizer=True)
    model = QuantisedModel(folder=folder, dequantised=plain, weights={})
    require_equal_tokens(model, ConvertSpec(dtype="float32", tp_size=2), tmp_path)


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


@pytest.mark.parametrize(
    ("family", "scheme", "spec"),
    [
        ("llama", "fp8", ConvertSpec()),
        ("qwen3_moe", "fp8", ConvertSpec(tp_size=2)),
        ("llama", "fp8, blocks of 128", ConvertSpec(keep_fp8=True)),
        ("llama", "compressed-tensors, float by channel", ConvertSpec(keep_fp8=True, tp_size=2)),
    ],
)
def test_fp8_on_torch_stays_within_bounds(family: str, scheme: str, spec: ConvertSpec, tmp_path: Path) -> None:
    """Inputs are rounded to FP8 there, so the differences are those of 3 bits of mantissa."""
    from tests.support.torch_ranks import ThreadRanks

    model = write_quantised_model(tmp_path, scheme, family, gain=1.0, **(EXPERT_SIZES if family != "llama" else {}))
    build = BuildSpec(max_seq_len=128, **ENGINES["torch"])
    engine = engine_of(model.folder, tmp_path, spec, build)
    ids = np.random.default_rng(1).integers(3, 259, 60).tolist()
    ranks: Any = ThreadRanks(engine.path, spec.tp_size, 1)
    found = PagedSteps(ranks, {"a": ids}).run([{"a": 40}, {"a": 20}])["a"]
    expected = Oracle(model.dequantised).logits(ids)
    shares = np.sqrt(np.square(found - expected).mean(axis=-1)) / expected.std()
    assert 0.01 < np.median(shares) < 0.12
    assert (shares > 0.2).mean() <= (0.1 if family != "llama" else 0)


def test_scales_of_another_shape_are_refused(tmp_path: Path) -> None:
    """One scale for a matrix, where the config says one for each output: a kernel would read what is behind it."""
    from trtserve.executor.torch.model import load_model

    folder = write_quantised_model(tmp_path, "fp8").folder
    engine = engine_of(folder, tmp_path, ConvertSpec(), BuildSpec(max_seq_len=128, **ENGINES["torch"])).path
    config = (engine / "config.json").read_text()
    (engine / "config.json").write_text(config.replace('"FP8"', f'"{FP8_ROWS}"'))
    with pytest.raises(CorruptFileError, match=r"the scales of .* have shape \[1\]; its config requires \["):
        load_model(engine, None)


@pytest.mark.parametrize(
    ("scheme", "spec"),
    [
        ("awq", ConvertSpec(tp_size=2)),
        ("gptq", ConvertSpec(gpu_sm=90)),
        ("gptq_asym", ConvertSpec(tp_size=2, pp_size=2)),
    ],
)
def test_codes_of_4_bits_on_torch(scheme: str, spec: ConvertSpec, tmp_path: Path) -> None:
    """Codes, scales and zero points are those of the files; the arithmetic is that of float16."""
    model = write_quantised_model(tmp_path, scheme, gain=1.0)
    require_equal_logits(model.folder, model.dequantised, spec, tmp_path, within=5e-3)


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_weight_only_on_torch(kind: Any, bits: Any, tp_size: int, tmp_path: Path) -> None:
    import torch

    from trtserve.executor.torch.packed import quantize

    folder = write_tiny_model(tmp_path / "model", gain=1.0, **SIZES)
    same = tmp_path / "same"
    shutil.copytree(folder, same)
    tensors = read_safetensors(folder / "model.safetensors")
    for name, weight in tensors.items():
        if ".layers." in name and weight.ndim == 2:
            # Ranks share the inputs of these two, and each chooses the groups of its own.
            parts = tp_size if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
            shards = torch.from_numpy(weight.copy()).chunk(parts, 1)
            tensors[name] = torch.cat([quantize(part, bits).floats(torch.float32) for part in shards], 1).numpy()
    write_any_safetensors(same / "model.safetensors", tensors)
    spec = ConvertSpec(dtype="float32", quantize=kind, tp_size=tp_size)
    require_equal_logits(folder, same, spec, tmp_path, within=1e-5)


def require_equal_logits(folder: Path, same: Path, spec: ConvertSpec, tmp_path: Path, *, within: float) -> None:
    """The logits of an engine on PyTorch are those of transformers with the weights that its codes stand for."""
    from tests.support.torch_ranks import ThreadRanks

    engine = engine_of(folder, tmp_path, spec, BuildSpec(max_seq_len=128, **ENGINES["torch"]))
    ids = np.random.default_rng(1).integers(3, 259, 60).tolist()
    ranks: Any = ThreadRanks(engine.path, spec.tp_size, spec.pp_size)
    found = PagedSteps(ranks, {"a": ids}).run([{"a": 40}, {"a": 1}, {"a": 19}])["a"]
    expected = Oracle(same).logits(ids)
    assert np.sqrt(np.square(found - expected).mean(axis=-1)).max() < within * expected.std()


def test_fp8_matrices_with_different_scales_are_joined() -> None:
    import torch

    from trtserve.executor.torch import plain_operations
    from trtserve.executor.torch.modules import load_matrix

    random = torch.Generator().manual_seed(3)
    floats = {name: torch.randn(32, 64, generator=random) * size for name, size in (("a", 1.0), ("b", 0.5))}
    scales = {name: weight.abs().max().reshape(1) / 448 for name, weight in floats.items()}
    inputs = torch.tensor([1 / 64])
    codes = {name: (weight / scales[name]).to(torch.float8_e4m3fn) for name, weight in floats.items()}
    scale: Any = lambda name: (scales[name], inputs)  # noqa: E731
    weights: Any = SimpleNamespace(
        tensor=codes.__getitem__, fp8_scales=scale, packed=lambda name: None, dtype=torch.float32
    )
    x, bias = torch.randn(5, 64, generator=random), torch.randn(64, generator=random)
    found = load_matrix(weights, ["a", "b"], plain_operations)(x, bias)
    rounded = (x / inputs).to(torch.float8_e4m3fn).float() * inputs
    halves = [codes["a"].float() * scales["a"], (codes["b"].float() * scales["b"] / scales["a"])]
    halves[1] = halves[1].to(torch.float8_e4m3fn).float() * scales["a"]
    torch.testing.assert_close(found, rounded @ torch.cat(halves).T + bias, atol=1e-4, rtol=1e-4)


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
    import torch
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
