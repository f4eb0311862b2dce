"""The operations of a decoder layer for CUDA (`operations.Operations`), from kernels in the Triton language."""

from trtserve.executor.torch.attention_kernels import decode_attention, prompt_attention
from trtserve.executor.torch.expert_kernels import expert_mlp
from trtserve.executor.torch.layer_kernels import add_rms_norm, gated, linear, norm_linear, rms_norm, rotate_and_store

__all__ = [
    "add_rms_norm",
    "decode_attention",
    "expert_mlp",
    "gated",
    "linear",
    "norm_linear",
    "prompt_attention",
    "rms_norm",
    "rotate_and_store",
]
