"""Run an engine folder with OpenVINO: paged attention over a KV cache in blocks, on the CPU or an Intel GPU.

The engine contains the stateful graph. It is turned into a paged one at load, with inputs for what was built in.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from trtserve.errors import BuildError, CorruptFileError
from trtserve.executor.engine.limits import DEFAULT_FREE_FRACTION, EngineOptions
from trtserve.executor.engine.lora import AdapterStack
from trtserve.executor.engine.model import Logits, StepInputs, single_sequence
from trtserve.executor.engine.shapes import layer_windows, lora_shape
from trtserve.executor.loaders import read_engine_config
from trtserve.executor.openvino.layer_graphs import STATE_TABLE, cpu_plugin, step_inputs
from trtserve.executor.openvino.paged_graph import (
    BLOCK_TABLES,
    NEW,
    add_adapters,
    add_long_sequences,
    add_prompt_table,
    block_tables,
    even_parts,
    has_chunks,
    new_places,
    to_paged_attention,
    with_caps,
)
from trtserve.host.machine import free_memory

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

# Inputs of the transformed graph; `rows` is added by paged_graph.
_STEP_INPUTS: tuple[tuple[str, str, type[np.generic]], ...] = (  # its name here and in `StepInputs`
    ("input_ids", "token_ids", np.int64),
    ("position_ids", "positions", np.int64),
    ("past_lens", "past_lens", np.int32),
    ("subsequence_begins", "subsequence_begins", np.int32),
    ("block_indices", "block_indices", np.int32),
    ("block_indices_begins", "block_indices_begins", np.int32),
    ("max_context_len", "max_context_len", np.int32),
    ("rows", "rows", np.int32),
)
_CACHE_LINE = 64
# The plugin caches the kernels of every shape it has seen, 5000 by default, each with memory of its own: a server with
# steps of different sizes grew by hundreds of megabytes for minutes. The layers share kernels, so that a few dozen
# cover the last handful of shapes; steps of equal size need no lookup.
_KERNELS_KEPT = 64
# oneDNN, which the plugin uses, caches 1024 primitives, some for every number of tokens in a step (0.7 MB each with the
# demo model): memory grew for minutes of random load. With 256 it stops growing after a thousand requests, and no
# request needs more CPU time.
_PRIMITIVES_KEPT = 256
_ACTIVATION_GROUP = 256
_LEAST_ACTIVATION_GROUP = 32
_INT4 = (ov.Type.i4, ov.Type.u4)
_BOUND_BY_MEMORY = 256 << 20  # from this many bytes of weights on, a step waits for memory: more than CPU caches hold


@functools.cache
def openvino_core() -> ov.Core:
    """Return the one Core of this process.

    The CPU plugin of each Core moves the thread's signal stack and restores the former one at its end. If two Cores end
    in another order than they began, that is freed memory, and the next Python signal handler crashes.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_PRIMITIVES_KEPT))  # read at its first use
    core = ov.Core()
    core.add_extension(cpu_plugin())  # the operations of layers with states, in graphs that are read
    return core


