"""Parts of a decoder's graph: operations, rotary position embedding, packed matrices and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops
from openvino._offline_transformations import compress_model_transformation
from openvino.utils.node_factory import NodeFactory
from openvino.utils.types import as_node

from trtserve.checkpoint.architectures.base import ClampedGate, Experts
from trtserve.checkpoint.quantized import Int4Weight, group_size
from trtserve.errors import UnsupportedModelError
from trtserve.executor.openvino.weight_quantization import Packing, quantize_in_groups, quantize_per_channel

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


def parameter(name: str, element_type: ov.Type, shape: list[int]) -> Any:
    """Return an input of the graph."""
    made = ops.parameter(ov.PartialShape(shape), element_type)
    made.set_friendly_name(name)
    made.get_output_tensor(0).set_names({name})
    return made


def constant(array: Array, name: str) -> Any:
    """Return a constant with a copy of `array`; OpenVINO does not keep a shared NumPy buffer alive."""
    if array.dtype.name == "bfloat16":
        # NumPy has no bfloat16, so the bits are copied.
        tensor = ov.Tensor(ov.Type.bf16, ov.Shape(list(array.shape)))
        tensor.data.view(np.uint16)[...] = array.view(np.uint16)
    else:
        tensor = ov.Tensor(ov.Type(array.dtype), ov.Shape(list(array.shape)))
        tensor.data[...] = array
    made = ov.op.Constant(tensor, shared_memory=True)
    made.set_friendly_name(name)
    return made


def decompressed(narrow: Any) -> Any:
    """Return the constant `narrow` as float32, by a Convert with OpenVINO's decompression mark.

    Without the mark the plugin widens the weights to float32 when it compiles and keeps them in addition to its own
    packed copy: 2.3 instead of 0.9 times the file in memory. Python cannot set the mark, so this takes a Convert that
    the compression pass made.
    """
    source = ops.parameter(ov.PartialShape([1]), ov.Type.f32)
    model = ov.Model([ops.result(ops.add(source, ops.constant(np.ones(1, dtype=np.float32))))], [source])
    compress_model_transformation(model)
    convert = next(node for node in model.get_ops() if node.get_type_name() == "Convert")
    convert.input(0).replace_source_output(narrow.output(0))
    model.validate_nodes_and_infer_types()
    return convert


def integers(*values: int) -> Any:
    """Return a constant i64 vector."""
    return ops.constant(np.array(values, dtype=np.int64))


def cut(states: Any, *lengths: int) -> list[Any]:
    """Return the parts of the last dimension."""
    return list(ops.variadic_split(states, ops.constant(np.int64(-1)), ops.constant(np.array(lengths))).outputs())


def add(left: Any, right: Any) -> Any:
    return ops.add(left, right).output(0)


def gather(table: Any, indices: Any) -> Any:
    return ops.gather(table, indices, ops.constant(np.int64(0))).output(0)


def dimension(node: Any, axis: int) -> Any:
    """Return one dimension of the shape of `node`, as a scalar."""
    return ops.gather(ops.shape_of(node), ops.constant(np.int64(axis)), ops.constant(np.int64(0)))


class GraphRotation:
    """Rotates pairs of numbers in each head by position × frequency; layers with the same rotation share one.

    frequencies: inverse frequencies, one per pair. If they cover less than `head`, only the first numbers are rotated.
    interleaved: pairs are neighbours (GPT-J), not the two halves of the rotated numbers (GPT-NeoX).
    scale: factor of the result.
    longer: other frequencies, and a boolean node, broadcast to [b, l, pairs], that selects them.
    """

    def __init__(
        self,
        position_ids: Any,
        frequencies: Sequence[float],
        *,
        head: int,
        interleaved: bool,
        scale: float = 1.0,
        longer: tuple[Sequence[float], Any] | None = None,
    ) -> None:
        self._size = 2 * len(frequencies)
        if self._size > head:
            raise UnsupportedModelError(
                f"The rotary embedding covers {self._size} numbers of a head, which has {head}."
            )
        self._head = head
        self._interleaved = interleaved
        positions = ops.convert(ops.unsqueeze(position_ids, integers(1)), "f32")
        angles = _angles(positions, frequencies)
        if longer is not None:
            angles = ops.select(longer[1], _angles(positions, longer[0]), angles)
        self._cosines, self._sines = (
            table if scale == 1.0 else ops.multiply(table, ops.constant(np.float32(scale)))
            for table in self._tables(angles)
        )

    def _tables(self, angles: Any) -> tuple[Any, Any]:
        """Return cosines and sines of the positions: two f32[b, 1, l, rotated numbers]."""
        if self._interleaved:
            repeated = ops.reshape(
                ops.concat([ops.unsqueeze(angles, integers(-1))] * 2, -1), integers(0, 0, self._size), True
            )
        else:
            repeated = ops.concat([angles, angles], -1)
        return ops.unsqueeze(ops.cos(repeated), integers(1)), ops.unsqueeze(ops.sin(repeated), integers(1))

    def rotate(self, states: Any) -> Any:
        """Return the rotated `states` [b, heads, l, head]."""
        if self._size == self._head:
            return self._rotate_all(states)
        first = ops.slice(states, integers(0), integers(self._size), integers(1), integers(3))
        rest = ops.slice(states, integers(self._size), integers(self._head), integers(1), integers(3))
        return ops.concat([self._rotate_all(first), rest], -1).output(0)

    def _rotate_all(self, states: Any) -> Any:
        turned = self._swap_neighbours(states) if self._interleaved else self._swap_halves(states)
        return ops.add(ops.multiply(states, self._cosines), ops.multiply(turned, self._sines)).output(0)

    def _swap_halves(self, states: Any) -> Any:
        """(x, y) → (−y, x) where x and y are the two halves of the rotated numbers (GPT-NeoX, Hugging Face's Llama).

        The axis of the concatenation must be written as -1: OpenVINO recognises (and fuses) only that form.
        """
        half = self._size // 2
        first = ops.slice(states, integers(0), integers(half), integers(1), integers(3))
        second = ops.slice(states, integers(half), integers(2 * half), integers(1), integers(3))
        return ops.concat([ops.multiply(second, ops.constant(np.float32(-1))), first], -1)

    def _swap_neighbours(self, states: Any) -> Any:
        """(x, y) → (−y, x) where x and y are neighbours (GPT-J)."""
        pairs = ops.reshape(states, integers(0, 0, 0, self._size // 2, 2), special_zero=True)
        first = ops.slice(pairs, integers(0), integers(1), integers(1), integers(4))
        second = ops.slice(pairs, integers(1), integers(2), integers(1), integers(4))
        turned = ops.concat([ops.multiply(second, ops.constant(np.float32(-1))), first], 4)
        return ops.reshape(turned, integers(0, 0, 0, self._size), special_zero=True)


def _angles(positions: Any, frequencies: Sequence[float]) -> Any:
    """Return positions f32[b, 1, l] times each frequency: [b, l, pairs]."""
    columns = ops.constant(np.asarray(frequencies, dtype=np.float32).reshape(1, -1, 1))
    return ops.transpose(ops.matmul(columns, positions, False, False), integers(0, 2, 1))


Bytes = npt.NDArray[np.uint8]

_LARGEST_U4 = 15


def packed(values: Array, name: str, packing: Packing) -> Any:
    """Return the matrix `values` [..., in] as float32 [first dimension, rest], from a constant `name` with `packing`.

    int8 has a scale for each row [in], also with three dimensions; int4 one for each group of its inputs.
    """
    if packing == "int4":
        flat = values.reshape(len(values), -1)
        return int4_matrix(quantize_in_groups(flat, group_size(values.shape[-1])), name)
    if packing == "int8":
        quantised, scales = quantize_per_channel(values)
        widened = ops.convert(constant(quantised, name), "f32")
        scaled = ops.multiply(widened, constant(scales, f"{name}.per_channel_scale"))
        return scaled if values.ndim == 2 else ops.reshape(scaled, integers(len(values), -1), False)
    return float_tensor(values if values.ndim < 3 else values.reshape(len(values), -1), name)


def float_tensor(values: Array, name: str) -> Any:
    """Return the constant `name` in the type of `values`, widened to float32."""
    stored = constant(values, name)
    return decompressed(stored) if stored.get_element_type() != ov.Type.f32 else stored


def int4_matrix(weight: Int4Weight, name: str) -> Any:
    """Return the matrix [out, in] without its `input_scales`: (codes − zero points) × scales per group of inputs.

    The CPU plugin recognises this order of operations as one packed weight. Without zero points the codes are signed
    (i4), which needs no subtraction.
    """
    outputs, inputs = weight.codes.shape
    groups = [outputs, inputs // weight.group_size]
    grouped = [*groups, weight.group_size]
    if weight.zero_points is None:
        # 0 … 15 minus 8 in two's complement: the highest of the four bits flips.
        widened = ops.convert(_nibbles(weight.codes ^ np.uint8(8), grouped, ov.Type.i4, name), "f32")
    else:
        codes = _nibbles(weight.codes, grouped, ov.Type.u4, name)
        zeros = _zero_points(weight.zero_points.reshape(*groups, 1), f"{name}.zero_points")
        widened = ops.subtract(ops.convert(codes, "f32"), ops.convert(zeros, "f32"))
    scales = constant(weight.scales.reshape(*groups, 1), f"{name}.group_scale")
    return ops.reshape(ops.multiply(widened, scales), integers(outputs, inputs), False)


def _zero_points(points: Bytes, name: str) -> Any:
    """Return the zero points as u4 if they fit; GPTQ's 16 does not."""
    if points.max() > _LARGEST_U4 or points.size % 2:
        return constant(points, name)
    return _nibbles(points, list(points.shape), ov.Type.u4, name)


def _nibbles(values: Bytes, shape: list[int], kind: ov.Type, name: str) -> Any:
    """Return the constant `name` of four-bit `values`, two per byte, the first one in the low bits."""
    flat = values.reshape(-1)
    tensor = ov.Tensor(kind, ov.Shape(shape))
    memory = tensor.data.view(np.uint8).reshape(-1)
    memory[: flat.size // 2] = flat[0 : flat.size - 1 : 2] | (flat[1::2] << 4)
    if flat.size % 2:
        memory[-1] = flat[-1]
    made = ov.op.Constant(tensor, shared_memory=True)
    made.set_friendly_name(name)
    return made


def dot_product_attention(query: Any, key: Any, value: Any, mask: Any, scale: Any, sinks: Any | None) -> Any:
    """Return scaled dot-product attention; `sinks` [1, heads, 1, 1] are scores of keys without a value.

    OpenVINO's Python function has no parameter for them, its operation has.
    """
    if sinks is None:
        return ops.scaled_dot_product_attention(query, key, value, mask, scale, causal=False)
    inputs = [as_node(each) for each in (query, key, value, mask, scale, sinks)]
    return NodeFactory("opset13").create("ScaledDotProductAttention", inputs, {"causal": False})


def xielu(states: Any, numbers: Floats) -> Any:
    """Return the activation whose two learned numbers are `numbers` (see `base.Activation`)."""
    plus, minus = np.logaddexp(0, numbers.astype(np.float64))
    above, below = ops.constant(np.float32(plus)), ops.constant(np.float32(minus + 0.5))
    zero, half = ops.constant(np.float32(0)), ops.constant(np.float32(0.5))
    negative = ops.minimum(states, zero)
    squared = ops.multiply(ops.multiply(states, states), above)
    curved = ops.multiply(ops.subtract(ops.elu(negative, 1.0), negative), below)
    curve = ops.select(ops.greater(states, zero), squared, curved)
    return ops.add(curve, ops.multiply(states, half)).output(0)


def clamped_gate(joined: Any, clamp: ClampedGate) -> Any:
    """Return the product of the halves [factors, gates] of the last dimension, as `ClampedGate` says."""
    halves = ops.split(joined, ops.constant(np.int64(-1)), 2)
    factor = ops.clamp(halves.output(0), -clamp.limit, clamp.limit)
    gate = ops.minimum(halves.output(1), ops.constant(np.float32(clamp.limit)))
    share = ops.sigmoid(ops.multiply(gate, ops.constant(np.float32(clamp.alpha))))
    return ops.multiply(ops.multiply(gate, share), ops.add(factor, ops.constant(np.float32(1))))


def last_unseen(queries: Any, window: int, chunked: bool) -> Any:
    """Return the last position before those that each of `queries` i64 sees in its window, or in its chunk."""
    size = ops.constant(np.int64(window))
    if not chunked:
        return ops.subtract(queries, size)
    return ops.subtract(ops.subtract(queries, ops.mod(queries, size)), ops.constant(np.int64(1)))


def token_weights(logits: Any, correction: Any | None, experts: Experts) -> Any:
    """Return the weights [b, l, experts] of the experts' outputs: the score of each chosen expert, 0 for others.

    Softmax is over all experts (transformers' MixtralTopKRouter and Qwen2MoeTopKRouter). Dividing the scores of the
    chosen experts by their sum equals a softmax over these (TensorRT-LLM's RENORMALIZE). `correction` [experts] is
    added to the scores to choose by, and not to the weights (transformers' DeepseekV3TopkRouter).
    """
    scores = ops.softmax(logits, -1) if experts.scores == "softmax" else ops.sigmoid(logits)
    wishes = scores if correction is None else ops.add(scores, correction)
    if experts.groups > 1:
        wishes = _of_best_groups(wishes, experts)
    best = _best(wishes, experts.chosen)
    weights = best.output(0) if wishes is scores else ops.gather_elements(scores, best.output(1), -1)
    if experts.renormalized:
        weights = ops.divide(weights, ops.reduce_sum(weights, integers(-1), keep_dims=True))
    if experts.scale != 1.0:
        weights = ops.multiply(weights, ops.constant(np.float32(experts.scale)))
    none = ops.broadcast(ops.constant(np.float32(0)), ops.shape_of(scores))
    return ops.scatter_elements_update(none, best.output(1), weights, ops.constant(np.int64(-1))).output(0)


def _best(values: Any, count: int) -> Any:
    """Return the node of the `count` largest values of the last dimension and their indices."""
    return ops.topk(values, ops.constant(np.int64(count)), -1, "max", "value", index_element_type="i64")


def _of_best_groups(wishes: Any, experts: Experts) -> Any:
    """Return `wishes` [b, l, experts], far below all others for the experts outside their token's best groups."""
    grouped = ops.reshape(wishes, integers(0, 0, experts.groups, -1), special_zero=True)
    groups = ops.reduce_sum(_best(grouped, experts.group_scores).output(0), integers(-1))
    best = _best(groups, experts.chosen_groups)
    none = ops.broadcast(ops.constant(np.float32(-np.inf)), ops.shape_of(groups))
    kept = ops.multiply(best.output(0), ops.constant(np.float32(0)))
    masks = ops.scatter_elements_update(none, best.output(1), kept, ops.constant(np.int64(-1)))
    return ops.reshape(ops.add(grouped, ops.unsqueeze(masks, integers(-1))), ops.shape_of(wishes), special_zero=False)


def rows_of_experts(weight: Array) -> Array:
    """[experts, out, in] → [experts · out, in]: one product gives the outputs of all experts."""
    return weight.reshape(-1, weight.shape[-1])


def rows_of_interleaved_experts(weight: Array) -> Array:
    """The same of rows gate, factor, gate, …, with each expert's factors before its gates."""
    return rows_of_experts(np.concatenate([weight[:, 1::2], weight[:, 0::2]], axis=1))


def columns_of_experts(weight: Array) -> Array:
    """[experts, out, in] → [out, experts, in]: a product with its rows sums over all experts."""
    return np.ascontiguousarray(weight.transpose(1, 0, 2))


def stacked_int4(weight: Int4Weight, experts: int, arranged: Callable[[Array], Array]) -> Int4Weight:
    """Arrange the experts' matrices [experts · out, in] like `arranged` does for floats; groups stay whole."""

    def rearrange(values: Array) -> Array:
        rows = arranged(values.reshape(experts, -1, values.shape[-1]))
        return rows.reshape(len(rows), -1)

    zeros = weight.zero_points
    return replace(
        weight,
        codes=rearrange(weight.codes),
        scales=rearrange(weight.scales),
        zero_points=None if zeros is None else rearrange(zeros),
    )
