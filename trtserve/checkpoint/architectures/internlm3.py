"""InternLM 3 and IQuest-Coder: Llama under other names."""

from __future__ import annotations

from typing import Any

from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import HfConfig, WrongConfigError

_INTERNLM = {"max_position_embeddings": 32768, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5}
_IQUEST = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config. transformers computes these models as Llamas, and refuses what a Llama has not."""
    if hf["architectures"][0] == "IQuestCoderForCausalLM":
        if hf.get("clip_qkv") is not None or hf.get("use_sliding_window"):
            raise WrongConfigError("This IQuest-Coder sets clip_qkv or use_sliding_window; no published one does.")
        return llama.own_config(hf, "IQuest-Coder", defaults=_IQUEST)
    inner, outer = bool(hf.get("qkv_bias", hf.get("attention_bias"))), bool(hf.get("bias", hf.get("mlp_bias")))
    if inner != outer:
        raise WrongConfigError(
            f"This InternLM 3 has qkv_bias = {inner} and bias = {outer}; no published one differs in them."
        )
    return llama.own_config({**hf, "attention_bias": inner, "mlp_bias": inner}, "InternLM 3", defaults=_INTERNLM)
