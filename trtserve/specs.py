"""What each stage is asked to do: frozen values, checked when they are made, hashed into fingerprints."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from trtserve.errors import UsageError
from trtserve.spec_fields import require_above_zero, require_choice, require_not_negative, require_positive

DType = Literal["auto", "float32", "float16", "bfloat16"]
Quantization = Literal["none", "int8", "int4", "int4_awq", "int8_sq", "fp8"]
Converter = Literal["own", "upstream"]
KvPrecision = Literal["auto", "f32", "f16", "u8"]
RuntimeName = Literal["auto", "tensorrt_llm", "llmapi", "openvino"]
PluginType = Literal["disable", "auto", "float16", "float32", "bfloat16"]
GemmPluginType = Literal["disable", "auto", "float16", "float32", "bfloat16", "fp8", "nvfp4"]
Switch = Literal["enable", "disable"]
KvCacheType = Literal["paged", "continuous", "disabled"]
ProfilingVerbosity = Literal["layer_names_only", "detailed", "none"]
TritonBackend = Literal["tensorrtllm", "python"]
SpeculativeMode = Literal[
    "none", "draft_tokens_external", "lookahead_decoding", "medusa", "explicit_draft_tokens", "eagle"
]

# Quantisations that look at activations: NVIDIA ModelOpt does them.
CALIBRATED = ("int4_awq", "int8_sq", "fp8")

_SUFFIX = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class ConvertSpec:
    """How a Hugging Face model becomes a TensorRT-LLM checkpoint.

    `moe_tp_size` × `moe_ep_size` is `tp_size`: how many ranks split each expert, and how many share the experts out.
    `gpu_sm` is the compute capability (× 10) for which 4-bit weights are put in order, `trtllm_version` what is to load
    the checkpoint (None: any). Ranks split rows (dimension 0) or columns (1) of a parallel embedding. `ignore_tensors`
    are patterns (fnmatch) of tensors that are left out although nothing says that the model does without them.
    NVIDIA's tools convert when `converter` is upstream or `quantize` is one of CALIBRATED; the fields from `workers` on
    are for them: threads, a dataset (name or folder) and how many of its samples, the folder of TensorRT-LLM's
    examples, which of its converters (folder or script), flags that they get as they are, and the `container` (tag or
    image) to run them in.
    """

    tp_size: int = 1
    pp_size: int = 1
    moe_tp_size: int | None = None
    moe_ep_size: int | None = None
    dtype: DType = "auto"
    quantize: Quantization = "none"
    gpu_sm: int = 80
    trtllm_version: str | None = None
    use_parallel_embedding: bool = False
    embedding_sharding_dim: int = 0
    ignore_tensors: tuple[str, ...] = ()
    converter: Converter = "own"
    workers: int | None = None
    calib_dataset: str | None = None
    calib_size: int | None = None
    trtllm_examples: Path | None = None
    trtllm_script: str | None = None
    converter_flags: tuple[str, ...] = ()
    container: str | None = None
    container_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_positive(self, "workers", "calib_size")
        require_choice("--converter", self.converter, get_args(Converter))
        self._require_upstream()
        require_positive(self, "tp_size", "pp_size", "moe_tp_size", "moe_ep_size", "gpu_sm")
        require_choice("--dtype", self.dtype, get_args(DType))
        require_choice("--quantize", self.quantize, get_args(Quantization))
        require_choice("--embedding-sharding-dim", str(self.embedding_sharding_dim), ("0", "1"))

    @property
    def upstream(self) -> bool:
        """True when one of NVIDIA's tools makes the checkpoint."""
        return self.converter == "upstream" or self.quantize in CALIBRATED

    def _require_upstream(self) -> None:
        # `trtllm_examples` may come from the environment of a machine, and is no wish then.
        wishes = ("workers", "calib_dataset", "calib_size", "trtllm_script", "converter_flags")
        given = [name for name in wishes if getattr(self, name) not in (None, ())]
        if given and not self.upstream:
            raise UsageError(
                f"--{given[0].replace('_', '-').replace('flags', 'flag')} is for NVIDIA's tools, which do not convert "
                "here.",
                hint=f"Add --converter upstream, or --quantize {', '.join(CALIBRATED)}.",
            )


