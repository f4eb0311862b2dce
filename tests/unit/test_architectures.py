"""Families: what they accept, what they write into config.json, and what they tell the graph builder."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.expected_configs import LLAMA3
from tests.support.tiny_models import FAMILIES, read_safetensors, write_tiny_model
from trtserve import architectures
from trtserve.architectures.rope import inverse_frequencies, rotary
from trtserve.architectures.windows import attention_windows
from trtserve.artifacts import Model
from trtserve.convert import plan_conversion
from trtserve.errors import UnsupportedModelError
from trtserve.specs import ConvertSpec


def hf_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def checkpoint_config(folder: Path, **changes: Any) -> dict[str, Any]:
    hf = hf_config(folder) | changes
    return architectures.supported(hf).checkpoint_config(hf) | {"architecture": hf["architectures"][0]}


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "llama3", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt2"),
        *("mixtral", "qwen2_moe", "qwen3_moe"),
    ],
)
def test_parameter_count_needs_the_config_only(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path, family)
    stored = sum(values.size for values in read_safetensors(folder / "model.safetensors").values())
    copied_head = 320 * 64 if family in ("llama3", "qwen3", "gemma", "gemma2", "gemma3", "gpt2") else 0
    assert architectures.parameter_count(checkpoint_config(folder)) == stored + copied_head


def test_an_unknown_architecture_is_named_with_those_that_work() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        architectures.supported({"architectures": ["MambaForCausalLM"]})
    for name in ("MambaForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "GPT2LMHeadModel"):
        assert name in caught.value.message


def test_a_config_without_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="names no architecture"):
        architectures.supported({"model_type": "llama"})


def test_a_checkpoint_of_an_old_release_finds_its_family() -> None:
    assert architectures.family("GPTForCausalLM") is architectures.family("GPT2LMHeadModel")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "'yarn'; supported are linear, dynamic, llama3",
        ),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'"),
        ("llama", {"quantization_config": {"quant_method": "quanto"}}, r"quantised already.*quantised \(quanto\)"),
        ("llama", {"hidden_act": "mish"}, "'mish'"),
        ("llama", {"intermediate_size": None}, "lacks intermediate_size"),
        ("llama", {"hidden_size": "64"}, "hidden_size = '64'; expected positive"),
        ("llama", {"num_key_value_heads": "2"}, "num_key_value_heads = '2'"),
        ("qwen2", {"layer_types": ["full_attention"]}, "names 1 layers"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("qwen3", {"attention_bias": True}, "sets attention_bias"),
        ("gemma", {"attention_bias": True}, "sets attention_bias"),
        ("gemma", {"hidden_activation": "relu"}, "'relu'"),
        ("gemma2", {"hidden_activation": "silu"}, "'silu'"),
        ("gemma3", {"use_bidirectional_attention": True}, "sets use_bidirectional_attention"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "sets attn_logit_softcapping"),
        ("gemma3", {"sliding_window": None}, "sliding_window = None"),
        ("gemma3", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "irregular"),
        ("gpt2", {"n_layer": 0}, "n_layer = 0"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"activation_function": "tanh"}, "'tanh'"),
    ],
)
def test_what_cannot_be_converted_is_named_from_the_config_alone(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        checkpoint_config(write_tiny_model(tmp_path, family), **changes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"rope_theta": "high"}, "rope_theta = 'high'; expected positive numbers"),
        ("llama", {"rope_theta": -1.0}, r"rope_theta = -1\.0"),
        ("llama", {"rope_scaling": [1]}, r"\[1\] for the scaling"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "factor = 'x'"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": -2}}, "factor = -2"),
        ("llama3", {"rope_scaling": LLAMA3 | {"low_freq_factor": 0}}, "low_freq_factor = 0"),
        ("llama", {"rms_norm_eps": "x"}, "rms_norm_eps = 'x'"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps = null"),
        ("gpt2", {"layer_norm_epsilon": 0}, "layer_norm_epsilon = 0"),
        ("starcoder2", {"norm_epsilon": True}, "norm_epsilon = True"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM'; expected a list"),
        ("llama", {"architectures": [1]}, r"architectures = \[1\]; expected a list"),
        ("gpt_neox", {"rotary_emb_base": "x"}, "rotary_emb_base = 'x'"),
        ("phi", {"partial_rotary_factor": -0.5}, "partial_rotary_factor = -0.5"),
        ("phi3_long", {"rope_scaling": "long"}, "'long' for the scaling"),
        ("gemma2", {"final_logit_softcapping": "x"}, "final_logit_softcapping = 'x'"),
        ("gemma3", {"rope_local_base_freq": "x"}, "rope_theta = 'x'"),
        ("mistral", {"sliding_window": "a"}, "sliding_window = 'a'"),
        ("mistral", {"sliding_window": 0}, "sliding_window = 0"),
    ],
)
def test_what_is_no_number_is_named(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        architectures.supported(FAMILIES[family][0] | changes)


def test_rotary_settings_are_read_in_both_spellings() -> None:
    assert rotary({"rope_theta": 5e5, "rope_scaling": LLAMA3}) == (5e5, LLAMA3)
    linear = {"type": "linear", "factor": 2.0}
    assert rotary({"rope_scaling": linear}) == (1e4, linear | {"rope_type": "linear"})
    assert rotary({"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}) == (5e5, LLAMA3)
    assert rotary({"rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}}) == (2e4, None)
    assert rotary({}) == (1e4, None)


def test_unscaled_and_linear_frequencies() -> None:
    plain = inverse_frequencies(8, 10000.0, None)
    assert plain == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-6)
    assert inverse_frequencies(8, 10000.0, {"type": "linear", "factor": 4.0}) == pytest.approx(
        [value / 4 for value in plain], rel=1e-7
    )


def test_llama3_frequencies_keep_short_waves_and_stretch_long_ones() -> None:
    plain = inverse_frequencies(128, 500000.0, None)
    scaled = inverse_frequencies(128, 500000.0, LLAMA3)
    for before, after in zip(plain, scaled, strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            assert after == before
        elif wavelength > 8192:
            assert after == pytest.approx(before / 8)
        else:
            assert before / 8 < after < before


def test_llama3_bounds_follow_both_factors() -> None:
    scaling = LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 8.0, "original_max_position_embeddings": 800}
    # Wavelengths 2π·base^(i / 4) for base 10^8: 6.28, 628 and more; kept below 100, stretched beyond 400.
    assert inverse_frequencies(8, 1e8, scaling) == pytest.approx([1.0, 1e-2 / 8, 1e-4 / 8, 1e-6 / 8], rel=1e-6)
    # 2π·50 = 314.2 lies between: smooth = (800 / 314.2 - 2) / (8 - 2).
    smooth = (800 / (2 * math.pi * 50) - 2) / 6
    expected = (1 - smooth) * 0.02 / 8 + smooth * 0.02
    assert inverse_frequencies(4, 2500.0, scaling)[1] == pytest.approx(expected, rel=1e-6)


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["llama", "llama3", "llama_linear", "llama_dynamic"])
def test_frequencies_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    pytest.importorskip("torch")
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    folder = write_tiny_model(tmp_path, family)
    config = checkpoint_config(folder)
    decoder = architectures.family("LlamaForCausalLM").decoder(config)
    expected = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder)).inv_freq.tolist()
    assert decoder.rope_inv_freq == pytest.approx(expected, rel=2e-7)


@pytest.mark.parametrize(
    ("changes", "window"),
    [({"sliding_window": 64}, 64), ({"sliding_window": None}, None), ({"sliding_window": 512}, 512)],
)
def test_mistrals_window_reaches_the_decoder(tmp_path: Path, changes: dict[str, Any], window: int | None) -> None:
    config = checkpoint_config(write_tiny_model(tmp_path, "mistral"), **changes)
    assert architectures.family("MistralForCausalLM").decoder(config).window(0) == window


def test_an_absent_window_is_4096_as_in_transformers(tmp_path: Path) -> None:
    hf = hf_config(write_tiny_model(tmp_path, "mistral", max_position_embeddings=8192))
    del hf["sliding_window"]
    config = architectures.supported(hf).checkpoint_config(hf)
    assert config["max_attention_window"] == [4096]
    assert "runtime_defaults" not in config


def test_windows_of_another_tools_checkpoint_are_read() -> None:
    config = {"max_position_embeddings": 512, "runtime_defaults": {"max_attention_window": [64, 512]}}
    assert attention_windows(config) == (64, None)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, ()),
        ({"use_sliding_window": True}, (None, 24)),
        ({"use_sliding_window": True, "max_window_layers": 2}, ()),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}, (24, None)),
        ({"layer_types": ["sliding_attention", "full_attention"]}, ()),
    ],
)
def test_qwens_windows_begin_at_a_layer(tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None]) -> None:
    config = checkpoint_config(write_tiny_model(tmp_path, "qwen2"), **changes)
    assert architectures.family("Qwen2ForCausalLM").decoder(config).windows == windows


def test_gemma2s_windows_follow_its_layer_types(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    config = checkpoint_config(write_tiny_model(tmp_path, "gemma2"), layer_types=kinds)
    assert architectures.family("Gemma2ForCausalLM").decoder(config).windows == (None, 24, 24)


def test_gemma3s_pattern_is_read_from_layer_types(tmp_path: Path) -> None:
    hf = hf_config(write_tiny_model(tmp_path, "gemma3"))
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = architectures.supported(hf | {"layer_types": kinds}).checkpoint_config(hf | {"layer_types": kinds})
    assert config["_sliding_window_pattern"] == 3
    decoder = architectures.family("Gemma3ForCausalLM").decoder(config)
    assert [decoder.window(layer) for layer in range(6)] == [24, 24, None] * 2


def test_gemma3s_rotations_are_read_in_both_spellings(tmp_path: Path) -> None:
    hf = hf_config(write_tiny_model(tmp_path, "gemma3"))
    old = architectures.supported(hf).checkpoint_config(hf)
    for key in ("rope_theta", "rope_local_base_freq", "rope_scaling"):
        del hf[key]
    hf["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert architectures.supported(hf).checkpoint_config(hf) == old
    hf["rope_parameters"]["sliding_attention"] |= {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match="layers with a window"):
        architectures.supported(hf)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3"])
def test_heads_that_are_rotated_in_part_are_refused_where_no_key_says_so(family: str) -> None:
    hf = FAMILIES[family][0]
    whole = architectures.supported(hf | {"partial_rotary_factor": 1.0})
    assert whole is architectures.family(hf["architectures"][0])
    for changes in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        with pytest.raises(UnsupportedModelError, match=r"a part of each head only \(partial_rotary_factor 0\.5\)"):
            architectures.supported(hf | changes)


def test_gemma3_heads_that_are_rotated_in_part_are_refused_in_either_kind_of_layer() -> None:
    for kind in ("full_attention", "sliding_attention"):
        nested = {"rope_parameters": {kind: {"rope_type": "default", "partial_rotary_factor": 0.5}}}
        with pytest.raises(UnsupportedModelError, match="a part of each head only"):
            architectures.supported(FAMILIES["gemma3"][0] | {"rope_scaling": None} | nested)


def test_the_first_exports_of_llama_spell_it_otherwise(tmp_path: Path) -> None:
    folders = [
        write_tiny_model(tmp_path / name, "llama", architectures=[name])
        for name in ("LlamaForCausalLM", "LLaMAForCausalLM")
    ]
    spec = ConvertSpec(trtllm_version="1.2")
    usual, first = (plan_conversion(Model(path=folder), spec) for folder in folders)
    assert first.config == usual.config
    assert first.config["architecture"] == "LlamaForCausalLM"
    assert first.headers == usual.headers


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_older_names_of_longrope_mean_it_in_phi3(name: str) -> None:
    hf = FAMILIES["phi3_long"][0]
    expected = architectures.supported(hf).checkpoint_config(hf)
    renamed = hf | {"rope_scaling": {**hf["rope_scaling"], "type": name}}
    assert architectures.supported(renamed).checkpoint_config(renamed) == expected


def test_decoders_say_what_the_graph_needs(tmp_path: Path) -> None:
    config = checkpoint_config(write_tiny_model(tmp_path / "a", attention_bias=True, head_dim=32))
    llama = architectures.family("LlamaForCausalLM").decoder(config)
    assert (llama.norm, llama.positions, llama.mlp, llama.activation) == ("rms", "rope", "gated", "silu")
    assert (llama.attention_bias, llama.dense_bias, llama.mlp_bias) == (True, True, False)
    assert llama.attention_scale == pytest.approx(32**-0.5)
    assert len(llama.rope_inv_freq or ()) == 16
    config = checkpoint_config(write_tiny_model(tmp_path / "b", "gpt2"), scale_attn_weights=False)
    gpt2 = architectures.family("GPT2LMHeadModel").decoder(config)
    assert (gpt2.norm, gpt2.positions, gpt2.mlp, gpt2.activation) == ("layer", "learned", "plain", "gelu_tanh")
    assert gpt2.attention_scale == pytest.approx(1.0)
    assert gpt2.rope_inv_freq is None


@pytest.mark.parametrize(
    ("architecture", "advice"),
    [
        ("GPTBigCodeForCausalLM", r"takes it from TensorRT-LLM 0\.12 on: --converter upstream"),
        (
            "Gemma3nForConditionalGeneration",
            r"nearest is Gemma3ForCausalLM; if TensorRT-LLM has a .* --trtllm-script FOLDER; .* --runtime llmapi",
        ),
        ("MambaForCausalLM", r"Choose a model of one of these .* from TensorRT-LLM 0\.12 on: --converter upstream"),
        ("RwkvForCausalLM", r"Choose a model of one of these .*; if TensorRT-LLM has a .* --trtllm-script FOLDER"),
    ],
)
def test_advice_names_what_takes_the_architecture(architecture: str, advice: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        architectures.family(architecture)
    assert re.search(advice, str(caught.value.hint))
    # A folder has to be named of what no table here has.
    assert ("--trtllm-script" in str(caught.value.hint)) is (architecture[:4] in ("Gemm", "Rwkv"))
