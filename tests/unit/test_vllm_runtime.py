"""The vllm runtime before its engine starts: which vLLM there is, what it is started with, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.counting_vllm import PACKAGES
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import MissingDependencyError, UnsupportedModelError, UsageError
from trtserve.executor import runtimes
from trtserve.executor.engine.admission import check_outputs
from trtserve.executor.engine.limits import (
    AdapterOptions,
    EngineLimits,
    EngineOptions,
    GuideTokenizer,
    KvCacheOptions,
    resolve_limits,
)
from trtserve.executor.engine.requests import AdapterSource, GenerationRequest, PromptTable
from trtserve.executor.engine.sampling import SamplingParameters
from trtserve.executor.vllm import engine_side, installation
from trtserve.executor.vllm.adapter import vllm_request
from trtserve.executor.vllm.arguments import engine_arguments, gpu_memory_utilization, kv_per_token, shape_of
from trtserve.executor.vllm.engine import child_environment
from trtserve.executor.vllm.installation import VllmInstallation, any_release, offer_of
from trtserve.executor.vllm.runtime import VllmRuntime, vllm_engine_config
from trtserve.host.gpus import Device
from trtserve.pipeline.model_files import folder_files
from trtserve.repository.assembling import require_vllm_serves, split_settings
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.store.sources import Source

COUNTING = VllmInstallation(Path("/env/bin/python"), PACKAGES / "vllm")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}


def planned(
    hf: dict[str, Any] = LLAMA,
    *,
    convert: ConvertSpec | None = None,
    build: BuildSpec | None = None,
    settings: dict[str, str] | None = None,
) -> EngineConfig:
    made = (convert or ConvertSpec(), build or BuildSpec(), settings or {})
    return vllm_engine_config(hf, 10**9, *made, COUNTING, named=None)


def test_names_come_from_vllms_own_files() -> None:
    assert {"max_model_len", "disable_log_requests"} <= COUNTING.arguments
    assert COUNTING.architectures == {"LlamaForCausalLM", "LlavaForConditionalGeneration"}


# A tiny model in the words of Llama, GPT-2, MPT, ChatGLM, Nemotron-H and DBRX, and inside configs of several models.
_GPT2 = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": None}
_MPT = {"vocab_size": 100, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
_OTHER_WORDS: dict[str, dict[str, Any]] = {
    "llama": {name: size for name, size in LLAMA.items() if name not in ("architectures", "torch_dtype")},
    "gpt2": _GPT2,
    "starcoder": {**_GPT2, "multi_query": True},
    "mpt": _MPT,
    "dbrx": {**_MPT, "attn_config": {"kv_n_heads": 2}},
    "chatglm": {
        "padded_vocab_size": 100,
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 4,
        "kv_channels": 8,
        "multi_query_group_num": 2,
        "seq_length": 64,
        "ffn_hidden_size": 64,
    },
    "nemotron": {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "layers_block_type": ["mamba", "moe"]},
    "gemma": {"text_config": {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}},
    "omni": {"thinker_config": {"text_config": {"intermediate_size": [64, 96], **_MPT}}, "talker_config": {}},
}


@pytest.mark.parametrize("words", _OTHER_WORDS.values(), ids=list(_OTHER_WORDS))
def test_every_architecture_of_vllms_registry_can_be_planned_in_every_models_words(words: dict[str, Any]) -> None:
    for name in any_release().architectures:
        hf = {"architectures": [name], **words}
        specs = (ConvertSpec(), BuildSpec(device="cuda"))
        config = vllm_engine_config(hf, 10**9, *specs, {}, any_release(), named=None)
        assert config.model.vocab_size
        heads, size = config.model.num_key_value_heads, config.model.head_size
        assert kv_per_token(config) == 2 * config.model.num_hidden_layers * heads * size * 2 > 0


def test_layers_of_several_sizes_count_as_the_largest() -> None:
    assert shape_of(_OTHER_WORDS["omni"], dtype="auto", tp_size=1, pp_size=1)["intermediate_size"] == 96
    assert shape_of(_OTHER_WORDS["starcoder"], dtype="auto", tp_size=1, pp_size=1)["num_key_value_heads"] == 1


def test_a_model_that_only_vllm_has_is_offered_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRTSERVE_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("TRTSERVE_HOME", str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["BailingMoeV2ForCausalLM"]}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UnsupportedModelError) as caught:
        folder_files(Source(kind="folder", location=str(tmp_path), text=str(tmp_path), name="new"))
    assert str(caught.value.hint).startswith("vLLM 0.19 and later has it: --runtime vllm --install-vllm newest.")
    monkeypatch.setattr(installation, "find_installation", lambda: COUNTING)
    assert offer_of("LlamaForCausalLM").endswith("which is here, has it: --runtime vllm. ")
    assert offer_of("NobodysForCausalLM") == ""


def test_the_engines_config_has_limits_and_arguments() -> None:
    convert = ConvertSpec(tp_size=2, dtype="float16", quantize="fp8")
    build = BuildSpec(max_batch_size=32, max_seq_len=2048, tokens_per_block=32)
    config = planned(
        convert=convert, build=build, settings={"kv_cache_dtype": "fp8", "structured_outputs_config.a": "1"}
    )
    assert (config.build.max_batch_size, config.build.max_seq_len) == (32, 2048)
    assert (config.model.dtype, config.mapping.ranks, config.trtserve.device) == ("float16", 2, "cpu")
    assert config.trtserve.engine_arguments == {
        "dtype": "float16",
        "quantization": "fp8",
        "block_size": 32,
        "kv_cache_dtype": "fp8",
        "structured_outputs_config": {"a": 1},
    }
    assert kv_per_token(config) == 4 * 1 * 8 * 2  # layers × heads of a rank × head size × keys and values, in a byte


def test_on_gpus_vllm_fits_the_longest_sequence_to_the_memory() -> None:
    assert planned(build=BuildSpec(device="cuda")).trtserve.engine_arguments == {"max_model_len": -1}
    assert planned(build=BuildSpec(device="cuda", max_seq_len=99)).trtserve.engine_arguments == {}


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (
            {"settings": {"max_modle_len": "9"}},
            UsageError,
            "--set max_modle_len: neither a parameter of a",
        ),
        ({"settings": {"model": "x"}}, UsageError, "--set model: trtserve itself needs to know it"),
        ({"settings": {"tensor_parallel_size": "2"}}, UsageError, "--set tensor_parallel_size: trtserve itself"),
        ({"settings": {"block_size": "[1"}}, UsageError, r"--set block_size=\[1: the value is not YAML"),
        ({"settings": {"block_size": "2001-01-01"}}, UsageError, "the value is a date, a set or bytes"),
        ({"settings": {"runner": "auto", "runner.x": "1"}}, UsageError, "runner is set to 'auto' and has no parts"),
        ({"convert": ConvertSpec(quantize="int4")}, UsageError, "--quantize int4: vLLM quantises to fp8"),
        ({"build": BuildSpec(max_beam_width=2)}, UsageError, "--max-beam-width has no meaning with --runtime vllm"),
        ({"build": BuildSpec(max_seq_len=9000)}, UsageError, "the model has 8192 positions"),
        (
            {"hf": {**LLAMA, "architectures": ["BertModel"]}},
            UnsupportedModelError,
            "no implementation of BertModel",
        ),
    ],
)
def test_what_this_vllm_does_not_have_is_refused(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        planned(**given)


def test_transformers_own_implementation_needs_no_entry_in_the_registry() -> None:
    hf = {**LLAMA, "architectures": ["NewForCausalLM"]}
    assert planned(hf, settings={"model_impl": "transformers"}).model.architecture == "NewForCausalLM"


def test_for_another_machine_the_table_of_vllms_releases_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtserve.executor.vllm.installation.find_installation", lambda *_, **__: None)

    def serves(architecture: str, python: str | None = "any", **settings: str) -> EngineConfig:
        hf = {**LLAMA, "architectures": [architecture]}
        spec = RepositorySpec(name="any", settings=settings, vllm_python=python)
        return require_vllm_serves(hf, 10**9, spec, convert=ConvertSpec(), build=BuildSpec())

    config = serves("Qwen3MoeForCausalLM", kv_cache_dtype="fp8")
    assert (config.trtserve.device, config.trtserve.vllm_python) == ("cuda", "")
    with pytest.raises(MissingDependencyError, match="needs vLLM, which is not installed here") as caught:
        serves("LlamaForCausalLM", None)
    assert "--vllm-python any" in str(caught.value.hint)
    assert serves("AquilaForCausalLM").model.architecture == "AquilaForCausalLM"  # of older releases
    with pytest.raises(UnsupportedModelError, match="no implementation of NobodysModel"):
        serves("NobodysModel")
    with pytest.raises(UsageError, match="--set max_modle_len: neither a parameter"):
        serves("LlamaForCausalLM", max_modle_len="9")
    # One that is here, and too old or too new for a model, says which releases have it.
    with pytest.raises(UnsupportedModelError, match=r"no implementation of AquilaForCausalLM. vLLM 0.19 – 0.24 has"):
        COUNTING.require_architecture("AquilaForCausalLM")


def test_a_model_with_a_vector_for_each_token_is_refused() -> None:
    async def tasks() -> tuple[str, ...]:
        return ("token_embed",)

    side = engine_side.EngineSide(io.BytesIO(), io.BytesIO())
    side._llm = SimpleNamespace(get_supported_tasks=tasks)
    for more in ({}, {"ranks": True}, {"query": "a"}):
        with pytest.raises(ValueError, match="no vectors or scores of whole texts; it is for token_embed"):
            asyncio.run(side._pooled(1, {"pooling": {}, "text": "a", **more}))


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ('Failed: [11:13:31] /project/cpp/a.cc:4944: Unsupported type "x"', 'Failed: Unsupported type "x"'),
        (
            (
                "for A\n  Value error, 9 is more than 8. [type=value_error, input_value=B({'a': ...}), input_type=B]\n"
                "    For further information visit https://example.org/value_error"
            ),
            "for A\n  Value error, 9 is more than 8.",
        ),
        (
            "EngineCore encountered an issue. See stack trace (above) for the root cause.",
            "EngineCore encountered an issue",
        ),
        ("It failed. See root cause above. Failed core proc(s): {}", "It failed"),
        ("", "ValueError"),
    ],
    ids=["xgrammar", "pydantic", "dead engine", "no engine", "nothing"],
)
def test_vllms_reasons_have_nothing_that_only_its_makers_can_use(said: str, wanted: str) -> None:
    assert engine_side._reason(ValueError(said)) == wanted


def test_settings_of_triton_models_are_told_from_vllms() -> None:
    given = {"max_queue_size": "3", "preprocessing.add_special_tokens": "false", "kv_cache_dtype": "fp8", "a.b": "1"}
    own, others = split_settings(given)
    assert list(own) == ["max_queue_size", "preprocessing.add_special_tokens"]
    assert list(others) == ["kv_cache_dtype", "a.b"]


def test_shapes_of_other_families() -> None:
    seen = shape_of({"architectures": ["A"], "text_config": LLAMA}, dtype="auto", tp_size=1, pp_size=1)
    assert (seen["hidden_size"], seen["head_size"], seen["dtype"]) == (64, 8, "bfloat16")
    latent = {**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert kv_per_token(planned(latent)) == 4 * 576 * 2


def test_engine_arguments_follow_the_settings_of_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtserve.host.machine.free_memory", lambda: 11 * 10**9)
    options = EngineOptions(
        chunked_context=True,
        kv_cache=KvCacheOptions(max_tokens=1000, reuse=True),
        guides=GuideTokenizer(),
        adapters=AdapterOptions(),
    )
    config = planned(settings={"scheduling_policy": "fcfs"}, build=BuildSpec(max_lora_rank=8))
    found = engine_arguments(config, options, Path("/model"), adapters=2)
    assert found["scheduling_policy"] == "fcfs"  # what the user gave wins
    assert found["kv_cache_memory_bytes"] == 1024 * kv_per_token(config)
    assert found["structured_outputs_config"] == {"backend": "xgrammar", "disable_any_whitespace": True}
    assert (found["enable_lora"], found["max_loras"], found["max_lora_rank"]) == (True, 2, 8)
    assert (found["enable_prefix_caching"], found["enable_chunked_prefill"]) == (True, True)
    assert found["skip_tokenizer_init"] is False
    half = engine_arguments(config, replace(options, kv_cache=KvCacheOptions(free_fraction=0.5)), Path(), adapters=0)
    assert half["kv_cache_memory_bytes"] == 5 * 10**9  # half of what the weights leave
    assert "enable_lora" not in half


def test_a_share_of_the_memory_beside_the_weights_becomes_one_of_all_memory() -> None:
    gpu = Device(index=0, name="", capability="9.0", memory=80 * 10**9, used=0, free=76 * 10**9, driver="")
    config = planned(build=BuildSpec(device="cuda"), convert=ConvertSpec())
    assert gpu_memory_utilization(config, 0.9, (gpu,)) == round((1 + 0.9 * 75) / 80, 4)
    assert gpu_memory_utilization(config, 1.0, (gpu,)) == 0.95  # what is free
    assert gpu_memory_utilization(config, 0.5, (gpu, replace(gpu, free=40 * 10**9))) == round((1 + 0.5 * 75) / 80, 4)


def test_memory_of_a_model_in_main_memory() -> None:
    runtime = VllmRuntime()
    assert runtime.memory_of(planned()).disk == 10**9
    assert runtime.memory_of(planned(build=BuildSpec(device="cuda"))).serving == 0


def test_only_a_seed_that_was_given_makes_vllm_draw_with_one() -> None:
    limits = EngineLimits(max_batch_size=4, max_seq_len=64, max_num_tokens=64, vocab_size=100)

    def words(**given: Any) -> dict[str, Any]:
        sampling = SamplingParameters(**given)
        asked = GenerationRequest(tokens=[1], max_tokens=4, sampling=sampling, num_sequences=3, top_log_probs=2)
        found: dict[str, Any] = vllm_request(asked, limits, {}, hidden_size=8, guides=False)["sampling"]
        return found

    assert words(greedy=False, seed=7, top_k=5)["seed"] == 7
    drawn = words(greedy=False, top_p=0.9)
    assert "seed" not in drawn
    assert (drawn["n"], drawn["logprobs"], drawn["ignore_eos"]) == (3, 2, True)
    assert words()["n"] == 1  # greedy sequences are copies


def test_a_prompt_table_and_the_prompts_log_probs_reach_vllm() -> None:
    limits = EngineLimits(
        max_batch_size=4, max_seq_len=64, max_num_tokens=64, vocab_size=100, max_prompt_embedding_table_size=2
    )

    def asked(limits: EngineLimits, rows: int, last: int) -> dict[str, Any]:
        request = GenerationRequest(
            tokens=[1, 100, last],
            max_tokens=4,
            sampling=SamplingParameters(),
            prompt_table=PromptTable(np.ones((rows, 8), np.float16)),
            return_log_probs=True,
            prompt_log_probs=True,
        )
        return vllm_request(request, limits, {}, hidden_size=8, guides=False)

    found = asked(limits, 2, 101)
    assert found["table"][:2] == [100, 8]
    assert np.frombuffer(found["table"][2], np.float32).tolist() == [1.0] * 16
    assert found["sampling"]["prompt_logprobs"] == 0
    with pytest.raises(RuntimeError, match="Token id 102 of the prompt is outside the vocabulary"):
        asked(limits, 2, 102)
    with pytest.raises(RuntimeError, match="has 3 rows, but the engine was built for 2 rows"):
        asked(limits, 3, 101)
    with pytest.raises(RuntimeError, match="built without a prompt table"):
        asked(replace(limits, max_prompt_embedding_table_size=0), 2, 101)


def test_lora_weights_of_a_request_are_refused_by_name() -> None:
    limits = EngineLimits(max_batch_size=4, max_seq_len=64, max_num_tokens=64, vocab_size=100)
    adapter = AdapterSource(1, np.zeros((1, 1)), np.zeros((1, 1)))
    request = GenerationRequest(tokens=[1], max_tokens=4, sampling=SamplingParameters(), adapter=adapter)
    with pytest.raises(RuntimeError, match="lora_weights are not supported by the vllm runtime, which loads adapters"):
        vllm_request(request, limits, {}, hidden_size=8, guides=False)


def test_images_go_to_models_that_read_them() -> None:
    config = planned({**LLAMA, "vision_config": {}})
    assert config.trtserve.reads_images
    assert not planned().trtserve.reads_images
    assert not planned(
        {**LLAMA, "vision_config": {}}, settings={"limit_mm_per_prompt.image": "0"}
    ).trtserve.reads_images
    options = EngineOptions()
    assert engine_arguments(config, options, Path("model"), adapters=0)["skip_tokenizer_init"] is False
    limits = resolve_limits(config, options)
    request = GenerationRequest(tokens=[1], max_tokens=4, sampling=SamplingParameters(), images=(b"GIF89a",))
    assert vllm_request(request, limits, {}, hidden_size=8, guides=False)["images"] == [b"GIF89a"]
    with pytest.raises(RuntimeError, match="images need the vllm runtime"):
        check_outputs(request, limits, generation_logits=False)


def test_auto_takes_vllm_where_nothing_else_serves_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(runtimes, "installed", lambda: None)
    monkeypatch.setattr("trtserve.executor.torch.runtime.cuda_version", lambda: None)
    monkeypatch.setattr(runtimes, "find_installation", lambda: COUNTING)  # for CPUs
    assert runtimes.automatic_runtime()[0] == "openvino"
    for_gpus = VllmInstallation(Path("/env/bin/python"), Path("/env/vllm"))
    for_gpus.__dict__.update(version="0.25.1", on_cpu=False)
    monkeypatch.setattr(runtimes, "find_installation", lambda: for_gpus)
    chosen, reason = runtimes.automatic_runtime()
    assert chosen == "vllm"
    assert "vLLM 0.25.1 on this machine, and neither TensorRT-LLM nor PyTorch" in reason


def test_vllms_process_keeps_the_folders_of_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    own = f"{sys.prefix}/lib/tritonserver", sysconfig.get_config_var("LIBDIR")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{own[0]}:/opt/driver/lib:{own[1]}")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    found = child_environment()
    assert found["LD_LIBRARY_PATH"] == "/opt/driver/lib"
    assert "PYTHONPATH" not in found
    monkeypatch.setenv("LD_LIBRARY_PATH", own[0])
    assert "LD_LIBRARY_PATH" not in child_environment()


def test_vllm_reports_its_use_only_if_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    assert child_environment()["VLLM_NO_USAGE_STATS"] == "1"
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    assert child_environment()["VLLM_NO_USAGE_STATS"] == "0"


def test_pixels_of_all_images_are_bounded_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a Pillow whose files say only their sizes, and that counts what is decoded."""
    decoded: list[int] = []

    class Sized(contextlib.nullcontext["Sized"]):
        has_transparency_data = False

        def __init__(self, content: io.BytesIO) -> None:
            super().__init__(self)
            self.width, self.height = map(int, content.read().split(b"x"))

        def convert(self, _mode: str) -> int:
            return self.width * self.height

    def exif_transpose(image: Sized) -> Sized:
        decoded.append(image.width * image.height)
        return image

    pillow = SimpleNamespace(
        Image=SimpleNamespace(open=lambda content, formats: Sized(content)),
        ImageOps=SimpleNamespace(exif_transpose=exif_transpose),
        UnidentifiedImageError=OSError,
    )
    monkeypatch.setitem(sys.modules, "PIL", pillow)
    assert engine_side._images([b"8000x5000", b"4000x6000"]) == [40_000_000, 24_000_000]
    decoded.clear()
    with pytest.raises(ValueError, match="image 0 has 40008000 pixels"):
        engine_side._images([b"8000x5001"])
    with pytest.raises(ValueError, match=r"image 1 has 24000001 pixels, .* has 64000001; .* smaller"):
        engine_side._images([b"8000x5000", b"24000001x1"])
    with pytest.raises(ValueError, match="has 65 images; at most 64"):
        engine_side._images([b"1x1"] * 65)
    assert decoded == [40_000_000]
