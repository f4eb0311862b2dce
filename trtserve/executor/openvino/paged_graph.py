"""Transform an engine's graph at load: paged attention, with capped scores or in chunks too; tables and adapters.

Engines store the graph before this, because OpenVINO 2026.4 can write a transformed graph but not read it back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops
from openvino._offline_transformations import paged_attention_transformation

from trtserve.executor.engine.model import Int32s, StepInputs
from trtserve.executor.engine.shapes import LoraShape
from trtserve.executor.openvino.graph import (
    ALIBI_SLOPES,
    CHUNKS,
    LAST_ATTENTION,
    LAST_LAYER_INPUT,
    LAST_PARALLEL_GATE,
    LAST_PARALLEL_MLP,
    LONG_ROPE_BEYOND,
    SCORE_CAP,
)
from trtserve.executor.openvino.graph_parts import dimension, integers, last_unseen, parameter
from trtserve.executor.openvino.memory import CAPPED_TOKENS

_WINDOW_INPUT = 10  # input 10 of PagedAttentionExtension is the sliding window in tokens, 0 for none
_ALIBI_INPUT = 11  # input 11 holds the ALiBi slopes, one per head, or is empty


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


BLOCK_TABLES = "block_tables"
"""An input i32[s, m] of a graph with a cap: the blocks of each sequence, padded with any of them."""
NEW = "new."  # begins the names of outputs [t, kv_heads, head]; the name of their cache follows
_TOKENS_PER_BLOCK = 32
# The plugin would widen all of a cache of another type than that of arithmetic in each step.
_CACHE_TYPES = {"f32": ov.Type.f32, "bf16": ov.Type.bf16}
_MASKED = -32752.0  # far below any capped score
# Numbers of inputs of PagedAttentionExtension.
_QUERY, _KEY, _VALUE, _SCALE, _WINDOW = 0, 1, 2, 9, 10
_OF_PAGED = ("subsequence_begins", "block_indices", "block_indices_begins", "max_context_len")


def has_chunks(graph: ov.Model) -> bool:
    """Return whether windows are chunks."""
    return bool(graph.has_rt_info(CHUNKS))


def with_caps(graph: ov.Model, head: int, kv_precision: str, *, chunks: bool) -> bool:
    """Replace paged attention with heads of size `head` if the graph has a cap, or `chunks`; return whether it has."""
    if not (graph.has_rt_info(SCORE_CAP) or chunks):
        return False
    capped = _CappedAttention(graph, head, _CACHE_TYPES[kv_precision])
    attentions = [node for node in graph.get_ordered_ops() if node.get_type_name() == "PagedAttentionExtension"]
    for layer, node in enumerate(attentions):
        node.output(0).replace(capped.attention(node, layer))
    graph.add_parameters(capped.inputs)
    graph.add_results(capped.results)
    for each in list(graph.get_parameters()):
        name = each.get_friendly_name()
        if name in _OF_PAGED or (name.startswith(("key_cache.", "value_cache.")) and each not in capped.inputs):
            graph.remove_parameter(each)
    graph.validate_nodes_and_infer_types()
    return True


class _CappedAttention:
    """Attention with capped scores (Gemma 2) or in chunks (Llama 4): OpenVINO's paged attention has neither.

    Plain operations take its place. They read the blocks of the cache and return new keys and values, which the model
    writes there. All sequences of a call have equally many new tokens (`even_parts`). The object has what the layers
    share.
    """

    def __init__(self, graph: ov.Model, head: int, cache_type: ov.Type) -> None:
        self._head, self._cache_type = head, cache_type
        self._cap = None
        if graph.has_rt_info(SCORE_CAP):
            self._cap = ops.constant(np.float32(graph.get_rt_info(SCORE_CAP).astype(str)))
        self._chunked = has_chunks(graph)
        found = {each.get_friendly_name(): each for each in graph.get_parameters()}
        self._past, self._tables = found["past_lens"], parameter(BLOCK_TABLES, ov.Type.i32, [-1, -1])
        count = dimension(self._past, 0)
        self._count = ops.unsqueeze(count, integers(0))
        self._new = ops.divide(dimension(found["input_ids"], 0), count)
        self._room = ops.multiply(dimension(self._tables, 1), ops.constant(np.int64(_TOKENS_PER_BLOCK)))
        self._masks: dict[int, Any] = {}
        self.inputs: list[Any] = [self._tables]
        self.results: list[Any] = []

    def attention(self, node: Any, layer: int) -> Any:
        """Return what replaces the attention `node`: [t, heads · head]."""
        width, of_keys = (
            int(node.input_value(number).get_partial_shape()[1].get_length()) for number in (_QUERY, _KEY)
        )
        kv_heads = of_keys // self._head
        query = ops.transpose(
            self._shaped(node.input_value(_QUERY), -1, kv_heads, width // of_keys, self._head), integers(0, 2, 3, 1, 4)
        )
        keys, values = (
            self._states(node.input_value(number), kv_heads, f"{kind}_cache.{layer}")
            for number, kind in ((_KEY, "key"), (_VALUE, "value"))
        )
        # [s, kv_heads, group · new, room + new]
        scores = ops.matmul(self._shaped(query, kv_heads, -1, self._head), keys, False, True)
        if self._cap is None:
            scores = ops.multiply(scores, node.input_value(_SCALE))
        else:
            scores = ops.multiply(scores, ops.divide(node.input_value(_SCALE), self._cap))
            scores = ops.multiply(ops.tanh(scores), self._cap)
        window = int(node.input_value(_WINDOW).get_node().get_data())
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        grouped = ops.concat([self._count, integers(kv_heads, width // of_keys), self._lengths()], 0)
        shares = ops.softmax(ops.add(ops.reshape(scores, grouped, False), self._masks[window]), -1)
        attended = ops.matmul(ops.reshape(shares, ops.shape_of(scores), False), values, False, False)
        attended = ops.transpose(
            self._shaped(attended, kv_heads, width // of_keys, -1, self._head), integers(0, 3, 1, 2, 4)
        )
        return ops.reshape(attended, integers(-1, width), False).output(0)

    def _states(self, flat: Any, kv_heads: int, name: str) -> Any:
        """Return keys or values [s, kv_heads, room + new, head]: those of a cache `name`, and the new ones."""
        cache = parameter(name, self._cache_type, [-1, kv_heads, _TOKENS_PER_BLOCK, self._head])
        result = ops.result(ops.convert(ops.reshape(flat, integers(-1, kv_heads, self._head), False), self._cache_type))
        result.get_output_tensor(0).set_names({NEW + name})
        self.inputs.append(cache)
        self.results.append(result)
        rows = ops.add(
            ops.multiply(ops.unsqueeze(self._tables, integers(1)), ops.constant(np.int32(kv_heads))),
            ops.constant(np.arange(kv_heads, dtype=np.int32).reshape(1, -1, 1)),
        )
        of_heads = ops.reshape(cache, integers(-1, _TOKENS_PER_BLOCK * self._head), False)
        past = ops.convert(ops.gather(of_heads, rows, ops.constant(np.int64(0))), "f32")
        new = ops.transpose(self._shaped(flat, -1, kv_heads, self._head), integers(0, 2, 1, 3))
        return ops.concat([self._shaped(past, kv_heads, -1, self._head), new], 2)

    def _mask(self, window: int) -> Any:
        """Return what is added to scores: f32[s, 1, 1, new, room + new]; `window` 0 is none."""
        zero, one = ops.constant(np.int64(0)), ops.constant(np.int64(1))
        past = ops.unsqueeze(ops.convert(self._past, "i64"), integers(1, 2))
        new = ops.range(zero, self._new, one, "i64")
        stored = ops.unsqueeze(ops.range(zero, self._room, one, "i64"), integers(0, 1))
        queries = ops.add(past, ops.unsqueeze(new, integers(0, 2)))
        # What a block has beyond the sequence's past is as far away as the future.
        stored = ops.select(ops.less(stored, past), stored, ops.constant(np.int64(1 << 40)))
        keys = ops.concat([stored, ops.add(past, ops.unsqueeze(new, integers(0, 1)))], 2)
        visible = ops.less_equal(keys, queries)
        if window:
            visible = ops.logical_and(visible, ops.greater(keys, last_unseen(queries, window, self._chunked)))
        mask = ops.select(visible, ops.constant(np.float32(0)), ops.constant(np.float32(_MASKED)))
        return ops.unsqueeze(mask, integers(1, 2))

    def _lengths(self) -> Any:
        return ops.concat([ops.unsqueeze(each, integers(0)) for each in (self._new, ops.add(self._room, self._new))], 0)

    def _shaped(self, states: Any, *sizes: int) -> Any:
        """Return states as [s, *sizes]."""
        return ops.reshape(states, ops.concat([self._count, integers(*sizes)], 0), False)


def even_parts(step: StepInputs) -> Iterator[tuple[StepInputs, npt.NDArray[np.intp]]]:
    """Return parts of a step whose sequences have equally many new tokens, and which of its `rows` each part has.

    Sequences that are longer than a call come in several parts, later tokens in later ones.
    """
    lengths = np.diff(step.subsequence_begins)
    for new in np.unique(lengths):
        members = np.flatnonzero(lengths == new)
        together = max(1, CAPPED_TOKENS // int(new))
        for first in range(0, len(members), together):
            some = members[first : first + together]
            for begin in range(0, int(new), CAPPED_TOKENS):
                yield _part(step, some, begin, min(begin + CAPPED_TOKENS, int(new)))


def _part(
    step: StepInputs, members: npt.NDArray[np.intp], begin: int, end: int
) -> tuple[StepInputs, npt.NDArray[np.intp]]:
    """Return new tokens `begin` … `end` of some sequences."""
    tokens = (step.subsequence_begins[members][:, None] + np.arange(begin, end)).reshape(-1)
    place = np.full(len(step.token_ids), -1)
    place[tokens] = np.arange(len(tokens))
    rows = np.flatnonzero(place[step.rows] >= 0)
    blocks = [step.block_indices[slice(*step.block_indices_begins[each : each + 2])] for each in members]
    adapters = step.adapters
    return replace(
        step,
        token_ids=step.token_ids[tokens],
        positions=step.positions[tokens],
        past_lens=step.past_lens[members] + np.int32(begin),
        subsequence_begins=np.arange(0, len(tokens) + 1, end - begin, dtype=np.int32),
        block_indices=np.concatenate(blocks),
        block_indices_begins=np.cumsum([0, *map(len, blocks)]).astype(np.int32),
        rows=place[step.rows[rows]].astype(np.int32),
        adapters=adapters and replace(adapters, owner=adapters.owner[tokens]),
        long_sequences=None if step.long_sequences is None else step.long_sequences[members],
    ), rows


def block_tables(step: StepInputs) -> Int32s:
    """Return BLOCK_TABLES of a step: the blocks that have past tokens, at least one."""
    begins = step.block_indices_begins
    most = max(1, -(-int(step.past_lens.max()) // _TOKENS_PER_BLOCK))
    places = np.minimum(begins[:-1, None] + np.arange(most), begins[1:, None] - 1)
    tables: Int32s = step.block_indices[places].astype(np.int32)
    return tables


def new_places(step: StepInputs) -> tuple[Int32s, Int32s]:
    """Return block and place in it of each token of a step."""
    lengths = np.diff(step.subsequence_begins)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    numbers = np.arange(len(step.token_ids)) + (step.past_lens - step.subsequence_begins[:-1])[owners]
    blocks, offsets = np.divmod(numbers, _TOKENS_PER_BLOCK)
    return step.block_indices[step.block_indices_begins[owners] + blocks], offsets
