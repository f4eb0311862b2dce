"""The LoRA adapter of a request on its way to the core model: by the client's tensors, or by a name."""

from __future__ import annotations

from typing import Any

import numpy as np
from lora_names import LoraNames, name_of
from numpy.typing import NDArray

Tensors = dict[str, NDArray[Any]]

_TENSORS = ("LORA_TASK_ID", "LORA_WEIGHTS", "LORA_CONFIG")


def adapter_outputs(inputs: Tensors, known: LoraNames, weights_type: str, batch: int) -> Tensors:
    """OUT_LORA_… tensors, none for a request without adapter.

    A name gives weights and config with every request: an ensemble cannot know whether the core model still has them.
    `weights_type` is the type of OUT_LORA_WEIGHTS in config.pbtxt. ValueError for an unknown name, and for one beside
    the client's own tensors.
    """
    outputs = {f"OUT_{name}": inputs[name] for name in _TENSORS if name in inputs}
    name = name_of(inputs.get("LORA_NAME"))
    if name is None:
        return outputs
    if outputs:
        raise ValueError("lora_name names an adapter; lora_task_id, lora_weights and lora_config cannot be given too.")
    weights, config = known.tensors(name)
    dtype = np.float32 if weights_type == "TYPE_FP32" else np.float16
    return {
        "OUT_LORA_TASK_ID": np.full((batch, 1), known.task_id(name), dtype=np.uint64),
        "OUT_LORA_WEIGHTS": np.repeat(weights.astype(dtype, copy=False), batch, axis=0),
        "OUT_LORA_CONFIG": np.repeat(config, batch, axis=0),
    }