class PagedModel:
    """A compiled paged-attention graph with its KV cache: `ModelRunner` on OpenVINO. Not thread-safe."""

    kv_memory_fraction = DEFAULT_FREE_FRACTION

    def __init__(self, engine: Path, *, threads: int | None = None, windows: Sequence[int] | None = None) -> None:
        """Read, transform and compile the engine in `engine`; `threads` limits OpenVINO's threads.

        `windows` are max_attention_window: the number of tokens that the layers see, repeated over the layers. Shorter
        windows of the model itself stay.
        """
        config = read_engine_config(engine)
        own = config.trtserve
        self.compute_precision = own.compute_precision
        self.kv_precision = own.kv_precision
        self.vocab_size = config.model.vocab_size
        self.hidden_size = config.model.hidden_size
        self.max_position = config.build.max_seq_len
        self.max_prompt_table = config.build.max_prompt_embedding_table_size
        self.lora = lora_shape(config)
        core = openvino_core()
        graph = _read_graph(core, engine / "rank0.xml")
        # None: no sequence of this engine can be long for LongRoPE.
        self.long_rope_beyond = add_long_sequences(graph, self.max_position)
        if windows and len(set(windows)) > 1 and any(_is_state(each) for each in graph.inputs):
            raise RuntimeError(
                f"max_attention_window has {len(windows)} values, for layers in turn; a model with layers that have a "
                "state instead of attention takes one"
            )
        chunked = has_chunks(graph)
        seen = layer_windows(own.windows, windows, self.max_position, chunked=chunked)
        to_paged_attention(graph, windows=seen)
        self._plugin = own.plugin
        self._capped = with_caps(graph, config.model.head_size, self.kv_precision, chunks=chunked and any(seen))
        if self.max_prompt_table:
            add_prompt_table(graph, vocab_size=self.vocab_size, hidden_size=self.hidden_size)
        if self.lora:
            add_adapters(graph, self.lora)
        compiled = _compile(core, graph, self._plugin, self._properties(threads, activation_group(graph)))
        self._request = compiled.create_infer_request()
        ports = {port.get_any_name(): index for index, port in enumerate(compiled.inputs)}
        self._ports = ports
        self._cache_ports = [
            (index, compiled.inputs[index]) for name, index in ports.items() if name.startswith(("key_", "value_"))
        ]
        self._state_ports = [(index, port) for index, port in enumerate(compiled.inputs) if _is_state(port)]
        self.bytes_per_state = _row_bytes(self._state_ports)
        # The plugin chooses the block size; value caches are [blocks, kv_heads, tokens, head].
        self.tokens_per_block = int(list(compiled.inputs[ports["value_cache.0"]].get_partial_shape())[2].get_length())
        self.bytes_per_block = _row_bytes(self._cache_ports)
        self._reads_memory = (engine / "rank0.bin").stat().st_size >= _BOUND_BY_MEMORY
        self.step_costs: list[float] = []
        self._padded_sizes: list[int] = []
        self._spare_block = 0
        self._caches: list[Array] = []
        self._remote: list[ov.RemoteTensor] = []  # caches in the memory of a GPU
        self._states: list[Array] = []
        self._held: list[Any] = []  # arrays that OpenVINO reads without a copy
        self._stack: AdapterStack | None = None
        self._stack_held: list[Any] = []
        self._set_prompt_table(None)
        self._set_stack(None)

    def _properties(self, threads: int | None, group: int) -> dict[str, Any]:
        """Return the properties of the plugin for this engine's precisions."""
        properties: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": self.compute_precision,
            "KV_CACHE_PRECISION": self.kv_precision,
        }
        if self._plugin != "CPU":
            return properties
        properties |= {
            "CPU_RUNTIME_CACHE_CAPACITY": _KERNELS_KEPT,
            # A core that is shared with other programs gets less work; by default all get the same.
            "TBB_PARTITIONER": "AUTO",
            # The plugin rounds activations to int8 before packed weights; exact arithmetic must not.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0 if self.compute_precision == "f32" else group,
        }
        if threads is not None:
            properties["INFERENCE_NUM_THREADS"] = threads
        return properties

    def free_memory(self) -> int:
        """Return the free bytes of this machine's memory, at most those that the GPU can use."""
        if self._plugin == "CPU":
            return free_memory()
        return min(free_memory(), int(openvino_core().get_property(self._plugin, "GPU_DEVICE_TOTAL_MEM_SIZE")))

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache; memory is used when a block is first written. One more block is the model's own."""
        self._spare_block = num_blocks
        if self._plugin == "CPU":
            self._caches = self._tables(self._cache_ports, num_blocks + 1)
        else:
            context = openvino_core().get_default_context(self._plugin)
            for index, port in self._cache_ports:
                shape = ov.Shape([num_blocks + 1, *_block_shape(port)])
                self._remote.append(context.create_tensor(port.get_element_type(), shape, {}))
                self._request.set_input_tensor(index, self._remote[-1])
        self.allocate_states(0)

    def allocate_states(self, num_states: int) -> None:
        """Allocate the rows of states. One more is the model's own, and one stays empty."""
        self._states = self._tables(self._state_ports, num_states + 2)

    def _tables(self, ports: Sequence[tuple[int, Any]], rows: int) -> list[Array]:
        """Set inputs to zeros with so many rows, and return them."""
        arrays = []
        for index, port in ports:
            array, tensor = _zeros([rows, *_block_shape(port)], port.get_element_type())
            self._request.set_input_tensor(index, tensor)
            arrays.append(array)
        return arrays

    def warm_up(self) -> None:
        """Run a step, in which OpenVINO packs the weights, and measure small steps and whether padding helps them.

        Padding is not used with exact arithmetic, because results would differ in the last bits. A model with states
        takes no drafts, which are what the times are for.
        """
        self._run_step(1)
        if self._states:
            return
        if min(self.max_position, self.tokens_per_block) < max(SIZES):
            return
        rounds = measure_steps(self._run_step)
        self.step_costs = seconds_of_each(least(rounds))
        if self._reads_memory and self.compute_precision != "f32":
            self._padded_sizes = padded_sizes(rounds)
            self.step_costs = [self.step_costs[size - 1] for size in self._padded_sizes]

    def _run_step(self, size: int) -> None:
        self._set_step(single_sequence([0] * size, [self._spare_block]))
        self._infer()

    def forward(self, step: StepInputs) -> Logits:
        """See `ModelRunner.forward`. The GIL is released while OpenVINO computes."""
        count, wanted, adapters = len(step.token_ids), len(step.rows), step.adapters
        if count <= len(self._padded_sizes) and wanted and adapters is None and not self._states:
            step = pad_step(step, self._padded_sizes[count - 1], self._spare_block)
        logits = self._forward_capped(step) if self._capped else self._compute(step)
        return logits[:wanted]  # without the rows of padding

    def _forward_capped(self, step: StepInputs) -> Logits:
        """Compute the parts of a step one after another, and write what they add to the cache."""
        logits = np.empty((len(step.rows), self.vocab_size), np.float32)
        for part, rows in even_parts(step):
            logits[rows] = self._compute(part)
            blocks, places = new_places(part)
            for (_, port), cache in zip(self._cache_ports, self._caches, strict=True):
                new = self._request.get_tensor(NEW + port.get_any_name()).data
                cache[blocks, :, places] = new.view(cache.dtype)
        return logits

    def _compute(self, step: StepInputs) -> Logits:
        adapters = step.adapters
        self._set_step(step)
        if step.prompt_table is not None or self._prompt_table is not None:
            self._set_prompt_table(step.prompt_table)
        if adapters is not None or self._stack is not None:
            if adapters is None or adapters.stack is not self._stack:
                self._set_stack(None if adapters is None else adapters.stack)
            if adapters is not None:
                for linear, mask in adapters.masks.items():
                    self._set_mask(linear, mask)
        return self._infer()

    def _set_step(self, step: StepInputs) -> None:
        self._held = []
        if self._capped:
            self._held.append(self._share(BLOCK_TABLES, block_tables(step)))
        for name, attribute, dtype in _STEP_INPUTS:
            if name not in self._ports:
                continue
            value = getattr(step, attribute)
            self._held.append(self._share(name, np.ascontiguousarray(value, dtype).reshape(np.shape(value))))
        if self._states:
            spare = len(self._states[0]) - 2
            rows = np.full(len(step.past_lens), spare) if step.states is None else step.states
            inputs = step_inputs(step.subsequence_begins, step.past_lens, rows, empty=spare + 1)
            self._held += [self._share(name, array) for name, array in inputs.items()]
        if self.long_rope_beyond is not None:
            self._set_long_sequences(step.subsequence_begins, step.long_sequences)

    def _share(self, name: str, array: Array) -> Array:
        """Set an input to an array, which must stay until the step has been computed, and return it."""
        self._request.set_input_tensor(self._ports[name], ov.Tensor(array, shared_memory=True))
        return array

    def _infer(self) -> Logits:
        self._request.start_async()
        self._request.wait()
        logits: Logits = self._request.get_output_tensor(0).data
        return logits.reshape(-1, self.vocab_size)

    def _set_long_sequences(self, begins: Array, long: Bools | None) -> None:
        """Set the flag of its sequence for every token."""
        flags = np.zeros(len(begins) - 1, np.bool_)
        if long is not None:
            flags[: len(long)] = long
        self._held.append(self._share("long_sequences", np.repeat(flags, np.diff(begins))))

    def _set_prompt_table(self, table: Logits | None) -> None:
        """Set the prompt table; without one the graph needs a single unused row."""
        self._prompt_table = table
        if self.max_prompt_table:
            rows = np.zeros((1, self.hidden_size), np.float32) if table is None else table
            self._table_held = self._share("prompt_table", np.ascontiguousarray(rows, np.float32))

    def _set_stack(self, stack: AdapterStack | None) -> None:
        """Set the weights of `stack`; without one they and the masks are 0 columns wide."""
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
        if not self.lora.bfloat16:
            self._stack_held.append(self._share(name, array))
            return
        bits = array.astype(np.uint16) if not array.size else array.view(np.uint16)
        self._stack_held.append(bits)
        self._request.set_input_tensor(self._ports[name], ov.Tensor(bits, ov.Shape(list(array.shape)), ov.Type.bf16))

    def _set_mask(self, linear: str, mask: npt.NDArray[np.bool_]) -> None:
        self._held.append(self._share(f"lora.mask.{linear}", mask))

    def copy_block(self, source: int, target: int) -> None:
        """Copy keys and values of block `source` to block `target`, in every layer."""
        for cache in self._caches:
            cache[target] = cache[source]
        for remote in self._remote:
            _rows(remote, source).copy_to(_rows(remote, target))

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `StatefulModel.copy_states`."""
        for table in self._states:
            table[list(targets)] = table[list(sources)]


def activation_group(graph: ov.Model) -> int:
    """Return how many activations share a scale when the plugin rounds them to int8, or 0 if each has its own.

    The kernels become slow if a group of activations is wider than a group of int4 weights. Apart from that, groups of
    256 are up to 1.3 times as fast as the plugin's default of 32 with one stream, and 1.6 times with eight.
    """
    constants = (node for node in graph.get_ops() if node.get_type_name() == "Constant")
    groups = {int(node.shape[-1]) for node in constants if node.get_element_type() in _INT4 and node.shape[-1] > 1}
    common = math.gcd(_ACTIVATION_GROUP, *groups)
    return common if common >= _LEAST_ACTIVATION_GROUP else 0


def load_model(engine: Path, options: EngineOptions) -> PagedModel:
    """Load the engine; `loaders.MODELS` names this module."""
    return PagedModel(engine, windows=options.kv_cache.windows)


def _read_graph(core: ov.Core, path: Path) -> ov.Model:
    try:
        return core.read_model(path)
    except RuntimeError as error:
        raise CorruptFileError(f"{path} cannot be read: {error}", hint="Build the engine again.") from error


def _compile(core: ov.Core, graph: ov.Model, plugin: str, properties: Mapping[str, Any]) -> ov.CompiledModel:
    try:
        return core.compile_model(graph, plugin, properties)
    except RuntimeError as error:
        raise BuildError(
            f"OpenVINO {ov.get_version()} cannot compile the engine: {error}",
            hint="Build the engine again on this machine.",
        ) from error


def _block_shape(port: Any) -> list[int]:
    return [int(size.get_length()) for size in list(port.get_partial_shape())[1:]]


def _is_state(port: Any) -> bool:
    """Return whether an input is a table of states."""
    return str(port.get_any_name()).startswith(STATE_TABLE)


def _row_bytes(ports: Sequence[tuple[int, Any]]) -> int:
    return sum(math.prod(_block_shape(port)) * int(port.get_element_type().size) for _, port in ports)


def _rows(remote: ov.RemoteTensor, block: int) -> ov.RemoteTensor:
    """Return one block of a cache in a GPU's memory."""
    shape = list(remote.get_shape())
    return ov.RemoteTensor(
        remote, ov.Coordinate([block, *[0] * (len(shape) - 1)]), ov.Coordinate([block + 1, *shape[1:]])
    )


