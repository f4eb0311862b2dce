"""Doubles of convert_checkpoint.py (one per family) and quantize.py.

They read config.json of the model folder, whose weights they do not look at, and write a checkpoint of zeros with the
right names, shapes and config. Setting convert_fault: exit (traceback, code 1), oom (SIGKILL before the last rank),
missing_rank, cut_rank, no_config (all three with code 0); convert_seconds per rank.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.doubles.checkpoint import LoaderError
from tests.doubles.containers import versions
from tests.doubles.converted_weights import rank_tensors, write_zeros
from tests.doubles.converter_options import FAMILIES, FOLDERS, MOVED, QUANTIZE
from tests.doubles.flags import Release, make_parser
from tests.doubles.settings import Settings, read_settings, record_call

_ARCHITECTURES = {
    "llama": {"LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"},
    "qwen": {"Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "QWenLMHeadModel"},
    "gpt": {"GPT2LMHeadModel", "Starcoder2ForCausalLM", "GPTBigCodeForCausalLM", "NemotronForCausalLM"},
    "gemma": {"GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"},
    "phi": {"PhiForCausalLM", "Phi3ForCausalLM"},
    "falcon": {"FalconForCausalLM", "RWForCausalLM"},
}
_PRECISIONS = {
    "int8": "W8A16",
    "int4": "W4A16",
    "int8_gptq": "W8A16_GPTQ",
    "int4_gptq": "W4A16_GPTQ",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "w4a16_awq": "W4A16_AWQ",
}
_FORMATS = {
    "fp8": "FP8",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "int8_wo": "W8A16",
    "int4_wo": "W4A16",
    "full_prec": None,
    "nvfp4": "NVFP4",
}


def script_path(family: str, release: Release) -> str:
    """Return the path of a family's script below the folder `examples` of a release."""
    old, new = FOLDERS[family]
    folder = old if release < MOVED else f"models/{new}"
    return f"{folder}/convert_checkpoint.py"


def _fail(script: str, text: str) -> int:
    sys.stdout.flush()
    sys.stderr.write(
        f'Traceback (most recent call last):\n  File "{script}", line 1, in <module>\n    main()\n{text}\n'
    )
    return 1


def _source(folder: str | None, family: str | None) -> dict[str, Any]:
    if folder is None:
        raise LoaderError("NotImplementedError", "No source model path specified!")
    path = Path(folder) / "config.json"
    if not path.exists():
        raise LoaderError(
            "OSError", f"{folder} does not appear to have a file named config.json (strict double: no hub)"
        )
    source: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    architecture = (source.get("architectures") or [""])[0]
    known = set().union(*_ARCHITECTURES.values()) if family is None else _ARCHITECTURES[family]
    if architecture not in known:
        raise LoaderError("AssertionError", f"(strict double) {architecture or 'no architecture'} in this script")
    return source


def _family(source: dict[str, Any]) -> str:
    return next(name for name, known in _ARCHITECTURES.items() if source["architectures"][0] in known)


def _dtype(asked: str, source: dict[str, Any]) -> str:
    """Resolve auto: the source's type, but float16 for float32 or none."""
    if asked != "auto":
        return asked
    found = source.get("torch_dtype") or source.get("dtype") or "float16"
    return "float16" if found == "float32" else str(found)


def _sizes(source: dict[str, Any]) -> dict[str, Any]:
    hidden = int(source["hidden_size"] if "hidden_size" in source else source["n_embd"])
    heads = int(source["num_attention_heads"] if "num_attention_heads" in source else source["n_head"])
    kv = source.get("num_key_value_heads", source.get("num_kv_heads")) or heads
    inner = source.get("intermediate_size") or source.get("n_inner") or source.get("ffn_hidden_size") or 4 * hidden
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": inner,
        "num_hidden_layers": source.get("num_hidden_layers", source.get("n_layer")),
        "head_size": source.get("head_dim") or hidden // heads,
        "vocab_size": source["vocab_size"],
        "max_position_embeddings": source.get("max_position_embeddings", source.get("n_positions")),
        "norm_epsilon": source.get("rms_norm_eps", source.get("layer_norm_epsilon", 1e-5)),
        "hidden_act": source.get("hidden_act", source.get("activation_function", "silu")),
        "rotary_scaling": source.get("rope_scaling"),
        "rotary_base": source.get("rope_theta", 10000.0),
    }


