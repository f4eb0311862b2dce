"""Build the OpenVINO graph of a decoder: a stateful model with packed weights, from a `Decoder` and its sizes.

The graph has the inputs and the key/value state of an exported Hugging Face model (input_ids, attention_mask,
position_ids, beam_idx → logits), which OpenVINO's paged-attention transformation expects.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

from trtserve.checkpoint.architectures.base import Decoder, Experts, QueryGrowth
from trtserve.checkpoint.quantized import Int4Weight
from trtserve.errors import BuildError
from trtserve.executor.engine.shapes import Sizes
from trtserve.executor.openvino.graph_parts import (
    GraphRotation,
    add,
    clamped_gate,
    columns_of_experts,
    constant,
    cut,
    dimension,
    dot_product_attention,
    float_tensor,
    gather,
    int4_matrix,
    integers,
    last_unseen,
    packed,
    parameter,
    rows_of_experts,
    rows_of_interleaved_experts,
    stacked_int4,
    token_weights,
    xielu,
)
from trtserve.executor.openvino.layer_graphs import (
    GraphStates,
    beside_attention,
    changed_but_first,
    corrected,
    enter_streams,
    far_above,
    joined,
    latent_attention,
    leave_streams,
    mixed,
    predicted,
    stream_of,
)
from trtserve.executor.openvino.weight_quantization import Packing
from trtserve.files import writing

Array = npt.NDArray[Any]

# The sum after the last layer's attention. After it tokens are independent of each other, so PagedModel drops the rows
# without requested logits there: this saves the last MLP, the final norm and lm_head for them.
LAST_ATTENTION = "last_attention"
# The products in the last layer that bypass that sum, if the MLP is parallel to the attention; the second is its gate.
LAST_PARALLEL_MLP = "last_parallel_mlp"
LAST_PARALLEL_GATE = "last_parallel_gate"
LAST_LAYER_INPUT = "last_layer_input"  # the last layer's input, with what else of a streamed block bypasses that sum
ALIBI_SLOPES = "alibi_slopes"  # the constant f32[heads] with the ALiBi slopes
# The constant i64[] with the length beyond which sequences are long for LongRoPE; input of a comparison.
LONG_ROPE_BEYOND = "long_rope_beyond"
# What an engine's file says: that scores have a cap, that windows are chunks.
SCORE_CAP, CHUNKS = "attention_softcap", "attention_chunks"
# Half of the most negative float16: far below any score, and finite in every precision of the CPU plugin.
_MASKED = -32752.0
_PROBE = 1 << 20


class GraphWeights(Protocol):
    """Tensors of the whole model by their checkpoint names."""

    def names(self) -> list[str]:
        """Return the names of all tensors."""

    def merged(self, name: str) -> Array:
        """Return one tensor as floats, with tensor-parallel shards joined."""

    def kind(self, name: str) -> Literal["float", "int4", "fp8"]:
        """Return how the tensor is stored."""

    def int4(self, name: str) -> Int4Weight:
        """Return an int4 matrix, with tensor-parallel shards joined."""


def build_graph(
    decoder: Decoder,
    sizes: Sizes,
    weights: GraphWeights,
    *,
    packing: Packing = None,
    read: Callable[[int], object] = lambda count: None,
) -> ov.Model:
    """Return the stateful graph of a whole decoder.

    Inputs: input_ids i64[b, l], attention_mask i64[b, past + l], position_ids i64[b, l], beam_idx i32[b]. Output:
    logits f32[b, l, vocab]. Weights keep the dtype they have in `weights` (fp8 becomes float16). With `packing` the
    matrices of the layers are quantised: int8 per output channel, as TensorRT-LLM's W8A16, or int4 in groups of inputs.
    The embeddings are not quantised; lm_head becomes int8, because every step reads all of it. A cap of attention
    scores is a mark (`SCORE_CAP`). `read` is called with the number of weights that have been read, for each tensor.
    """
    return GraphBuilder(decoder, sizes, weights, packing, read).build()


def save_graph(graph: ov.Model, path: Path) -> None:
    """Write `graph` to `path` (.xml) and its weights next to it (.bin), in their own precision.

    Raises DiskSpaceError or ArtifactError when the file system refuses.
    """
    try:
        ov.save_model(graph, path, compress_to_fp16=False)
    except RuntimeError as error:
        # OpenVINO does not say why: what it could not write, Python cannot write either.
        needed = sum(each.data.nbytes for each in graph.get_ops() if isinstance(each, ov.op.Constant))
        with writing(path.parent), path.with_suffix(".bin").open("ab") as handle:
            os.posix_fallocate(handle.fileno(), 0, needed + _PROBE)
        raise BuildError(f"{path} could not be written: {error}") from error


class GraphBuilder:
    """Builds the graph operation by operation; the methods follow the order of the decoder."""

    def __init__(
        self, decoder: Decoder, sizes: Sizes, weights: GraphWeights, packing: Packing, read: Callable[[int], object]
    ) -> None:
        self.decoder = decoder
        self.sizes = sizes
        self._weights = weights
        self.names = frozenset(weights.names())
        self.packing = packing
        self._read = read
        self._sinks: list[Any] = []
        self._input_ids = parameter("input_ids", ov.Type.i64, [-1, -1])
        self._attention_mask = parameter("attention_mask", ov.Type.i64, [-1, -1])
        self._position_ids = parameter("position_ids", ov.Type.i64, [-1, -1])
        self._beam_idx = parameter("beam_idx", ov.Type.i32, [-1])
        full = sizes.of_layer(full=True).head if decoder.latent is None else decoder.latent.rotated
        self.rotation = self._make_rotation(decoder.rope_inv_freq, decoder.rope_scale, full)
        self._local_rotation = self._make_rotation(decoder.local_rope_inv_freq, 1.0, sizes.head) or self.rotation
        self._stored: dict[int, tuple[Any, Any]] = {}
        self._inputs: list[Any] = []
        self._query_factor = None if decoder.query_growth is None else self._grown(decoder.query_growth)
        self.states = GraphStates()
        self.masks = {window: self._causal_mask(window) for window in {*decoder.windows, None}}

    def build(self) -> ov.Model:
        hidden, streams = self._embed(), self.decoder.streams
        blocks = {
            "parallel": self._parallel,
            "post": self._post_normed,
            "sandwich": self._sandwich,
            "branch": self._branch,
            "streamed": self._streamed,
            "single": self._single,
        }
        add_block = blocks.get(self.decoder.block, self._sequential)
        for layer in range(self.sizes.layers):
            name = f"transformer.layers.{layer}"
            hidden = add_block(hidden, name, layer)
            if self._inputs and streams is None:
                hidden = self._add_input(hidden, name, layer)
            if self.decoder.layer_scales:
                hidden = ops.multiply(hidden, self.weight(f"{name}.scale")).output(0)
        result = ops.result(self._logits(hidden))
        result.get_output_tensor(0).set_names({"logits"})
        inputs = [self._input_ids, self._attention_mask, self._position_ids, self._beam_idx, *self.states.parameters]
        graph = ov.Model([result], self._sinks, inputs, "decoder")
        if self.decoder.attention_softcap is not None:
            graph.set_rt_info(str(self.decoder.attention_softcap), SCORE_CAP)
        if self.decoder.chunked:
            graph.set_rt_info("true", CHUNKS)
        return graph

    def _logits(self, hidden: Any) -> Any:
        if self.decoder.streams is not None:
            hidden = leave_streams(self, hidden, self.decoder.streams.count)
        if self.decoder.block != "post":
            hidden = self._norm(hidden, "transformer.ln_f")
        logits = self.linear(hidden, "lm_head", packing="int8" if self.packing else None)
        logits = _scaled(logits, self.decoder.logits_scale)
        if self.decoder.logits_softcap is not None:  # limits logits to (−c, c): c·tanh(logits / c)
            cap = ops.constant(np.float32(self.decoder.logits_softcap))
            logits = ops.multiply(ops.tanh(ops.divide(logits, cap)), cap)
        return logits

    def _sequential(self, hidden: Any, name: str, layer: int) -> Any:
        normed = self._norm(hidden, f"{name}.input_layernorm")
        hidden = self._add_attention(hidden, self._attention(normed, f"{name}.attention", layer), layer)
        inner = self._mlp(self._norm(hidden, f"{name}.{self.decoder.mlp_norm}"), f"{name}.mlp", layer)
        return add(hidden, _scaled(inner, self.decoder.residual_scale))

    def _sandwich(self, hidden: Any, name: str, layer: int) -> Any:
        attended = self._attention(self._norm(hidden, f"{name}.input_layernorm"), f"{name}.attention", layer)
        hidden = self._add_attention(hidden, self._norm(attended, f"{name}.post_layernorm"), layer)
        before, experts = self._norm(hidden, f"{name}.pre_feedforward_layernorm"), self.decoder.experts_of(layer)
        if experts is not None and experts.apart:
            inner = self._apart(hidden, before, f"{name}.mlp", experts)
        else:
            inner = self._mlp(before, f"{name}.mlp", layer)
        normed = self._norm(inner, f"{name}.post_feedforward_layernorm")
        return add(hidden, _scaled(normed, self.decoder.residual_scale))

    def _branch(self, hidden: Any, name: str, layer: int) -> Any:
        attended = self._attention(hidden, f"{name}.attention", layer)
        hidden = self._add_attention(hidden, self._norm(attended, f"{name}.post_layernorm"), layer)
        normed = self._norm(self._mlp(hidden, f"{name}.mlp", layer), f"{name}.post_feedforward_layernorm")
        return add(hidden, _scaled(normed, self.decoder.residual_scale))

    def _parallel(self, hidden: Any, name: str, layer: int) -> Any:
        normed = self._norm(hidden, f"{name}.input_layernorm")
        mlp_norm = self.decoder.mlp_norm
        other = normed if mlp_norm is None else self._norm(hidden, f"{name}.{mlp_norm}")
        hidden = self._add_attention(hidden, self._attention(normed, f"{name}.attention", layer), layer)
        mark = LAST_PARALLEL_MLP if layer == self.sizes.layers - 1 else None
        return add(hidden, _scaled(self._mlp(other, f"{name}.mlp", layer, mark=mark), self.decoder.residual_scale))

    def _post_normed(self, hidden: Any, name: str, layer: int) -> Any:
        hidden = self._add_attention(hidden, self._attention(hidden, f"{name}.attention", layer), layer)
        hidden = self._norm(hidden, f"{name}.input_layernorm")
        return self._norm(add(hidden, self._mlp(hidden, f"{name}.mlp", layer)), f"{name}.post_layernorm")

    def _streamed(self, states: Any, name: str, layer: int) -> Any:
        assert self.decoder.streams is not None
        count, active = self.decoder.streams.count, self.decoder.streams.active
        predictions, own = predicted(self, states, name, count, active), self._inputs[layer]
        hidden = stream_of(predictions, active)
        normed = self._norm(hidden, f"{name}.input_layernorm")
        beside = beside_attention(self, normed, name)
        attended = self._norm(self._attention(normed, f"{name}.attention", layer), f"{name}.post_layernorm")
        hidden = self._add_attention(hidden, attended, layer)
        if layer == self.sizes.layers - 1:
            predictions, beside, own = joined(predictions, beside, own, LAST_LAYER_INPUT)
        hidden = _scaled(add(hidden, beside), math.sqrt(0.5))
        inner = self._mlp(self._norm(hidden, f"{name}.pre_feedforward_layernorm"), f"{name}.mlp", layer)
        made = add(hidden, self._norm(inner, f"{name}.post_feedforward_layernorm"))
        states = corrected(self, predictions, made, name, active)
        chosen = ops.multiply(stream_of(states, active), self.weight(f"{name}.streams.scale")).output(0)
        return changed_but_first(states, self._of_input(chosen, own, name), count)

    def _single(self, hidden: Any, name: str, layer: int) -> Any:
        normed = self._norm(hidden, f"{name}.input_layernorm")
        if layer not in self.decoder.mlp_layers:
            return self._add_attention(hidden, self._attention(normed, f"{name}.attention", layer), layer)
        return add(hidden, _scaled(self._mlp(normed, f"{name}.mlp", layer), self.decoder.residual_scale))

    def _add_attention(self, hidden: Any, attended: Any, layer: int) -> Any:
        total = add(hidden, _scaled(attended, self.decoder.residual_scale))
        if layer == max(set(range(self.sizes.layers)) - self.decoder.mlp_layers):
            total.get_node().set_friendly_name(LAST_ATTENTION)
        return total

    # Inputs of the first layer

    def _embed(self) -> Any:
        embedded = gather(self.weight("transformer.vocab_embedding.weight"), self._input_ids)
        if self.decoder.positions == "learned":
            positions = gather(self.weight("transformer.position_embedding.weight"), self._position_ids)
            embedded = add(embedded, positions)
        embedded = _scaled(embedded, self.decoder.embedding_scale)
        if self.decoder.embedding_norm:
            embedded = self._norm(embedded, "transformer.ln_embed")
        if self.decoder.layer_inputs:
            self._inputs = self._layer_inputs(embedded)
        streams = self.decoder.streams
        return embedded if streams is None else enter_streams(self, embedded, streams.count)

    def _layer_inputs(self, embedded: Any) -> list[Any]:
        """Return the input [b, l, n] of each layer: half of a table, half of a product of the embedding."""
        size, layers = self.decoder.layer_inputs, self.sizes.layers
        table = gather(self.weight("transformer.layer_embedding.weight"), self._input_ids)
        made = _scaled(self.linear(embedded, "transformer.layer_projection", packing=None), self.sizes.hidden**-0.5)
        made = ops.reshape(made, integers(0, 0, layers, size), special_zero=True).output(0)
        made = ops.reshape(self.normed(made, "transformer.layer_norm"), integers(0, 0, layers * size), True)
        total = _scaled(add(_scaled(table, math.sqrt(size)), made), math.sqrt(0.5))
        return cut(total, *[size] * layers)

    def _add_input(self, hidden: Any, name: str, layer: int) -> Any:
        own = self._inputs[layer]
        if layer == self.sizes.layers - 1:
            own = ops.multiply(own, ops.constant(np.float32(1))).output(0)
            own.get_node().set_friendly_name(LAST_LAYER_INPUT)
        return add(hidden, self._of_input(hidden, own, name))

    def _of_input(self, hidden: Any, own: Any, name: str) -> Any:
        """Return what a layer makes of its input."""
        gate = self._activate(self.linear(hidden, f"{name}.inputs.gate", packing=self.packing))
        made = self.linear(ops.multiply(gate, own).output(0), f"{name}.inputs.proj", packing=self.packing)
        return self._norm(made, f"{name}.post_inputs_layernorm")

    def _grown(self, growth: QueryGrowth) -> Any:
        """Return the factors of the queries: f32[b, 1, l, 1]."""
        positions = ops.convert(ops.unsqueeze(self._position_ids, integers(1, 3)), "f32")
        # The half keeps whole quotients whole: the plugin multiplies by a rounded 1 / every.
        positions = ops.add(positions, ops.constant(np.float32(growth.first + 0.5)))
        turns = ops.floor(ops.divide(positions, ops.constant(np.float32(growth.every))))
        grown = ops.log(ops.add(turns, ops.constant(np.float32(1))))
        return ops.add(ops.multiply(grown, ops.constant(np.float32(growth.beta))), ops.constant(np.float32(1)))

    def _make_rotation(self, frequencies: Sequence[float] | None, scale: float, head: int) -> GraphRotation | None:
        if frequencies is None:
            return None
        decoder, longer = self.decoder, None
        if decoder.long_rope is not None:
            # True when the sequence now has more tokens; keys that were rotated before are not rotated again.
            beyond = constant(np.array(decoder.long_rope.beyond, dtype=np.int64), LONG_ROPE_BEYOND)
            longer = decoder.long_rope.inv_freq, ops.greater(dimension(self._attention_mask, 1), beyond)
        return GraphRotation(
            self._position_ids, frequencies, head=head, interleaved=decoder.rope_interleaved, scale=scale, longer=longer
        )

    def _causal_mask(self, window: int | None) -> Any:
        """Return an additive mask f32[b, 1, l, past + l] of padding, the future and tokens outside the window."""
        total = dimension(self._attention_mask, 1)
        length = dimension(self._input_ids, 1)
        zero, one = ops.constant(np.int64(0)), ops.constant(np.int64(1))
        keys = ops.range(zero, total, one, "i64")
        queries = ops.unsqueeze(ops.range(ops.subtract(total, length), total, one, "i64"), integers(1))
        visible = ops.less_equal(keys, queries)
        if window is not None:
            visible = ops.logical_and(visible, ops.greater(keys, last_unseen(queries, window, self.decoder.chunked)))
        present = ops.unsqueeze(ops.convert(self._attention_mask, "boolean"), integers(1, 2))
        mask = ops.select(
            ops.logical_and(present, visible), ops.constant(np.float32(0)), ops.constant(np.float32(_MASKED))
        )
        if self.decoder.alibi_slopes is None:
            return mask
        slopes = constant(np.asarray(self.decoder.alibi_slopes, dtype=np.float32), ALIBI_SLOPES)
        return ops.add(mask, ops.multiply(ops.unsqueeze(slopes, integers(0, 2, 3)), ops.convert(keys, "f32")))

    # Attention

    def _attention(self, hidden: Any, name: str, layer: int) -> Any:
        """Return what the layer adds to its input: attention, or what it has instead."""
        if (mixer := self.decoder.mixer_of(layer)) is not None:
            made = mixed(self, hidden, f"{name.rpartition('.')[0]}.mixer", layer, mixer)
            return add(made, self._attended(hidden, name, layer)) if self.decoder.mixer_beside else made
        return self._attended(hidden, name, layer)

    def _attended(self, hidden: Any, name: str, layer: int) -> Any:
        if self.decoder.latent is not None:
            return latent_attention(self, hidden, name, layer, self.decoder.latent)
        sizes, query, key, value = self._states(hidden, name, layer)
        scale = ops.constant(np.float32(self.decoder.attention_scale))
        sinks = None
        if self.decoder.attention_sinks:
            sinks = ops.reshape(self.weight(f"{name}.sinks"), integers(1, sizes.heads, 1, 1), False)
        attended = dot_product_attention(query, key, value, self.masks[self.decoder.window(layer)], scale, sinks)
        joined = ops.reshape(
            ops.transpose(attended, integers(0, 2, 1, 3)), integers(0, 0, sizes.heads * sizes.head), special_zero=True
        )
        if self.decoder.attention_gate:
            joined = ops.multiply(joined, ops.sigmoid(self.linear(hidden, f"{name}.gate", packing=self.packing)))
        return _scaled(
            self.linear(joined.output(0), f"{name}.dense", packing=self.packing), self.decoder.attention_factor
        )

    def _states(self, hidden: Any, name: str, layer: int) -> tuple[Sizes, Any, Any, Any]:
        """Return the layer's sizes, queries, and keys and values repeated for them."""
        window = self.decoder.window(layer)
        sizes, rotation = self.sizes.of_layer(full=window is None), self.rotation
        if window is not None:
            rotation = self._local_rotation
        if self.decoder.rotation(layer) is None:
            rotation = None
        fused = self.linear(hidden, f"{name}.qkv", packing=self.packing)
        query, states = fused, []
        if (key_layer := self.decoder.key_layer(layer)) == layer:
            query, *states = cut(fused, *(count * sizes.head for count in (sizes.heads, *[sizes.kv_heads] * 2)))
        query = self._placed(query, sizes.heads, f"{name}.q_layernorm", rotation)
        if self._query_factor is not None and self.decoder.growth(layer) is not None:
            query = ops.multiply(query, self._query_factor).output(0)
        if states:
            key = self._placed(states[0], sizes.kv_heads, f"{name}.k_layernorm", rotation)
            value = self._heads(states[1], sizes.kv_heads)
            if self.decoder.value_norm:
                value = self._over_rms(value)
            self._stored[layer] = (
                self.append_to_state(key, f"past_key_values.{layer}.key", sizes),
                self.append_to_state(value, f"past_key_values.{layer}.value", sizes),
            )
        key, value = (self.repeat_heads(each, sizes) for each in self._stored[key_layer])
        return sizes, query, key, value

    def _placed(self, flat: Any, heads: int, norm: str, rotation: GraphRotation | None) -> Any:
        """Return queries or keys [b, l, heads · head] as [b, heads, l, head], normed by `norm` and rotated."""
        kind = self.decoder.qk_norm
        states = self._heads(
            self.normed(flat, norm) if kind == "all" else flat, heads, norm if kind == "heads" else None
        )
        states = states if rotation is None else rotation.rotate(states)
        if kind == "bare" and rotation is not None:
            return self._over_rms(states)
        return self.normed(states, norm) if kind == "rotated" else states

    def _heads(self, flat: Any, heads: int, norm: str | None = None) -> Any:
        """[b, l, heads · head] → [b, heads, l, head]; `norm` has one weight for all heads, or one for each."""
        size = int(flat.get_partial_shape()[-1].get_length()) // heads
        split = ops.reshape(flat, integers(0, 0, heads, size), special_zero=True).output(0)
        if norm is not None:
            split = self.normed(split, norm)
        return ops.transpose(split, integers(0, 2, 1, 3)).output(0)

    def append_to_state(self, states: Any, name: str, sizes: Sizes) -> Any:
        """Append `states` to the state `name` and return all of it: [b, kv_heads, past + l, head]."""
        batch = ops.gather(ops.shape_of(self._input_ids), integers(0), ops.constant(np.int64(0)))
        empty = ops.concat([batch, integers(sizes.kv_heads), integers(0), integers(sizes.head)], 0)
        initial = ops.broadcast(ops.constant(np.float32(0)), empty)
        shape = ov.PartialShape([-1, sizes.kv_heads, -1, sizes.head])
        past = ops.read_value(initial, name, ov.Type.f32, shape)
        chosen = ops.gather(past, self._beam_idx, ops.constant(np.int64(0)))
        total = ops.concat([chosen, states], 2)
        self._sinks.append(ops.assign(total, name))
        return total.output(0)

    def repeat_heads(self, states: Any, sizes: Sizes) -> Any:
        """Repeat key/value heads for the query heads: [b, kv_heads, n, head] → [b, heads, n, head]."""
        if sizes.kv_heads == sizes.heads:
            return states
        length = ops.gather(ops.shape_of(states), integers(2), ops.constant(np.int64(0)))
        batch = ops.gather(ops.shape_of(states), integers(0), ops.constant(np.int64(0)))
        group = sizes.heads // sizes.kv_heads
        wide = ops.concat([batch, integers(sizes.kv_heads), integers(group), length, integers(sizes.head)], 0)
        copies = ops.broadcast(ops.unsqueeze(states, integers(2)), wide, "BIDIRECTIONAL")
        return ops.reshape(copies, integers(0, sizes.heads, -1, sizes.head), special_zero=True).output(0)

    # Position-wise parts

    def _norm(self, hidden: Any, name: str) -> Any:
        normal, bias = self.normed(hidden, name), f"{name}.bias"
        return add(normal, self.weight(bias)) if bias in self.names else normal

    def normed(self, states: Any, name: str, epsilon: float | None = None) -> Any:
        """Return states [b, l, …, n] over their last dimension; a weight of more than n numbers is [heads, n]."""
        values, size = self.floats(f"{name}.weight"), int(states.get_partial_shape()[-1].get_length())
        weight = float_tensor(values if values.size == size else values.reshape(-1, size), f"{name}.weight")
        if self.decoder.norm == "layer":
            return ops.multiply(ops.mvn(states, integers(-1), True, self.sizes.epsilon, "inside_sqrt"), weight).output(
                0
            )
        return ops.multiply(self._over_rms(states, epsilon), weight).output(0)

    def _over_rms(self, states: Any, epsilon: float | None = None) -> Any:
        square = ops.power(states, ops.constant(np.float32(2)))
        mean = ops.reduce_mean(square, integers(-1), keep_dims=True)
        root = ops.sqrt(ops.add(mean, ops.constant(np.float32(epsilon or self.sizes.epsilon))))
        return ops.multiply(states, ops.divide(ops.constant(np.float32(1)), root)).output(0)

    def _mlp(self, hidden: Any, name: str, layer: int, *, mark: str | None = None) -> Any:
        experts = self.decoder.experts_of(layer)
        if experts is not None:
            return self._experts(hidden, name, experts)
        inner = _scaled(self.linear(hidden, f"{name}.fc", packing=self.packing, mark=mark), self.decoder.gate_factor)
        if (threshold := self.decoder.gate_threshold(layer)) is not None:
            inner = far_above(inner, threshold)
        if self.decoder.activation == "xielu":
            inner = xielu(inner, self.floats(f"{name}.xielu"))
        else:
            inner = self._activate_half(inner) if self.decoder.mlp == "fused" else self._activate(inner)
        if self.decoder.gated:
            gate = self.linear(hidden, f"{name}.gate", packing=self.packing, mark=mark and LAST_PARALLEL_GATE)
            inner = ops.multiply(inner, gate).output(0)
        return _scaled(self.linear(inner, f"{name}.proj", packing=self.packing), self.decoder.mlp_factor)

    def _experts(self, hidden: Any, name: str, experts: Experts) -> Any:
        output = self._routed(hidden, name, experts, self._token_weights(hidden, f"{name}.router", experts))
        return add(output, self._shared(hidden, name, experts)) if experts.shared else output

    def _apart(self, hidden: Any, normed: Any, name: str, experts: Experts) -> Any:
        """Compute experts, and a shared one that sees `normed`; each has norms of its own."""
        seen = _scaled(self._norm(hidden, f"{name}.router_norm"), self.sizes.hidden**-0.5)
        weights = self._token_weights(seen, f"{name}.router", experts)
        routed = self._routed(self._norm(hidden, f"{name}.pre_experts_layernorm"), name, experts, weights)
        shared = self._norm(self._shared(normed, name, experts), f"{name}.post_shared_layernorm")
        return add(shared, self._norm(routed, f"{name}.post_experts_layernorm"))

    def _routed(self, hidden: Any, name: str, experts: Experts, weights: Any) -> Any:
        """Compute all experts as one wide MLP in which each token weights them: 0 for the experts it does not use.

        Exact, with two products on packed matrices. Every step reads and multiplies with all experts: for a token that
        uses k of n experts this is n / k times the arithmetic, and as much memory traffic as a step of many tokens has
        anyway.
        """
        arranged = rows_of_interleaved_experts if experts.interleaved else rows_of_experts
        outer = self._stacked(f"{name}.fc.weight", arranged, experts.count)
        inner = ops.reshape(ops.matmul(hidden, outer, False, True), integers(0, 0, experts.count, -1), True)
        if f"{name}.fc.bias" in self.names:
            bias = arranged(self.floats(f"{name}.fc.bias")).reshape(experts.count, -1)
            inner = ops.add(inner, float_tensor(bias, f"{name}.fc.bias"))
        shares = ops.unsqueeze(weights, integers(-1))
        if experts.scaled_inputs:  # an expert that is not chosen sees and adds 0
            inner = ops.multiply(inner, shares)
        if not experts.gated:
            inner = self._activate(inner)
        else:
            inner = self._activate_half(inner) if experts.clamp is None else clamped_gate(inner, experts.clamp)
        weighted = inner if experts.scaled_inputs else ops.multiply(inner, shares)
        joined = ops.reshape(weighted, integers(0, 0, -1), special_zero=True)
        proj = self._stacked(f"{name}.proj.weight", columns_of_experts, experts.count)
        output = ops.matmul(joined, proj, False, True).output(0)
        if f"{name}.proj.bias" in self.names:
            bias = self.floats(f"{name}.proj.bias").reshape(experts.count, -1)
            output = add(output, ops.matmul(weights, float_tensor(bias, f"{name}.proj.bias"), False, False))
        return output

    def _shared(self, hidden: Any, name: str, experts: Experts) -> Any:
        shared = f"{name}.shared_expert"
        inner = self.linear(hidden, f"{shared}.fc", packing=self.packing)
        inner = self._activate_half(inner) if experts.gated else self._activate(inner)
        inner = self.linear(inner, f"{shared}.proj", packing=self.packing)
        if experts.shared_gate:
            gate = ops.sigmoid(self.linear(hidden, f"{shared}_gate", packing=None))
            inner = ops.multiply(inner, gate).output(0)
        return inner

    def _token_weights(self, hidden: Any, router: str, experts: Experts) -> Any:
        logits = ops.matmul(hidden, self.weight(f"{router}.weight"), False, True)
        if f"{router}.bias" in self.names:
            logits = ops.add(logits, self.weight(f"{router}.bias"))
        correction = f"{router}.correction"
        weights = token_weights(logits, self.weight(correction) if correction in self.names else None, experts)
        scale = f"{router}.scale"
        return ops.multiply(weights, self.weight(scale)).output(0) if scale in self.names else weights

    def _activate_half(self, joined: Any) -> Any:
        """Multiply the first half of the numbers by the activated second half."""
        halves = ops.split(joined, ops.constant(np.int64(-1)), 2)
        return ops.multiply(halves.output(0), self._activate(halves.output(1))).output(0)

    def _activate(self, states: Any) -> Any:
        activation = self.decoder.activation
        if activation == "silu":
            return ops.swish(states).output(0)
        if activation in ("relu", "relu2"):
            positive = ops.relu(states).output(0)
            return positive if activation == "relu" else ops.multiply(positive, positive).output(0)
        activated = ops.gelu(states, "tanh" if activation == "gelu_tanh" else "erf").output(0)
        if self.decoder.mlp == "plain":
            return activated
        # No GELU is below -1: this only keeps OpenVINO 2026.4 from fusing the whole MLP into one kernel on CPUs with
        # AMX, which with one thread divides by zero and ends the process.
        return ops.maximum(activated, ops.constant(np.float32(-1))).output(0)

    def linear(self, hidden: Any, name: str, *, packing: Packing, mark: str | None = None) -> Any:
        """hidden [b, l, in] × weight [out, in]ᵀ (+ bias, if the checkpoint has one); `mark` names the product."""
        weight, scales = self._matrix(f"{name}.weight", packing)
        if scales is not None:
            hidden = ops.multiply(hidden, scales).output(0)
        product = ops.matmul(hidden, weight, False, True).output(0)
        if mark is not None:
            product.get_node().set_friendly_name(mark)
        bias = f"{name}.bias"
        return add(product, self.weight(bias)) if bias in self.names else product

    # Weights

    def _stacked(self, name: str, arranged: Callable[[Array], Array], count: int) -> Any:
        """Return the matrices of all experts as one [out, in]; each row of each expert has its own scales."""
        if self._weights.kind(name) == "int4":
            return int4_matrix(stacked_int4(self._int4(name), count, arranged), name)
        return packed(arranged(self.floats(name)), name, self.packing)

    def _matrix(self, name: str, packing: Packing) -> tuple[Any, Any]:
        """Return a matrix, and the factors of its inputs (None for none)."""
        if self._weights.kind(name) != "int4":
            return packed(self.floats(name), name, packing), None
        weight = self._int4(name)
        scales = weight.input_scales
        return int4_matrix(weight, name), None if scales is None else constant(scales, f"{name}.input_scales")

    def weight(self, name: str) -> Any:
        return float_tensor(self.floats(name), name)

    def floats(self, name: str) -> Array:
        """Return a tensor as floats; FP8 becomes float16, which is more precise."""
        values = self._weights.merged(name)
        self._read(values.size)
        return values.astype(np.float16) if self._weights.kind(name) == "fp8" else values

    def _int4(self, name: str) -> Int4Weight:
        weight = self._weights.int4(name)
        self._read(weight.codes.size)
        return weight


def _scaled(states: Any, factor: float) -> Any:
    return states if factor == 1.0 else ops.multiply(states, ops.constant(np.float32(factor))).output(0)
