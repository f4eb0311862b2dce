"""Transform an engine's graph at load: paged attention, and inputs for prompt tables and adapters.

Engines store the graph before this, because OpenVINO 2026.4 can write a transformed graph but not read it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

# Private in OpenVINO: tests/unit/test_paged_model.py checks the inputs that the transformation creates.
from openvino._offline_transformations import paged_attention_transformation

from trtserve.executor.engine.shapes import LoraShape
from trtserve.executor.openvino.graph import (
    ALIBI_SLOPES,
    LAST_ATTENTION,
    LAST_LAYER_INPUT,
    LAST_PARALLEL_GATE,
    LAST_PARALLEL_MLP,
    LONG_ROPE_BEYOND,
)
from trtserve.executor.openvino.graph_parts import parameter

# Input 10 of PagedAttentionExtension is the sliding window in tokens, 0 for none.
_WINDOW_INPUT = 10
# Input 11 holds the ALiBi slopes, one per head, or is empty.
_ALIBI_INPUT = 11


def to_paged_attention(graph: ov.Model, *, windows: Sequence[int | None] = ()) -> None:
    """Turn the stateful `graph` into one over flat tokens and cache blocks that computes only the requested `rows`.

    `windows` are the sliding windows of the layers in tokens, None for none; a shorter list is repeated.
    """
    slopes = _constants(graph).get(ALIBI_SLOPES)
    slopes = None if slopes is None else slopes.get_data().copy()
    paged_attention_transformation(graph)
    nodes = graph.get_ordered_ops()
    attentions = [node for node in nodes if node.get_type_name() == "PagedAttentionExtension"]
    for layer, node in enumerate(attentions):
        window = windows[layer % len(windows)] if windows else None
        if window is not None:
            node.input(_WINDOW_INPUT).replace_source_output(ops.constant(np.int32(window)).output(0))
        if slopes is not None:
            node.input(_ALIBI_INPUT).replace_source_output(ops.constant(slopes).output(0))
    for each in graph.get_parameters():
        if each.get_friendly_name().startswith(("key_cache.", "value_cache.")):
            each.set_element_type(ov.Type.dynamic)
    _gather_rows(graph, {node.get_friendly_name(): node for node in nodes})
    graph.validate_nodes_and_infer_types()


def add_long_sequences(graph: ov.Model, longest: int) -> int | None:
    """Add an input `long_sequences` boolean[t]: the tokens of sequences that LongRoPE rotates with its long factors.

    Must be called before `to_paged_attention`. Returns the number of tokens beyond which a sequence is long, or None
    without an input, for a model without LongRoPE or with sequences of at most `longest` tokens.
    """
    beyond = _constants(graph).get(LONG_ROPE_BEYOND)
    if beyond is None:
        return None
    (comparison,) = (port.get_node() for port in beyond.output(0).get_target_inputs())
    limit = int(beyond.get_data())
    if longest <= limit:
        long = ops.constant(np.array(False))
    else:
        flags = parameter("long_sequences", ov.Type.boolean, [-1])
        graph.add_parameters([flags])
        long = ops.unsqueeze(flags, ops.constant(np.array([1, 2])))
    for consumer in list(comparison.output(0).get_target_inputs()):
        consumer.replace_source_output(long.output(0))
    return limit if longest > limit else None


def add_prompt_table(graph: ov.Model, *, vocab_size: int, hidden_size: int) -> None:
    """Add an input `prompt_table` f32[n, hidden], n ≥ 1, with the embeddings of ids from `vocab_size` on."""
    weights = _constants(graph)["transformer.vocab_embedding.weight"]
    embed = _consumer(weights, "Gather")
    ids = embed.input_value(1)
    table = parameter("prompt_table", ov.Type.f32, [-1, hidden_size])
    first, axis = _scalar(vocab_size, ids), ops.constant(np.int64(0))
    own = ops.greater_equal(ids, first)
    embed.input(1).replace_source_output(ops.minimum(ids, _scalar(vocab_size - 1, ids)).output(0))
    consumers = list(embed.output(0).get_target_inputs())
    row = ops.maximum(ops.subtract(ids, first), _scalar(0, ids))
    chosen = ops.select(ops.unsqueeze(own, ops.constant(np.int64(-1))), ops.gather(table, row, axis), embed)
    for consumer in consumers:
        consumer.replace_source_output(chosen.output(0))
    graph.add_parameters([table])
    graph.validate_nodes_and_infer_types()


def add_adapters(graph: ov.Model, shape: LoraShape) -> None:
    """Let adapters change the outputs of the matrices in `shape`; `graph` must have paged attention already.

    New inputs: `lora.mask.LINEAR` boolean[t, w] (see AdapterBatch; [1, 0] for none), and `lora.a.LAYER.LINEAR`
    [w, inputs], `lora.b.LAYER.LINEAR` [w, outputs] per layer. Each matrix gets one product for all of its modules and
    adapters: output + select(mask, x·aᵀ)·b. Columns of other adapters become 0, whatever their values.
    """
    constants = _constants(graph)
    rows = next(each for each in graph.get_parameters() if each.get_friendly_name() == "rows")
    masks = {linear: parameter(f"lora.mask.{linear}", ov.Type.boolean, [-1, -1]) for linear in shape.linears}
    parameters = list(masks.values())
    kind = ov.Type.bf16 if shape.bfloat16 else ov.Type.f32
    for layer in range(shape.layers):
        for linear, (inputs, outputs) in shape.linears.items():
            a = parameter(f"lora.a.{layer}.{linear}", kind, [-1, inputs])
            b = parameter(f"lora.b.{layer}.{linear}", kind, [-1, outputs])
            parameters += [a, b]
            mask = masks[linear]
            if layer == shape.layers - 1 and linear.startswith("mlp."):
                # After the last attention there are only the requested rows.
                mask = ops.gather(mask, rows, ops.constant(np.int64(0)))
            _add_product(constants[f"transformer.layers.{layer}.{linear}.weight"], mask, a, b)
    graph.add_parameters(parameters)
    graph.validate_nodes_and_infer_types()


def _add_product(weight: Any, mask: Any, a: Any, b: Any) -> None:
    """Add the adapters' part to the product with the matrix `weight`, after its bias."""
    product = _consumer(weight, "MatMul")
    # As [t, inputs]: a product [t, 1, inputs] would be computed token by token.
    width = int(list(a.get_output_partial_shape(0))[1].get_length())
    flat = ops.reshape(product.input_value(0), ops.constant(np.array([-1, width])), False)
    inner = ops.matmul(flat, _wide(a), False, True)
    inner = ops.select(mask, inner, ops.constant(np.float32(0)))
    delta = ops.unsqueeze(ops.matmul(inner, _wide(b), False, False), ops.constant(np.int64(1)))
    end = _after_bias(product)
    consumers = list(end.output(0).get_target_inputs())
    total = ops.add(end, delta)
    # LAST_ATTENTION and similar names are never on the product itself, so no name is lost.
    for consumer in consumers:
        consumer.replace_source_output(total.output(0))


