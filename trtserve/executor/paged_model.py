"""How an engine folder becomes a running model: paged attention over a KV cache in blocks, on the CPU with OpenVINO.

A transformed graph cannot be stored (OpenVINO 2026.4 writes it but does not read it back), hence the engine holds
the stateful graph, and the transformation happens here, at load.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

# Private in OpenVINO: tests/unit/test_paged_model.py pins the inputs that the transformation makes.
from openvino._offline_transformations import paged_attention_transformation

from trtserve.errors import ArtifactError, BuildError, CorruptFileError
from trtserve.executor.graph import LAST_ATTENTION

Array = npt.NDArray[Any]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]

# Inputs of the transformed graph in the order in which `forward` fills them; `rows` is ours.
_STEP_INPUTS: tuple[tuple[str, type[np.generic]], ...] = (
    ("input_ids", np.int64),
    ("position_ids", np.int64),
    ("past_lens", np.int32),
    ("subsequence_begins", np.int32),
    ("block_indices", np.int32),
    ("block_indices_begins", np.int32),
    ("max_context_len", np.int32),
    ("rows", np.int32),
)
# Input 10 of PagedAttentionExtension is its sliding window in tokens, 0 for none.
_WINDOW_INPUT = 10
_CACHE_LINE = 64


@functools.cache
def openvino_core() -> ov.Core:
    """The one Core of this process.

    The CPU plugin of each Core moves the thread's signal stack and puts the former one back at its end. When two Cores
    end in another order than they began, that is freed memory, and the next Python signal handler crashes.
    """
    return ov.Core()


class PagedModel:
    """A compiled paged-attention graph with its KV cache.

    `bytes_per_block` counts keys and values of all layers. Not for use by several threads at once.
    """

    def __init__(self, engine: Path, *, threads: int | None = None) -> None:
        """Read, transform and compile the engine in `engine`; `threads` limits OpenVINO's threads."""
        config = read_engine_config(engine)
        own = config["trtserve"]
        self.compute_precision: str = own["compute_precision"]
        self.kv_precision: str = own["kv_precision"]
        self.vocab_size = int(config["pretrained_config"]["vocab_size"])
        self.max_position = int(config["build_config"]["max_seq_len"])
        core = openvino_core()
        graph = _read_graph(core, engine / "rank0.xml")
        to_paged_attention(graph, window=own.get("window"))
        compiled = _compile(core, graph, self._properties(threads))
        self._request = compiled.create_infer_request()
        ports = {port.get_any_name(): index for index, port in enumerate(compiled.inputs)}
        self._step_inputs = [(ports[name], np.dtype(kind)) for name, kind in _STEP_INPUTS]
        self._cache_ports = [
            (index, compiled.inputs[index]) for name, index in ports.items() if name.startswith(("key_", "value_"))
        ]
        self.tokens_per_block = _tokens_per_block(compiled, ports)
        self.bytes_per_block = sum(_block_bytes(port) for _, port in self._cache_ports)
        self._caches: list[Array] = []
        self._held: list[Any] = []

    def _properties(self, threads: int | None) -> dict[str, Any]:
        """Properties of the CPU plugin for this engine's precisions."""
        properties: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": self.compute_precision,
            "KV_CACHE_PRECISION": self.kv_precision,
        }
        if self.compute_precision == "f32":
            # Otherwise the plugin rounds activations to int8 in front of int8 weights.
            properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
        if threads is not None:
            properties["INFERENCE_NUM_THREADS"] = threads
        return properties

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache of `num_blocks` blocks; memory is taken when a block is first written."""
        self._caches = []
        for index, port in self._cache_ports:
            shape = [num_blocks, *(int(size.get_length()) for size in list(port.get_partial_shape())[1:])]
            cache, tensor = _zeros(shape, port.get_element_type())
            self._request.set_input_tensor(index, tensor)
            self._caches.append(cache)

    def forward(
        self,
        *,
        token_ids: Int64s,
        positions: Int64s,
        past_lens: Int32s,
        subsequence_begins: Int32s,
        block_indices: Int32s,
        block_indices_begins: Int32s,
        max_context_len: int,
        rows: Int32s | Int64s,
    ) -> Logits:
        """Logits f32[r, vocab] of the tokens numbered `rows`; the tokens' keys and values enter the cache.

        token_ids and positions i64[t] hold the new tokens of all sequences one after another; sequence s owns
        tokens subsequence_begins[s] … subsequence_begins[s + 1] and the cache blocks
        block_indices[block_indices_begins[s] … block_indices_begins[s + 1]]; past_lens i32[s] counts its tokens
        that are in the cache already. `max_context_len` is the longest past plus new. The result is a view that is
        valid until the next call. The GIL is released while OpenVINO computes.
        """
        request = self._request
        values = (
            token_ids,
            positions,
            past_lens,
            subsequence_begins,
            block_indices,
            block_indices_begins,
            max_context_len,
            rows,
        )
        self._held = [
            np.ascontiguousarray(value, dtype).reshape(np.shape(value))
            for value, (_, dtype) in zip(values, self._step_inputs, strict=True)
        ]
        for array, (index, _) in zip(self._held, self._step_inputs, strict=True):
            request.set_input_tensor(index, ov.Tensor(array, shared_memory=True))
        request.start_async()
        request.wait()
        logits: Logits = request.get_output_tensor(0).data
        return logits.reshape(-1, self.vocab_size)

    def copy_block(self, source: int, target: int) -> None:
        """Copy keys and values of block `source` to block `target`, in every layer."""
        for cache in self._caches:
            cache[target] = cache[source]


def to_paged_attention(graph: ov.Model, *, window: int | None) -> None:
    """Turn the stateful `graph` into one over flat tokens and cache blocks that computes only the `rows` asked for."""
    paged_attention_transformation(graph)
    nodes = graph.get_ordered_ops()
    for node in nodes:
        if node.get_type_name() == "PagedAttentionExtension" and window is not None:
            node.input(_WINDOW_INPUT).replace_source_output(ops.constant(np.int32(window)).output(0))
    for parameter in graph.get_parameters():
        if parameter.get_friendly_name().startswith(("key_cache.", "value_cache.")):
            parameter.set_element_type(ov.Type.dynamic)
    _gather_rows(graph, next(node for node in nodes if node.get_friendly_name() == LAST_ATTENTION))
    graph.validate_nodes_and_infer_types()


def _gather_rows(graph: ov.Model, node: Any) -> None:
    """Let everything behind `node` see only the tokens numbered by a new input `rows` i32[r]."""
    rows = ops.parameter(ov.PartialShape([-1]), ov.Type.i32)
    rows.set_friendly_name("rows")
    rows.get_output_tensor(0).set_names({"rows"})
    consumers = list(node.output(0).get_target_inputs())
    chosen = ops.gather(node, rows, ops.constant(np.int64(0)))
    for consumer in consumers:
        consumer.replace_source_output(chosen.output(0))
    graph.add_parameters([rows])


def read_engine_config(engine: Path) -> Mapping[str, Any]:
    """The `config.json` of an engine of the openvino runtime."""
    path = engine / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(
            f"{engine} has no config.json: it is not an engine folder.", hint="Give the path that `build` printed."
        ) from None
    except ValueError as error:
        raise CorruptFileError(f"{path} is not valid JSON: {error}.", hint="Build the engine again.") from error
    if config.get("trtserve", {}).get("runtime") != "openvino":
        raise ArtifactError(
            f"{engine} is not an engine of the openvino runtime.",
            hint="Engines of TensorRT-LLM run on NVIDIA GPUs; `trtserve build --runtime openvino` makes one for CPUs.",
        )
    return config


def _read_graph(core: ov.Core, path: Path) -> ov.Model:
    try:
        return core.read_model(path)
    except RuntimeError as error:
        raise CorruptFileError(f"{path} cannot be read: {error}", hint="Build the engine again.") from error


def _compile(core: ov.Core, graph: ov.Model, properties: Mapping[str, Any]) -> ov.CompiledModel:
    try:
        return core.compile_model(graph, "CPU", properties)
    except RuntimeError as error:
        raise BuildError(
            f"OpenVINO {ov.get_version()} cannot compile the engine: {error}",
            hint="Build the engine again on this machine.",
        ) from error


def _tokens_per_block(compiled: ov.CompiledModel, ports: Mapping[str, int]) -> int:
    """The plugin chooses the block size; value caches are [blocks, kv_heads, tokens, head] in every precision."""
    return int(list(compiled.inputs[ports["value_cache.0"]].get_partial_shape())[2].get_length())


def _block_bytes(port: Any) -> int:
    numbers = 1
    for size in list(port.get_partial_shape())[1:]:
        numbers *= int(size.get_length())
    return numbers * int(port.get_element_type().size)


def _zeros(shape: list[int], element_type: ov.Type) -> tuple[Array, ov.Tensor]:
    """Zeros at a cache line's start, as an array and as the tensor over the same memory.

    NumPy asks the system for zeroed pages, which cost nothing until they are written.
    """
    storage = {1: np.uint8, 2: np.uint16, 4: np.float32}[element_type.size]
    count = int(np.prod(shape)) * element_type.size
    raw = np.zeros(count + _CACHE_LINE, dtype=np.uint8)
    start = -raw.ctypes.data % _CACHE_LINE
    array = raw[start : start + count].view(storage).reshape(shape)
    return array, ov.Tensor(array, ov.Shape(shape), element_type)
