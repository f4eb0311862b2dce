"""Single faults in engines, adapters, tokenizers and LLM API models."""

from __future__ import annotations

import shutil

from tests.support.repository_changes import (
    CORE,
    ENGINE,
    POST,
    PRE,
    TOKENIZER,
    Fault,
    adapter_content,
    adapter_rank,
    both,
    content,
    instances,
    parameter,
    remove,
    replaced,
    shortened,
    tokens,
    vocabulary,
)

_YAML = "tensorrt_llm/1/model.yaml"
_ADAPTER = "tensorrt_llm/1/lora/french"

CORE_FAULTS: tuple[Fault, ...] = (
    # Engines.
    Fault("cpp", "core-files", "config.json is cut off", replaced(ENGINE, '{"pretrained_config": {')),
    Fault("gpus", "core-files", "an invalid list of GPUs", parameter(CORE, "gpu_device_ids", "0-3")),
    Fault("cpp", "path", "an engine path to nowhere", parameter(CORE, "gpt_model_path", "engines/tiny")),
    Fault(
        "upstream",
        "path",
        "an engine path of another machine",
        parameter(CORE, "gpt_model_path", "/engines/tiny/1-gpu"),
    ),
    Fault("newest", "path", "adapters that are elsewhere", parameter(CORE, "lora_prefetch_dir", "/adapters")),
    Fault(
        "cpp",
        "path-outside",
        "another engine in the repository",
        both(
            lambda r: shutil.copytree(r / CORE / "1", r / CORE / "engine"),
            parameter(CORE, "gpt_model_path", "tensorrt_llm/engine"),
        ),
    ),
    Fault("cpp", "engine-config", "no config.json", remove(ENGINE)),
    Fault(
        "cpp", "engine-config", "a checkpoint's config.json", replaced(ENGINE, '{"architecture": "LlamaForCausalLM"}')
    ),
    Fault("gpus", "engine-rank", "a rank is missing", remove(f"{CORE}/1/rank1.engine")),
    Fault("cpp", "engine-rank", "an empty rank", replaced(f"{CORE}/1/rank0.engine", "")),
    Fault("openvino", "engine-rank", "a CPU engine without its weights", remove(f"{CORE}/1/rank0.bin")),
    Fault("cpp", "engine-extra", "a rank too many", replaced(f"{CORE}/1/rank1.engine", "ftrt engine 1")),
    Fault("gpus", "engine-size", "a rank much smaller than the other", replaced(f"{CORE}/1/rank1.engine", "ftrt")),
    Fault(
        "cpp",
        "engine-mapping",
        "a mapping that contradicts itself",
        content(ENGINE, "pretrained_config", "mapping", "world_size", to=4),
    ),
    Fault(
        "cpp",
        "engine-release",
        "an engine of another release",
        both(
            content(ENGINE, "version", to="0.15.0"),
            content("manifest.json", "facts", "core_models", CORE, "origin", to={}),
        ),
    ),
    Fault("gpus", "gpu-groups", "one GPU for two ranks", parameter(CORE, "gpu_device_ids", "0;1")),
    Fault("gpus", "gpu-groups", "one instance for two groups", instances(CORE, 1)),
    Fault("gpus", "gpu-groups", "a GPU in two groups", parameter(CORE, "gpu_device_ids", "0,1;1,2")),
    Fault("gpus", "gpu-groups", "an MPI rank in two groups", parameter(CORE, "participant_ids", "1,2;2,3")),
    Fault("gpus", "gpu-groups", "the orchestrator's rank", parameter(CORE, "participant_ids", "0,1;2,3")),
    Fault(
        "python",
        "gpu-groups",
        "two groups for the python variant",
        both(parameter(CORE, "gpu_device_ids", "0;1"), instances(CORE, 2)),
    ),
    Fault(
        "cpp", "worker-path", "the worker's program elsewhere", parameter(CORE, "executor_worker_path", "/opt/worker")
    ),
    Fault("cpp", "beam-width", "more beams than were built", parameter(CORE, "max_beam_width", "4")),
    Fault(
        "cpp",
        "paged-context",
        "chunks without paged context",
        both(
            parameter(CORE, "enable_chunked_context", "true"),
            content(ENGINE, "build_config", "plugin_config", "use_paged_context_fmha", to=False),
        ),
    ),
    Fault(
        "newest",
        "paged-context",
        "reuse without paged context",
        both(
            parameter(CORE, "enable_kv_cache_reuse", "true"),
            content(ENGINE, "build_config", "plugin_config", "use_paged_context_fmha", to=False),
        ),
    ),
    Fault("upstream", "cache-both", "tokens and a share", parameter(CORE, "max_tokens_in_paged_kv_cache", "2560")),
    Fault("cpp", "cache-small", "a cache below one sequence", parameter(CORE, "max_tokens_in_paged_kv_cache", "64")),
    Fault("draft", "cache-shares", "shares of more than all", parameter(CORE, "kv_cache_free_gpu_mem_fraction", "0.9")),
    Fault("cpp", "manifest-engine", "another release's engine", content(ENGINE, "version", to="1.2.0")),
    # Adapters and drafts.
    Fault("lora", "lora-table", "lora.json is cut off", replaced("lora.json", '{"adapters"')),
    Fault("lora", "lora-files", "an adapter's file is missing", remove(f"{_ADAPTER}/model.lora_config.npy")),
    Fault(
        "lora",
        "lora-files",
        "a folder that is not there",
        content("lora.json", "adapters", "french", "folder", to="adapters/french"),
    ),
    Fault("lora", "lora-fit", "a rank above the engine's", adapter_rank),
    Fault("lora", "lora-fit", "other weights under the same id", adapter_content),
    Fault(
        "lora",
        "lora-fit",
        "an engine without adapters",
        content(ENGINE, "build_config", "plugin_config", "lora_plugin", to=None),
    ),
    Fault("lora", "lora-cache", "pages smaller than ranks", parameter(CORE, "lora_cache_max_adapter_size", "2")),
    Fault(
        "draft",
        "draft",
        "another vocabulary",
        content("tensorrt_llm_draft/1/config.json", "pretrained_config", "vocab_size", to=512),
    ),
    Fault("draft", "draft", "a target that takes no drafts", content(ENGINE, "build_config", "max_draft_len", to=0)),
    # Tokenizers.
    Fault(
        "cpp",
        "tokenizer-path",
        "a folder that is not there",
        parameter(POST, "tokenizer_dir", "/tensorrt_llm/tokenizer"),
    ),
    Fault("cpp", "tokenizer-path", "no folder given", parameter(PRE, "tokenizer_dir", "")),
    Fault(
        "cpp",
        "tokenizer-files",
        "a folder without a tokenizer",
        both(remove(TOKENIZER), lambda r: (r / TOKENIZER).mkdir()),
    ),
    Fault(
        "cpp",
        "tokenizer-pair",
        "two tokenizers",
        both(
            lambda r: shutil.copytree(r / TOKENIZER, r / POST / "1/tokenizer"),
            parameter(POST, "tokenizer_dir", f"{POST}/1/tokenizer"),
            tokens(lambda t: vocabulary(t).update(new=300), place=f"{POST}/1/tokenizer"),
        ),
    ),
    Fault(
        "cpp", "tokenizer-vocabulary", "tokens beyond the engine's", tokens(lambda t: vocabulary(t).update(new=5000))
    ),
    Fault(
        "cpp",
        "tokenizer-added",
        "added tokens beyond the engine's",
        tokens(lambda t: t.setdefault("added_tokens", []).append({"content": "<tool>", "id": 5000, "special": True})),
    ),
    Fault(
        "cpp",
        "tokenizer-end",
        "another end than the model's",
        content(f"{TOKENIZER}/generation_config.json", "eos_token_id", to=7),
    ),
    Fault(
        "cpp", "tokenizer-load", "tokenizer.json is cut off", replaced(f"{TOKENIZER}/tokenizer.json", '{"version": ')
    ),
    Fault(
        "cpp",
        "tokenizer-load",
        "code of a stranger",
        both(
            content(
                f"{TOKENIZER}/tokenizer_config.json",
                "auto_map",
                to={"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]},
            ),
            content(f"{TOKENIZER}/tokenizer_config.json", "tokenizer_class", to="OwnTokenizer"),
        ),
    ),
    Fault("cpp", "tokenizer-exact", "letters are lost", tokens(lambda t: t.update(normalizer={"type": "Lowercase"}))),
    Fault(
        "cpp",
        "chat-template",
        "a template that is cut off",
        replaced(f"{TOKENIZER}/chat_template.jinja", "{% for m in messages %}{{ m.content }}"),
    ),
    # The LLM API.
    Fault("llmapi", "llmapi-settings", "no model.yaml", remove(_YAML)),
    Fault("llmapi", "core-files", "model.yaml names no model", replaced(_YAML, "backend: pytorch\n")),
    Fault("llmapi", "llmapi-keyword", "a misspelt keyword", content(_YAML, "max_sequence_len", to=128)),
    Fault(
        "upstream-llmapi",
        "llmapi-dropped",
        "a keyword of 0.19",
        content(_YAML, "pytorch_backend_config", to={"use_cuda_graph": False}),
    ),
    Fault("llmapi", "llmapi-value", "a word for a number", content(_YAML, "max_seq_len", to="long")),
    Fault("llmapi", "llmapi-model", "the model's folder is gone", remove(f"{CORE}/1/model")),
    Fault("upstream-llmapi", "llmapi-model", "a path of another machine", content(_YAML, "model", to="/models/llama")),
    Fault(
        "llmapi",
        "llmapi-ranks",
        "another parallelism than the manifest's",
        content(_YAML, "tensor_parallel_size", to=4),
    ),
    Fault("llmapi", "gpu-groups", "one GPU for two ranks", parameter(CORE, "gpu_device_ids", "0")),
    Fault(
        "llmapi", "llmapi-policy", "streaming in one file only", content(_YAML, "triton_config", "decoupled", to=False)
    ),
    Fault("llmapi", "llmapi-model", "weights are cut off", shortened(f"{CORE}/1/model/model.safetensors")),
    Fault(
        "llmapi",
        "llmapi-model",
        "the index names a shard that is not there",
        replaced(
            f"{CORE}/1/model/model.safetensors.index.json", '{"weight_map": {"lm_head.weight": "model-2.safetensors"}}'
        ),
    ),
    # Several models.
    Fault(
        "two models",
        "gpu-shared",
        "GPUs of two models overlap",
        both(parameter(CORE, "gpu_device_ids", "0,1"), parameter(f"{CORE}_b", "gpu_device_ids", "1,2")),
    ),
    Fault("two models", "manifest-models", "the alias of the second model is gone", remove("other")),
    Fault(
        "two models",
        "inner-model",
        "the second alias asks for a model that is not there",
        parameter("other", "tensorrt_llm_model_name", "tensorrt_llm_c"),
    ),
)