def _zeros(shape: list[int], element_type: ov.Type) -> tuple[Array, ov.Tensor]:
    """Return zeros aligned to a cache line, as an array and as a tensor on the same memory.

    NumPy asks the system for zeroed pages, which use no memory until they are written.
    """
    storage = {1: np.uint8, 2: np.uint16, 4: np.float32}[element_type.size]
    count = int(np.prod(shape)) * element_type.size
    raw = np.zeros(count + _CACHE_LINE, dtype=np.uint8)
    start = -raw.ctypes.data % _CACHE_LINE
    array = raw[start : start + count].view(storage).reshape(shape)
    return array, ov.Tensor(array, ov.Shape(shape), element_type)


SIZES = (1, 2, 4, 6, 8, 12)  # the measured numbers of tokens
_ROUNDS = 3
# A padded step must be this much faster: smaller gains may be chance, and results differ in the last bit.
_REQUIRED_RATIO = 0.95


def pad_step(step: StepInputs, size: int, block: int) -> StepInputs:
    """Pad a step to `size` tokens; the others are sequences of their own in `block`.

    Each has its own place in the block. The last row is repeated as well, because the output matrix gains too.
    """
    others = np.arange(size - len(step.token_ids))
    if not len(others):
        return step
    begins, block_begins = step.subsequence_begins, step.block_indices_begins
    return replace(
        step,
        token_ids=np.append(step.token_ids, np.zeros_like(others)),
        positions=np.append(step.positions, others),
        past_lens=np.append(step.past_lens, others),
        subsequence_begins=np.append(begins, begins[-1] + 1 + others),
        block_indices=np.append(step.block_indices, np.full_like(others, block)),
        block_indices_begins=np.append(block_begins, block_begins[-1] + 1 + others),
        max_context_len=max(step.max_context_len, len(others)),
        rows=np.append(step.rows, np.repeat(step.rows[-1:], len(others))),
    )


