"""Run a checkpoint for comparisons: whole sequences, float32 arithmetic, no paged KV cache.

Nothing is written to disk. Weights keep the type or packing that an engine of the checkpoint would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

from trtserve.checkpoint.architectures.base import Decoder
from trtserve.errors import UnsupportedModelError
from trtserve.executor.engine.shapes import Sizes
from trtserve.executor.openvino.graph import GraphWeights, build_graph
from trtserve.executor.openvino.layer_graphs import STATE_TABLE, step_inputs
from trtserve.executor.openvino.paged_model import openvino_core
from trtserve.executor.openvino.weight_quantization import Packing

Logits = npt.NDArray[np.float32]


class ReferenceModel:
    """A decoder that computes the logits of every token of a sequence. Not thread-safe."""

    def __init__(
        self,
        decoder: Decoder,
        sizes: Sizes,
        weights: GraphWeights,
        *,
        packing: Packing = None,
        threads: int | None = None,
    ) -> None:
        """Build and compile the graph; `threads` limits OpenVINO's threads.

        Raises UnsupportedModelError for a model that OpenVINO cannot compile.
        """
        graph = build_graph(decoder, sizes, weights, packing=packing)
        if decoder.attention_softcap is not None:
            cap_scores(graph, decoder.attention_softcap)
        try:
            self._request = openvino_core().compile_model(graph, "CPU", _properties(threads)).create_infer_request()
        except RuntimeError as error:
            raise UnsupportedModelError(f"OpenVINO {ov.get_version()} cannot compile the graph: {error}") from error
        self._tables = [port for port in self._request.model_inputs if port.get_any_name().startswith(STATE_TABLE)]
        for port in self._tables:  # a row that is written, and one that stays empty
            shape = [2, *(int(size.get_length()) for size in list(port.get_partial_shape())[1:])]
            self._request.set_tensor(port, ov.Tensor(np.zeros(shape, np.float32)))
        self.vocab_size = sizes.vocab

    def logits(self, tokens: Sequence[int]) -> Logits:
        """Return logits f32[l, vocab] of the sequence `tokens`."""
        ids = np.asarray(tokens, dtype=np.int64)[np.newaxis]
        self._request.reset_state()
        row = np.zeros(1, np.int32)
        states = step_inputs(np.array([0, ids.size]), row, row, empty=1) if self._tables else {}
        results: Any = self._request.infer(
            {
                "input_ids": ids,
                "attention_mask": np.ones_like(ids),
                "position_ids": np.arange(ids.size, dtype=np.int64)[np.newaxis],
                "beam_idx": np.zeros(1, dtype=np.int32),
                **states,
            }
        )
        logits: Logits = results["logits"][0].copy()
        return logits


def _properties(threads: int | None) -> dict[str, Any]:
    """Return properties for float32 everywhere; the last one keeps the plugin from rounding activations to int8."""
    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }
    return properties if threads is None else properties | {"INFERENCE_NUM_THREADS": threads}


def cap_scores(graph: ov.Model, cap: float) -> None:
    """Limit the scores of every attention in `graph` to (-cap, cap) before the mask: cap * tanh(score / cap).

    Attention without pages has no operation for this (Gemma 2), so it is written out in plain ones.
    """
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "ScaledDotProductAttention":
            node.output(0).replace(_capped_attention(*node.input_values(), cap=cap).output(0))
    graph.validate_nodes_and_infer_types()


def _capped_attention(query: Any, key: Any, value: Any, mask: Any, scale: Any, *, cap: float) -> Any:
    scores = ops.multiply(ops.matmul(query, key, False, True), scale)
    limit = ops.constant(np.float32(cap))
    capped = ops.multiply(ops.tanh(ops.divide(scores, limit)), limit)
    # The mask's half-precision minimum is far below any capped score in float32.
    shares = ops.softmax(ops.add(capped, mask), 3)
    return ops.matmul(shares, value, False, False)
