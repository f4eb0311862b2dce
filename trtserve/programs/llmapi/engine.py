"""TensorRT-LLM's LLM API in this process: its requests, settings, event loop, and the work of other ranks."""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..shared.arrays import MOST_BYTES, decoded, encoded, performance, words_of
from ..shared.files import read_text

Inputs = Mapping[str, NDArray[Any]]

_PREFIX = "sampling_param_"
# These have several elements.
_WORDS = ("stop", "bad")
_WANTED = (
    "return_finish_reason", "return_stop_reason", "return_cumulative_logprob", "return_num_input_tokens",
    "return_num_output_tokens",
)  # fmt: skip
_LORA = ("lora_id", "lora_name", "lora_path")


@dataclass(frozen=True)
class LlmRequest:
    """One prompt for the LLM."""

    prompt: str
    streaming: bool
    sampling: dict[str, Any]  # keywords of SamplingParams
    lora: dict[str, Any] = field(default_factory=dict)  # keywords of LoRARequest, or empty without an adapter
    wanted: frozenset[str] = frozenset()  # the `return_…` inputs that are true


def read_request(inputs: Inputs, *, decoupled: bool) -> LlmRequest:
    """Read the inputs of one request. Raises ValueError for wrong ones."""
    text = inputs.get("text_input")
    if text is None or text.size != 1:
        raise ValueError(f"text_input has {0 if text is None else text.size} prompts; this model takes one.")
    streaming = bool(_scalar(inputs, "streaming") or False)
    if streaming and not decoupled:
        raise ValueError("Streaming is only supported in decoupled mode.")
    return LlmRequest(
        prompt=_text(text.reshape(-1)[0], "text_input"),
        streaming=streaming,
        sampling=_sampling(inputs),
        lora=_lora(inputs),
        wanted=frozenset(name for name in _WANTED if _scalar(inputs, name)),
    )


def _sampling(inputs: Inputs) -> dict[str, Any]:
    keywords: dict[str, Any] = {}
    for name, value in inputs.items():
        keyword = name.removeprefix(_PREFIX)
        if keyword == name:
            continue
        if keyword in _WORDS:
            keywords[keyword] = [word for word in words_of(value, name) if word] or None
        else:
            keywords[keyword] = _scalar(inputs, name)
    keywords.setdefault("exclude_input_from_output", False)
    return {keyword: value for keyword, value in keywords.items() if value is not None}


def _lora(inputs: Inputs) -> dict[str, Any]:
    given = [name for name in _LORA if name in inputs]
    if not given:
        return {}
    if len(given) < len(_LORA):
        raise ValueError(f"{' and '.join(given)} given alone; lora_id, lora_name and lora_path must be given together.")
    source = _text(inputs["lora_ckpt_source"].item(), "lora_ckpt_source") if "lora_ckpt_source" in inputs else "hf"
    if source not in ("hf", "nemo"):
        raise ValueError(f"lora_ckpt_source is {source!r}; expected hf or nemo.")
    return {
        "lora_int_id": int(inputs["lora_id"].item()),
        "lora_name": _text(inputs["lora_name"].item(), "lora_name"),
        "lora_path": _text(inputs["lora_path"].item(), "lora_path"),
        "lora_ckpt_source": source,
    }


def _scalar(inputs: Inputs, name: str) -> Any:
    """Return the only element as a Python object, or None when the tensor is absent."""
    value = inputs.get(name)
    if value is None:
        return None
    if value.size != 1:
        raise ValueError(f"Expected a scalar tensor for tensor {name}; it has {value.size} elements.")
    first = value.reshape(-1)[0]
    return first.item() if isinstance(first, np.generic) else _text(first, name)


def _text(value: Any, name: str) -> str:
    """Return a text. Raises ValueError for one that is longer than any prompt."""
    if isinstance(value, bytes) and len(value) > MOST_BYTES:
        raise ValueError(f"{name} has {len(value)} bytes; at most {MOST_BYTES} are allowed.")
    return decoded(value, name) if isinstance(value, bytes) else str(value)


Outputs = dict[str, NDArray[Any]]

# Output → field of the KV cache's metrics.
_CACHE = {
    "kv_cache_reused_block": "num_reused_blocks",
    "kv_cache_missed_block": "num_missed_blocks",
    "kv_cache_alloc_new_blocks": "num_new_allocated_blocks",
    "kv_cache_alloc_total_blocks": "num_total_allocated_blocks",
}


