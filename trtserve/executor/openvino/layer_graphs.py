"""Layers of few families in OpenVINO's graph: those with a state, latent attention (MLA), several streams.

States are those of convolutions, gated delta rules and state spaces. The CPU plugin has operations that read a
sequence's state from a row of a table and write it to a row, which an engine of 2026.4 can be made of though no opset
of the Python package has them. Several streams are f32[b, l, n, hidden]; see `Streams`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.utils.node_factory import NodeFactory

from trtserve.checkpoint.architectures.base import LatentAttention
from trtserve.checkpoint.architectures.parts.mixers import DeltaNet, Mixer, ShortConvolution, StateSpace, Table
from trtserve.errors import UnsupportedModelError
from trtserve.executor.openvino.graph_parts import add, constant, cut, float_tensor, integers, parameter

if TYPE_CHECKING:
    from trtserve.executor.openvino.graph import GraphBuilder

STATE_TABLE = "state_table."  # begins the names of the tables f32[rows, …]
STATE_INPUTS = {name: f"states.{name}" for name in ("begins", "rows", "row_begins", "past", "interval")}
"""Inputs i32 of all layers with states: the first token of each sequence and the end [s + 1]; the row that each reads
and the row that it writes [2 s]; where these begin [s + 1]; past tokens [s]; after how many tokens a state is written
besides the last one [s]."""
NEVER = np.iinfo(np.int32).max  # an interval that is longer than any sequence


@functools.cache
def cpu_plugin() -> Path:
    """Return the library of the CPU plugin, whose operations can be added to graphs."""
    found = sorted((Path(ov.__file__).parent / "libs").glob("*cpu_plugin*"))
    if not found:
        raise UnsupportedModelError(
            f"OpenVINO {ov.get_version()} has no CPU plugin in its package, which models with states need.",
            hint="Install OpenVINO with pip.",
        )
    return found[0]


@functools.cache
def _factory() -> NodeFactory:
    factory = NodeFactory()
    factory.add_extension(str(cpu_plugin()))
    return factory


class GraphStates:
    """The inputs of a graph with which its layers find the states of sequences."""

    def __init__(self) -> None:
        self.parameters: list[Any] = []
        self._shared: list[Any] = []

    def operation(
        self, kind: str, data: list[Any], table: str, shape: Table, more: list[Any], **attributes: object
    ) -> Any:
        """Add an operation of the plugin over tokens [t, …]: `data`, the state's table, `more` data, the inputs."""
        if not self._shared:
            self._shared = [parameter(name, ov.Type.i32, [-1]) for name in STATE_INPUTS.values()]
            self.parameters += self._shared
        states = parameter(f"{STATE_TABLE}{table}", ov.Type.f32, [-1, *shape])
        self.parameters.append(states)
        inputs = [_output(node) for node in (*data, states, *more, *self._shared)]
        return _factory().create(kind, inputs, attributes).output(0)


def mixed(builder: GraphBuilder, hidden: Any, name: str, layer: int, mixer: Mixer) -> Any:
    """Return what a layer with a state adds to its input [b, l, hidden]."""
    flat = ops.reshape(hidden, integers(-1, builder.sizes.hidden), False)
    if isinstance(mixer, ShortConvolution):
        result = _short_convolution(builder, flat, name, layer, mixer)
    elif isinstance(mixer, DeltaNet):
        result = _delta_net(builder, flat, name, layer, mixer)
    else:
        result = _state_space(builder, flat, name, layer, mixer)
    made = _linear(builder, result, f"{name}.out_proj")
    if isinstance(mixer, StateSpace) and mixer.factor != 1.0:
        made = ops.multiply(made, ops.constant(np.float32(mixer.factor)))
    return ops.reshape(made, ops.shape_of(hidden), False).output(0)


def _short_convolution(builder: GraphBuilder, flat: Any, name: str, layer: int, mixer: ShortConvolution) -> Any:
    before, after, x = cut(_linear(builder, flat, f"{name}.in_proj"), *[mixer.width] * 3)
    return ops.multiply(after, _convolved(builder, ops.multiply(before, x), name, layer, mixer))


