"""Triton model `postprocessing`: token ids in, text out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from ..shared.parameters import ModelParameters
from ..shared.tokenizer import AnchoredDecoder, tokenizer_of

_MOST_TOKENS = 1 << 20  # of a request; decoding more would hold up all others
# Before release 0.14 the ensemble sent these through this model to the client.
_PASSED_ON = ("CUM_LOG_PROBS", "OUTPUT_LOG_PROBS", "CONTEXT_LOGITS", "GENERATION_LOGITS", "BATCH_INDEX")


class TritonPythonModel:
    """Decodes every beam of every batch row."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer named by the parameter `tokenizer_dir`."""
        config = json.loads(args["model_config"])
        repository = Path(args["model_repository"]).resolve().parent
        parameters = ModelParameters(config, repository, pb_utils.Logger.log_warn)
        skip = parameters.choice("skip_special_tokens", default=True)
        try:
            self._decoder = AnchoredDecoder(tokenizer_of(parameters)[0], skip_special_tokens=skip)
        except ValueError as error:
            raise pb_utils.TritonModelException(str(error)) from error
        outputs = {output["name"] for output in config["output"]}
        self._passed_on = [name for name in _PASSED_ON if f"OUT_{name}" in outputs]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer each request; one that fails does not affect the others."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            texts = self._decoder.decode(_rows(inputs["TOKENS_BATCH"], inputs["SEQUENCE_LENGTH"]))
        except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            failure = pb_utils.TritonError(f"The tokens cannot be decoded: {error}", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(output_tensors=[], error=failure)
        encoded = np.array([text.encode("utf-8") for text in texts], dtype=np.object_)
        tensors = [pb_utils.Tensor("OUTPUT", encoded)]
        tensors += [pb_utils.Tensor(f"OUT_{name}", inputs[name]) for name in self._passed_on if name in inputs]
        return pb_utils.InferenceResponse(output_tensors=tensors)


def _rows(tokens: NDArray[Any], lengths: NDArray[Any]) -> list[list[int]]:
    """Cut ids [batch, beams, length] to their lengths [batch, beams]; row-major over (row, beam).

    Raises ValueError for lengths that do not fit the rows, and for more tokens than one request may hold.
    """
    # Without -1: the last response of a stream may be empty, and NumPy cannot infer an axis of an empty array.
    flat = tokens.reshape(math.prod(tokens.shape[:-1]), tokens.shape[-1])
    if flat.shape[0] != lengths.size:
        raise ValueError(f"SEQUENCE_LENGTH has {lengths.size} entries for {flat.shape[0]} rows.")
    if len(flat) <= _MOST_TOKENS:
        rows = [row[:length] for row, length in zip(flat, lengths.reshape(-1), strict=True)]
        if sum(map(len, rows)) <= _MOST_TOKENS:
            return [row.tolist() for row in rows]
    raise ValueError(
        f"TOKENS_BATCH has shape {list(tokens.shape)}; at most {_MOST_TOKENS} rows and tokens are decoded in a request."
    )
