"""The options that say what a model repository is like; `repo` and `import` have them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NameOption = Annotated[
    str | None, typer.Option("--name", help="Name under which the model is served; default: the engine's name.")
]
StreamingOption = Annotated[
    bool,
    typer.Option(
        "--streaming/--no-streaming",
        "--decoupled/--no-decoupled",
        help="Streaming: core and BLS model may send many responses, and take streaming calls only.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="[MODEL.]KEY=VALUE", help="Parameter of a Triton model (default: the core model); repeatable."
    ),
]
ReleaseOption = Annotated[
    str | None,
    typer.Option(
        "--release",
        help="Exact tensors of one TensorRT-LLM release, 0.12 … 1.2; default: the engine's; on CPUs "
        "inputs of all of them.",
    ),
]
TritonBatchOption = Annotated[
    int | None,
    typer.Option("--triton-max-batch-size", help="Prompts per request that Triton accepts; default: the engine's."),
]
KvTokensOption = Annotated[
    int | None, typer.Option("--max-tokens-in-paged-kv-cache", help="Size of the KV cache in tokens.")
]
KvFractionOption = Annotated[
    float | None,
    typer.Option("--kv-cache-free-gpu-mem-fraction", help="Share of the free memory for the KV cache, in (0, 1]."),
]
BatchingOption = Annotated[
    str | None,
    typer.Option("--batching-strategy", help="inflight_fused_batching (default), or V1: no new request in a batch."),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--batch-scheduler-policy",
        help="guaranteed_no_evict (default): a request that began has its memory; max_utilization: it may be paused.",
    ),
]
ReuseOption = Annotated[
    bool | None,
    typer.Option(
        "--enable-kv-cache-reuse/--disable-kv-cache-reuse",
        help="Keep the KV cache of prompts for those that begin alike.",
    ),
]
ChunkedOption = Annotated[
    bool | None,
    typer.Option(
        "--enable-chunked-context/--disable-chunked-context",
        help="Take long prompts in pieces, between other requests.",
    ),
]
WindowOption = Annotated[
    str | None,
    typer.Option(
        "--max-attention-window-size", help="Tokens that attention looks back; a list with commas: per layer."
    ),
]
ExcludeOption = Annotated[
    bool | None,
    typer.Option(
        "--exclude-input-in-output/--include-input-in-output", help="Whether answers leave the prompt out by default."
    ),
]
AccumulateOption = Annotated[
    bool | None,
    typer.Option(
        "--accumulate-tokens/--no-accumulate-tokens",
        help="Streamed answers of the BLS model hold the whole text so far.",
    ),
]
QueueOption = Annotated[
    int | None, typer.Option("--max-queue-size", help="Requests that may wait; more are refused. Default: no limit.")
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft-engine",
        metavar="ENGINE",
        help="Engine of a smaller model that proposes tokens (speculative decoding): a folder, or an imported model.",
    ),
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option("--lora", metavar="NAME=FOLDER", help="Adapter that clients may choose by name; repeatable."),
]
BlsInstancesOption = Annotated[
    int | None,
    typer.Option(
        "--bls-instance-count",
        help="Processes of the BLS model; default: 1, and for streams of the C++ backend as many as the engine's "
        "batch, at most 32.",
    ),
]
TritonBackendOption = Annotated[
    str | None,
    typer.Option(
        "--triton-backend",
        help="What runs an engine of TensorRT-LLM: tensorrtllm (NVIDIA's C++ backend, default) or python.",
    ),
]
SuffixOption = Annotated[
    str, typer.Option("--suffix", help="End of the names of all models but the alias, such as _b.")
]
AbsolutePathsOption = Annotated[
    bool, typer.Option("--absolute-paths", help="Write absolute paths, for servers that others start.")
]
ContainerPathsOption = Annotated[
    str | None,
    typer.Option(
        "--container-paths", metavar="PREFIX", help="Write the paths that a container sees, which has it at PREFIX."
    ),
]
IntoOption = Annotated[
    Path | None, typer.Option("--into", metavar="REPOSITORY", help="Add the models to this repository.")
]
TokenizersOption = Annotated[int, typer.Option("--preprocessing-instance-count", help="Processes that tokenise.")]
DetokenizersOption = Annotated[
    int, typer.Option("--postprocessing-instance-count", help="Processes that make text of tokens.")
]
CopyOption = Annotated[bool, typer.Option("--copy", help="Copy the engine files instead of hard-linking them.")]
