"""Layers with a state in OpenVINO's graph: convolutions, gated delta rules, state spaces.

The CPU plugin has operations that read a sequence's state from a row of a table and write it to a row, which an engine
of 2026.4 can be made of though no opset of the Python package has them.
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

from trtserve.checkpoint.architectures.parts.mixers import DeltaNet, Mixer, ShortConvolution, StateSpace, Table
from trtserve.errors import UnsupportedModelError
from trtserve.executor.openvino.graph_parts import constant, cut, integers, parameter

if TYPE_CHECKING:
    from trtserve.executor.openvino.graph import GraphBuilder

STATE_TABLE = "state_table."
"""Begins the names of the tables f32[rows, …]."""
STATE_INPUTS = {name: f"states.{name}" for name in ("begins", "rows", "row_begins", "past", "interval")}
"""Inputs i32 of all layers with states: the first token of each sequence and the end [s + 1]; the row that each reads
and the row that it writes [2 s]; where these begin [s + 1]; past tokens [s]; after how many tokens a state is written
besides the last one [s]."""
NEVER = np.iinfo(np.int32).max
"""An interval that is longer than any sequence."""


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
        "PagedSelectiveSSM",
        [_negative_decay(builder, name), steps, b, x, c],
        f"{layer}.heads",
        mixer.tables[1],
        [],
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
