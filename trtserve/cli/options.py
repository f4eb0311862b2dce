"""Options that several commands share, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON (versioned envelope).")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, with every external command.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="Folder of the artefact; default: a folder of the store.", metavar="DIR")
]

# Options of convert, build and repo that `import` takes too.
TpSizeOption = Annotated[int, typer.Option("--tp-size", help="Tensor-parallel size: GPUs that share every layer.")]
MoeTpSizeOption = Annotated[
    int | None,
    typer.Option("--moe-tp-size", help="GPUs that share every expert; times --moe-ep-size this is --tp-size."),
]
MoeEpSizeOption = Annotated[
    int | None, typer.Option("--moe-ep-size", help="GPUs among which the experts are dealt out; default: 1.")
]
ParallelEmbeddingOption = Annotated[
    bool,
    typer.Option(
        "--use-parallel-embedding", help="Split the embedding over tensor-parallel ranks; Gemma's is split always."
    ),
]
ShardingDimOption = Annotated[
    int,
    typer.Option(
        "--embedding-sharding-dim", help="What of a parallel embedding is split: 0 the vocabulary, 1 the hidden size."
    ),
]
IgnoreTensorsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore-tensors",
        metavar="PATTERN",
        help="Tensors of the model that are left out although they are not known, such as v_head.*; repeatable.",
    ),
]
PpSizeOption = Annotated[int, typer.Option("--pp-size", help="Pipeline-parallel size: groups of layers.")]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="Type of the weights: auto, float32, float16, bfloat16; auto: the model's; float16 for a float32 model.",
    ),
]
QuantizeOption = Annotated[
    str,
    typer.Option(
        "--quantize",
        help="none, int8 or int4 (weight-only, done when the engine is built), or by NVIDIA ModelOpt: int4_awq, "
        "int8_sq, fp8.",
    ),
]
GpuSmOption = Annotated[
    int,
    typer.Option(
        "--gpu-sm",
        help="Compute capability, times 10, of the GPUs that will serve a 4-bit model (AWQ, GPTQ): TensorRT-LLM keeps "
        "its weights in the order of their kernels. 80: A100, 86 and 89: RTX, L40S, 90: H100.",
    ),
]
ConverterOption = Annotated[
    str,
    typer.Option(
        "--converter",
        help="own, or upstream: NVIDIA's convert_checkpoint.py of the installed TensorRT-LLM.",
    ),
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", help="Threads of NVIDIA's converter; each converts a rank.")
]
CalibDatasetOption = Annotated[
    str | None,
    typer.Option(
        "--calib-dataset",
        help="Texts that calibrate int4_awq, int8_sq and fp8: a dataset's name or folder; default: ModelOpt's.",
    ),
]
CalibSizeOption = Annotated[
    int | None, typer.Option("--calib-size", help="How many of these texts are used; default: ModelOpt's.")
]
ExamplesOption = Annotated[
    Path | None,
    typer.Option(
        "--trtllm-examples",
        metavar="DIR",
        envvar="TRTSERVE_TRTLLM_EXAMPLES",
        help="Folder of TensorRT-LLM's examples, or a checkout of its release; default: where NVIDIA's containers have "
        "them. Also read from TRTSERVE_TRTLLM_EXAMPLES.",
    ),
]
ScriptOption = Annotated[
    str | None,
    typer.Option(
        "--trtllm-script",
        metavar="FOLDER",
        help="Folder, or path below the examples, of the convert_checkpoint.py to run; default: by architecture.",
    ),
]
ConverterFlagOption = Annotated[
    list[str] | None,
    typer.Option(
        "--converter-flag",
        metavar="FLAG",
        help="Handed to NVIDIA's tool as it is, such as =--load_by_shard; repeatable.",
    ),
]
VerifyOption = Annotated[
    bool,
    typer.Option(
        "--verify", help="Compare the checkpoint with the model, as `check` does, and go on only if it passes."
    ),
]
MaxBatchSizeOption = Annotated[
    int | None,
    typer.Option("--max-batch-size", help="Requests that are served at once; default: 16; trtllm-build's on GPUs."),
]
MaxInputLenOption = Annotated[
    int | None, typer.Option("--max-input-len", help="Tokens of a prompt; default: --max-seq-len.")
]
MaxSeqLenOption = Annotated[
    int | None,
    typer.Option(
        "--max-seq-len", help="Tokens of prompt and answer; default: what the model knows (CPU: 4096 at most)."
    ),
]
MaxNumTokensOption = Annotated[
    int | None,
    typer.Option("--max-num-tokens", help="Tokens of all requests in one step; default: 2048 on CPUs, 8192 on GPUs."),
]
MaxBeamWidthOption = Annotated[int, typer.Option("--max-beam-width", help="Beams of a request.")]
MaxDraftLenOption = Annotated[
    int, typer.Option("--max-draft-len", help="Draft tokens of a request; more than 0 lets requests bring drafts.")
]
SpeculativeModeOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-decoding-mode",
        help="none or draft_tokens_external; default: what --max-draft-len needs. On GPUs also lookahead_decoding, "
        "medusa, explicit_draft_tokens, eagle.",
    ),
]
PromptTableOption = Annotated[
    int,
    typer.Option(
        "--max-prompt-embedding-table-size",
        "--max-multimodal-len",
        help="Rows of the prompt tables (p-tuning) of all requests in a step; 0: none.",
    ),
]
ContextLogitsOption = Annotated[
    bool, typer.Option("--gather-context-logits", help="Requests may ask for the logits of their prompts.")
]
GenerationLogitsOption = Annotated[
    bool, typer.Option("--gather-generation-logits", help="Requests may ask for the logits of their answers.")
]
AllLogitsOption = Annotated[bool, typer.Option("--gather-all-token-logits", help="Both of the former.")]
LoraPluginOption = Annotated[
    str,
    typer.Option(
        "--lora-plugin",
        help="Adapters (LoRA), and the type of their weights: disable, auto (the model's), float16, float32, bfloat16.",
    ),
]
LoraModulesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lora-target-modules",
        metavar="NAMES",
        help="What adapters may change: attn_qkv, attn_q, attn_k, attn_v, attn_dense, mlp_h_to_4h, mlp_4h_to_h, "
        "mlp_gate; a list with commas, or given several times.",
    ),
]
MaxLoraRankOption = Annotated[int, typer.Option("--max-lora-rank", help="The largest rank of an adapter.")]
PagedContextOption = Annotated[
    str | None,
    typer.Option(
        "--use-paged-context-fmha",
        help="enable or disable: without it no KV block of another request is reused; default: enable (disable until "
        "TensorRT-LLM 0.18).",
    ),
]
KvPrecisionOption = Annotated[
    str, typer.Option("--kv-precision", help="KV cache on CPUs: auto, f32, f16, u8; auto: u8, f32 for float32 weights.")
]
RuntimeOption = Annotated[
    str,
    typer.Option(
        "--runtime",
        help="auto, tensorrt_llm (engines for NVIDIA GPUs), llmapi (GPUs without engines) or openvino (CPUs); auto: "
        "what this machine has.",
    ),
]
ContainerOption = Annotated[
    str | None,
    typer.Option(
        "--container",
        "--container-image",
        metavar="TAG",
        help="Run NVIDIA's tools in this container: a tag such as 25.12, or an image by name or digest.",
    ),
]
ContainerFlagOption = Annotated[
    list[str] | None,
    typer.Option(
        "--container-flag", metavar="FLAG", help="Handed to docker run as it is, such as =--shm-size=8g; repeatable."
    ),
]
TrtllmVersionOption = Annotated[
    str | None,
    typer.Option(
        "--trtllm-version",
        metavar="VERSION",
        envvar="TRTSERVE_TRTLLM_VERSION",
        help="TensorRT-LLM to work for, such as 1.2.0; default: that of the engine, else what is installed. Also read "
        "from TRTSERVE_TRTLLM_VERSION.",
    ),
]
