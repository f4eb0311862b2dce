"""Models and tensors in KServe v2: what a model declares, what a client sends and receives."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from trtserve.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CORE_MODEL = "tensorrt_llm"
STANDARD_MODELS = ("preprocessing", CORE_MODEL, "postprocessing", "ensemble", "tensorrt_llm_bls")
"""The models of TensorRT-LLM's repository; any other model in it is the alias."""
# Inputs and outputs that core and text models share in every release.
TEXT_INPUT, IDS_INPUT = "text_input", "input_ids"
TEXT_OUTPUT, IDS_OUTPUT = "text_output", "output_ids"
VLLM_INPUT = "sampling_parameters"
"""Input of models of NVIDIA's backend `vllm`: a JSON object with vLLM's own parameters."""


@functools.cache
def numpy_type(datatype: str) -> np.dtype[Any]:
    """Return the NumPy type of a Triton type (FP32 → float32; BF16 → ml_dtypes.bfloat16; BYTES → object)."""
    import numpy as np

    if datatype == "BF16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype("object" if datatype == "BYTES" else datatype.lower().replace("fp", "float"))


@dataclass(frozen=True, kw_only=True)
class TensorDescription:
    """The declaration of a model's input or output."""

    name: str
    datatype: str  # Triton type without `TYPE_`; BYTES for strings
    dims: tuple[int, ...]  # without the batch axis
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.datatype.replace('BYTES', 'STRING')} {list(self.dims)}"


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """The values of one input."""

    name: str
    datatype: str
    shape: tuple[int, ...]  # with the batch axis
    values: Sequence[Any] | npt.NDArray[Any]  # flat; an array of any shape is flattened

    def raw(self) -> bytes:
        """Return the content in KServe's raw form: little-endian numbers; strings after their 4-byte length."""
        if self.datatype == "BYTES":
            encoded = [value if isinstance(value, bytes) else str(value).encode() for value in self.flat()]
            return b"".join(len(text).to_bytes(4, "little") + text for text in encoded)
        import numpy as np

        return np.asarray(self.values, numpy_type(self.datatype)).tobytes()

    def flat(self) -> list[Any]:
        """Return the values as a flat list of Python values."""
        if isinstance(self.values, Sequence):
            return list(self.values)
        flat: list[Any] = self.values.reshape(-1).tolist()
        return flat


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """The configuration of a running model."""

    name: str
    decoupled: bool
    max_batch_size: int
    inputs: Mapping[str, TensorDescription]
    outputs: Mapping[str, TensorDescription]
    parameters: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelDescription:
        """Read the JSON form of `config.pbtxt` (field names as in Triton's model_config.proto)."""
        parameters = config.get("parameters") or {}
        return cls(
            name=config["name"],
            decoupled=bool((config.get("model_transaction_policy") or {}).get("decoupled", False)),
            max_batch_size=int(config.get("max_batch_size", 0)),
            inputs=_tensor_descriptions(config.get("input", ())),
            outputs=_tensor_descriptions(config.get("output", ())),
            parameters={key: value.get("string_value", "") for key, value in parameters.items()},
        )

    def flag(self, parameter: str) -> bool:
        """Return whether a parameter is true, by the words that the BLS model accepts."""
        return self.parameters.get(parameter, "").lower() in ("true", "yes", "1", "t")

    def input(self, name: str) -> TensorDescription:
        """Return the declared input; UsageError suggests similar names when there is none."""
        if name not in self.inputs:
            similar = get_close_matches(name, self.inputs, n=3)
            suggestion = f"Did you mean {' or '.join(repr(each) for each in similar)}? " if similar else ""
            raise UsageError(
                f"The model {self.name!r} has no input {name!r}.",
                hint=f"{suggestion}Its inputs: {', '.join(sorted(self.inputs))}.",
            )
        return self.inputs[name]

    def tensor(self, name: str, values: Sequence[Any] | npt.NDArray[Any], *, rows: int = 1) -> Tensor:
        """Make the input `name` from the `values` of one row, repeated in each row of the batch.

        A list is one-dimensional; an array must have the declared dims. Raises UsageError when there is no such input.
        """
        declared = self.input(name)
        if isinstance(values, Sequence):
            shape = tuple(len(values) if size < 0 else size for size in declared.dims)
            content: Sequence[Any] | npt.NDArray[Any] = list(values) * rows if rows > 1 else values
        else:
            import numpy as np

            shape, content = values.shape, np.repeat(values[np.newaxis], rows, axis=0)
        return Tensor(name=name, datatype=declared.datatype, shape=self._batch(rows) + shape, values=content)

    def row_tensor(self, name: str, rows: Sequence[Sequence[Any]]) -> Tensor:
        """Make the input `name` from one list of values per row of the batch, all of the same length."""
        declared = self.input(name)
        shape = (*self._batch(len(rows)), len(rows[0]))
        return Tensor(
            name=name, datatype=declared.datatype, shape=shape, values=[value for row in rows for value in row]
        )

    def _batch(self, rows: int) -> tuple[int, ...]:
        if self.max_batch_size < rows > 1:
            raise UsageError(
                f"The model {self.name!r} takes at most {max(1, self.max_batch_size)} prompts per request, not {rows}.",
                hint="Leave --batch out to send each prompt as its own request.",
            )
        return (rows,) if self.max_batch_size > 0 else ()

    def has(self, *names: str) -> bool:
        """Return whether one of `names` is an input."""
        return any(name in self.inputs for name in names)

    def first_input(self, *names: str) -> str:
        """Return the first of `names` (an input's names in different releases) that the model has, else the first."""
        return next((name for name in names if name in self.inputs), names[0])