def measure_steps(run: Callable[[int], object]) -> list[dict[int, float]]:
    """Return the seconds of steps of each of `SIZES`, of several rounds; `run` computes a step of this many tokens."""
    rounds = []
    for _ in range(_ROUNDS + 1):
        seconds = {}
        for size in SIZES:
            begin = time.perf_counter()
            run(size)
            seconds[size] = time.perf_counter() - begin
        rounds.append(seconds)
    return rounds[1:]  # the first step of a size compiles its kernels


def least(rounds: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the least seconds of each size: other programs may have disturbed some rounds."""
    return {size: min(seconds[size] for seconds in rounds) for size in rounds[0]}


def padded_sizes(rounds: Sequence[Mapping[int, float]]) -> list[int]:
    """Return to how many tokens steps of 1, 2, … tokens should be padded: faster in each round, so not by chance."""
    seconds = least(rounds)
    limits = [[_REQUIRED_RATIO * own for own in seconds_of_each(each)] for each in rounds]
    sizes = []
    for tokens in range(1, max(seconds) + 1):
        best = min((size for size in seconds if size >= tokens), key=seconds.__getitem__)
        faster = all(each[best] <= limit[tokens - 1] for each, limit in zip(rounds, limits, strict=True))
        sizes.append(best if faster else tokens)
    return sizes


def seconds_of_each(seconds: Mapping[int, float]) -> list[float]:
    """Return the seconds of steps of 1, 2, … tokens, between the measured sizes by interpolation."""
    known = sorted(seconds)
    each: list[float] = np.interp(range(1, known[-1] + 1), known, [seconds[size] for size in known]).tolist()
    return each
