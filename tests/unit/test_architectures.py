"""Families: what they accept, what they write into config.json, and what they tell the graph builder."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import EVERY, FAMILIES, cases
from tests.support.tiny_models import read_safetensors, write_tiny_model
from trtserve.artifacts import Model
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint import architectures
from trtserve.checkpoint.architectures.parts.model_keys import KEYS
from trtserve.checkpoint.architectures.parts.positions import attention_windows, inverse_frequencies, rotary
from trtserve.checkpoint.supported import supported_family
from trtserve.errors import UnsupportedModelError
from trtserve.nvidia.releases.converters import convertible_family
from trtserve.pipeline.checkpoint_config import checkpoint_config as convertible_config
from trtserve.pipeline.convert_own import plan_own_conversion
from trtserve.repository.check.rules import refusal
from trtserve.specs import ConvertSpec

LLAMA3 = FAMILIES["llama3"].config["rope_scaling"] | {"original_max_position_embeddings": 8192}


def hf_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def checkpoint_config(folder: Path, **changes: Any) -> CheckpointConfig:
    hf = hf_config(folder) | changes
    content = supported_family(hf).checkpoint_config(hf) | {"architecture": hf["architectures"][0]}
    return CheckpointConfig.of(content)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_count_needs_the_config_only(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path, family)
    source = read_safetensors(folder / "model.safetensors")
    (expected,) = FAMILIES[family].ranks(source, hf_config(folder), 1)
    assert architectures.parameter_count(checkpoint_config(folder)) == sum(values.size for values in expected.values())


def test_the_tests_cover_every_family() -> None:
    """Most tests iterate `tests.support.families.FAMILIES`; docs/contributing.md says how to add a family."""
    covered = {family.architecture for family in FAMILIES.values()}
    # Tested as a config of Falcon in test_other_families.py.
    assert covered == architectures.FAMILIES.keys() - {"RWForCausalLM"}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "names no architecture"),
        (["LlamaForCausalLM", "MistralForCausalLM"], "several architectures: LlamaForCausalLM, MistralForCausalLM"),
        (["Qwen2ForCausalLM"], "two families: model_type = llama and the architecture Qwen2ForCausalLM"),
    ],
)
def test_a_config_without_one_architecture_is_refused(names: list[str], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        supported_family({"model_type": "llama", "architectures": names})


def test_checkpoint_architecture_names_are_recognised() -> None:
    assert architectures.family("GPTForCausalLM") == architectures.family("GPT2LMHeadModel")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "llama",
            {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}},
            "'ntk'; supported: linear, dynamic, yarn, llama3",
        ),
        ("llama_yarn", {"max_position_embeddings": None, "rope_scaling": {"type": "yarn"}}, "lacks factor, original_"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'"),
        (
            "llama",
            {"quantization_config": {"quant_method": "quanto"}},
            r"quantised \(quanto\)",
        ),
        ("llama", {"hidden_act": "mish"}, "'mish'"),
        ("llama", {"intermediate_size": None}, "lacks intermediate_size"),
        ("llama", {"hidden_size": "64"}, "hidden_size = '64'; expected positive"),
        ("llama", {"num_key_value_heads": "2"}, "num_key_value_heads = '2'"),
        ("qwen2", {"layer_types": ["full_attention"]}, "1 entries"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("gemma", {"attention_bias": True}, "sets attention_bias"),
        ("gemma", {"hidden_activation": "relu"}, "'relu'"),
        ("gemma2", {"hidden_activation": "silu"}, "'silu'"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu', which is not supported"),
        ("gemma3", {"rope_parameters": {"rope_theta": 77.0}}, r"\{'rope_theta': 77.0\}; expected full_attention"),
        ("gemma3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type = 'linear'; expected the key rope_type"),
        ("gemma3n", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type = 'linear'; expected the key rope_type"),
        ("gemma3", {"use_bidirectional_attention": True}, "sets use_bidirectional_attention"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "sets attn_logit_softcapping"),
        ("gemma3", {"sliding_window": None}, "sliding_window = None"),
        ("gemma3", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "irregular"),
        ("llama", {"layer_types": ["sliding_attention", "full_attention"]}, "other programs follow"),
        ("mixtral", {"layer_types": ["full_attention"] * 2, "sliding_window": 64}, "sliding_window = 64 and"),
        ("phi3", {"layer_types": ["full_attention"] * 2, "sliding_window": 64}, "sliding_window = 64 and"),
        ("starcoder2", {"layer_types": ["full_attention"] * 2, "sliding_window": 64}, "sliding_window = 64 and"),
        ("llama", {"is_causal": False}, "is_causal = false"),
        ("gpt2", {"is_causal": None}, "is_causal = none"),
        ("llama", {"head_dim": 1 << 30}, "head_dim = 1073741824; no model is that large"),
        ("llama", {"rope_parameters": []}, r"rope_parameters = \[\]; expected an object"),
        ("glm", {"partial_rotary_factor": 1e9}, "partial_rotary_factor"),
        ("llama_yarn", {"rope_theta": 1}, "rope_theta = 1 beside rotary scaling 'yarn'"),
        ("qwen2", {"max_window_layers": None}, "max_window_layers = None; expected numbers of 0 or more"),
        ("llama", {"attention_bias": "false"}, "attention_bias = 'false'; expected true or false"),
        ("gemma", {"use_bidirectional_attention": ""}, "use_bidirectional_attention = ''; expected true, false"),
        ("gemma3", {"use_bidirectional_attention": []}, r"use_bidirectional_attention = \[\]; expected true, false"),
        ("ministral", {"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ("bloom", {"n_head": 2}, "n_head = 2 and num_attention_heads = 4"),
        ("gpt2", {"n_layer": 0}, "n_layer = 0"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"activation_function": "tanh"}, "'tanh'"),
    ],
)
def test_unsupported_features_are_refused_from_config_alone(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        checkpoint_config(write_tiny_model(tmp_path, family), **changes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"rope_theta": "high"}, "rope_theta = 'high'; expected positive numbers"),
        ("llama", {"rope_theta": -1.0}, r"rope_theta = -1\.0"),
        ("llama", {"rope_scaling": [1]}, r"rope_scaling = \[1\]"),
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
        ("phi3_long", {"rope_scaling": "long"}, "rope_scaling = 'long'"),
        ("gemma2", {"final_logit_softcapping": "x"}, "final_logit_softcapping = 'x'"),
        ("gemma3", {"rope_local_base_freq": "x"}, "rope_local_base_freq = 'x'"),
        ("mistral", {"sliding_window": "a"}, "sliding_window = 'a'"),
        ("mistral", {"sliding_window": 0}, "sliding_window = 0"),
    ],
)
def test_non_numeric_config_values_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        supported_family(FAMILIES[family].config | changes)


_LIES: tuple[Any, ...] = (
    *(None, 0, -1, 10**400, 2**40, 10**7, 0.5, float("nan"), float("inf")),
    *("x", "", "a" * 5000, [], [None], [[1]], ["x"] * 5000, {"a": 1}),
)


def places(config: Any, inside: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all values of a config."""
    for key, value in config.items() if isinstance(config, dict) else enumerate(config):
        yield (*inside, key)
        if isinstance(value, dict | list):
            yield from places(value, (*inside, key))