def output_arrays(output: Any, wanted: Collection[str]) -> Outputs:
    """Return output name → array without a batch axis; `output` is a `RequestOutput` with the text so far."""
    sequences = output.outputs
    arrays: Outputs = {"text_output": encoded([sequence.text for sequence in sequences])}
    if "return_finish_reason" in wanted:
        arrays["finish_reason"] = encoded([str(sequence.finish_reason) for sequence in sequences])
    if "return_stop_reason" in wanted:
        arrays["stop_reason"] = encoded([str(sequence.stop_reason) for sequence in sequences])
    if "return_cumulative_logprob" in wanted:
        # The LLM returns None when it has no number; NumPy makes it NaN.
        arrays["cumulative_logprob"] = np.array([each.cumulative_logprob for each in sequences], dtype=np.float32)
    if "return_num_input_tokens" in wanted:
        arrays["num_input_tokens"] = np.array([len(output.prompt_token_ids)], dtype=np.int32)
    if "return_num_output_tokens" in wanted:
        arrays["num_output_tokens"] = np.array([sum(len(each.token_ids) for each in sequences)], dtype=np.int32)
    if (metrics := getattr(sequences[0], "request_perf_metrics", None)) is not None:
        arrays.update(performance(metrics, _CACHE))
        arrays["kv_cache_hit_rate"] = np.array([metrics.kv_cache_metrics.kv_cache_hit_rate], dtype=np.float32)
    return arrays


_JOB_VARIABLES = (
    "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_SIZE", "OMPI_FIRST_RANKS", "OMPI_APP_CTX_NUM_PROCS", "OMPI_MCA_orte_",
    "ORTE_", "PMI_", "PMIX_",
)  # fmt: skip
_CONFIGURATION = "PMIX_MCA_"


def forget_mpi_job() -> None:
    """Remove the environment variables of Triton's MPI job, because the LLM starts its own workers."""
    for name in list(os.environ):
        if name.startswith(_JOB_VARIABLES) and not name.startswith(_CONFIGURATION):
            del os.environ[name]


def read_settings(folder: Path) -> dict[str, Any]:
    """Read model.yaml, or the file that LLM_CONFIG_PATH names. Raises ValueError when it names no model."""
    import yaml

    path = folder / os.environ.get("LLM_CONFIG_PATH", "model.yaml")
    content = yaml.safe_load(read_text(path))
    if not isinstance(content, dict) or "model" not in content:
        raise ValueError(f"{path} names no model.")
    return content


def choose_gpus(groups: str, instances: int, instance: str) -> int | None:
    """Make only the GPUs of this instance visible and return their number, or None when it has all GPUs.

    `groups` is the parameter gpu_device_ids, `instance` the name that Triton gave the instance, such as `llm_0_1`. Call
    this before TensorRT-LLM is imported, because CUDA opens all visible GPUs then. Raises ValueError for a wrong list.
    """
    if instances <= 1 and not groups:
        return None
    lists = groups.split(";") if groups else []
    if len(lists) != instances:
        raise ValueError(
            f"Parameter gpu_device_ids is {groups!r}; expected one group of GPUs for each of {instances} instances."
        )
    chosen = lists[int(instance.rpartition("_")[2])] if instances > 1 else lists[0]
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["TRTLLM_VISIBLE_DEVICES"] = chosen
    return len(chosen.split(","))


class LlmEngine:
    """One `LLM` with its own event loop; only rank 0 has one."""

    def __init__(self, settings: Mapping[str, Any], repository: Path, *, gpus: int | None) -> None:
        """Load the model; other ranks work for rank 0 until it ends."""
        forget_mpi_job()
        self._api = importlib.import_module("tensorrt_llm")
        utilities = importlib.import_module("tensorrt_llm._utils")
        self.leads = utilities.global_mpi_rank() == 0
        if not self.leads:
            communicator = importlib.import_module("mpi4py.MPI").COMM_WORLD
            with importlib.import_module("mpi4py.futures").MPICommExecutor(communicator):
                pass
            return
        keywords = {name: value for name, value in settings.items() if name != "triton_config"}
        # A folder of the repository becomes an absolute path; other folders and names of the hub stay as they are.
        folder = repository / str(keywords["model"])
        keywords["model"] = str(folder) if folder.is_dir() else str(keywords["model"])
        if gpus is not None:
            keywords["gpus_per_node"] = gpus
        if utilities.global_mpi_size() > 1:
            keywords["_mpi_session"] = _mpi_session()
        self._llm, self._turns = self._api.LLM(**keywords), 0
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    def start(self, request: LlmRequest) -> Any:
        """Start a request, in the event loop; the result can be iterated there, and has `abort`."""
        parameters = self._api.SamplingParams(**request.sampling)
        keywords: dict[str, Any] = {}
        if request.lora:
            requests = importlib.import_module("tensorrt_llm.executor.request")
            keywords["lora_request"] = requests.LoRARequest(**request.lora)
        return self._llm.generate_async(request.prompt, parameters, streaming=request.streaming, **keywords)

    def turn(self) -> int:
        """Ask the event loop for a turn, and return how many of them it has made."""
        self.loop.call_soon_threadsafe(lambda: setattr(self, "_turns", self._turns + 1))
        return self._turns

    def healthy(self) -> bool:
        """Return whether the LLM still works; True in older releases, which cannot tell."""
        check = getattr(self._llm, "_check_health", None)
        return check is None or bool(check())

    def close(self) -> None:
        """Stop the event loop and the model."""
        if not self.leads:
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self.loop.close()
        self._llm.shutdown()


def _mpi_session() -> Any:
    communicator = importlib.import_module("mpi4py.MPI").COMM_WORLD
    session = importlib.import_module("tensorrt_llm.llmapi").MpiCommSession
    return session(comm=communicator, n_workers=communicator.Get_size())
