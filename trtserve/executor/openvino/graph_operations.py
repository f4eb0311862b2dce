"""Operations for building a decoder's graph, and constants that keep their width."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops
from openvino._offline_transformations import compress_model_transformation

Array = npt.NDArray[Any]


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


def add(left: Any, right: Any) -> Any:
    """Return left + right."""
    return ops.add(left, right).output(0)


def gather(table: Any, indices: Any) -> Any:
    """Return the rows `indices` of `table`."""
    return ops.gather(table, indices, ops.constant(np.int64(0))).output(0)


def dimension(node: Any, axis: int) -> Any:
    """Return one dimension of the shape of `node`, as a scalar."""
    return ops.gather(ops.shape_of(node), ops.constant(np.int64(axis)), ops.constant(np.int64(0)))
