"""How an engine folder becomes a running model: paged attention over a KV cache in blocks, on the CPU with OpenVINO.

The engine holds the stateful graph; what makes it a paged one, with the inputs of what was built in, happens at load.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from trtserve.errors import ArtifactError, BuildError, CorruptFileError
from trtserve.executor.companions import SIZES, StepInputs, fastest, in_company, lone_token
from trtserve.executor.graph import Sizes
from trtserve.executor.lora import AdapterBatch, AdapterStack
from trtserve.executor.lora_modules import LoraShape, lora_modules
from trtserve.executor.paged_graph import add_adapters, add_long_sequences, add_prompt_table, to_paged_attention

Array = npt.NDArray[Any]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

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
_CACHE_LINE = 64
# The plugin keeps the kernels of every shape it has met, 5000 by default, each with memory of its own: a server whose
# steps differ in size grew by hundreds of megabytes for minutes. The layers share kernels, so that a few dozen are
# those of the last handful of shapes; steps of equal size look nothing up.
_KERNELS_KEPT = 64
# oneDNN below it keeps 1024 primitives of its own, some for every number of tokens that a step ever had (0.7 MB each
# with the demo model): memory grew for minutes of random load. With 256 it is flat after a thousand requests, and no
# request costs more CPU time.
_PRIMITIVES_KEPT = 256
_ACTIVATION_GROUP = 256
_LEAST_ACTIVATION_GROUP = 32
_INT4 = (ov.Type.i4, ov.Type.u4)
# Bytes of weights from which a step waits for memory, larger than what caches of a CPU hold for one model.
_BOUND_BY_MEMORY = 256 << 20


@functools.cache
def openvino_core() -> ov.Core:
    """The one Core of this process.

    The CPU plugin of each Core moves the thread's signal stack and puts the former one back at its end. When two Cores
    end in another order than they began, that is freed memory, and the next Python signal handler crashes.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_PRIMITIVES_KEPT))  # read at its first use
    return ov.Core()


