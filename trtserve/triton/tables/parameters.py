"""Every parameter of the five Triton models in every release, and what becomes of it on the openvino runtime.

Source: config.pbtxt of the tagged releases, as summarised in the interface reference of this project. A parameter
whose values changed has one row for each form. Their order is that of config.pbtxt.
"""

from __future__ import annotations

from trtserve.releases.launcher import WORKER
from trtserve.triton.parameter_values import (
    CHOICE,
    DEVICES,
    FOLDER,
    SWITCH,
    TEXT,
    TREE,
    Values,
    integer,
    integers,
    one_of,
    share,
)
from trtserve.triton.tables.rows import (
    EFFECTIVE,
    ConfigField,
    Fate,
    Parameter,
    effective_but,
    refused,
    without_meaning,
)

_MODES = ("auto", "top_k", "top_p", "top_k_top_p", "beam_search", "medusa")
_LATER_MODES = ("redrafter", "lookahead", "eagle")

_ONE_MEMORY = without_meaning("the KV cache is in the memory of the host already")
_NO_GPU = without_meaning("there is no GPU")
_NO_KERNEL = without_meaning("it chooses CUDA kernels")
_NO_ORCHESTRATOR = without_meaning("there is no orchestrator; one process serves the model")
_NO_DECODER_PAIR = without_meaning("models are decoder-only")
_TEXT_ONLY = without_meaning("it belongs to models that take images")
_NO_LOOKAHEAD = refused("lookahead decoding is not carried out")
_NO_TREE = refused("trees of draft tokens are not carried out")
_NO_IMAGES = refused("models that take images are not served")


def _row(
    name: str,
    since: str,
    values: Values,
    meaning: str,
    fate: Fate = EFFECTIVE,
    *,
    default: str = "",
    until: str | None = None,
    text: str = "",
    required: bool = False,
    needs_key: bool = False,
) -> Parameter:
    return Parameter(
        name=name,
        since=since,
        until=until,
        values=values,
        meaning=meaning,
        fate=fate,
        default=default,
        text=text,
        required=required,
        needs_key=needs_key,
    )


def _modes_refused(*modes: str) -> Fate:
    return refused(
        "the embedded executor has no such decoder",
        only=modes,
        differs="with any other mode each request is sampled by its own top_k and top_p, or searched with its beams",
    )


