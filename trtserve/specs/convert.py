"""Options of `convert`: how a Hugging Face model is converted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from trtserve.errors import UsageError
from trtserve.specs.options import NVIDIA_TOOLS, InContainer, given_flags, option

DType = Literal["auto", "float32", "float16", "bfloat16"]
Quantization = Literal["none", "int8", "int4", "int4_awq", "int8_sq", "fp8"]
Converter = Literal["own", "upstream"]

CALIBRATED = ("int4_awq", "int8_sq", "fp8")  # quantisations that look at activations; NVIDIA ModelOpt does them

_checkpoint = partial(option, panel="Checkpoint")
_nvidia_tools = partial(option, panel=NVIDIA_TOOLS)


@dataclass(frozen=True, kw_only=True)
class ConvertSpec(InContainer):
    """How a Hugging Face model becomes a TensorRT-LLM checkpoint.

    NVIDIA's tools convert when `converter` is upstream or `quantize` is one of CALIBRATED.
    """

    tp_size: int = option(
        1, metavar="N", help="Tensor-parallel size: GPUs that share every layer.", minimum=1, common=True
    )
    pp_size: int = option(
        1, metavar="N", help="Pipeline-parallel size: groups of layers, one after the other.", minimum=1, common=True
    )
    dtype: DType = option(
        "auto", help="Type of the weights; auto: the model's own, and float16 for float32 models.", common=True
    )
    quantize: Quantization = option(
        "none",
        help="int8 and int4 are weight-only and happen when the engine is built; int4_awq, int8_sq and fp8 are done by "
        "NVIDIA ModelOpt.",
        common=True,
    )
    keep_fp8: bool | None = _checkpoint(
        None,
        help="Keep FP8 codes with a scale for each channel or block, for the runtimes torch and openvino; otherwise "
        "they are widened. Codes with one scale for a matrix are always kept.",
        unset="kept by import where the runtime is torch and the GPU has FP8",
    )
    moe_tp_size: int | None = _checkpoint(
        None,
        help="GPUs that share every expert; --moe-tp-size × --moe-ep-size is --tp-size.",
        minimum=1,
        unset="--tp-size / --moe-ep-size",
    )
    moe_ep_size: int | None = _checkpoint(
        None, help="GPUs that the experts are distributed over.", minimum=1, unset="1"
    )
    gpu_sm: int = _checkpoint(
        80,
        metavar="SM",
        help="Compute capability × 10 of the GPUs that will serve a 4-bit model (AWQ, GPTQ): the order of its weights "
        "depends on it. 80: A100, 86 and 89: RTX and L40S, 90: H100.",
        minimum=1,
    )
    use_parallel_embedding: bool = _checkpoint(
        False, help="Split the embedding over tensor-parallel ranks; Gemma always does."
    )
    embedding_sharding_dim: Literal[0, 1] = _checkpoint(
        0, help="Axis to split a parallel embedding along: 0 vocabulary, 1 hidden size."
    )
    ignore_tensors: tuple[str, ...] = _checkpoint(
        (), metavar="PATTERN", help="Skip unrecognised tensors that match PATTERN, such as v_head.*; repeatable."
    )
    converter: Converter = _checkpoint(
        "own", help="own, or upstream: NVIDIA's convert_checkpoint.py of the installed TensorRT-LLM."
    )
    workers: int | None = _nvidia_tools(
        None, help="Threads of NVIDIA's converter; each converts one rank.", minimum=1, unset="the converter's"
    )
    calib_dataset: str | None = _nvidia_tools(
        None,
        metavar="DATASET",
        help="Texts to calibrate int4_awq, int8_sq and fp8 with: name or folder of a dataset.",
        unset="ModelOpt's",
    )
    calib_size: int | None = _nvidia_tools(None, help="How many of these texts to use.", minimum=1, unset="ModelOpt's")
    trtllm_examples: Path | None = _nvidia_tools(
        None,
        metavar="DIR",
        help="Folder of TensorRT-LLM's examples, or a checkout of its release.",
        unset="where NVIDIA's containers have them",
        variable="TRTSERVE_TRTLLM_EXAMPLES",
    )
    trtllm_script: str | None = _nvidia_tools(
        None,
        metavar="FOLDER",
        help="Folder, or path below the examples, of the convert_checkpoint.py to run.",
        unset="by architecture",
    )
    converter_flags: tuple[str, ...] = _nvidia_tools(
        (),
        "--converter-flag",
        metavar="FLAG",
        help="Pass FLAG to NVIDIA's converter unchanged, for example --converter-flag=--load_by_shard; repeatable.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # --trtllm-examples and --container may come from the environment of a whole machine, so they do not count.
        names = ("workers", "calib_dataset", "calib_size", "trtllm_script", "converter_flags")
        if not self.upstream and (given := given_flags(self, names)):
            raise UsageError(
                f"{given[0]} is for NVIDIA's tools, but our own converter runs here.",
                hint=f"Add --converter upstream, or --quantize {', '.join(CALIBRATED)}.",
            )

    @property
    def ranks(self) -> int:
        """The processes that share the model."""
        return self.tp_size * self.pp_size

    @property
    def upstream(self) -> bool:
        """True when one of NVIDIA's tools makes the checkpoint."""
        return self.converter == "upstream" or self.quantize in CALIBRATED
