"""How a decoder becomes an OpenVINO graph: a stateful model with packed weights, built from `Decoder` and sizes.

The graph has the inputs and the key/value state of an exported Hugging Face model (input_ids, attention_mask,
position_ids, beam_idx → logits), which is what OpenVINO's paged-attention transformation understands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops
from openvino._offline_transformations import compress_model_transformation

from trtserve.architectures.base import Decoder
from trtserve.errors import BuildError, UnsupportedModelError

Array = npt.NDArray[Any]

# The sum after the last layer's attention. From here on every token goes its own way, so that PagedModel can drop
# there the rows whose logits nobody asked for: it spares the last MLP, the final norm and lm_head.
LAST_ATTENTION = "last_attention"
# Half of the largest float16: far below any score, finite in every precision the CPU may choose.
_MASKED = -32752.0


class Weights(Protocol):
    """Tensors of the whole model by their checkpoint names."""

    def names(self) -> list[str]:
        """Names of all tensors."""

    def merged(self, name: str) -> Array:
        """One tensor, tensor-parallel shards joined."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a decoder, from the checkpoint's `config.json`."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    epsilon: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        """Read the sizes, with TensorRT-LLM's defaults for keys that older releases leave out."""
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return cls(
            vocab=int(config["vocab_size"]),
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head=int(config.get("head_size") or hidden // heads),
            epsilon=float(config.get("norm_epsilon", 1e-5)),
        )


def build_graph(decoder: Decoder, sizes: Sizes, weights: Weights, *, int8: bool = False) -> ov.Model:
    """The stateful graph of a whole decoder.

    Inputs: input_ids i64[b, l], attention_mask i64[b, past + l], position_ids i64[b, l], beam_idx i32[b].
    Output: logits f32[b, l, vocab]. Weights keep the dtype they have in `weights`; with `int8` the matrices inside
    the layers are quantised per output channel (TensorRT-LLM's W8A16: embeddings and lm_head stay as they are).
    """
    return _GraphBuilder(decoder, sizes, weights, int8=int8).build()


def save_graph(graph: ov.Model, path: Path) -> None:
    """Write `graph` to `path` (.xml) and its weights beside it (.bin), in the precision they have."""
    try:
        ov.save_model(graph, path, compress_to_fp16=False)
    except RuntimeError as error:
        raise BuildError(f"{path} could not be written: {error}", hint="Is the disk full?") from error


def quantize_per_channel(weight: Array) -> tuple[Array, Array]:
    """Symmetric int8 of `weight` [out, in]: (values i8[out, in], scales f32[out, 1]), weight ≈ values × scales.

    The largest absolute value of a row becomes 127, as in TensorRT-LLM's weight-only quantisation.
    """
    wide = weight.astype(np.float32)
    scales = np.abs(wide).max(axis=1, keepdims=True) / 127.0
    scales[scales == 0.0] = 1.0
    return np.rint(wide / scales).astype(np.int8), scales


class _GraphBuilder:
    """Adds one operation after another; the methods follow the order of the decoder."""

    def __init__(self, decoder: Decoder, sizes: Sizes, weights: Weights, *, int8: bool) -> None:
        self._decoder = decoder
        self._sizes = sizes
        self._weights = weights
        self._names = frozenset(weights.names())
        self._int8 = int8
        self._sinks: list[Any] = []
        self._input_ids = _parameter("input_ids", ov.Type.i64, [-1, -1])
        self._attention_mask = _parameter("attention_mask", ov.Type.i64, [-1, -1])
        self._position_ids = _parameter("position_ids", ov.Type.i64, [-1, -1])
        self._beam_idx = _parameter("beam_idx", ov.Type.i32, [-1])
        self._rotation = self._rope_tables()
        self._mask = self._causal_mask()

    def build(self) -> ov.Model:
        hidden = self._embed()
        for layer in range(self._sizes.layers):
            hidden = self._layer(hidden, f"transformer.layers.{layer}", layer)
        logits = self._linear(self._norm(hidden, "transformer.ln_f"), "lm_head", int8=False)
        result = ops.result(logits)
        result.get_output_tensor(0).set_names({"logits"})
        inputs = [self._input_ids, self._attention_mask, self._position_ids, self._beam_idx]
        return ov.Model([result], self._sinks, inputs, "decoder")

    def _layer(self, hidden: Any, name: str, layer: int) -> Any:
        attended = self._attention(self._norm(hidden, f"{name}.input_layernorm"), f"{name}.attention", layer)
        hidden = _add(hidden, attended)
        if layer == self._sizes.layers - 1:
            hidden.get_node().set_friendly_name(LAST_ATTENTION)
        return _add(hidden, self._mlp(self._norm(hidden, f"{name}.post_layernorm"), f"{name}.mlp"))

    # Inputs of the first layer

    def _embed(self) -> Any:
        embedded = _gather(self._weight("transformer.vocab_embedding.weight"), self._input_ids)
        if self._decoder.positions == "learned":
            positions = _gather(self._weight("transformer.position_embedding.weight"), self._position_ids)
            embedded = _add(embedded, positions)
        return embedded

    def _rope_tables(self) -> tuple[Any, Any] | None:
        """Cosines and sines of the positions: two f32[b, 1, l, head]."""
        if self._decoder.rope_inv_freq is None:
            return None
        frequencies = np.asarray(self._decoder.rope_inv_freq, dtype=np.float32)
        if 2 * len(frequencies) != self._sizes.head:
            raise UnsupportedModelError(
                f"Rotary embedding over {2 * len(frequencies)} of {self._sizes.head} numbers per head is not built; "
                "expected all of them."
            )
        positions = ops.convert(ops.unsqueeze(self._position_ids, _ints(1)), "f32")
        columns = ops.constant(frequencies.reshape(1, -1, 1))
        angles = ops.transpose(ops.matmul(columns, positions, False, False), _ints(0, 2, 1))
        if self._decoder.rope_interleaved:
            repeated = ops.reshape(
                ops.concat([ops.unsqueeze(angles, _ints(-1))] * 2, -1), _ints(0, 0, self._sizes.head), True
            )
        else:
            repeated = ops.concat([angles, angles], -1)
        return ops.unsqueeze(ops.cos(repeated), _ints(1)), ops.unsqueeze(ops.sin(repeated), _ints(1))

    def _causal_mask(self) -> Any:
        """Additive mask f32[b, 1, l, past + l]: padding, the future and what left the sliding window."""
        total = _dimension(self._attention_mask, 1)
        length = _dimension(self._input_ids, 1)
        zero, one = ops.constant(np.int64(0)), ops.constant(np.int64(1))
        keys = ops.range(zero, total, one, "i64")
        queries = ops.unsqueeze(ops.range(ops.subtract(total, length), total, one, "i64"), _ints(1))
        visible = ops.less_equal(keys, queries)
        if self._decoder.window is not None:
            oldest = ops.subtract(queries, ops.constant(np.int64(self._decoder.window)))
            visible = ops.logical_and(visible, ops.greater(keys, oldest))
        present = ops.unsqueeze(ops.convert(self._attention_mask, "boolean"), _ints(1, 2))
        return ops.select(
            ops.logical_and(present, visible), ops.constant(np.float32(0)), ops.constant(np.float32(_MASKED))
        )

    # Attention

    def _attention(self, hidden: Any, name: str, layer: int) -> Any:
        sizes = self._sizes
        fused = self._linear(hidden, f"{name}.qkv", int8=self._int8)
        lengths = [sizes.heads * sizes.head, sizes.kv_heads * sizes.head, sizes.kv_heads * sizes.head]
        parts = ops.variadic_split(fused, ops.constant(np.int64(-1)), ops.constant(np.array(lengths)))
        query = self._rotate(self._split_heads(parts.output(0), sizes.heads))
        key = self._rotate(self._split_heads(parts.output(1), sizes.kv_heads))
        value = self._split_heads(parts.output(2), sizes.kv_heads)
        key = self._repeat_heads(self._remember(key, f"past_key_values.{layer}.key"))
        value = self._repeat_heads(self._remember(value, f"past_key_values.{layer}.value"))
        scale = ops.constant(np.float32(self._decoder.attention_scale))
        attended = ops.scaled_dot_product_attention(query, key, value, self._mask, scale, causal=False)
        joined = ops.reshape(
            ops.transpose(attended, _ints(0, 2, 1, 3)), _ints(0, 0, sizes.heads * sizes.head), special_zero=True
        )
        return self._linear(joined.output(0), f"{name}.dense", int8=self._int8)

    def _split_heads(self, flat: Any, heads: int) -> Any:
        """[b, l, heads · head] → [b, heads, l, head]."""
        split = ops.reshape(flat, _ints(0, 0, heads, self._sizes.head), special_zero=True)
        return ops.transpose(split, _ints(0, 2, 1, 3)).output(0)

    def _rotate(self, states: Any) -> Any:
        """Rotary position embedding of [b, heads, l, head]."""
        if self._rotation is None:
            return states
        cosines, sines = self._rotation
        turned = self._turn_pairs(states) if self._decoder.rope_interleaved else self._turn_halves(states)
        return ops.add(ops.multiply(states, cosines), ops.multiply(turned, sines)).output(0)

    def _turn_halves(self, states: Any) -> Any:
        """(x, y) → (−y, x) where x and y are the two halves of a head (GPT-NeoX, Hugging Face's Llama).

        The axis of the concatenation must be written as -1: OpenVINO recognises (and fuses) only that form.
        """
        half = self._sizes.head // 2
        first = ops.slice(states, _ints(0), _ints(half), _ints(1), _ints(3))
        second = ops.slice(states, _ints(half), _ints(2 * half), _ints(1), _ints(3))
        return ops.concat([ops.multiply(second, ops.constant(np.float32(-1))), first], -1)

    def _turn_pairs(self, states: Any) -> Any:
        """(x, y) → (−y, x) where x and y are neighbours (GPT-J)."""
        pairs = ops.reshape(states, _ints(0, 0, 0, self._sizes.head // 2, 2), special_zero=True)
        first = ops.slice(pairs, _ints(0), _ints(1), _ints(1), _ints(4))
        second = ops.slice(pairs, _ints(1), _ints(2), _ints(1), _ints(4))
        turned = ops.concat([ops.multiply(second, ops.constant(np.float32(-1))), first], 4)
        return ops.reshape(turned, _ints(0, 0, 0, self._sizes.head), special_zero=True)

    def _remember(self, states: Any, name: str) -> Any:
        """Append `states` to the state `name`; all of it comes back: [b, kv_heads, past + l, head]."""
        sizes = self._sizes
        batch = ops.gather(ops.shape_of(self._input_ids), _ints(0), ops.constant(np.int64(0)))
        empty = ops.concat([batch, _ints(sizes.kv_heads), _ints(0), _ints(sizes.head)], 0)
        initial = ops.broadcast(ops.constant(np.float32(0)), empty)
        shape = ov.PartialShape([-1, sizes.kv_heads, -1, sizes.head])
        past = ops.read_value(initial, name, ov.Type.f32, shape)
        chosen = ops.gather(past, self._beam_idx, ops.constant(np.int64(0)))
        whole = ops.concat([chosen, states], 2)
        self._sinks.append(ops.assign(whole, name))
        return whole.output(0)

    def _repeat_heads(self, states: Any) -> Any:
        """Give every query head its key/value head: [b, kv_heads, n, head] → [b, heads, n, head]."""
        sizes = self._sizes
        if sizes.kv_heads == sizes.heads:
            return states
        length = ops.gather(ops.shape_of(states), _ints(2), ops.constant(np.int64(0)))
        batch = ops.gather(ops.shape_of(states), _ints(0), ops.constant(np.int64(0)))
        group = sizes.heads // sizes.kv_heads
        wide = ops.concat([batch, _ints(sizes.kv_heads), _ints(group), length, _ints(sizes.head)], 0)
        copies = ops.broadcast(ops.unsqueeze(states, _ints(2)), wide, "BIDIRECTIONAL")
        return ops.reshape(copies, _ints(0, sizes.heads, -1, sizes.head), special_zero=True).output(0)

    # Position-wise parts

    def _norm(self, hidden: Any, name: str) -> Any:
        weight = self._weight(f"{name}.weight")
        if self._decoder.norm == "layer":
            normal = ops.mvn(hidden, _ints(-1), True, self._sizes.epsilon, "inside_sqrt")
            return _add(ops.multiply(normal, weight), self._weight(f"{name}.bias"))
        square = ops.power(hidden, ops.constant(np.float32(2)))
        mean = ops.reduce_mean(square, _ints(-1), keep_dims=True)
        root = ops.sqrt(ops.add(mean, ops.constant(np.float32(self._sizes.epsilon))))
        normal = ops.multiply(hidden, ops.divide(ops.constant(np.float32(1)), root))
        return ops.multiply(normal, weight).output(0)

    def _mlp(self, hidden: Any, name: str) -> Any:
        inner = self._activate(self._linear(hidden, f"{name}.fc", int8=self._int8))
        if self._decoder.mlp == "gated":
            inner = ops.multiply(inner, self._linear(hidden, f"{name}.gate", int8=self._int8)).output(0)
        return self._linear(inner, f"{name}.proj", int8=self._int8)

    def _activate(self, states: Any) -> Any:
        activation = self._decoder.activation
        if activation == "silu":
            return ops.swish(states).output(0)
        if activation == "relu":
            return ops.relu(states).output(0)
        return ops.gelu(states, "tanh" if activation == "gelu_tanh" else "erf").output(0)

    def _linear(self, hidden: Any, name: str, *, int8: bool) -> Any:
        """hidden [b, l, in] × weight [out, in]ᵀ (+ bias, where the checkpoint has one)."""
        weight = self._int8_weight(f"{name}.weight") if int8 else self._weight(f"{name}.weight")
        product = ops.matmul(hidden, weight, False, True).output(0)
        bias = f"{name}.bias"
        return _add(product, self._weight(bias)) if bias in self._names else product

    # Weights

    def _weight(self, name: str) -> Any:
        constant = _constant(self._weights.merged(name), name)
        return _decompressed(constant) if constant.get_element_type() != ov.Type.f32 else constant

    def _int8_weight(self, name: str) -> Any:
        values, scales = quantize_per_channel(self._weights.merged(name))
        constant = _constant(values, name)
        return ops.multiply(ops.convert(constant, "f32"), _constant(scales, f"{name}.per_channel_scale"))


def _parameter(name: str, element_type: ov.Type, shape: list[int]) -> Any:
    parameter = ops.parameter(ov.PartialShape(shape), element_type)
    parameter.set_friendly_name(name)
    parameter.get_output_tensor(0).set_names({name})
    return parameter


def _constant(array: Array, name: str) -> Any:
    """A constant that owns a copy of `array`: a shared NumPy buffer would be freed behind OpenVINO's back."""
    if array.dtype.name == "bfloat16":
        # NumPy has no type of its own for it, so the bits are copied.
        tensor = ov.Tensor(ov.Type.bf16, ov.Shape(list(array.shape)))
        tensor.data.view(np.uint16)[...] = array.view(np.uint16)
    else:
        tensor = ov.Tensor(ov.Type(array.dtype), ov.Shape(list(array.shape)))
        tensor.data[...] = array
    constant = ov.op.Constant(tensor, shared_memory=True)
    constant.set_friendly_name(name)
    return constant


def _decompressed(constant: Any) -> Any:
    """`constant` as float32, by a Convert that carries OpenVINO's decompression mark.

    Without the mark the plugin widens the weights to float32 when it compiles and keeps them beside its own packed
    copy: 2.3 instead of 0.9 × the file in memory. Python cannot set the mark, so a Convert that the compression pass
    made is taken over.
    """
    parameter = ops.parameter(ov.PartialShape([1]), ov.Type.f32)
    model = ov.Model([ops.result(ops.add(parameter, ops.constant(np.ones(1, dtype=np.float32))))], [parameter])
    compress_model_transformation(model)
    convert = next(node for node in model.get_ops() if node.get_type_name() == "Convert")
    convert.input(0).replace_source_output(constant.output(0))
    model.validate_nodes_and_infer_types()
    return convert


def _ints(*values: int) -> Any:
    return ops.constant(np.array(values, dtype=np.int64))


def _add(left: Any, right: Any) -> Any:
    return ops.add(left, right).output(0)


def _gather(table: Any, indices: Any) -> Any:
    return ops.gather(table, indices, ops.constant(np.int64(0))).output(0)


def _dimension(node: Any, axis: int) -> Any:
    """One dimension of the shape of `node`, as a scalar."""
    return ops.gather(ops.shape_of(node), ops.constant(np.int64(axis)), ops.constant(np.int64(0)))