def _delta_net(builder: GraphBuilder, flat: Any, name: str, layer: int, mixer: DeltaNet) -> Any:
    joined, gates = cut(_linear(builder, flat, f"{name}.in_proj"), mixer.channels, mixer.values)
    betas, steps = cut(builder.linear(flat, f"{name}.gates", packing=None), *[mixer.value_heads] * 2)
    convolved = ops.swish(_convolved(builder, joined, name, layer, mixer))
    query, key, value = (
        ops.reshape(part, integers(-1, heads, size), False)
        for part, heads, size in zip(
            cut(convolved, mixer.keys, mixer.keys, mixer.values),
            (mixer.key_heads, mixer.key_heads, mixer.value_heads),
            (mixer.key, mixer.key, mixer.value),
            strict=True,
        )
    )
    decays = ops.multiply(_softplus(builder, steps, name), _negative_decay(builder, name))
    attended = builder.states.operation(
        "PagedGatedDeltaNet",
        [query, key, value],
        f"{layer}.heads",
        mixer.tables[1],
        [decays, ops.sigmoid(betas)],
        use_qk_l2norm=True,
    )
    normed = builder.normed(attended, f"{name}.norm")
    return ops.multiply(ops.reshape(normed, integers(-1, mixer.values), False), ops.swish(gates))


