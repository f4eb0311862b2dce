"""Single faults that are put into good repositories, each with the rule that must find it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from tests.support.repository_changes import (
    BLS,
    CORE,
    ENGINE,
    POST,
    PRE,
    TOKENIZER,
    Change,
    adapter_content,
    adapter_rank,
    added_tensor,
    assign,
    both,
    closed,
    content,
    dangling,
    edit,
    instances,
    mapped,
    moved,
    parameter,
    policy,
    remove,
    replaced,
    step,
    stray,
    tensor,
    text,
    tokens,
    vocabulary,
    without,
)


@dataclass(frozen=True)
class Fault:
    """`change` puts it into the good repository `base`; `rule` must find it."""

    base: str
    rule: str
    what: str
    change: Change


_YAML = "tensorrt_llm/1/model.yaml"
_ADAPTER = "tensorrt_llm/1/lora/french"

FAULTS: tuple[Fault, ...] = (
    # Files.
    Fault(
        "cpp",
        "placeholder",
        "a bare placeholder",
        text("ensemble/config.pbtxt", "max_batch_size: 12", "max_batch_size: ${n}"),
    ),
    Fault(
        "cpp", "placeholder", "a quoted placeholder", parameter(CORE, "kv_cache_free_gpu_mem_fraction", "${fraction}")
    ),
    Fault("cpp", "config-syntax", "a brace is missing", text(f"{PRE}/config.pbtxt", "parameters {", "parameters ")),
    Fault("cpp", "config-syntax", "an unknown field", text(f"{PRE}/config.pbtxt", "max_batch_size", "maximum_batch")),
    Fault("cpp", "stray-folder", "a folder that is no model", stray),
    Fault("cpp", "stray-folder", "config.pbtxt is missing", remove("ensemble/config.pbtxt")),
    Fault("cpp", "model-name", "another name than the folder", edit(PRE, assign("name", "tokenize"))),
    Fault("cpp", "version-folder", "no version folder", remove("ensemble/1")),
    Fault("cpp", "program-missing", "no model.py", remove(f"{POST}/1/model.py")),
    Fault("cpp", "program-syntax", "model.py is cut off", replaced(f"{POST}/1/model.py", "def initialize(self\n")),
    Fault("cpp", "program-module", "a shared module is missing", remove(f"{PRE}/1/hf_tokenizer.py")),
    Fault("upstream", "program-module", "NVIDIA's lib folder is missing", remove(f"{BLS}/1/lib")),
    Fault("cpp", "backend", "an unknown backend", edit(POST, assign("backend", "pyton"))),
    Fault("cpp", "backend", "the ensemble without its platform", edit("ensemble", assign("platform", ""))),
    Fault(
        "cpp",
        "backend",
        "a reserved name for another model",
        both(
            remove(POST),
            lambda r: shutil.copytree(r / PRE, r / POST),
            edit(POST, assign("name", POST)),
            edit(POST, assign("platform", "ensemble")),
        ),
    ),
    Fault("cpp", "file-access", "a broken link", dangling(f"{CORE}/1/rank0.engine")),
    Fault("cpp", "file-access", "a file that nobody may read", closed(f"{TOKENIZER}/tokenizer.json")),
    Fault("cpp", "manifest-models", "the alias is missing", remove("tiny")),
    Fault("cpp", "manifest-models", "a model is missing", remove(BLS)),
    Fault("cpp", "manifest-engine", "a rank is cut off", replaced(f"{CORE}/1/rank0.engine", "eng")),
    Fault("openvino", "manifest-engine", "weights are cut off", replaced(f"{CORE}/1/rank0.bin", "we")),
    Fault(
        "cpp",
        "manifest-engine",
        "another engine's config.json",
        content(ENGINE, "build_config", "max_seq_len", to=4096),
    ),
    Fault("cpp", "manifest-engine", "another vocabulary", content(ENGINE, "pretrained_config", "vocab_size", to=400)),
    Fault(
        "openvino",
        "parameter-classes",
        "parameter_classes.json is old",
        replaced(f"{CORE}/1/parameter_classes.json", "{}"),
    ),
    # Parameters and the shape of the service.
    Fault("cpp", "parameter-release", "a key of a later release", parameter(CORE, "num_nodes", "1")),
    Fault("upstream", "parameter-release", "a key that was dropped", parameter(PRE, "tokenizer_type", "llama")),
    Fault("upstream-newest", "parameter-release", "a key that was renamed", parameter(PRE, "visual_model_path", "/v")),
    Fault("cpp", "parameter-unknown", "a misspelt key", parameter(CORE, "kv_cache_free_gpu_mem_fractions", "0.5")),
    Fault("cpp", "parameter-value", "yes for a switch", parameter(CORE, "exclude_input_in_output", "yes")),
    Fault("cpp", "parameter-value", "a misspelt policy", parameter(CORE, "batch_scheduler_policy", "guaranteed_evict")),
    Fault("upstream", "parameter-value", "a misspelt batching strategy", parameter(CORE, "gpt_model_type", "inflight")),
    Fault("cpp", "parameter-value", "a share above 1", parameter(CORE, "kv_cache_free_gpu_mem_fraction", "90")),
    Fault("cpp", "parameter-value", "a number that is none", parameter(CORE, "max_beam_width", "two")),
    Fault(
        "cpp",
        "parameter-value",
        "a mode of a later release",
        text(
            f"{CORE}/config.pbtxt",
            "parameters {",
            'parameters { key: "decoding_mode" value { string_value: "topk" } }\nparameters {',
        ),
    ),
    Fault("newest", "parameter-missing", "a key that must exist", parameter(CORE, "guided_decoding_backend", None)),
    Fault("cpp", "parameter-missing", "no batching strategy", parameter(CORE, "gpt_model_type", None)),
    Fault("cpp", "parameter-missing", "an empty engine path", parameter(CORE, "gpt_model_path", "")),
    Fault("cpp", "parameter-empty", "an empty list of GPUs", parameter(CORE, "gpu_device_ids", "")),
    Fault("openvino", "parameter-refused", "what the CPU cannot do", parameter(CORE, "sink_token_length", "4")),
    Fault(
        "openvino",
        "parameter-refused",
        "a cache beyond all memory",
        parameter(CORE, "max_tokens_in_paged_kv_cache", "4000000000"),
    ),
    Fault("cpp", "streaming", "the core model does not stream", policy(CORE, False)),
    Fault("upstream", "streaming", "the BLS model does not stream", policy(BLS, False)),
    Fault("cpp", "streaming-tokenizer", "postprocessing is decoupled", policy(POST, True)),
    Fault("cpp", "batch-engine", "batches beyond the engine's", edit(CORE, assign("max_batch_size", 64))),
    Fault("upstream", "batch-inner", "smaller batches behind the BLS model", edit(BLS, assign("max_batch_size", 64))),
    Fault(
        "cpp",
        "batch-preferred",
        "an impossible preferred batch",
        edit(CORE, lambda c: c.dynamic_batching.preferred_batch_size.append(99)),
    ),
    Fault(
        "cpp",
        "queue-delay",
        "a queue that waits two seconds",
        edit(CORE, lambda c: setattr(c.dynamic_batching, "max_queue_delay_microseconds", 2000000)),
    ),
    Fault("cpp", "instance-count", "no instances", instances(PRE, 0)),
    Fault("upstream", "instance-bls", "one BLS process", instances(BLS, 1)),
    Fault("cpp", "instance-bls", "one process for streams", instances("tiny", 1)),
    Fault(
        "cpp",
        "inner-model",
        "the BLS model asks an absent one",
        parameter(BLS, "tensorrt_llm_model_name", "tensorrt_llm_2"),
    ),
    Fault("draft", "inner-model", "the draft model is absent", remove("tensorrt_llm_draft")),
    # Engines.
    Fault("cpp", "core-files", "config.json is cut off", replaced(ENGINE, '{"pretrained_config": {')),
    Fault("gpus", "core-files", "a list of GPUs that is none", parameter(CORE, "gpu_device_ids", "0-3")),
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
        "another engine beside the own one",
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
    Fault("cpp", "engine-extra", "a rank too many", replaced(f"{CORE}/1/rank1.engine", "engine 1")),
    Fault("gpus", "engine-size", "a rank much smaller than the other", replaced(f"{CORE}/1/rank1.engine", "e")),
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
    Fault("gpus", "gpu-ranks", "one GPU for two ranks", parameter(CORE, "gpu_device_ids", "0;1")),
    Fault("gpus", "gpu-instances", "one instance for two groups", instances(CORE, 1)),
    Fault("gpus", "gpu-twice", "a GPU in two groups", parameter(CORE, "gpu_device_ids", "0,1;1,2")),
    Fault("gpus", "gpu-twice", "an MPI rank in two groups", parameter(CORE, "participant_ids", "1,2;2,3")),
    Fault("gpus", "participant-zero", "the orchestrator's rank", parameter(CORE, "participant_ids", "0,1;2,3")),
    Fault(
        "python",
        "gpu-python",
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
    # Tensors.
    Fault("upstream", "tensor-type", "UINT32 as in 0.6", tensor(CORE, "request_output_len", assign("data_type", 4))),
    Fault("cpp", "tensor-dims", "dims as before 0.12", tensor(PRE, "QUERY", lambda t: t.dims.__setitem__(0, -1))),
    Fault("cpp", "tensor-shape", "no reshape", tensor(CORE, "temperature", lambda t: t.ClearField("reshape"))),
    Fault(
        "upstream", "tensor-shape", "no ragged batch", tensor(CORE, "input_ids", assign("allow_ragged_batch", False))
    ),
    Fault(
        "upstream", "tensor-optional", "required bad words", tensor("ensemble", "bad_words", assign("optional", False))
    ),
    Fault("upstream", "tensor-missing", "no input_lengths", without(CORE, "input_lengths")),
    Fault(
        "upstream",
        "tensor-release",
        "a name of a later release",
        tensor(BLS, "min_length", assign("name", "min_tokens")),
    ),
    Fault(
        "upstream-newest",
        "tensor-release",
        "a name of an old release",
        tensor(CORE, "seed", assign("name", "random_seed")),
    ),
    Fault("cpp", "tensor-name", "a misspelt name", tensor(BLS, "temperature", assign("name", "temprature"))),
    Fault(
        "cpp",
        "tensor-twice",
        "an input twice",
        added_tensor(BLS, name="temperature", data_type=11, dims=[1], optional=True),
    ),
    Fault(
        "newest",
        "logits-type",
        "FP16 logits of an FP32 engine",
        tensor(CORE, "context_logits", assign("data_type", 10)),
    ),
    Fault("lora", "feature-unreachable", "no adapters in requests", without(CORE, "lora_weights")),
    # The ensemble.
    Fault("cpp", "ensemble-step", "a step without its model", step(2, assign("model_name", "postprocessor"))),
    Fault("cpp", "ensemble-map", "an input that is none", step(0, moved("input_map", "QUERY", "PROMPT"))),
    Fault("cpp", "ensemble-map", "an output that is none", step(1, moved("output_map", "output_ids", "ids"))),
    Fault("cpp", "ensemble-input", "a needed input is not mapped", step(1, mapped("input_map", "input_lengths", None))),
    Fault(
        "cpp", "ensemble-source", "a tensor that nothing makes", step(2, mapped("input_map", "TOKENS_BATCH", "_TOKENS"))
    ),
    Fault(
        "cpp",
        "ensemble-source",
        "an input that nothing takes",
        added_tensor("ensemble", name="mood", data_type=13, dims=[1], optional=True),
    ),
    Fault("upstream", "ensemble-type", "two types", tensor(POST, "SEQUENCE_LENGTH", assign("data_type", 9))),
    Fault("upstream", "ensemble-dims", "two shapes", tensor(POST, "SEQUENCE_LENGTH", lambda t: t.dims.extend([2]))),
    Fault("cpp", "ensemble-batch", "a step of smaller batches", edit(POST, assign("max_batch_size", 2))),
    Fault(
        "openvino",
        "ensemble-policy",
        "streaming that no step does",
        both(policy("ensemble", True), policy(CORE, False)),
    ),
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
    Fault("llmapi", "gpu-ranks", "one GPU for two ranks", parameter(CORE, "gpu_device_ids", "0")),
    Fault(
        "llmapi", "llmapi-policy", "streaming in one file only", content(_YAML, "triton_config", "decoupled", to=False)
    ),
)