@dataclass(frozen=True, kw_only=True)
class CheckSpec:
    """What a numerical check asks both models: `max_tokens` of each greedy answer; None: the built-in prompts."""

    max_tokens: int = 16
    prompts: Path | None = None

    def __post_init__(self) -> None:
        require_positive(self, "max_tokens")


_BUILD_CHOICES = {
    "speculative_decoding_mode": SpeculativeMode,
    "lora_plugin": PluginType,
    **dict.fromkeys(
        (
            "use_paged_context_fmha",
            "use_fp8_context_fmha",
            "context_fmha",
            "remove_input_padding",
            "reduce_fusion",
            "multiple_profiles",
        ),
        Switch,
    ),
    "gemm_plugin": GemmPluginType,
    "gpt_attention_plugin": PluginType,
    "kv_cache_type": KvCacheType,
    "logits_dtype": Literal["float16", "float32"],
    "profiling_verbosity": ProfilingVerbosity,
}


@dataclass(frozen=True, kw_only=True)
class BuildSpec:
    """Limits, features and precision of an engine; None means: derived from the model by the runtime.

    `max_input_len`, `max_seq_len` and `max_num_tokens` count tokens, `max_batch_size` counts requests. From
    `max_beam_width` to `max_lora_rank` the names and defaults are those of `trtllm-build` of TensorRT-LLM 1.2.

    The fields from `use_paged_context_fmha` on are `trtllm-build`'s too, and None leaves its default alone; those of
    BUILDER_FIELDS mean nothing to other runtimes. `build_workers` counts ranks that are built at the same time, None
    takes as many as memory and GPUs allow; `builder_flags` are handed on as they are. `container` is a tag or image.
    """

    max_batch_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    max_beam_width: int = 1
    max_draft_len: int = 0
    speculative_decoding_mode: SpeculativeMode | None = None
    max_prompt_embedding_table_size: int = 0
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    gather_all_token_logits: bool = False
    lora_plugin: PluginType = "disable"
    lora_target_modules: Sequence[str] | None = None
    max_lora_rank: int = 64
    kv_precision: KvPrecision = "auto"
    runtime: RuntimeName = "auto"
    trtllm_version: str | None = None
    use_paged_context_fmha: Switch | None = None
    use_fp8_context_fmha: Switch | None = None
    context_fmha: Switch | None = None
    remove_input_padding: Switch | None = None
    reduce_fusion: Switch | None = None
    multiple_profiles: Switch | None = None
    gemm_plugin: GemmPluginType | None = None
    gpt_attention_plugin: PluginType | None = None
    kv_cache_type: KvCacheType | None = None
    tokens_per_block: int | None = None
    opt_num_tokens: int | None = None
    logits_dtype: Literal["float16", "float32"] | None = None
    profiling_verbosity: ProfilingVerbosity | None = None
    build_workers: int | None = None
    builder_flags: tuple[str, ...] = ()
    container: str | None = None
    container_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_positive(self, "max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens")
        require_positive(self, "max_beam_width", "max_lora_rank", "tokens_per_block", "opt_num_tokens")
        if self.build_workers is not None and self.build_workers < 1:
            raise UsageError(f"The number of workers is {self.build_workers}; it must be at least 1.")
        require_not_negative(self, "max_draft_len", "max_prompt_embedding_table_size")
        for name, choices in _BUILD_CHOICES.items():
            value = getattr(self, name)
            if value is not None:
                require_choice(f"--{name.replace('_', '-')}", value, get_args(choices))
        require_choice("--kv-precision", self.kv_precision, get_args(KvPrecision))
        require_choice("--runtime", self.runtime, get_args(RuntimeName))


