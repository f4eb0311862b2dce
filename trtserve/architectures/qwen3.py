"""Qwen3: a Llama whose queries and keys are normed head by head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.architectures import llama
from trtserve.architectures.base import CheckpointConfig, Decoder, HfConfig, Target
from trtserve.architectures.llama import unused
from trtserve.architectures.llama_tensors import Parts, llama_targets
from trtserve.architectures.qwen2 import qwen_config
from trtserve.errors import UnsupportedModelError

__all__ = ["BASE_PREFIX", "TIED", "checkpoint_config", "decoder", "targets", "unused"]

BASE_PREFIX = "model."
TIED = False

# transformers' default, which does not follow from the hidden size.
_HEAD_SIZE = 128


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Family part of the checkpoint's config: keys of TensorRT-LLM 1.2's QWenConfig, and the windows.

    `qk_layernorm` stays false, as upstream writes it: its layers have the norms by `qwen_type`.
    """
    if hf.get("attention_bias"):
        raise UnsupportedModelError("This Qwen3 sets attention_bias, which a TensorRT-LLM checkpoint cannot express.")
    head_size = hf.get("head_dim") or _HEAD_SIZE
    return qwen_config({**hf, "head_dim": head_size}, qwen_type="qwen3", attn_bias=False)


def targets(config: CheckpointConfig) -> list[Target]:
    """Every tensor of the checkpoint of the whole model, in file order."""
    return llama_targets(config, Parts(head_norms=True))


def decoder(config: CheckpointConfig) -> Decoder:
    """What the decoder is made of."""
    return replace(llama.decoder(config), attention_bias=False, dense_bias=False, mlp_bias=False, qk_norm=True)