def _state_space(builder: GraphBuilder, flat: Any, name: str, layer: int, mixer: StateSpace) -> Any:
    inputs = _linear(builder, flat, f"{name}.in_proj")
    if mixer.input_factors is not None:
        inputs = ops.multiply(inputs, ops.constant(np.array(mixer.input_factors, np.float32))).output(0)
    gates, joined, steps = cut(inputs, mixer.inner, mixer.channels, mixer.heads)
    convolved = ops.swish(_convolved(builder, joined, name, layer, mixer))
    shared = mixer.groups * mixer.state
    x, b, c = cut(convolved, mixer.inner, shared, shared)
    x = ops.reshape(x, integers(-1, mixer.heads, mixer.head), False)
    b, c = (ops.reshape(part, integers(-1, mixer.groups, mixer.state), False) for part in (b, c))
    steps = _softplus(builder, steps, name)
    if mixer.time_limit is not None:
        steps = ops.clamp(steps, *mixer.time_limit)
    scanned = builder.states.operation(
        "PagedSelectiveSSM", [_negative_decay(builder, name), steps, b, x, c], f"{layer}.heads", mixer.tables[1], []
    )
    skip = ops.reshape(builder.weight(f"{name}.skip"), integers(mixer.heads, 1), False)
    result = ops.reshape(ops.add(scanned, ops.multiply(x, skip)), integers(-1, mixer.inner), False)
    if not mixer.norm_groups:
        return ops.multiply(result, ops.swish(gates))
    if not mixer.norm_first:
        result = ops.multiply(result, ops.swish(gates))
    parts = ops.reshape(result, integers(-1, mixer.norm_groups, mixer.inner // mixer.norm_groups), False).output(0)
    result = ops.reshape(builder.normed(parts, f"{name}.norm"), integers(-1, mixer.inner), False)
    return ops.multiply(result, ops.swish(gates)) if mixer.norm_first else result


def _convolved(builder: GraphBuilder, flat: Any, name: str, layer: int, mixer: Mixer) -> Any:
    weight = builder.floats(f"{name}.conv.weight").astype(np.float32).reshape(mixer.channels, 1, mixer.taps)
    bias = f"{name}.conv.bias"
    added = builder.floats(bias).astype(np.float32) if bias in builder.names else np.zeros(0, np.float32)
    return builder.states.operation(
        "PagedCausalConv1D",
        [flat],
        f"{layer}.inputs",
        mixer.tables[0],
        [constant(weight, f"{name}.conv.weight"), constant(added, bias)],
    )


def _linear(builder: GraphBuilder, flat: Any, name: str) -> Any:
    return builder.linear(flat, name, packing=builder.packing)


def _softplus(builder: GraphBuilder, steps: Any, name: str) -> Any:
    return ops.softplus(ops.add(steps, builder.weight(f"{name}.time_bias")))


def _negative_decay(builder: GraphBuilder, name: str) -> Any:
    return constant(-np.exp(builder.floats(f"{name}.decay").astype(np.float32)), f"{name}.decay")


def _output(node: Any) -> Any:
    return node if isinstance(node, ov.Output) else node.output(0)


def step_inputs(begins: Any, past: Any, rows: Any, *, empty: int) -> Mapping[str, Any]:
    """Return STATE_INPUTS of a step; a sequence without past tokens reads the row `empty`."""
    read = np.where(past > 0, rows, empty)
    arrays = {
        "begins": begins,
        "rows": np.stack([read, rows], axis=1).reshape(-1),
        "row_begins": np.arange(0, 2 * len(rows) + 1, 2),
        "past": past,
        "interval": np.full(len(rows), NEVER),
    }
    return {STATE_INPUTS[name]: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()}


if TYPE_CHECKING:
    from trtserve.executor.openvino.graph import GraphBuilder


def latent_attention(builder: GraphBuilder, hidden: Any, name: str, layer: int, latent: LatentAttention) -> Any:
    """Attend with one key per token for all heads: its rotated part and its latent vector, which is the value too.

    The matrices that make keys and values of the latent vector are applied to queries and results instead.
    """

    def norm(states: Any, name: str) -> Any:
        return builder.normed(states, name, latent.epsilon)

    heads, size = builder.sizes.heads, latent.rotated + latent.rank
    lower, packing = hidden, builder.packing
    if f"{name}.q_a.weight" in builder.names:
        lower = norm(builder.linear(hidden, f"{name}.q_a", packing=packing), f"{name}.q_a_layernorm")
    queries = builder.linear(lower, f"{name}.q_b", packing=packing)
    queries = ops.transpose(
        ops.reshape(queries, integers(0, 0, heads, latent.plain + latent.rotated), special_zero=True),
        integers(0, 2, 1, 3),
    )
    plain, turned = cut(queries, latent.plain, latent.rotated)
    of_heads = builder.floats(f"{name}.kv_b.weight").reshape(heads, -1, latent.rank)
    keys, values = (
        float_tensor(np.ascontiguousarray(part), f"{name}.{kind}")
        for kind, part in (("keys", of_heads[:, : latent.plain]), ("values", of_heads[:, latent.plain :]))
    )
    assert builder.rotation is not None
    query = ops.concat([builder.rotation.rotate(turned), ops.matmul(plain, keys, False, False)], -1)
    stored, turned = cut(builder.linear(hidden, f"{name}.kv_a", packing=builder.packing), latent.rank, latent.rotated)
    turned = builder.rotation.rotate(ops.unsqueeze(turned, integers(1)))
    stored = ops.unsqueeze(norm(stored, f"{name}.kv_a_layernorm"), integers(1))
    key = ops.concat([turned, stored], -1).output(0)
    key, value = (
        builder.repeat_heads(
            builder.append_to_state(key, f"past_key_values.{layer}.{kind}", builder.sizes), builder.sizes
        )
        for kind in ("key", "value")
    )
    scale = ops.constant(np.float32(builder.decoder.attention_scale))
    attended = ops.scaled_dot_product_attention(query, key, value, builder.masks[None], scale, causal=False)
    kept = ops.slice(attended, integers(latent.rotated), integers(size), integers(1), integers(3))
    result = ops.transpose(ops.matmul(kept, values, False, True), integers(0, 2, 1, 3))
    joined = ops.reshape(result, integers(0, 0, heads * latent.value), special_zero=True)
    return builder.linear(joined.output(0), f"{name}.dense", packing=builder.packing)


if TYPE_CHECKING:
    from trtserve.executor.openvino.graph import GraphBuilder

_LEAST_SQUARE = 1e-5


def enter_streams(builder: GraphBuilder, hidden: Any, count: int) -> Any:
    """Return the states that are made of an embedding [b, l, hidden], all as large as it."""
    made = [builder.linear(hidden, f"transformer.stream_entry.{n}", packing=None) for n in range(1, count)]
    return ops.concat([ops.unsqueeze(each, integers(2)) for each in [hidden, *_as_large(hidden, made)]], 2).output(0)


def leave_streams(builder: GraphBuilder, states: Any, count: int) -> Any:
    """Return the mean [b, l, hidden] of what is made of the states, all as large as the first one."""
    first, *others = (stream_of(states, n) for n in range(count))
    made = [
        builder.linear(each, f"transformer.stream_exit.{n}", packing=None) for n, each in enumerate(others, start=1)
    ]
    total = first
    for each in _as_large(first, made):
        total = add(total, each)
    return ops.multiply(total, ops.constant(np.float32(1 / count))).output(0)


def stream_of(states: Any, number: int) -> Any:
    """Return one of the states: [b, l, hidden]."""
    return ops.gather(states, ops.constant(np.int64(number)), ops.constant(np.int64(2))).output(0)


def predicted(builder: GraphBuilder, states: Any, name: str, count: int, active: int) -> Any:
    """Return the states, to each of which a mixture of all is added."""
    router = _routed(builder, stream_of(states, active), name)
    mixture = builder.linear(router, f"{name}.streams.prediction", packing=None)
    mixture = ops.reshape(mixture, integers(0, 0, count, count), special_zero=True)
    return add(states, ops.matmul(mixture, states, False, False))


def corrected(builder: GraphBuilder, predictions: Any, made: Any, name: str, active: int) -> Any:
    """Return the states after a layer, which made `made` of the active one."""
    factors = builder.linear(_routed(builder, made, name), f"{name}.streams.correction", packing=None)
    factors = ops.unsqueeze(ops.add(factors, ops.constant(np.float32(1))), integers(3))
    missing = ops.unsqueeze(ops.subtract(made, stream_of(predictions, active)), integers(2))
    return add(predictions, ops.multiply(factors, missing))


def changed_but_first(states: Any, change: Any, count: int) -> Any:
    """Return the states; `change` [b, l, hidden] is added to all but the first."""
    others = ops.constant(np.array([0] + [1] * (count - 1), np.float32).reshape(count, 1))
    return add(states, ops.multiply(ops.unsqueeze(change, integers(2)), others))


def beside_attention(builder: GraphBuilder, normed: Any, name: str) -> Any:
    """Return attention's input and the product of low rank that stands beside it."""
    low = builder.linear(normed, f"{name}.beside.left", packing=builder.packing)
    made = builder.linear(low, f"{name}.beside.right", packing=builder.packing)
    return add(normed, builder.normed(made, f"{name}.post_beside_layernorm"))


def joined(predictions: Any, beside: Any, own: Any, mark: str) -> tuple[Any, Any, Any]:
    """Return the three again as parts of one operation that `mark` names."""
    count, hidden = (int(predictions.get_partial_shape()[axis].get_length()) for axis in (2, 3))
    flat = ops.reshape(predictions, integers(0, 0, count * hidden), special_zero=True)
    whole = ops.concat([flat, beside, own], -1).output(0)
    whole.get_node().set_friendly_name(mark)
    size = int(own.get_partial_shape()[-1].get_length())
    flat, beside, own = cut(whole, count * hidden, hidden, size)
    return ops.reshape(flat, integers(0, 0, count, hidden), special_zero=True).output(0), beside, own


def far_above(gate: Any, deviations: float) -> Any:
    """Return by how much each number is larger than the mean and so many standard deviations, at least 0."""
    mean = ops.reduce_mean(gate, integers(-1), keep_dims=True)
    centred = ops.subtract(gate, mean)
    square = ops.reduce_mean(ops.multiply(centred, centred), integers(-1), keep_dims=True)
    least = ops.multiply(ops.sqrt(square), ops.constant(np.float32(deviations)))
    return ops.relu(ops.subtract(centred, least)).output(0)


def _routed(builder: GraphBuilder, hidden: Any, name: str) -> Any:
    normed = ops.multiply(
        builder.normed(hidden, f"{name}.streams_layernorm"), ops.constant(np.float32(1 / builder.sizes.hidden))
    )
    return ops.tanh(builder.linear(normed.output(0), f"{name}.streams.router", packing=None)).output(0)


def _as_large(like: Any, made: list[Any]) -> list[Any]:
    """Return `made` with the root mean square of `like`."""
    size = ops.sqrt(_square(like))
    roots = [ops.sqrt(ops.maximum(_square(each), ops.constant(np.float32(_LEAST_SQUARE)))) for each in made]
    return [ops.divide(ops.multiply(each, size), root).output(0) for each, root in zip(made, roots, strict=True)]


def _square(states: Any) -> Any:
    return ops.reduce_mean(ops.multiply(states, states), integers(-1), keep_dims=True)