BUILDER_FIELDS = (
    "use_fp8_context_fmha",
    "context_fmha",
    "remove_input_padding",
    "reduce_fusion",
    "multiple_profiles",
    "gemm_plugin",
    "gpt_attention_plugin",
    "kv_cache_type",
    "tokens_per_block",
    "opt_num_tokens",
    "logits_dtype",
    "profiling_verbosity",
    "build_workers",
    "builder_flags",
)
"""Fields of BuildSpec that mean something to `trtllm-build` alone."""


@dataclass(frozen=True, kw_only=True)
class RepositorySpec:
    """How a model repository is assembled from an engine and a tokenizer.

    `name` is the alias under which a copy of the BLS model is served. `settings` are parameters of the Triton
    models, keyed `parameter` (core model) or `model.parameter`; the fields from `batching_strategy` to
    `max_queue_size` are another way to give the common ones, None leaves them alone. `lora` maps names to folders.

    `triton_backend`, `trtllm_version` and the paths are for engines of TensorRT-LLM: None takes the C++ backend, the
    release of the engine. `suffix` ends the names of all models but the alias.
    Paths in the configurations are relative to the repository, unless `absolute_paths`, or `container_paths` says
    where a container will see the repository. `bls_instance_count` None follows from the engine.
    """

    name: str
    streaming: bool = True
    release: str | None = None
    triton_max_batch_size: int | None = None
    preprocessing_instance_count: int = 1
    postprocessing_instance_count: int = 1
    bls_instance_count: int | None = None
    max_tokens_in_paged_kv_cache: int | None = None
    kv_cache_free_gpu_mem_fraction: float | None = None
    batching_strategy: str | None = None
    batch_scheduler_policy: str | None = None
    enable_kv_cache_reuse: bool | None = None
    enable_chunked_context: bool | None = None
    max_attention_window_size: str | None = None
    exclude_input_in_output: bool | None = None
    accumulate_tokens: bool | None = None
    max_queue_size: int | None = None
    lora: dict[str, Path] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    copy: bool = False
    triton_backend: TritonBackend | None = None
    trtllm_version: str | None = None
    suffix: str = ""
    absolute_paths: bool = False
    container_paths: str | None = None

    def __post_init__(self) -> None:
        require_positive(
            self,
            "triton_max_batch_size",
            "preprocessing_instance_count",
            "postprocessing_instance_count",
            "bls_instance_count",
            "max_tokens_in_paged_kv_cache",
        )
        require_not_negative(self, "max_queue_size")
        fraction = self.kv_cache_free_gpu_mem_fraction
        if fraction is not None and not 0 < fraction <= 1:
            raise UsageError(f"--kv-cache-free-gpu-mem-fraction is {fraction}; it must lie in (0, 1].")
        if self.triton_backend is not None:
            require_choice("--triton-backend", self.triton_backend, get_args(TritonBackend))
        if self.suffix and not _SUFFIX.fullmatch(self.suffix):
            raise UsageError(f"--suffix is {self.suffix!r}; use letters, digits, '.', '_' and '-'.")
        if self.container_paths is not None:
            self._require_container_paths()

    def _require_container_paths(self) -> None:
        if self.absolute_paths:
            raise UsageError("--absolute-paths and --container-paths contradict each other; give one.")
        if not str(self.container_paths).startswith("/"):
            raise UsageError(
                f"--container-paths is {self.container_paths!r}; expected the absolute path under which the container "
                "sees the repository."
            )


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """How a server is started; port 0 is not allowed, since clients must know the ports beforehand.

    With `auto_ports` further instances pass over ports that are taken. `gpus` are the devices for all instances, empty
    for all of the machine. `multi_model` is orchestrator mode, whose workers `spawn_processes` False starts before it.
    `trtllm_version` replaces the version that is found. `gpu0_pool_bytes` is the CUDA pool of GPU 0 on rank 0,
    `exit_timeout` the seconds that tritonserver has to end in order. `proxy_port` and the one above it are those of
    the reverse proxy that is written for several `instances`. `container` is the tag or image to run in.
    """

    name: str | None = None
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    auto_ports: bool = False
    world_size: int | None = None
    instances: int = 1
    proxy_port: int = 8080
    gpus: tuple[int, ...] = ()
    multi_model: bool = False
    spawn_processes: bool = True
    oversubscribe: bool = False
    gpu0_pool_bytes: int = 0
    exit_timeout: int = 3
    trtllm_version: str | None = None
    ready_timeout: float = 600.0
    extra_arguments: tuple[str, ...] = ()
    container: str | None = None
    container_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ports = (self.http_port, self.grpc_port, self.metrics_port)
        for port in ports:
            if not 1 <= port <= 65535:
                raise UsageError(f"Port {port} is outside 1 … 65535.")
        if len(set(ports)) != len(ports):
            raise UsageError(f"The HTTP, gRPC and metrics ports must differ; got {', '.join(map(str, ports))}.")
        require_positive(self, "world_size", "instances", "exit_timeout")
        require_not_negative(self, "gpu0_pool_bytes")
        require_above_zero(self, "ready_timeout")
        if not 1 <= self.proxy_port < 65535:
            raise UsageError(f"--proxy-port {self.proxy_port} is outside 1 … 65534 (the next one is for gRPC).")
        self._require_mode()

    def _require_mode(self) -> None:
        if not self.spawn_processes and not self.multi_model:
            raise UsageError(
                "--disable-spawn-processes belongs to orchestrator mode.", hint="Give --multi-model with it."
            )
        if self.multi_model and self.instances > 1:
            raise UsageError(
                "--instances starts several leaders; an orchestrator has its instances in the repository.",
                hint="Set the instance_group count and gpu_device_ids of the core model: 0,1;2,3 for two.",
            )