class PagedModel:
    """A compiled paged-attention graph with its KV cache.

    `bytes_per_block` counts keys and values of all layers. `max_prompt_table` counts the rows of prompt tables that
    the engine was built for, 0 for none; `lora` says what its adapters may look like, None for none. `long_beyond` is
    the number of tokens beyond which a sequence is long for LongRoPE, None when it makes no difference here. Not for
    use by several threads at once.
    """

    def __init__(self, engine: Path, *, threads: int | None = None, windows: Sequence[int] | None = None) -> None:
        """Read, transform and compile the engine in `engine`; `threads` limits OpenVINO's threads.

        `windows` are max_attention_window: how many tokens back the layers see, repeated over the layers; the
        model's own windows stay where they are shorter.
        """
        config = read_engine_config(engine)
        own = config["trtserve"]
        self.compute_precision: str = own["compute_precision"]
        self.kv_precision: str = own["kv_precision"]
        self.vocab_size = int(config["pretrained_config"]["vocab_size"])
        self.hidden_size = int(config["pretrained_config"]["hidden_size"])
        self.max_position = int(config["build_config"]["max_seq_len"])
        self.max_prompt_table = int(config["build_config"].get("max_prompt_embedding_table_size", 0))
        self.lora = lora_shape(config)
        core = openvino_core()
        graph = _read_graph(core, engine / "rank0.xml")
        self.long_beyond = add_long_sequences(graph, self.max_position)
        to_paged_attention(graph, windows=_windows(own["windows"], windows, self.max_position))
        if self.max_prompt_table:
            add_prompt_table(graph, vocab_size=self.vocab_size, hidden_size=self.hidden_size)
        if self.lora:
            add_adapters(graph, self.lora)
        compiled = _compile(core, graph, self._properties(threads, activation_group(graph)))
        self._request = compiled.create_infer_request()
        ports = {port.get_any_name(): index for index, port in enumerate(compiled.inputs)}
        self._ports = ports
        self._step_inputs = [(ports[name], np.dtype(kind)) for name, kind in _STEP_INPUTS]
        self._cache_ports = [
            (index, compiled.inputs[index]) for name, index in ports.items() if name.startswith(("key_", "value_"))
        ]
        self.tokens_per_block = _tokens_per_block(compiled, ports)
        self.bytes_per_block = sum(_block_bytes(port) for _, port in self._cache_ports)
        self._reads_memory = (engine / "rank0.bin").stat().st_size >= _BOUND_BY_MEMORY
        self._lone_size = 1
        self._spare_block = 0
        self._caches: list[Array] = []
        self._held: list[Any] = []
        self._stack: AdapterStack | None = None
        self._stack_held: list[Any] = []
        self._set_prompt_table(None)
        self._set_stack(None)

    def _properties(self, threads: int | None, group: int) -> dict[str, Any]:
        """Properties of the CPU plugin for this engine's precisions."""
        properties: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": self.compute_precision,
            "KV_CACHE_PRECISION": self.kv_precision,
            "CPU_RUNTIME_CACHE_CAPACITY": _KERNELS_KEPT,
            # A core that others take time of gets less to do; the plugin's own is to divide all work evenly.
            "TBB_PARTITIONER": "AUTO",
            # The plugin rounds activations to int8 in front of packed weights; in exact arithmetic it must not.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0 if self.compute_precision == "f32" else group,
        }
        if threads is not None:
            properties["INFERENCE_NUM_THREADS"] = threads
        return properties

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache of `num_blocks` blocks; memory is taken when a block is first written.

        One more belongs to the model itself.
        """
        self._caches, self._spare_block = [], num_blocks
        for index, port in self._cache_ports:
            shape = [num_blocks + 1, *(int(size.get_length()) for size in list(port.get_partial_shape())[1:])]
            cache, tensor = _zeros(shape, port.get_element_type())
            self._request.set_input_tensor(index, tensor)
            self._caches.append(cache)

    def warm_up(self) -> None:
        """Compute a step, in which OpenVINO packs the weights, and find how one token is computed fastest here.

        Not in exact arithmetic, whose last bits must not depend on that.
        """
        self._lone_step(1)
        if self._reads_memory and self.compute_precision != "f32" and self.max_position >= max(SIZES):
            self._lone_size = fastest(self._lone_step)

    def _lone_step(self, size: int) -> None:
        self._set_step(in_company(lone_token(self._spare_block), size, self._spare_block))
        self._infer()

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
        prompt_table: Logits | None = None,
        adapters: AdapterBatch | None = None,
        long_sequences: Bools | None = None,
    ) -> Logits:
        """Logits f32[r, vocab] of the tokens numbered `rows`; the tokens' keys and values enter the cache.

        token_ids and positions i64[t] hold the new tokens of all sequences one after another; sequence s owns
        tokens subsequence_begins[s] … subsequence_begins[s + 1] and the cache blocks
        block_indices[block_indices_begins[s] … block_indices_begins[s + 1]]; past_lens i32[s] counts its tokens
        that are in the cache already. `max_context_len` is the longest past plus new. `prompt_table`
        f32[n, hidden] holds the embeddings of the ids vocab_size … vocab_size + n − 1; an engine built without one
        takes None only, likewise with `adapters`. `long_sequences` boolean[s] tells which sequences are to be rotated
        as long ones, from their first token on; None when none is. The result is a view that is valid until the next
        call. The GIL is released while OpenVINO computes.
        """
        step = StepInputs(
            token_ids,
            positions,
            past_lens,
            subsequence_begins,
            block_indices,
            block_indices_begins,
            max_context_len,
            rows,
        )
        if len(token_ids) == 1 and adapters is None:
            step = in_company(step, self._lone_size, self._spare_block)
        self._set_step(step, long_sequences)
        if prompt_table is not None or self._prompt_table is not None:
            self._set_prompt_table(prompt_table)
        if adapters is not None or self._stack is not None:
            self._set_adapters(adapters)
        return self._infer()[: len(rows)]  # without those of company

    def _set_step(self, step: StepInputs, long_sequences: Bools | None = None) -> None:
        values: tuple[Any, ...] = step
        self._held = [
            np.ascontiguousarray(value, dtype).reshape(np.shape(value))
            for value, (_, dtype) in zip(values, self._step_inputs, strict=True)
        ]
        for array, (index, _) in zip(self._held, self._step_inputs, strict=True):
            self._request.set_input_tensor(index, ov.Tensor(array, shared_memory=True))
        if self.long_beyond is not None:
            self._set_long_sequences(self._held[3], long_sequences)

    def _infer(self) -> Logits:
        self._request.start_async()
        self._request.wait()
        logits: Logits = self._request.get_output_tensor(0).data
        return logits.reshape(-1, self.vocab_size)

    def _set_long_sequences(self, begins: Array, long: Bools | None) -> None:
        """The flag of its sequence for every token."""
        flags = np.zeros(len(begins) - 1, np.bool_)
        if long is not None:
            flags[: len(long)] = long
        self._held.append(np.repeat(flags, np.diff(begins)))
        tensor = ov.Tensor(self._held[-1], shared_memory=True)
        self._request.set_input_tensor(self._ports["long_sequences"], tensor)

    def _set_prompt_table(self, table: Logits | None) -> None:
        """Without a table the graph needs a row that nobody asks for."""
        self._prompt_table = table
        if self.max_prompt_table:
            rows = np.zeros((1, self.hidden_size), np.float32) if table is None else table
            self._table_held = np.ascontiguousarray(rows, np.float32)
            tensor = ov.Tensor(self._table_held, shared_memory=True)
            self._request.set_input_tensor(self._ports["prompt_table"], tensor)

    def _set_adapters(self, adapters: AdapterBatch | None) -> None:
        """Set the masks of this step, and the weights only when they are not those of the last one."""
        if adapters is None or adapters.stack is not self._stack:
            self._set_stack(None if adapters is None else adapters.stack)
        if adapters is not None:
            for linear, mask in adapters.masks.items():
                self._set_mask(linear, mask)

    def _set_stack(self, stack: AdapterStack | None) -> None:
        """Set the weights of `stack`; without one they are no columns wide, and so is the mask."""
        self._stack, self._stack_held = stack, []
        if self.lora is None:
            return
        for linear, (inputs, outputs) in self.lora.linears.items():
            nothing = np.zeros((0, inputs), np.float32), np.zeros((0, outputs), np.float32)
            for layer in range(self.lora.layers):
                a, b = nothing if stack is None else stack.weights[layer, linear]
                self._set_weights(f"lora.a.{layer}.{linear}", a)
                self._set_weights(f"lora.b.{layer}.{linear}", b)
            if stack is None:
                self._set_mask(linear, np.zeros((1, 0), np.bool_))

    def _set_weights(self, name: str, array: Array) -> None:
        assert self.lora is not None
        if self.lora.bfloat16:
            bits = array.astype(np.uint16) if not array.size else array.view(np.uint16)
            tensor = ov.Tensor(bits, ov.Shape(list(array.shape)), ov.Type.bf16)
            self._stack_held.append(bits)
        else:
            tensor = ov.Tensor(array, shared_memory=True)
            self._stack_held.append(array)
        self._request.set_input_tensor(self._ports[name], tensor)

    def _set_mask(self, linear: str, mask: npt.NDArray[np.bool_]) -> None:
        self._held.append(mask)
        self._request.set_input_tensor(self._ports[f"lora.mask.{linear}"], ov.Tensor(mask, shared_memory=True))

    def copy_block(self, source: int, target: int) -> None:
        """Copy keys and values of block `source` to block `target`, in every layer."""
        for cache in self._caches:
            cache[target] = cache[source]


def activation_group(graph: ov.Model) -> int:
    """How many activations share a scale when the plugin rounds them to int8 in front of packed weights; 0: none are.

    The kernels leave their fast way when a group of activations is wider than a group of int4 weights. Beside that,
    256 multiply up to 1.3 times as fast as the plugin's own 32 at one stream, and 1.6 times at eight.
    """
    constants = (node for node in graph.get_ops() if node.get_type_name() == "Constant")
    groups = {int(node.shape[-1]) for node in constants if node.get_element_type() in _INT4 and node.shape[-1] > 1}
    common = math.gcd(_ACTIVATION_GROUP, *groups)
    return common if common >= _LEAST_ACTIVATION_GROUP else 0


def lora_shape(config: Mapping[str, Any]) -> LoraShape | None:
    """What the adapters of an engine with this `config.json` look like; None when it takes none."""
    build, model = config["build_config"], config["pretrained_config"]
    if not build.get("plugin_config", {}).get("lora_plugin"):
        return None
    lora = build["lora_config"]
    return LoraShape(
        modules=lora_modules(model, lora["lora_target_modules"], fused_mlp=config["trtserve"].get("mlp") == "fused"),
        layers=Sizes.of(model).layers,
        max_rank=int(lora["max_lora_rank"]),
        bfloat16=config["trtserve"]["compute_precision"] == "bf16",
    )


def _windows(own: Sequence[int | None], asked: Sequence[int] | None, longest: int) -> list[int | None]:
    """The windows of the layers, to be repeated over them: the shorter one of the model's own and what was asked for.

    None where it is as long as the longest sequence, so that the graph stays as it is.
    """
    both: tuple[Sequence[int | None], ...] = (own or (None,), asked or (None,))
    repeated = [[turn[layer % len(turn)] for turn in both] for layer in range(math.lcm(*map(len, both)))]
    shortest = [min((window for window in pair if window is not None), default=longest) for pair in repeated]
    return [window if window < longest else None for window in shortest]


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