def _smooth(arguments: argparse.Namespace) -> str:
    channel = "CHANNEL" if arguments.per_channel else "TENSOR"
    if not arguments.per_channel and not arguments.per_token:
        return "W8A8_SQ_PER_TENSOR_PLUGIN"
    return f"W8A8_SQ_PER_{channel}_PER_{'TOKEN' if arguments.per_token else 'TENSOR'}_PLUGIN"


def _quantization(arguments: argparse.Namespace) -> dict[str, Any]:
    """The object `quantization` that a family script's flags give."""
    given = vars(arguments)
    algorithm: str | None = None
    precision = given.get("weight_only_precision") or given.get("use_weight_only_with_precision")
    if given.get("use_weight_only_with_precision") or (given.get("use_weight_only") and precision):
        algorithm = _PRECISIONS[str(precision)]
    elif given.get("use_fp8") or given.get("enable_fp8"):
        algorithm = "FP8"
    elif given.get("smoothquant") is not None or given.get("use_smooth_quant_plugin") is not None:
        algorithm = _smooth(arguments)
    elif given.get("use_fp8_rowwise"):
        algorithm = "FP8_PER_CHANNEL_PER_TOKEN"
    elif precision not in (None, "int8"):
        raise LoaderError("AssertionError", "(strict double) a precision has no effect without --use_weight_only")
    cache = "INT8" if given.get("int8_kv_cache") or given.get("calibrate_kv_cache") else None
    cache = "FP8" if given.get("fp8_kv_cache") else cache
    return {"quant_algo": algorithm, "kv_cache_quant_algo": cache, "group_size": given.get("group_size", 128)}


def _write(output: Path, family: str, config: dict[str, Any], settings: Settings, *, workers: int) -> None:
    """Write config.json and one file per rank, with the configured fault."""
    output.mkdir(parents=True, exist_ok=True)
    size = config["mapping"]["world_size"]
    if workers < 1:
        raise LoaderError("ValueError", "max_workers must be greater than 0")
    if settings.convert_fault != "no_config":
        (output / "config.json").write_text(json.dumps(config, indent=4), encoding="utf-8")
    for rank in range(size):
        time.sleep(settings.convert_seconds)
        last = rank == size - 1
        if last and settings.convert_fault == "oom":
            os.kill(os.getpid(), signal.SIGKILL)
        if last and settings.convert_fault == "exit":
            raise LoaderError("RuntimeError", "CUDA out of memory.")
        if last and settings.convert_fault == "missing_rank":
            continue
        path = output / f"rank{rank}.safetensors"
        write_zeros(path, rank_tensors(family, config, rank))
        if last and settings.convert_fault == "cut_rank":
            os.truncate(path, path.stat().st_size - 1)