@dataclass(frozen=True, kw_only=True)
class BenchSpec:
    """What a benchmark sends: token counts are means and standard deviations of a normal distribution.

    `request_rate` (requests/s) makes an open loop, whose arrivals follow a schedule; None makes a closed loop, in which
    `concurrency` users send their next request when the last is answered. In an open loop `concurrency` caps the
    requests in flight (None: no cap). `timeout` bounds the measured window in seconds. `vocab_size`, `max_input_len`
    and `max_seq_len` replace what the engine's config says.

    With `dataset` the prompts are those of a file, `num_requests` at most, and answers get `op_tokens_per_word` tokens
    for each word of the file's. `tokenizer` is a folder in place of the server's. `ignore_eos`: an answer goes on after
    its end token, so that it has the length that was asked for.
    """

    input_mean: float = 128
    input_stdev: float = 16
    output_mean: float = 32
    output_stdev: float = 4
    num_requests: int = 100
    request_rate: float | None = None
    concurrency: int | None = None
    arrivals: Literal["exponential", "constant"] = "exponential"
    seed: int = 0
    warmup_requests: int = 10
    model: str = "tensorrt_llm"
    timeout: float = 600.0
    vocab_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    dataset: Path | None = None
    op_tokens_per_word: float = 1.3
    tokenizer: Path | None = None
    ignore_eos: bool = True

    @property
    def traffic(self) -> str:
        """The kind of traffic, as the subcommand of `bench` is called."""
        return "token-norm-dist" if self.dataset is None else "dataset"

    def __post_init__(self) -> None:
        require_above_zero(self, "input_mean", "output_mean", "request_rate", "timeout", "op_tokens_per_word")
        require_positive(self, "input_mean", "output_mean", "num_requests", "concurrency", "vocab_size")
        require_positive(self, "max_input_len", "max_seq_len")
        require_choice("--arrivals", self.arrivals, ("exponential", "constant"))
        for name in ("input_stdev", "output_stdev", "warmup_requests", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must not be negative.")
