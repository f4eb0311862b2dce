"""Options of `repo`, how a model repository is assembled, and of `check`, what it must satisfy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from trtserve.errors import UsageError
from trtserve.specs.options import ForRelease, Spec, option

REPOSITORY = "Model repository"
_repository = partial(option, panel=REPOSITORY)
_requests = partial(option, panel="Requests and KV cache")
PATHS = "Names and paths"
_paths = partial(option, panel=PATHS)

_SUFFIX = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class RepositorySpec(ForRelease):
    """How a model repository is assembled from an engine and a tokenizer.

    `settings` are parameters of the Triton models, keyed `parameter` (core model) or `model.parameter`; options such as
    `batching_strategy` set the common ones, and None leaves them alone.
    """

    name: str = option(
        "", metavar="NAME", help="Name under which the model is served.", unset="the engine's name", common=True
    )
    streaming: bool = option(
        True,
        "--streaming/--no-streaming",
        "--decoupled/--no-decoupled",
        help="Stream answers: the core and BLS models are decoupled and accept streaming calls only.",
        common=True,
    )
    settings: dict[str, str] = option(
        {},
        "--set",
        metavar="[MODEL.]KEY=VALUE",
        help="Set a parameter of a Triton model (of the core model without MODEL); repeatable.",
        common=True,
    )
    lora: dict[str, Path] = option(
        {},
        "--lora",
        metavar="NAME=FOLDER",
        help="Serve this LoRA adapter under NAME: a PEFT folder or one that `trtserve lora` made; repeatable.",
        common=True,
    )
    release: str | None = _repository(
        None,
        metavar="RELEASE",
        help="Declare exactly the tensors of this TensorRT-LLM release, such as 0.18. Some clients of 0.12 and 0.13 "
        "need it.",
        unset="the engine's; on CPUs the inputs of all releases",
    )
    triton_backend: Literal["tensorrtllm", "python"] | None = _repository(
        None, help="What runs a TensorRT-LLM engine: NVIDIA's C++ backend, or Python.", unset="tensorrtllm"
    )
    triton_max_batch_size: int | None = _repository(
        None,
        metavar="PROMPTS",
        help="Prompts that Triton accepts in one request.",
        minimum=1,
        unset="the engine's batch size",
    )
    preprocessing_instance_count: int = _repository(1, metavar="PROCESSES", help="Processes that tokenise.", minimum=1)
    postprocessing_instance_count: int = _repository(
        1, metavar="PROCESSES", help="Processes that turn tokens into text.", minimum=1
    )
    bls_instance_count: int | None = _repository(
        None,
        metavar="N",
        help="Processes of the BLS model; each serves one request at a time.",
        minimum=1,
        unset="1; for streams of the C++ backend the engine's batch size, at most 32",
    )
    max_tokens_in_paged_kv_cache: int | None = _requests(
        None, metavar="TOKENS", help="Size of the KV cache.", minimum=1, unset="what memory allows"
    )
    kv_cache_free_gpu_mem_fraction: float | None = _requests(
        None,
        metavar="SHARE",
        help="Share of the free memory for the KV cache.",
        above=0,
        maximum=1,
        unset="the backend's, 0.9",
    )
    batching_strategy: Literal["inflight_fused_batching", "inflight_batching", "V1"] | None = _requests(
        None, help="V1 adds no request to a running batch.", unset="inflight_fused_batching"
    )
    batch_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] | None = _requests(
        None,
        help="guaranteed_no_evict starts a request only when all of its memory is free; max_utilization may pause it.",
        unset="guaranteed_no_evict",
    )
    enable_kv_cache_reuse: bool | None = _requests(
        None,
        "--enable-kv-cache-reuse/--disable-kv-cache-reuse",
        help="Reuse the KV cache of prompts that begin alike. With an 8-bit cache log-probs then differ slightly from "
        "request to request, which NVIDIA's end_to_end_test.py --return-log-probs reports as a failure.",
    )
    enable_chunked_context: bool | None = _requests(
        None,
        "--enable-chunked-context/--disable-chunked-context",
        help="Process long prompts in pieces, between other requests.",
    )
    max_attention_window_size: str | None = _requests(
        None, metavar="TOKENS[,…]", help="How far attention looks back; a list gives a window per layer."
    )
    exclude_input_in_output: bool | None = _requests(
        None,
        "--exclude-input-in-output/--include-input-in-output",
        help="Whether answers leave out the prompt by default.",
    )
    accumulate_tokens: bool | None = _requests(
        None,
        "--accumulate-tokens/--no-accumulate-tokens",
        help="Whether streamed answers of the BLS model repeat the whole text so far.",
    )
    max_queue_size: int | None = _requests(
        None, metavar="REQUESTS", help="Requests that may wait; further ones are refused.", minimum=0, unset="no limit"
    )
    ngram_max_draft_len: int | None = _requests(
        None,
        metavar="TOKENS",
        help="Most draft tokens that a step guesses from the text of a request; 0 for none.",
        minimum=0,
        unset="11",
    )
    vllm_python: str | None = _requests(
        None,
        metavar="PYTHON",
        help="Interpreter that has vLLM, or the folder of its virtual environment, for --runtime vllm; any: that of a "
        "container or another machine.",
        unset="the one that runs trtserve",
        variable="TRTSERVE_VLLM_PYTHON",
    )
    suffix: str = _paths("", help="End of the names of all models but the served one, such as _b.")
    absolute_paths: bool = _paths(False, help="Write absolute paths, for servers that others start.")
    container_paths: str | None = _paths(
        None, metavar="PREFIX", help="Write paths for a container that sees the repository at PREFIX."
    )
    copy: bool = _paths(False, help="Copy the engine's files instead of hard-linking them.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.suffix and not _SUFFIX.fullmatch(self.suffix):
            raise UsageError(f"--suffix is {self.suffix!r}; use letters, digits, '.', '_' and '-'.")
        if self.container_paths is None:
            return
        if self.absolute_paths:
            raise UsageError("--absolute-paths and --container-paths contradict each other; give one.")
        if not self.container_paths.startswith("/"):
            raise UsageError(
                f"--container-paths is {self.container_paths!r}; expected the absolute path under which the container "
                "sees the repository."
            )


CHECKPOINTS = "Checkpoints"


@dataclass(frozen=True, kw_only=True)
class CheckSpec(Spec):
    """The release that an artefact must fit, and prompts for a numerical check of a checkpoint and its original."""

    trtllm_version: str | None = option(
        None,
        metavar="VERSION",
        help="TensorRT-LLM that will load the checkpoint, or serve the repository (implies --machine).",
        common=True,
    )

    prompts: Path | None = option(
        None,
        metavar="FILE",
        help="One prompt per line, a text or a JSON list of token ids.",
        unset="a small built-in set of both",
        panel=CHECKPOINTS,
    )
    max_tokens: int = option(16, metavar="TOKENS", help="Length of each greedy answer.", minimum=1, panel=CHECKPOINTS)

    @property
    def compares(self) -> tuple[str, ...]:
        """The fields of the numerical check."""
        return ("prompts", "max_tokens")
