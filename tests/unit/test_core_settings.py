"""Parameters of config.pbtxt become an executor configuration, in every release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtserve.nvidia.releases import RELEASES
from trtserve.programs.core import settings
from trtserve.programs.core import settings as guides
from trtserve.programs.core.settings import load_executor_module
from trtserve.programs.shared.parameters import ModelParameters


class Core:
    """The core model's readers of parameters, with the warnings that they gave."""

    def __init__(self, repository: Path, release: str) -> None:
        self.settings = settings
        self.guides = guides
        self.module = load_executor_module("openvino", release)
        self.reader = ModelParameters
        self.repository = repository
        self.warnings: list[str] = []

    def parameters(self, values: dict[str, str]) -> Any:
        entries = {name: {"string_value": value} for name, value in values.items()}
        return self.reader({"parameters": entries}, self.repository, self.warnings.append)

    def config(self, queue: int = 0, **values: str) -> Any:
        """The ExecutorConfig of these parameters."""
        model = {"dynamic_batching": {"default_queue_policy": {"max_queue_size": queue}}}
        given = self.parameters({"gpt_model_type": "inflight_fused_batching", **values})
        return self.settings.executor_config(self.module, given, model)

    def guided(self, **values: str) -> Any:
        """The GuidedDecodingConfig of these parameters."""
        return self.guides.guided_decoding_config(self.module, self.parameters(values))


@pytest.fixture
def core(tmp_path: Path) -> Core:
    return Core(tmp_path, "1.2")


@pytest.mark.parametrize(
    ("word", "batching"),
    [("inflight_fused_batching", "INFLIGHT"), ("inflight_batching", "INFLIGHT"), ("V1", "STATIC"), ("v1", "STATIC")],
)
def test_batching(core: Core, word: str, batching: str) -> None:
    assert core.config(gpt_model_type=word).batching_type.name == batching


@pytest.mark.parametrize("word", ["", "inflight", "${batching_strategy}"])
def test_an_unknown_gpt_model_type_does_not_load(core: Core, word: str) -> None:
    with pytest.raises(ValueError, match="gpt_model_type"):
        core.config(gpt_model_type=word)


def test_policies(core: Core) -> None:
    assert core.config().scheduler_config.capacity_scheduler_policy.name == "GUARANTEED_NO_EVICT"
    policy = core.config(batch_scheduler_policy="max_utilization").scheduler_config.capacity_scheduler_policy
    assert policy.name == "MAX_UTILIZATION"
    assert core.warnings == []


def test_unknown_words_give_a_warning_and_the_default(core: Core) -> None:
    config = core.config(batch_scheduler_policy="static_batch", decoding_mode="best")
    assert config.scheduler_config.capacity_scheduler_policy.name == "GUARANTEED_NO_EVICT"
    assert config.decoding_config is None
    assert [warning.split(";")[0] for warning in core.warnings] == [
        "Parameter decoding_mode is 'best'",
        "Parameter batch_scheduler_policy is 'static_batch'",
    ]


@pytest.mark.parametrize("release", RELEASES)
def test_decoding_modes(tmp_path: Path, release: str) -> None:
    core = Core(tmp_path, release)
    for word in ("top_k", "top_p", "top_k_top_p", "beam_search", "medusa"):
        assert core.config(decoding_mode=word).decoding_config.decoding_mode is not None
    assert core.warnings == []


@pytest.mark.parametrize("word", ["redrafter", "lookahead", "eagle"])
def test_modes_of_later_releases(tmp_path: Path, word: str) -> None:
    old, new = Core(tmp_path, "0.15"), Core(tmp_path, "0.16")
    assert old.config(decoding_mode=word).decoding_config is None
    assert len(old.warnings) == 1
    assert new.config(decoding_mode=word).decoding_config is not None
    assert new.warnings == []


def test_windows(core: Core, tmp_path: Path) -> None:
    assert core.config(max_attention_window_size="64,128").kv_cache_config.max_attention_window == [64, 128]
    old = Core(tmp_path, "0.12")
    assert old.config(max_attention_window_size="64").kv_cache_config.max_attention_window == [64]


