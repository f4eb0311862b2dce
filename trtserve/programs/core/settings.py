"""Build the ExecutorConfig from the parameters of config.pbtxt; unset ones keep the executor's defaults."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..shared.files import MOST_TOKENIZER, read_json, read_object, read_text
from ..shared.parameters import ModelParameters
from ..shared.tokenizer import configured_end_ids, token_ids

Keywords = dict[str, Any]

_BATCHING = {"inflight_fused_batching": "INFLIGHT", "inflight_batching": "INFLIGHT", "v1": "STATIC"}
_POLICIES = ("max_utilization", "guaranteed_no_evict")
_NGRAM_DRAFT = 11  # unless the parameter `ngram_max_draft_len` says otherwise: as many as a measured step has room for
# Mode → constructor of DecodingMode, and the first release that has it.
_DECODING_MODES = {
    "auto": ("Auto", "0.12"),
    "top_k": ("TopK", "0.12"),
    "top_p": ("TopP", "0.12"),
    "top_k_top_p": ("TopKTopP", "0.12"),
    "beam_search": ("BeamSearch", "0.12"),
    "medusa": ("Medusa", "0.12"),
    "redrafter": ("ExplicitDraftTokens", "0.16"),
    "lookahead": ("Lookahead", "0.16"),
    "eagle": ("Eagle", "0.16"),
}


def executor_config(module: ExecutorModule, parameters: ModelParameters, config: dict[str, Any]) -> Any:
    """Build the ExecutorConfig; ValueError names a parameter with a wrong value.

    As in NVIDIA's backend, an unknown word is an error for `gpt_model_type`, and gives a warning and the default for
    `batch_scheduler_policy` and `decoding_mode`.
    """
    api = module.api
    queue_policy = config.get("dynamic_batching", {}).get("default_queue_policy", {})
    keywords = given(
        max_beam_width=parameters.integer("max_beam_width"),
        enable_chunked_context=parameters.switch("enable_chunked_context"),
        normalize_log_probs=parameters.switch("normalize_log_probs"),
        iter_stats_max_iterations=parameters.integer("iter_stats_max_iterations"),
        request_stats_max_iterations=parameters.integer("request_stats_max_iterations"),
        gpu_weights_percent=parameters.number("gpu_weights_percent"),
        max_queue_size=int(queue_policy.get("max_queue_size", 0)) or None,
        parallel_config=_parallel_config(module, parameters),
        decoding_config=_decoding_config(module, parameters),
    )
    if module.since("0.20") and parameters.switch("enable_trt_overlap"):
        keywords["enable_trt_overlap"] = True
    value = parameters.text("gpt_model_type")
    if value is None or value.lower() not in _BATCHING:
        raise ValueError(f"Parameter gpt_model_type is {value!r}; expected one of {', '.join(_BATCHING)}.")
    keywords["batching_type"] = getattr(api.BatchingType, _BATCHING[value.lower()])
    scheduler_policy = parameters.word("batch_scheduler_policy", _POLICIES, default="guaranteed_no_evict")
    keywords["scheduler_config"] = api.SchedulerConfig(getattr(api.CapacitySchedulerPolicy, scheduler_policy.upper()))
    keywords["kv_cache_config"] = api.KvCacheConfig(**_kv_cache(module, parameters))
    keywords["peft_cache_config"] = api.PeftCacheConfig(**_peft_cache(parameters))
    keywords["extended_runtime_perf_knob_config"] = _knobs(api, parameters)
    # This model starts decoder-only executors. (The embedded one refuses the parameter itself.)
    if module.torch is not None and (path := parameters.text("encoder_model_path")) is not None:
        raise ValueError(f"Parameter encoder_model_path is {path!r}; this model serves decoder-only engines.")
    settings = api.ExecutorConfig(**keywords)
    length = parameters.integer("ngram_max_draft_len")
    if module.torch is None:
        settings.ngram_max_draft_len = _NGRAM_DRAFT if length is None else length
    elif length is not None:
        raise ValueError(f"Parameter ngram_max_draft_len is {length}; TensorRT-LLM's executor makes no such drafts.")
    return settings


def given(**keywords: Any) -> Keywords:
    """Return the keywords that have a value."""
    return {name: value for name, value in keywords.items() if value is not None}


def _kv_cache(module: ExecutorModule, parameters: ModelParameters) -> Keywords:
    reuse = parameters.switch("enable_kv_cache_reuse")
    if reuse is None and module.torch is None:
        reuse = module.since("0.17")  # as in TensorRT-LLM; the embedded executor has the newest default
    keywords = given(
        enable_block_reuse=reuse,
        max_tokens=parameters.integer("max_tokens_in_paged_kv_cache"),
        sink_token_length=parameters.integer("sink_token_length"),
        free_gpu_memory_fraction=parameters.number("kv_cache_free_gpu_mem_fraction"),
        host_cache_size=parameters.integer("kv_cache_host_memory_bytes"),
        onboard_blocks=parameters.switch("kv_cache_onboard_blocks"),
        cross_kv_cache_fraction=parameters.number("cross_kv_cache_fraction"),
    )
    if windows := parameters.text("max_attention_window_size"):
        sizes = _integers("max_attention_window_size", windows)
        keywords["max_attention_window"] = sizes if module.since("0.13") else sizes[0]
    return keywords


def _peft_cache(parameters: ModelParameters) -> Keywords:
    prefetched = parameters.path("lora_prefetch_dir")
    return given(
        optimal_adapter_size=parameters.integer("lora_cache_optimal_adapter_size"),
        max_adapter_size=parameters.integer("lora_cache_max_adapter_size"),
        device_cache_percent=parameters.number("lora_cache_gpu_memory_fraction"),
        host_cache_size=parameters.integer("lora_cache_host_memory_bytes"),
        lora_prefetch_dir=prefetched and str(prefetched),
    )


def _knobs(api: Any, parameters: ModelParameters) -> Any:
    knobs = api.ExtendedRuntimePerfKnobConfig(
        **given(
            multi_block_mode=parameters.switch("multi_block_mode"),
            enable_context_fmha_fp32_acc=parameters.switch("enable_context_fmha_fp32_acc"),
        )
    )
    # TensorRT-LLM's constructor does not take these properties.
    later = given(
        cuda_graph_mode=parameters.switch("cuda_graph_mode"),
        cuda_graph_cache_size=parameters.integer("cuda_graph_cache_size"),
    )
    for name, value in later.items():
        setattr(knobs, name, value)
    return knobs


def _parallel_config(module: ExecutorModule, parameters: ModelParameters) -> Any:
    api = module.api
    devices = parameters.text("gpu_device_ids")
    keywords = given(device_ids=_integers("gpu_device_ids", devices) if devices else None)
    if os.environ.get("TRTLLM_ORCHESTRATOR") == "1":
        if os.environ.get("TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES", "1") == "0":
            raise ValueError("This model spawns its own workers; pre-started workers need the C++ backend.")
        keywords["communication_mode"] = api.CommunicationMode.ORCHESTRATOR
        worker = parameters.text("executor_worker_path") or ""
        keywords["orchestrator_config"] = api.OrchestratorConfig(True, worker)
    return api.ParallelConfig(**keywords) if keywords else None


def _decoding_config(module: ExecutorModule, parameters: ModelParameters) -> Any:
    api = module.api
    keywords: Keywords = {}
    modes = {word: name for word, (name, since) in _DECODING_MODES.items() if module.since(since)}
    if (mode := parameters.word("decoding_mode", modes, default="auto")) != "auto":
        keywords["decoding_mode"] = getattr(api.DecodingMode, modes[mode])()
    if choices := parameters.text("medusa_choices"):
        keywords["medusa_choices"] = _choices(choices)
    if choices := parameters.text("eagle_choices"):
        keywords["eagle_config"] = api.EagleConfig(_choices(choices))
    names = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
    lookahead = [parameters.integer(name) for name in names]
    if any(value is not None for value in lookahead):
        if None in lookahead:
            raise ValueError(f"The parameters {', '.join(names)} must be given together.")
        keywords["lookahead_decoding_config"] = api.LookaheadDecodingConfig(*lookahead)
    return api.DecodingConfig(**keywords) if keywords else None


def _integers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"Parameter {name} is {text!r}; expected numbers separated by commas.") from None


def _choices(text: str) -> list[list[int]]:
    """`{0,0},{0,1}` → [[0, 0], [0, 1]]."""
    return [[int(part) for part in group.split(",")] for group in re.findall(r"\{([\d,\s]+)\}", text)]


_BACKENDS = ("xgrammar", "llguidance")


def guided_decoding_config(module: ExecutorModule, parameters: ModelParameters) -> Any:
    """Return the GuidedDecodingConfig of the parameters, or None when guided decoding is off.

    Raises ValueError for an unknown backend, and for a folder without `tokenizer.json`. TensorRT-LLM has `llguidance`
    since 1.0; the embedded executor of older releases accepts the same guides under the name xgrammar.
    """
    backend = parameters.text("guided_decoding_backend")
    if backend is None or not module.since("0.16"):
        return None
    if backend.lower() not in _BACKENDS:
        raise ValueError(f"Parameter guided_decoding_backend is {backend!r}; expected one of {', '.join(_BACKENDS)}.")
    config = module.api.GuidedDecodingConfig
    name = backend.upper() if module.since("1.0") else "XGRAMMAR"
    return config(getattr(config.GuidedDecodingBackend, name), **_tokenizer(parameters))


def _tokenizer(parameters: ModelParameters) -> dict[str, Any]:
    """Return `encoded_vocab`, `tokenizer_str` and `stop_token_ids`.

    They come from the file that `xgrammar_tokenizer_info_path` names, else from the tokenizer's own files.
    """
    info = parameters.path("xgrammar_tokenizer_info_path")
    if info is not None:
        return _of_file(info)
    folder = parameters.path("tokenizer_dir")
    if folder is None or not (folder / "tokenizer.json").is_file():
        raise ValueError(
            "Parameter guided_decoding_backend is set; it needs a tokenizer_dir with the file tokenizer.json, "
            f"and {str(folder)!r} has none."
        )
    text = read_text(folder / "tokenizer.json", MOST_TOKENIZER)
    ids = token_ids(json.loads(text))
    vocabulary = sorted(ids, key=lambda token: ids[token])
    return {"encoded_vocab": vocabulary, "tokenizer_str": text, "stop_token_ids": _stop_ids(folder, ids)}


def _of_file(info: Path) -> dict[str, Any]:
    try:
        content = read_json(info, MOST_TOKENIZER)
        return {name: content[name] for name in ("encoded_vocab", "tokenizer_str", "stop_token_ids")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"Parameter xgrammar_tokenizer_info_path is {str(info)!r}; expected a JSON file with encoded_vocab, "
            f"tokenizer_str and stop_token_ids, but reading it gave {type(error).__name__}: {error}"
        ) from None


def _stop_ids(folder: Path, ids: dict[str, int]) -> list[int]:
    """Return the tokenizer's EOS id and the end ids that the model's files name."""
    eos = read_object(folder / "tokenizer_config.json").get("eos_token")
    token = eos.get("content") if isinstance(eos, dict) else eos
    return list(dict.fromkeys([*([ids[token]] if token in ids else []), *configured_end_ids(folder)]))


def runs_on_gpu(engine: Path) -> bool:
    """Return whether an engine of the embedded executor runs on a GPU."""
    return (read_object(engine / "config.json").get("trtserve") or {}).get("device") == "cuda"


# NumPy has no bfloat16: the two bytes of a value, on their way from Triton to PyTorch.
BFLOAT16 = np.dtype([("bfloat16", "<i2")])


@lru_cache(maxsize=16)
def release_order(release: str) -> tuple[int, int]:
    """`0.17.0.post1` → (0, 17)."""
    major, minor = release.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class ExecutorModule:
    """TensorRT-LLM's executor bindings, or trtserve's embedded executor with the same interface."""

    api: Any  # the module with the classes
    release: tuple[int, int]  # the TensorRT-LLM release whose keywords the classes take
    torch: Any = None
    """PyTorch, whose tensors TensorRT-LLM takes, or None for the embedded executor, which takes NumPy arrays."""

    def since(self, release: str) -> bool:
        """Return whether the classes are those of `release` or later."""
        return self.release >= release_order(release)

    def as_tensor(self, array: NDArray[Any]) -> Any:
        """Convert an array to the tensor type of the executor."""
        array = np.ascontiguousarray(array)
        if self.torch is None:
            return array
        if array.dtype == BFLOAT16:
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)

    def bfloat16_array(self, capsule: Any) -> NDArray[Any]:
        """Convert the DLPack capsule of a BF16 input to an array: BFLOAT16 for TensorRT-LLM, else float32."""
        if self.torch is None:
            return bfloat16_as_float32(capsule)
        tensor = self.torch.from_dlpack(capsule).cpu().contiguous()
        array: NDArray[Any] = tensor.view(self.torch.int16).numpy().view(BFLOAT16)
        return array

    def as_array(self, tensor: Any) -> NDArray[Any]:
        """Convert a tensor of the executor to a NumPy array; bfloat16 becomes float32."""
        if self.torch is None:
            return np.asarray(tensor)
        tensor = tensor.detach().cpu()
        array: NDArray[Any] = (tensor.float() if tensor.dtype == self.torch.bfloat16 else tensor).numpy()
        return array


def load_executor_module(name: str | None, release: str | None) -> ExecutorModule:
    """Import the embedded executor when the parameter `executor` names a runtime, TensorRT-LLM's when it is unset."""
    if name is not None:
        known = importlib.import_module("trtserve.executor.loaders").MODELS
        if name not in known:
            expected = " or ".join(known)
            raise ValueError(f"Parameter executor is {name!r}; expected {expected}, or no value for TensorRT-LLM.")
        return load_embedded_executor(release)
    api = importlib.import_module("tensorrt_llm.bindings.executor")
    return ExecutorModule(api, release_order(str(api.__version__)), importlib.import_module("torch"))