def _mapping(arguments: argparse.Namespace, family: str) -> dict[str, int]:
    if family == "gemma":
        tp, pp = arguments.world_size, 1
    else:
        tp, pp = arguments.tp_size, arguments.pp_size
    if family == "phi" and pp != 1:
        raise LoaderError("AssertionError", "Pipeline parallelism is not supported.")
    moe = getattr(arguments, "moe_tp_size", -1), getattr(arguments, "moe_ep_size", -1)
    experts = {(True, True): (tp, 1), (True, False): (tp // moe[1], moe[1]), (False, True): (moe[0], tp // moe[0])}
    sizes = experts.get((moe[0] == -1, moe[1] == -1), moe)
    if sizes[0] * sizes[1] != tp:
        raise LoaderError("AssertionError", "moe_tp_size * moe_ep_size must equal to tp_size")
    return {
        "world_size": tp * pp,
        "gpus_per_node": 8,
        "cp_size": 1,
        "tp_size": tp,
        "pp_size": pp,
        "moe_tp_size": sizes[0],
        "moe_ep_size": sizes[1],
    }


def _check_split(config: dict[str, Any]) -> None:
    tp, pp = config["mapping"]["tp_size"], config["mapping"]["pp_size"]
    if config["num_attention_heads"] % tp or config["intermediate_size"] % tp:
        raise LoaderError("AssertionError", f"heads and intermediate size must be divisible by tp_size {tp}")
    if config["num_hidden_layers"] % pp:
        raise LoaderError("AssertionError", f"num_hidden_layers must be divisible by pp_size {pp}")


def _convert(
    arguments: argparse.Namespace, family: str | None, settings: Settings, quantization: dict[str, Any]
) -> None:
    folder = getattr(arguments, "model_dir", None)
    source = _source(folder, family)
    found = family or _family(source)
    config = {
        "architecture": source["architectures"][0],
        "dtype": _dtype(arguments.dtype, source),
        "logits_dtype": "float32",
        **_sizes(source),
        "position_embedding_type": "learned_absolute" if found == "gpt" else "rope_gpt_neox",
        "attn_bias": found == "qwen" and not source["architectures"][0].startswith("Qwen3"),
        "mapping": _mapping(arguments, found),
        "quantization": quantization,
        "use_parallel_embedding": getattr(arguments, "use_parallel_embedding", False),
        "embedding_sharding_dim": getattr(arguments, "embedding_sharding_dim", 0),
    }
    _check_split(config)
    output = getattr(arguments, "output_dir", None) or arguments.output_model_dir
    _write(Path(output), found, config, settings, workers=getattr(arguments, "workers", 1))


def _run(tool: str, script: str, work: Callable[[], None]) -> int:
    began = time.time()
    try:
        work()
    except LoaderError as error:
        return _fail(script, str(error))
    took = time.strftime("%H:%M:%S", time.gmtime(time.time() - began))
    what = "Quantization done. Total time used" if tool == "quantize.py" else "Total time of converting checkpoints:"
    sys.stdout.write(f"{what} {took}\n")
    return 0


def main(arguments: list[str], folder: Path, *, family: str, script: str) -> int:
    """Run a family's script; returns the exit code."""
    record_call(folder, "convert_checkpoint.py", [script, *arguments])
    settings = read_settings(folder)
    found = versions(settings)
    sys.stdout.write(f"[TensorRT-LLM] TensorRT-LLM version: {found.tensorrt_llm}\n{found.tensorrt_llm}\n")
    sys.stdout.flush()
    parsed = make_parser("convert_checkpoint.py", FAMILIES[family], found.release).parse_args(arguments)
    return _run("convert_checkpoint.py", script, lambda: _convert(parsed, family, settings, _quantization(parsed)))


def quantize(arguments: list[str], folder: Path, *, script: str) -> int:
    """Run examples/quantization/quantize.py; returns the exit code."""
    record_call(folder, "quantize.py", [script, *arguments])
    settings = read_settings(folder)
    found = versions(settings)
    sys.stdout.write(f"[TensorRT-LLM] TensorRT-LLM version: {found.tensorrt_llm}\n")
    sys.stdout.flush()
    parsed = make_parser("quantize.py", QUANTIZE, found.release).parse_args(arguments)
    if parsed.model_dir is None and parsed.nemo_ckpt_path is None:
        return _fail(script, "ValueError: One of source checkpoint (model_dir, nemo_ckpt_path) must be specified")
    if parsed.device == "cuda" and settings.gpus == 0:
        return _fail(script, "RuntimeError: Found no NVIDIA driver on your system.")
    cache = parsed.kv_cache_dtype
    chosen = {
        "quant_algo": _FORMATS[parsed.qformat],
        "kv_cache_quant_algo": cache.upper() if cache else None,
        "group_size": parsed.awq_block_size,
    }
    return _run("quantize.py", script, lambda: _convert(parsed, None, settings, chosen))
