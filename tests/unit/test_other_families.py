"""Families with names of their own: what they accept, their config.json, and the contents of every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.expected_other_configs import OTHER_CONFIGS
from tests.support.expected_others import other_ranks
from tests.support.tiny_models import read_safetensors, write_safetensors, write_tiny_model
from trtserve import architectures
from trtserve.architectures.alibi import alibi_slopes
from trtserve.architectures.checkpoint import CheckpointReader
from trtserve.artifacts import Model
from trtserve.convert import convert_model
from trtserve.errors import ConversionError, UnsupportedModelError
from trtserve.specs import ConvertSpec

CASES: list[tuple[str, dict[str, Any]]] = [
    ("gptj", {"vocab_size": 323}),
    ("gptj", {"tie_word_embeddings": True}),
    ("gpt_neox", {"vocab_size": 323}),
    ("gpt_neox", {"tie_word_embeddings": True}),
    ("opt", {"vocab_size": 323}),
    ("opt", {"do_layer_norm_before": False, "tie_word_embeddings": False}),
    ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": False, "vocab_size": 323}),
    ("opt", {"word_embed_proj_dim": 96, "tie_word_embeddings": False}),
    ("phi", {"vocab_size": 323}),
    ("phi", {"tie_word_embeddings": True}),
    ("phi3", {"vocab_size": 323, "num_key_value_heads": 1}),
    ("phi3", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("phi3_long", {}),
    ("starcoder2", {"vocab_size": 323}),
    ("starcoder2", {"tie_word_embeddings": False, "use_bias": False, "num_key_value_heads": 4}),
    ("bloom", {"vocab_size": 323}),
    ("bloom", {"tie_word_embeddings": False}),
    ("falcon", {"vocab_size": 323}),
    ("falcon", {"tie_word_embeddings": False}),
    ("falcon_new", {"vocab_size": 323, "tie_word_embeddings": False}),
    ("falcon_new", {"num_ln_in_parallel_attn": 1}),
    ("falcon_rw", {}),
]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_each_rank_holds_exactly_its_part(tmp_path: Path, family: str, overrides: dict[str, Any], tp: int) -> None:
    folder = write_tiny_model(tmp_path / "hf", family, **overrides)
    hf = json.loads((folder / "config.json").read_text())
    source = read_safetensors(folder / "model.safetensors")
    spec = ConvertSpec(tp_size=tp, dtype="float32")
    out = convert_model(Model(path=folder), spec, out=tmp_path / "out").path
    reader = CheckpointReader(out)
    for rank, wanted in enumerate(other_ranks(source, hf, tp)):
        actual = read_safetensors(out / f"rank{rank}.safetensors")
        assert actual.keys() == wanted.keys() == set(reader.names())
        for name, values in wanted.items():
            np.testing.assert_array_equal(actual[name], values, err_msg=name)
    for name, values in other_ranks(source, hf, 1)[0].items():
        np.testing.assert_array_equal(reader.merged(name), values, err_msg=name)


PROJECTED: dict[str, Any] = {"word_embed_proj_dim": 32, "do_layer_norm_before": False}


@pytest.mark.parametrize("split", [{}, {"use_parallel_embedding": True}, {"embedding_sharding_dim": 1}])
def test_products_of_several_blocks_go_to_all_ranks(
    split: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtserve.architectures.products._BLOCK_BYTES", 4 * 64 * 50)
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
def test_projections_that_cannot_be(tmp_path: Path, name: str, values: Any, message: str) -> None:
    folder = write_tiny_model(tmp_path / "hf", "opt", **PROJECTED)
    tensors = read_safetensors(folder / "model.safetensors")
    old = tensors.pop(f"model.decoder.{name}.weight")
    if values is not None:
        new = old.reshape(values) if isinstance(values, tuple) else np.full_like(old, values)
        tensors[f"model.decoder.{name}.weight"] = new
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ConversionError, match=message):
        convert_model(Model(path=folder), ConvertSpec(), out=tmp_path / "out")


@pytest.mark.parametrize(
    "family",
    ["gptj", "gpt_neox", "opt", "phi", "phi3", "phi3_long", "starcoder2", "bloom", "falcon", "falcon_new", "falcon_rw"],
)
def test_pipeline_stages_hold_what_one_rank_holds(tmp_path: Path, family: str) -> None:
    layers: dict[str, Any] = {"n_layer" if family in ("gptj", "bloom") else "num_hidden_layers": 3}
    folder = write_tiny_model(tmp_path / "hf", family, **layers)
    one = CheckpointReader(convert_model(Model(path=folder), ConvertSpec(), out=tmp_path / "one").path)
    spec = ConvertSpec(tp_size=2, pp_size=2)
    two = CheckpointReader(convert_model(Model(path=folder), spec, out=tmp_path / "two").path)
    assert one.names() == two.names()
    for name in one.names():
        np.testing.assert_array_equal(two.merged(name), one.merged(name), err_msg=name)


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    hf = json.loads((folder / "config.json").read_text()) | changes
    return architectures.supported(hf).checkpoint_config(hf)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gptj", {"n_inner": 100}, "100 wide"),
        ("gptj", {"rotary_dim": None}, "lacks rotary_dim"),
        ("gptj", {"activation_function": "gelu"}, "'gelu' is not supported"),
        ("gpt_neox", {"use_parallel_residual": False}, "use_parallel_residual off"),
        ("gpt_neox", {"attention_bias": False}, "attention_bias off"),
        ("gpt_neox", {"rope_scaling": {"type": "linear", "factor": 2.0}}, r"\(linear\), which .* gpt_neox cannot"),
        ("opt", {"word_embed_proj_dim": 0.5}, "word_embed_proj_dim = 0.5; expected positive whole numbers"),
        ("opt", {"enable_bias": False}, "enable_bias off"),
        ("opt", {"_remove_final_layer_norm": True}, "no final norm"),
        ("phi", {"qk_layernorm": True}, "norms its queries"),
        ("phi", {"num_key_value_heads": 2}, "2 key/value heads for 4"),
        ("phi3", {"hidden_act": "gelu"}, "supported: silu, swish"),
        (
            "phi3_long",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "1 short and 0 long .* expected 8",
        ),
        ("starcoder2", {"hidden_act": "gelu"}, "'gelu' is not supported"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("falcon_new", {"parallel_attn": False}, "without parallel attention"),
        ("falcon", {"activation": "relu"}, "'relu'"),
    ],
)
def test_what_cannot_be_converted_is_named(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_of(write_tiny_model(tmp_path, family), **changes)


def test_the_first_falcons_are_known_by_their_old_names(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "falcon")
    old = {"architectures": ["RWForCausalLM"], "n_layer": 2, "n_head": 4, "num_attention_heads": None}
    assert config_of(folder, model_type="RefinedWebModel", **old) == OTHER_CONFIGS["falcon"]
    grouped = config_of(folder, model_type="RefinedWeb", n_head_kv=2, **old)
    assert grouped == OTHER_CONFIGS["falcon_new"]


def test_slopes_of_alibi() -> None:
    assert alibi_slopes(4) == (2**-2, 2**-4, 2**-6, 2**-8)
    assert alibi_slopes(6) == (*alibi_slopes(4), 2**-1, 2**-3)
    assert alibi_slopes(1) == (2**-8,)