def changed(config: Any, way: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value there."""
    if not way:
        return value
    copy = dict(config) if isinstance(config, dict) else list(config)
    copy[way[0]] = changed(copy[way[0]], way[1:], value) if len(way) > 1 else value
    return copy


def convert(config: dict[str, Any]) -> None:
    """All that is made of a config before weights are read."""
    hf = architectures.text_model(config)
    module, made = supported_family(hf), convertible_config(hf, ConvertSpec())
    architectures.parameter_count(architectures.described(hf, made))
    module.decoder(made)


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_values_of_every_key_are_taken_or_refused_by_name(family: str) -> None:
    """Lies for the keys of each family and for what is in them, two for other keys; another error is a fault.

    No object is taken, and no message is long. `make families` tells all lies.
    """
    config, chance = FAMILIES[family].config | {"dtype": "float16"}, random.Random(family)
    lies = [(way, lie) for way in places(config) for lie in (_LIES if EVERY else chance.sample(_LIES, 4))]
    lies += [((key,), lie) for key in sorted({*KEYS} - {*config}) for lie in chance.sample(_LIES, 2)]
    for way, lie in lies:
        error = refusal(partial(convert, changed(config, way, lie)))
        assert len(str(error)) <= 4000, way
        if way[-1] in KEYS and isinstance(lie, dict):
            assert str(way[-1]) in str(error), way


@pytest.mark.parametrize(("family", "changes"), cases("logits"), ids=str)
def test_a_config_without_a_key_is_taken_or_refused_by_name(family: str, changes: dict[str, Any]) -> None:
    config = FAMILIES[family].config | changes | {"dtype": "float16"}
    for key in config:
        refusal(partial(supported_family, {name: value for name, value in config.items() if name != key}))
        refusal(partial(supported_family, config | {key: None}))


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


def test_llama3_bounds_follow_both_factors() -> None:
    scaling = LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 8.0, "original_max_position_embeddings": 800}
    # Wavelengths 2π·base^(i / 4) for base 10^8: 6.28, 628 and more; kept below 100, stretched beyond 400.
    assert inverse_frequencies(8, 1e8, scaling) == pytest.approx([1.0, 1e-2 / 8, 1e-4 / 8, 1e-6 / 8], rel=1e-6)
    # 2π·50 = 314.2 lies between: smooth = (800 / 314.2 - 2) / (8 - 2).
    smooth = (800 / (2 * math.pi * 50) - 2) / 6
    expected = (1 - smooth) * 0.02 / 8 + smooth * 0.02
    assert inverse_frequencies(4, 2500.0, scaling)[1] == pytest.approx(expected, rel=1e-6)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("family", ["llama", "llama3", "llama_linear", "llama_dynamic"])
def test_frequencies_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    folder = write_tiny_model(tmp_path, family)
    config = checkpoint_config(folder)
    decoder = architectures.family("LlamaForCausalLM").decoder(config)
    expected = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder)).inv_freq.tolist()
    assert decoder.rope_inv_freq == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(
    ("changes", "window"),
    [({"sliding_window": 64}, 64), ({"sliding_window": None}, None), ({"sliding_window": 512}, 512)],
)
def test_mistral_window_reaches_the_decoder(tmp_path: Path, changes: dict[str, Any], window: int | None) -> None:
    config = checkpoint_config(write_tiny_model(tmp_path, "mistral"), **changes)
    assert architectures.family("MistralForCausalLM").decoder(config).window(0) == window


def test_an_absent_window_is_4096_as_in_transformers(tmp_path: Path) -> None:
    hf = hf_config(write_tiny_model(tmp_path, "mistral", max_position_embeddings=8192))
    del hf["sliding_window"]
    config = supported_family(hf).checkpoint_config(hf)
    assert config["max_attention_window"] == [4096]
    assert "runtime_defaults" not in config


def test_windows_in_runtime_defaults_are_read() -> None:
    config = {"max_position_embeddings": 512, "runtime_defaults": {"max_attention_window": [64, 512]}}
    assert attention_windows(CheckpointConfig.of(config)) == (64, None)


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
def test_qwen_windows_start_at_max_window_layers(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None]
) -> None:
    config = checkpoint_config(write_tiny_model(tmp_path, "qwen2"), **changes)
    assert architectures.family("Qwen2ForCausalLM").decoder(config).windows == windows


def test_gemma2_windows_follow_layer_types(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    config = checkpoint_config(write_tiny_model(tmp_path, "gemma2"), layer_types=kinds)
    assert architectures.family("Gemma2ForCausalLM").decoder(config).windows == (None, 24, 24)


def test_gemma3_pattern_is_read_from_layer_types(tmp_path: Path) -> None:
    hf = hf_config(write_tiny_model(tmp_path, "gemma3"))
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = supported_family(hf | {"layer_types": kinds}).checkpoint_config(hf | {"layer_types": kinds})
    assert config["_sliding_window_pattern"] == 3
    decoder = architectures.family("Gemma3ForCausalLM").decoder(CheckpointConfig.of(config))
    assert [decoder.window(layer) for layer in range(6)] == [24, 24, None] * 2


def test_gemma3_rotations_are_read_in_both_spellings(tmp_path: Path) -> None:
    hf = hf_config(write_tiny_model(tmp_path, "gemma3"))
    old = supported_family(hf).checkpoint_config(hf)
    for key in ("rope_theta", "rope_local_base_freq", "rope_scaling"):
        del hf[key]
    hf["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert supported_family(hf).checkpoint_config(hf) == old
    hf["rope_parameters"]["sliding_attention"] |= {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match="layers with a window"):
        supported_family(hf)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3"])
def test_partial_rotation_is_refused_where_no_key_records_it(family: str) -> None:
    hf = FAMILIES[family].config
    whole = supported_family(hf | {"partial_rotary_factor": 1.0})
    assert whole == architectures.family(hf["architectures"][0])
    for changes in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor = 0\.5"):
            supported_family(hf | changes)


def test_gemma3_partial_rotation_is_refused_in_both_kinds_of_layer() -> None:
    for kind in ("full_attention", "sliding_attention"):
        nested = {"rope_parameters": {kind: {"rope_type": "default", "partial_rotary_factor": 0.5}}}
        with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor = 0\.5"):
            supported_family(FAMILIES["gemma3"].config | {"rope_scaling": None} | nested)


def test_old_llama_spelling_is_recognised(tmp_path: Path) -> None:
    folders = [
        write_tiny_model(tmp_path / name, "llama", architectures=[name])
        for name in ("LlamaForCausalLM", "LLaMAForCausalLM")
    ]
    spec = ConvertSpec(trtllm_version="1.2")
    usual, first = (plan_own_conversion(Model(path=folder), spec) for folder in folders)
    assert first.config == usual.config
    assert first.config.architecture == "LlamaForCausalLM"
    assert first.headers == usual.headers


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_phi3_accepts_older_names_of_longrope(name: str) -> None:
    hf = FAMILIES["phi3_long"].config
    expected = supported_family(hf).checkpoint_config(hf)
    renamed = hf | {"rope_scaling": {**hf["rope_scaling"], "type": name}}
    assert supported_family(renamed).checkpoint_config(renamed) == expected


@pytest.mark.parametrize(
    ("architecture", "advice"),
    [
        ("GPTBigCodeForCausalLM", r"supports it from TensorRT-LLM 0\.12: --converter upstream"),
        ("GlmMoeDsaForCausalLM", r"help families\.md` lists what is\. .* --trtllm-script FOLDER\. .* --runtime llmapi"),
        ("MambaForCausalLM", r"help families\.md` lists .* from TensorRT-LLM 0\.12: --converter upstream"),
        ("RwkvForCausalLM", r"help families\.md` lists .* If TensorRT-LLM has a .* --trtllm-script FOLDER"),
    ],
)
def test_unsupported_architecture_error_suggests_alternatives(architecture: str, advice: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        convertible_family({"architectures": [architecture]})
    assert re.search(advice, str(caught.value.hint))
    # A folder has to be named of what no table here has.
    assert ("--trtllm-script" in str(caught.value.hint)) is (architecture[:4] in ("GlmM", "Rwkv"))


@pytest.mark.parametrize(
    ("architecture", "similar"),
    [("Qwen3MoEForCausalLM", " Similar ones that are: Qwen3MoeForCausalLM"), ("RwkvForCausalLM", "")],
)
def test_an_unknown_architecture_is_answered_with_similar_ones_only(architecture: str, similar: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        supported_family({"architectures": [architecture]})
    assert caught.value.message.startswith(f"Architecture {architecture} is not supported.{similar}")
    assert caught.value.message.count("For") <= 4


@pytest.mark.parametrize("layers", [None, 1, "1", [True], ["1"], [1.0], {}])
def test_a_bamba_without_a_list_of_layers_with_attention_is_refused(layers: object) -> None:
    with pytest.raises(UnsupportedModelError, match=r"attn_layer_indices = .*; expected a list of the layers"):
        supported_family(FAMILIES["bamba"].config | {"attn_layer_indices": layers})


@pytest.mark.parametrize("family", ["falcon_h1", "granite_hybrid", "bamba"])
def test_another_activation_of_a_model_with_state_spaces_is_refused(family: str) -> None:
    """Their convolutions would have it too."""
    with pytest.raises(UnsupportedModelError, match="'relu' is not supported"):
        supported_family(FAMILIES[family].config | {"hidden_act": "relu"})


@pytest.mark.parametrize(("given", "cap"), [({}, 30.0), ({"final_logit_softcapping": None}, None)])
def test_gemma_3n_has_no_cap_of_scores_where_its_config_says_null(given: dict[str, None], cap: float | None) -> None:
    config = {key: value for key, value in FAMILIES["gemma3n"].config.items() if key != "final_logit_softcapping"}
    found = convertible_config({**config, **given}, ConvertSpec())
    assert found.own_or_none("final_logit_softcapping", float) == cap
