"""Families with their own tensor names: what they refuse, and the projected embeddings of small OPT models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.families import FAMILIES
from tests.support.stages import convert_model
from tests.support.tiny_models import read_safetensors, write_safetensors, write_tiny_model
from trtserve.artifacts import Model
from trtserve.checkpoint.architectures.parts.positions import alibi_slopes
from trtserve.checkpoint.supported import supported_family
from trtserve.checkpoint.unified import CheckpointReader
from trtserve.errors import ConversionError, UnsupportedModelError
from trtserve.specs import ConvertSpec

LINEAR = {"type": "linear", "factor": 2.0}
PROJECTED: dict[str, Any] = {"word_embed_proj_dim": 32, "do_layer_norm_before": False}


@pytest.mark.parametrize("split", [{}, {"use_parallel_embedding": True}, {"embedding_sharding_dim": 1}])
def test_projected_embeddings_reach_all_ranks(
    split: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtserve.checkpoint.products._BLOCK_BYTES", 4 * 64 * 50)
    folder = write_tiny_model(tmp_path / "hf", "opt", vocab_size=323, **PROJECTED)
    source = read_safetensors(folder / "model.safetensors")
    spec = ConvertSpec(tp_size=2, dtype="float16", **({"use_parallel_embedding": True} | split if split else {}))
    reader = CheckpointReader(convert_model(Model(path=folder), spec, out=tmp_path / "out").path)
    tables = {name: values.astype(np.float16).astype(np.float32) for name, values in source.items()}
    tokens = tables["model.decoder.embed_tokens.weight"]
    for name, factor in {
        "transformer.vocab_embedding.weight": tables["model.decoder.project_in.weight"].T,
        "lm_head.weight": tables["model.decoder.project_out.weight"],
    }.items():
        found = reader.merged(name)
        assert found.dtype == np.float16
        np.testing.assert_allclose(found, tokens @ factor, rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("project_in", None, r"missing: model\.decoder\.project_in"),
        ("project_in", (32, 64), r"project_in\.weight is \[32, 64\], expected \[64, 32\]"),
        ("project_out", np.inf, r"project_out\.weight has values that are not finite in float16"),
    ],
)
def test_invalid_projections_are_refused(tmp_path: Path, name: str, values: Any, message: str) -> None:
    folder = write_tiny_model(tmp_path / "hf", "opt", **PROJECTED)
    tensors = read_safetensors(folder / "model.safetensors")
    old = tensors.pop(f"model.decoder.{name}.weight")
    if values is not None:
        new = old.reshape(values) if isinstance(values, tuple) else np.full_like(old, values)
        tensors[f"model.decoder.{name}.weight"] = new
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ConversionError, match=message):
        convert_model(Model(path=folder), ConvertSpec(), out=tmp_path / "out")


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    hf = json.loads((folder / "config.json").read_text()) | changes
    return supported_family(hf).checkpoint_config(hf)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gptj", {"n_inner": 100}, "n_inner = 100"),
        ("gptj", {"rotary_dim": None}, "lacks rotary_dim"),
        ("gptj", {"activation_function": "gelu"}, "'gelu' is not supported"),
        ("opt", {"word_embed_proj_dim": 0.5}, "word_embed_proj_dim = 0.5; expected positive integers"),
        ("opt", {"enable_bias": False}, "disables enable_bias"),
        ("opt", {"_remove_final_layer_norm": True}, "no final norm"),
        ("phi", {"qk_layernorm": True}, "normalises queries"),
        ("phi", {"num_key_value_heads": 2}, "2 key/value heads for 4"),
        ("phi3", {"rope_scaling": LINEAR}, "'linear'; a Phi 3 has longrope"),
        ("phi3", {"hidden_act": "gelu"}, "supported: silu, swish"),
        (
            "phi3_long",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "1 short and 0 long .* expected 8",
        ),
        (
            "phi3_long",
            {"rope_scaling": {**FAMILIES["phi3_long"].config["rope_scaling"], "factor": 3.0}},
            "the rotary factor 3 .* expected",
        ),
        ("starcoder2", {"hidden_act": "gelu"}, "'gelu' is not supported"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("falcon_new", {"parallel_attn": False}, "parallel_attn = false"),
        ("falcon", {"activation": "relu"}, "'relu'"),
        ("olmo3", {"rope_scaling": FAMILIES["olmo3"].config["rope_scaling"] | {"truncate": False}}, "truncate = false"),
        ("qwen3_5", {"hidden_act": "relu"}, "Activation 'relu' is not supported"),
        ("qwen3_next", {"hidden_act": "gelu"}, "Activation 'gelu' is not supported"),
        ("nemotron_h_moe", {"mlp_bias": True}, "mlp_bias = true; no published Nemotron with experts"),
    ],
)
def test_unsupported_features_are_refused(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_of(write_tiny_model(tmp_path, family), **changes)


def test_refinedweb_models_are_recognised(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "falcon")
    old = {"architectures": ["RWForCausalLM"], "n_layer": 2, "n_head": 4, "num_attention_heads": None}
    assert config_of(folder, model_type="RefinedWebModel", **old) == FAMILIES["falcon"].expected
    grouped = config_of(folder, model_type="RefinedWeb", n_head_kv=2, **old)
    assert grouped == FAMILIES["falcon_new"].expected


def test_alibi_slopes() -> None:
    assert alibi_slopes(4) == (2**-2, 2**-4, 2**-6, 2**-8)
    assert alibi_slopes(6) == (*alibi_slopes(4), 2**-1, 2**-3)
    assert alibi_slopes(1) == (2**-8,)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt_neox", {"use_parallel_residual": False}, ["a GPT-NeoX that disables use_parallel_residual"]),
        ("gpt_neox", {"attention_bias": False}, ["a GPT-NeoX that disables attention_bias"]),
        ("gpt_neox", {"rope_scaling": LINEAR}, ["rotary scaling 'linear' of the family gpt_neox"]),
        ("phi", {"rope_scaling": LINEAR}, ["rotary scaling 'linear' of the family phi"]),
        ("starcoder2", {"rope_scaling": LINEAR}, ["rotary scaling 'linear' of the family starcoder2"]),
        ("falcon", {"rope_scaling": LINEAR}, ["rotary scaling 'linear' of the family falcon"]),
        ("qwen3_moe", {"attention_bias": True}, ["biases of a Qwen 3's attention"]),
    ],
)
def test_what_only_our_runtimes_have_is_marked(
    tmp_path: Path, family: str, changes: dict[str, Any], words: list[str]
) -> None:
    folder = write_tiny_model(tmp_path, family)
    assert "superset" not in config_of(folder)
    assert config_of(folder, **changes)["superset"] == words
