"""What `convert` is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from trtserve.errors import UsageError
from trtserve.specs.fields import require_choice, require_positive

DType = Literal["auto", "float32", "float16", "bfloat16"]
Quantization = Literal["none", "int8", "int4", "int4_awq", "int8_sq", "fp8"]
Converter = Literal["own", "upstream"]

# Quantisations that look at activations: NVIDIA ModelOpt does them.
CALIBRATED = ("int4_awq", "int8_sq", "fp8")


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