CORE = (
    _row("max_beam_width", "0.5", integer(1, neutral=1), "largest beam width of a request", default="1"),
    _row(
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        "0.5",
        one_of("no", "yes"),
        "whether inputs are brought to the CPU first",
        without_meaning("every tensor is on the CPU"),
        text="no",
    ),
    _row(
        "gpt_model_type",
        "0.5",
        one_of("inflight_fused_batching", "inflight_batching", "V1", "v1"),
        "batching strategy (`batching_strategy`)",
        required=True,
    ),
    _row("gpt_model_path", "0.5", FOLDER, "folder of the engine (`engine_dir`)", required=True),
    _row("encoder_model_path", "0.11", FOLDER, "folder of the encoder's engine", refused("models are decoder-only")),
    _row(
        "max_tokens_in_paged_kv_cache", "0.5", integer(1), "size of the KV cache in tokens", default="by the fraction"
    ),
    _row("max_attention_window_size", "0.7", integer(1), "attention window in tokens", default="all", until="0.12"),
    _row("max_attention_window_size", "0.13", integers(1), "attention windows of the layers in tokens", default="all"),
    _row(
        "sink_token_length",
        "0.10",
        integer(0, neutral=0),
        "attention sink tokens",
        refused("the attention keeps no sink tokens", neutral=("0",)),
    ),
    _row(
        "batch_scheduler_policy",
        "0.5",
        one_of("guaranteed_no_evict", "max_utilization"),
        "when requests become active",
        default="guaranteed_no_evict",
    ),
    _row(
        "kv_cache_free_gpu_mem_fraction",
        "0.5",
        share(zero=False),
        "KV cache, share of free memory",
        effective_but("of the host's memory; unset means what the largest batch needs, 0.3 of the free memory at most"),
        default="0.9",
    ),
    _row("cross_kv_cache_fraction", "0.14", share(zero=True), "share of the cross-attention cache", _NO_DECODER_PAIR),
    _row("kv_cache_host_memory_bytes", "0.10", integer(0), "host memory for KV blocks", _ONE_MEMORY, default="0"),
    _row("kv_cache_onboard_blocks", "0.10", SWITCH, "bring blocks back to the GPU", _ONE_MEMORY, default="true"),
    _row("exclude_input_in_output", "0.6", SWITCH, "leave the prompt out of output_ids", default="false"),
    _row("cancellation_check_period_ms", "0.10", integer(1), "period of looking for cancelled requests", default="100"),
    _row("stats_check_period_ms", "0.10", integer(1), "period of the metrics", default="100"),
    _row("iter_stats_max_iterations", "0.10", integer(0), "iterations whose statistics are kept", default="1000"),
    _row("request_stats_max_iterations", "0.10", integer(0), "the same for each request's statistics", default="0"),
    _row("enable_kv_cache_reuse", "0.7", SWITCH, "reuse of KV blocks", default="false; from 0.19 true"),
    _row("normalize_log_probs", "0.8", SWITCH, "normalise log probabilities of sampled tokens", default="true"),
    _row("enable_chunked_context", "0.8", SWITCH, "cut long prompts into pieces", default="false"),
    _row("gpu_device_ids", "0.8", DEVICES, "GPUs of the model", _NO_GPU, default="all"),
    _row("participant_ids", "0.13", DEVICES, "MPI ranks of the model", _NO_ORCHESTRATOR),
    _row("num_nodes", "0.19", integer(1), "MPI nodes", _NO_ORCHESTRATOR, default="1"),
    _row("lora_cache_optimal_adapter_size", "0.9", integer(1), "rank that cache pages are made for", default="8"),
    _row("lora_cache_max_adapter_size", "0.9", integer(1), "largest rank of an adapter", default="64"),
    _row("lora_cache_gpu_memory_fraction", "0.9", share(zero=True), "adapters, share of memory", default="0.05"),
    _row("lora_cache_host_memory_bytes", "0.9", integer(0), "host memory for adapters", default="1 GB"),
    _row("lora_prefetch_dir", "0.19", FOLDER, "folder of adapters, each called by its task id, read at the start"),
    _row(
        "decoding_mode",
        "0.9",
        one_of(*_MODES),
        "how tokens are chosen",
        _modes_refused("medusa"),
        default="by the beam width",
        until="0.15",
    ),
    _row(
        "decoding_mode",
        "0.16",
        one_of(*_MODES, *_LATER_MODES),
        "how tokens are chosen",
        _modes_refused("medusa", *_LATER_MODES),
        default="by the beam width",
    ),
    _row("executor_worker_path", "0.10", FOLDER, "program of the workers", _NO_ORCHESTRATOR, text=WORKER),
    _row("lookahead_window_size", "0.19", integer(1), "lookahead W", _NO_LOOKAHEAD),
    _row("lookahead_ngram_size", "0.19", integer(1), "lookahead N", _NO_LOOKAHEAD),
    _row("lookahead_verification_set_size", "0.19", integer(0), "lookahead G", _NO_LOOKAHEAD),
    _row("medusa_choices", "0.9", TREE, "tree of Medusa's draft tokens", _NO_TREE),
    _row("eagle_choices", "0.16", TREE, "tree of Eagle's draft tokens", _NO_TREE),
    _row("gpu_weights_percent", "0.10", share(zero=True), "share of the weights on the GPU", _NO_GPU, default="1.0"),
    _row("enable_context_fmha_fp32_acc", "0.12", SWITCH, "accumulate attention in FP32", _NO_KERNEL, default="false"),
    _row("multi_block_mode", "0.12", SWITCH, "attention by several blocks", _NO_KERNEL, default="true"),
    _row("cuda_graph_mode", "0.15", SWITCH, "CUDA graphs", _NO_KERNEL, default="false"),
    _row("cuda_graph_cache_size", "0.15", integer(0), "CUDA graphs that are kept", _NO_KERNEL, default="0"),
    _row(
        "speculative_decoding_fast_logits",
        "0.15",
        SWITCH,
        "send draft logits from process to process",
        _NO_ORCHESTRATOR,
        default="false",
    ),
    _row("tokenizer_dir", "0.19", FOLDER, "folder of the tokenizer, for guided decoding", needs_key=True),
    _row(
        "guided_decoding_backend",
        "0.19",
        one_of("xgrammar"),
        "what reads guides",
        default="off",
        until="0.21",
        needs_key=True,
    ),
    _row(
        "guided_decoding_backend",
        "1.0",
        one_of("xgrammar", "llguidance"),
        "what reads guides",
        default="off",
        needs_key=True,
    ),
    _row(
        "xgrammar_tokenizer_info_path",
        "0.19",
        FOLDER,
        "vocabulary for guides",
        without_meaning("guides take the vocabulary from tokenizer_dir"),
        needs_key=True,
    ),
    _row(
        "enable_trt_overlap",
        "0.20",
        SWITCH,
        "overlap of batches",
        refused("an experiment of the C++ backend since 0.20; leave it out", only=("true", "1")),
        default="false",
    ),
)

