"""The Python core model against TensorRT-LLM's bindings: a strict stand-in per release, every parameter and input."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtserve.nvidia.releases import RELEASES, order
from trtserve.programs.core.request import RequestFactory
from trtserve.programs.core.settings import ExecutorModule, executor_config, load_executor_module
from trtserve.programs.shared.parameters import ModelParameters
from trtserve.repository.profiles import CORE, TensorSpec, profile

STAND_INS = Path(__file__).parents[1] / "support" / "stand_ins"

# A value that asks for something, for each kind of parameter; those that only one kind of engine takes by name.
VALUES = {"bool": "true", "int": "3", "float": "0.5", "list": "1", "text": "x"}
OWN_VALUES = {
    "gpt_model_type": "inflight_fused_batching",
    "batch_scheduler_policy": "max_utilization",
    "decoding_mode": "top_k_top_p",
    "medusa_choices": "{0},{0,0}",
    "eagle_choices": "{0},{0,0}",
    "max_attention_window_size": "64",
    "enable_trt_overlap": "false",
    "lora_prefetch_dir": "/adapters",
    "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
}
NOT_READ = {"gpt_model_path", "encoder_model_path", "tokenizer_dir", "xgrammar_tokenizer_info_path"}
NOT_FOR_DECODERS = {
    "encoder_input_features",
    "encoder_output_lengths",
    "cross_attention_mask",
    "skip_cross_attn_blocks",
    "decoder_input_ids",
    "decoder_input_lengths",
    "context_phase_params",
    "stop",
    # One row has one adapter, one kind of draft and one prompt: these go with others or exclude them.
    "num_return_sequences",
}
OWN_INPUTS: dict[str, Any] = {
    "input_ids": [[5, 6, 7]],
    "input_lengths": [[3]],
    "request_output_len": [[4]],
    "stop_words_list": [[[1, 2], [1, 2]]],
    "bad_words_list": [[[1, 2], [2, -1]]],
    "beam_width": [[1]],
    "prompt_table_extra_ids": [[1, 2, 3]],
    "guided_decoding_guide_type": [[b"regex"]],
    "guided_decoding_guide": [[b"[a-z]+"]],
    "retention_token_range_starts": [[0, 1]],
    "retention_token_range_ends": [[1, -1]],
    "retention_token_range_priorities": [[50, 60]],
    "retention_token_range_durations_ms": [[-1, 100]],
    "retention_decode_priority": [[70]],
    "retention_decode_duration_ms": [[100]],
    "top_p": [[0.5]],
    "mrope_position_deltas": [[2]],
}
SIZES = {"prompt_embedding_table": (1, 2, 8), "draft_input_ids": (1, 2), "draft_logits": (1, 2, 16)}
DTYPES = {
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "FP16": np.float16,
    "BOOL": np.bool_,
    "STRING": np.object_,
    "$logits": np.float32,
    "$prompt": np.float16,
    "$lora": np.float16,
}


def forget_stand_ins() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("tensorrt_llm", "torch")]:
        del sys.modules[name]


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A TensorRT-LLM of one release, where Python looks for it; PyTorch itself is put aside."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("tensorrt_llm", "torch")}
    forget_stand_ins()
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.setenv("TRTSERVE_STAND_IN_RELEASE", f"{request.param}.0")
    yield str(request.param)
    forget_stand_ins()
    sys.modules.update(kept)


def executor_module() -> ExecutorModule:
    return load_executor_module(None, None)


def test_every_parameter(release: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = executor_module()
    rows = profile(release).models[CORE].parameters
    values = {row.name: OWN_VALUES.get(row.name, VALUES.get(row.values.kind, "1")) for row in rows}
    # In 0.14 the template has it and the bindings do not: NVIDIA's own model could not start with it either.
    absent = NOT_READ | ({"cross_kv_cache_fraction"} if release == "0.14" else set())
    given = {name: value for name, value in values.items() if name not in absent}
    warned: list[str] = []
    reader = ModelParameters(
        {"parameters": {name: {"string_value": value} for name, value in given.items()}}, tmp_path, warned.append
    )
    queue = {"dynamic_batching": {"default_queue_policy": {"max_queue_size": 7}}}
    config = executor_config(module, reader, queue)
    assert not warned
    assert config.max_queue_size == 7
    assert config.kv_cache_config.free_gpu_memory_fraction == 0.5
    assert config.kv_cache_config.max_attention_window == (64 if release == "0.12" else [64])
    if order(release) >= order("0.15"):
        assert config.extended_runtime_perf_knob_config.cuda_graph_mode is True
    monkeypatch.setenv("TRTLLM_ORCHESTRATOR", "1")
    parallel = executor_config(module, reader, queue).parallel_config
    assert parallel.communication_mode is module.api.CommunicationMode.ORCHESTRATOR
    assert parallel.device_ids == [1]
    monkeypatch.setenv("TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES", "0")
    with pytest.raises(ValueError, match="pre-started"):
        executor_config(module, reader, queue)


def value_of(tensor: TensorSpec) -> Any:
    """A batch of one row that asks for something."""
    dtype = DTYPES[tensor.type]
    if tensor.name in OWN_INPUTS:
        return np.array(OWN_INPUTS[tensor.name], dtype=dtype)
    shape = SIZES.get(tensor.name, (1, *(2 if size < 0 else size for size in tensor.dims)))
    return np.ones(shape, dtype=dtype)


def test_every_input(release: str) -> None:
    module = executor_module()
    factory = RequestFactory(module, decoupled=True, exclude_input=False)
    inputs = {
        tensor.name: value_of(tensor)
        for tensor in profile(release).models[CORE].inputs
        if tensor.name not in NOT_FOR_DECODERS and not (release < "0.17" and tensor.name.startswith("mrope"))
    }
    made = factory.requests(inputs)[0]
    torch = importlib.import_module("torch")
    assert made.input_token_ids == [5, 6, 7]
    for tensor in (made.embedding_bias, made.lora_config.weights, made.prompt_tuning_config.embedding_table):
        assert isinstance(tensor, torch.Tensor)
    assert made.streaming is True
    assert made.sampling_config.top_k == 1
    seed = made.sampling_config.random_seed if release == "0.12" else made.sampling_config.seed
    assert seed == 1


def test_a_plain_request_passes_no_none(release: str) -> None:
    """What was not given is left to the executor, which takes None for few parameters."""
    module = executor_module()
    factory = RequestFactory(module, decoupled=True, exclude_input=False)
    plain = {name: np.array(OWN_INPUTS[name]) for name in ("input_ids", "input_lengths", "request_output_len")}
    assert factory.requests(plain)[0].streaming is False
    if order(release) >= order("0.14"):
        made = factory.requests({**plain, "num_return_sequences": np.array([[2]])})[0]
        owner = made if order(release) < order("0.16") else made.sampling_config
        assert owner.num_return_sequences == 2


def test_the_stand_in_is_strict(release: str) -> None:
    api = executor_module().api
    wrong_calls: tuple[Callable[[], Any], ...] = (
        lambda: api.OutputConfig(return_log_probs=None),
        lambda: api.SchedulerConfig(unknown=1),
        lambda: api.ExtendedRuntimePerfKnobConfig(cuda_graph_mode=True),
        lambda: api.PromptTuningConfig(np.zeros((2, 8), np.float16)),
        lambda: api.KvCacheConfig(max_attention_window=[1] if release == "0.12" else 1),
    )
    for wrong in wrong_calls:
        with pytest.raises(TypeError):
            wrong()
