"""Descriptions of the Triton models as a running server would give them, without a server."""

from __future__ import annotations

from trtserve.client.tensors import ModelDescription, TensorDescription
from trtserve.repository.profiles import profile


def described(name: str, *, release: str | None = None, decoupled: bool = True, **parameters: str) -> ModelDescription:
    """One of the five models: of the default repository, or of a release."""
    model = profile(release).models[name]
    inputs, outputs = (
        {
            tensor.name: TensorDescription(
                name=tensor.name, datatype=_datatype(tensor.type), dims=tensor.dims, optional=tensor.optional
            )
            for tensor in tensors
        }
        for tensors in (model.inputs, model.outputs)
    )
    return ModelDescription(
        name=name, decoupled=decoupled, max_batch_size=8, inputs=inputs, outputs=outputs, parameters=parameters
    )


def _datatype(text: str) -> str:
    """`$logits` and `$prompt` are chosen when a repository is made."""
    return "FP32" if text == "$logits" else "FP16" if text.startswith("$") else text.replace("STRING", "BYTES")