def _tensor_descriptions(entries: Sequence[Mapping[str, Any]]) -> dict[str, TensorDescription]:
    return {
        entry["name"]: TensorDescription(
            name=entry["name"],
            datatype=str(entry["data_type"]).removeprefix("TYPE_").replace("STRING", "BYTES"),
            dims=tuple(int(size) for size in entry["dims"]),
            optional=bool(entry.get("optional", False)),
        )
        for entry in entries
    }


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """One request to a model."""

    model: ModelDescription
    tensors: Sequence[Tensor]
    id: str
    stream: bool = False
    outputs: Sequence[str] = ()  # the outputs that the answer has; empty: all
    timeout: float | None = None  # seconds until the answer must be there, instead of the client's own limit


@dataclass(kw_only=True, slots=True)
class Reply:
    """One response."""

    outputs: Mapping[str, npt.NDArray[Any]]
    """Output name → array; strings in object arrays. Triton's generate endpoint has no shapes: its arrays are flat."""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def numbers(self, name: str) -> list[int]:
        """Return the values of an output of whole numbers."""
        values: list[int] = self.outputs[name].reshape(-1).tolist()
        return values


def decoded(datatype: str, shape: Sequence[int], content: bytes) -> npt.NDArray[Any]:
    """Return the array of an output's raw content; invalid UTF-8 in strings is replaced."""
    import numpy as np

    if datatype != "BYTES":
        return np.frombuffer(content, numpy_type(datatype)).reshape(tuple(shape))
    return text_array(_texts(content)).reshape(tuple(shape))


def text_array(texts: Sequence[str]) -> npt.NDArray[Any]:
    """Return a flat array of strings."""
    import numpy as np

    array = np.empty(len(texts), dtype=object)
    array[:] = texts
    return array


def _texts(content: bytes) -> list[str]:
    texts, start = [], 0
    while start < len(content):
        length = int.from_bytes(content[start : start + 4], "little")
        texts.append(content[start + 4 : start + 4 + length].decode(errors="replace"))
        start += 4 + length
    return texts


def generate_shape(dims: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the shape that Triton's generate endpoint gives to `count` flat values of an input with `dims`.

    `dims` include the batch axis (-1). The innermost variable dim gets what the fixed dims leave; other variable dims
    become 1. Source: Triton's docs/protocol/extension_generate.md.
    """
    fixed = math.prod(size for size in dims if size > 0)
    rest, shape = count // fixed if fixed else 0, []
    for size in reversed(dims):
        shape.append(size if size > 0 else rest)
        rest = rest if size > 0 else 1
    return tuple(reversed(shape))


def stop_request(core: ModelDescription, request_id: str, *, timeout: float | None = None) -> ModelRequest:
    """Return a request to the core model that stops those with this id, as NVIDIA's client does.

    Needed when a cancelled call does not reach the engine (ensembles check for it only between their steps). An
    unknown id is not an error, so this is harmless when the cancellation came first.
    """
    values: dict[str, list[Any]] = {"input_ids": [0], "input_lengths": [0], "request_output_len": [0], "stop": [True]}
    tensors = [core.tensor(name, value) for name, value in values.items() if name in core.inputs]
    return ModelRequest(model=core, tensors=tensors, id=request_id, stream=core.decoupled, timeout=timeout)