PREPROCESSING = (
    _row("tokenizer_dir", "0.5", FOLDER, "folder of the tokenizer"),
    _row("add_special_tokens", "0.7", CHOICE, "add the tokenizer's special tokens to prompts", default="true"),
    _row("visual_model_path", "0.12", FOLDER, "folder of the vision engine", _NO_IMAGES, until="0.18"),
    _row("multimodal_model_path", "0.19", FOLDER, "folder of the vision engine", _NO_IMAGES),
    _row("hf_model_path", "0.20", TEXT, "Hugging Face model of the processor", _TEXT_ONLY),
    _row("gpt_model_path", "0.12", FOLDER, "folder of the engine, for the size of its vocabulary"),
    _row("max_num_images", "0.15", integer(1), "images of a request", _TEXT_ONLY),
)

POSTPROCESSING = (
    _row("tokenizer_dir", "0.5", FOLDER, "folder of the tokenizer"),
    _row("skip_special_tokens", "0.7", CHOICE, "leave special tokens out of texts", default="true"),
)

BLS = (
    _row("accumulate_tokens", "0.7", CHOICE, "each answer of a stream holds the whole text so far", default="false"),
    _row("tensorrt_llm_model_name", "0.9", TEXT, "core model that is asked", default="tensorrt_llm"),
    _row("tensorrt_llm_draft_model_name", "0.9", TEXT, "core model that proposes draft tokens", default="none"),
    _row("multimodal_encoders_name", "0.13", TEXT, "model that encodes images", _NO_IMAGES),
)

FIELDS = (
    ConfigField(name="max_queue_size", meaning="requests that may wait; 0: no limit"),
    ConfigField(name="max_queue_delay_microseconds", meaning="how long Triton gathers requests into one call"),
    ConfigField(name="logits_datatype", meaning="type of the logits", kind="words", types=("FP32", "FP16")),
    ConfigField(
        name="encoder_input_features_data_type",
        meaning="type of an input of encoders",
        kind="words",
        types=("FP16", "BF16", "FP32"),
    ),
    ConfigField(
        name="prompt_embedding_table_data_type",
        meaning="type of prompt tables",
        kind="words",
        types=("FP16", "BF16", "FP32"),
    ),
    ConfigField(
        name="decoupled_mode", kind="bool", meaning="many answers to a request", flag="--streaming / --no-streaming"
    ),
    ConfigField(name="triton_max_batch_size", meaning="prompts of a request", flag="--triton-max-batch-size"),
    ConfigField(
        name="preprocessing_instance_count", meaning="processes that tokenise", flag="--preprocessing-instance-count"
    ),
    ConfigField(
        name="postprocessing_instance_count",
        meaning="processes that make text of tokens",
        flag="--postprocessing-instance-count",
    ),
    ConfigField(name="bls_instance_count", meaning="processes of the BLS model", flag="--bls-instance-count"),
)