def test_numbers_and_switches(core: Core) -> None:
    config = core.config(
        queue=7,
        max_beam_width="3",
        enable_kv_cache_reuse="false",
        kv_cache_host_memory_bytes="1000",
        enable_chunked_context="True",
        normalize_log_probs="0",
        lora_cache_optimal_adapter_size="4",
        lora_cache_max_adapter_size="16",
        lora_cache_gpu_memory_fraction="0.25",
        lora_cache_host_memory_bytes="5000",
        lora_prefetch_dir="adapters",
    )
    cache, adapters = config.kv_cache_config, config.peft_cache_config
    assert (config.max_beam_width, config.max_queue_size) == (3, 7)
    assert (cache.enable_block_reuse, cache.host_cache_size) == (False, 1000)
    assert (config.enable_chunked_context, config.normalize_log_probs) == (True, False)
    assert (adapters.optimal_adapter_size, adapters.max_adapter_size) == (4, 16)
    assert (adapters.device_cache_percent, adapters.host_cache_size) == (0.25, 5000)
    assert adapters.lora_prefetch_dir == str(core.repository / "adapters")


@pytest.mark.parametrize("release", RELEASES)
def test_unset_parameters_keep_the_defaults(tmp_path: Path, release: str) -> None:
    core = Core(tmp_path, release)
    reuse = core.config(enable_kv_cache_reuse="${enable_kv_cache_reuse}").kv_cache_config.enable_block_reuse
    assert reuse == core.module.since("0.17")
    assert core.config(max_beam_width="two").max_beam_width == 1
    assert core.warnings == ["Parameter max_beam_width is 'two', which is not a number; it is ignored."]


def tokenizer(folder: Path, model: dict[str, Any], **files: Any) -> str:
    """A tokenizer folder in the repository; its relative name."""
    (folder / "tokens").mkdir()
    content = {"model": model, "added_tokens": [{"id": 2, "content": "</s>"}]}
    for name, value in {"tokenizer": content, **files}.items():
        (folder / "tokens" / f"{name}.json").write_text(json.dumps(value))
    return "tokens"


@pytest.mark.parametrize("vocabulary", [{"a": 0, "b": 1}, [["a", -1.0], ["b", -2.0]]], ids=["table", "unigram"])
@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>"}])
def test_guided_decoding_reads_the_tokenizer(core: Core, tmp_path: Path, vocabulary: Any, eos: Any) -> None:
    folder = tokenizer(
        tmp_path,
        {"vocab": vocabulary},
        tokenizer_config={"eos_token": eos},
        generation_config={"eos_token_id": [2, 1]},
    )
    config = core.guided(guided_decoding_backend="llguidance", tokenizer_dir=folder)
    assert config.backend.name == "LLGUIDANCE"
    assert config.encoded_vocab == ["a", "b", "</s>"]
    assert json.loads(config.tokenizer_str)["model"]["vocab"] == vocabulary
    assert config.stop_token_ids == [2, 1]


@pytest.mark.parametrize(
    ("release", "word", "backend"),
    [("1.2", "xgrammar", "XGRAMMAR"), ("0.19", "xgrammar", "XGRAMMAR"), ("0.19", "llguidance", "XGRAMMAR")],
)
def test_backends(tmp_path: Path, release: str, word: str, backend: str) -> None:
    folder = tokenizer(tmp_path, {"vocab": {"a": 0, "b": 1}})
    config = Core(tmp_path, release).guided(guided_decoding_backend=word, tokenizer_dir=folder)
    assert config.backend.name == backend
    assert config.stop_token_ids == []


def test_guided_decoding_reads_nvidias_tokenizer_info(core: Core, tmp_path: Path) -> None:
    info = {"encoded_vocab": ["x"], "tokenizer_str": "{}", "stop_token_ids": [0], "vocab_type": 2}
    (tmp_path / "info.json").write_text(json.dumps(info))
    config = core.guided(guided_decoding_backend="xgrammar", xgrammar_tokenizer_info_path="info.json")
    assert (config.encoded_vocab, config.tokenizer_str, config.stop_token_ids) == (["x"], "{}", [0])


@pytest.mark.parametrize("content", [None, "{", "[]", '{"encoded_vocab": ["x"]}'])
def test_a_broken_tokenizer_info_is_an_error(core: Core, tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "info.json").write_text(content)
    with pytest.raises(ValueError, match=r"xgrammar_tokenizer_info_path is .*expected a JSON file with encoded_vocab"):
        core.guided(guided_decoding_backend="xgrammar", xgrammar_tokenizer_info_path="info.json")


def test_guided_decoding_is_off_by_default(core: Core) -> None:
    assert core.guided() is None
    with pytest.raises(ValueError, match="expected one of xgrammar, llguidance"):
        core.guided(guided_decoding_backend="outlines")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        core.guided(guided_decoding_backend="xgrammar", tokenizer_dir="nowhere")


def test_ngram_drafts(core: Core) -> None:
    assert core.config().ngram_max_draft_len == 11
    assert core.config(ngram_max_draft_len="3").ngram_max_draft_len == 3