def _wide(weights: Any) -> Any:
    """Return the input as float32; the plugin may still compute in the input's own type."""
    return weights if weights.get_element_type() == ov.Type.f32 else ops.convert(weights, "f32")


def _after_bias(product: Any) -> Any:
    """Return the sum of `product` and its bias, or `product` itself without a bias."""
    consumers = list(product.output(0).get_target_inputs())
    if len(consumers) != 1:
        return product
    after = consumers[0].get_node()
    if after.get_type_name() != "Add":
        return product
    other = after.input_value(1 - consumers[0].get_index()).get_node()
    while other.get_type_name() == "Convert":
        other = other.input_value(0).get_node()
    return after if other.get_type_name() == "Constant" else product


def _consumer(node: Any, kind: str) -> Any:
    """Return the first operation of `kind` after a weight, skipping conversions."""
    for _ in range(6):
        if node.get_type_name() == kind:
            return node
        node = next(iter(node.output(0).get_target_inputs())).get_node()
    raise AssertionError(f"no {kind} after a weight; found {node.get_type_name()}")


def _constants(graph: ov.Model) -> Mapping[str, Any]:
    return {node.get_friendly_name(): node for node in graph.get_ops() if node.get_type_name() == "Constant"}


def _scalar(value: int, like: Any) -> Any:
    return ops.constant(value, dtype=like.get_element_type())


def _gather_rows(graph: ov.Model, nodes: Mapping[str, Any]) -> None:
    """Let everything after the last attention see only the tokens in a new input `rows` i32[r]."""
    rows = parameter("rows", ov.Type.i32, [-1])
    ends = [list(nodes[LAST_ATTENTION].output(0).get_target_inputs())]
    if LAST_LAYER_INPUT in nodes:
        ends.append(list(nodes[LAST_LAYER_INPUT].output(0).get_target_inputs()))
    ends += [[nodes[mark].input(0)] for mark in (LAST_PARALLEL_MLP, LAST_PARALLEL_GATE) if mark in nodes]
    for consumers in ends:
        chosen = ops.gather(consumers[0].get_source_output(), rows, ops.constant(np.int64(0)))
        for consumer in consumers:
            consumer.replace_source_output(chosen.output(0))
    graph.add_parameters([rows])