def load_embedded_executor(release: str | None) -> ExecutorModule:
    """Import the embedded executor for a repository of `release`; None: the newest."""
    wanted = release or str(importlib.import_module("trtserve.nvidia.releases").NEWEST)
    return ExecutorModule(importlib.import_module("trtserve.executor.api"), release_order(wanted))


_CPU = 1
_BFLOAT_CODE = 4


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def bfloat16_as_float32(capsule: Any) -> NDArray[np.float32]:
    """Return a float32 copy of the tensor. Raises ValueError when it is not BF16 on the CPU.

    A bfloat16 is the upper half of a float32. The tensor must be contiguous, as Triton's are. The capsule is not
    consumed: its owner frees the memory.
    """
    read = ctypes.pythonapi.PyCapsule_GetPointer
    read.restype, read.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = ctypes.cast(read(capsule, b"dltensor"), ctypes.POINTER(_Tensor)).contents
    if (tensor.device_type, tensor.code, tensor.bits, tensor.lanes) != (_CPU, _BFLOAT_CODE, 16, 1):
        raise ValueError(f"A tensor of type code {tensor.code} and {tensor.bits} bits is not a BF16 tensor on the CPU.")
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    count = int(np.prod(shape))
    halves = np.frombuffer(ctypes.string_at(tensor.data + tensor.byte_offset, count * 2) if count else b"", np.uint16)
    return (halves.astype(np.uint32) << 16).view(np.float32).reshape(shape)
