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
PpSizeOption = Annotated[int, typer.Option("--pp-size", help="Pipeline-parallel size: groups of layers.")]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="Type of the weights: auto, float32, float16, bfloat16; auto: the model's; float16 for a float32 model.",
    ),
]
QuantizeOption = Annotated[
    str, typer.Option("--quantize", help="none, or int8 (weight-only; done when the engine is built).")
]
MaxBatchSizeOption = Annotated[
    int | None, typer.Option("--max-batch-size", help="Requests that are served at once; default: 16.")
]
MaxInputLenOption = Annotated[
    int | None, typer.Option("--max-input-len", help="Tokens of a prompt; default: --max-seq-len.")
]
MaxSeqLenOption = Annotated[
    int | None,
    typer.Option("--max-seq-len", help="Tokens of prompt and answer; default: what the model knows, up to 4096."),
]
MaxNumTokensOption = Annotated[
    int | None, typer.Option("--max-num-tokens", help="Tokens of all requests in one step; default: 2048.")
]
KvPrecisionOption = Annotated[
    str, typer.Option("--kv-precision", help="KV cache: auto, f32, f16, u8; auto: u8, f32 for float32 weights.")
]
RuntimeOption = Annotated[
    str,
    typer.Option(
        "--runtime",
        help="auto or openvino; auto: what this machine has. tensorrt_llm and llmapi are not in this version.",
    ),
]
