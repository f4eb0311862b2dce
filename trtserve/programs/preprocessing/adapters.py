"""The LoRA tensors that the ensemble passes to the core model: the client's own, or those of a named adapter."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..shared.lora_names import LoraNames, name_of

Tensors = dict[str, NDArray[Any]]

_TENSORS = ("LORA_TASK_ID", "LORA_WEIGHTS", "LORA_CONFIG")


def adapter_outputs(inputs: Tensors, known: LoraNames, weights_type: str, batch: int) -> Tensors:
    """Return the OUT_LORA_… tensors, or empty for a request without an adapter.

    A named adapter sends weights and config with every request, because an ensemble cannot know whether the core model
    still has them cached. `weights_type` is the type of OUT_LORA_WEIGHTS in config.pbtxt. Raises ValueError for an
    unknown name, and for a name together with the client's own tensors.
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
