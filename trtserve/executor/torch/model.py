"""Run one rank of an engine folder with PyTorch: paged attention over a KV cache in blocks."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.checkpoint.architectures import family
from trtserve.checkpoint.architectures.base import Decoder
from trtserve.errors import ArtifactError, MissingDependencyError
from trtserve.executor.engine.limits import DEFAULT_FREE_FRACTION, MOST_FREE_FRACTION
from trtserve.executor.engine.model import FatalModelError, Int32s, Logits, StepInputs, single_sequence
from trtserve.executor.engine.shapes import Sizes, layer_windows, lora_shape
from trtserve.executor.loaders import read_engine_config
from trtserve.executor.torch.adapters import Adapters, AdapterStore, spans_of
from trtserve.executor.torch.decoder import Inputs, TorchDecoder
from trtserve.executor.torch.mixers import LayerCache, StepStates, keys_of, tables_of
from trtserve.executor.torch.operations import Device, Operations
from trtserve.executor.torch.rank_group import ALONE, RankGroup
from trtserve.executor.torch.weights import EngineWeights
from trtserve.host.machine import free_memory

# `expert_kernels.FEW` and MANY; that module needs the Triton language.
_EXPERT_TILES = 4, 32
# Tokens of the first prompt in `warm_up`.
_WARM_TOKENS = 16
# Tokens that the decoding sequences of a step with prompts see together, from which a kernel of their own is worth its
# launch: 63 sequences of 4,096 tokens are equally fast on an H100.
_OWN_ATTENTION = 250_000
# Of cuBLAS and cuBLASLt, for the streams of steps, of warming up and of capturing.
_WORKSPACES, _WORKSPACE_BYTES = 4, 32 << 20


class TorchModel:
    """The decoder of one rank with its KV cache: `ModelRunner` on PyTorch. Not thread-safe."""

    step_costs: Sequence[float] = ()

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        weights: EngineWeights,
        *,
        layers: range,
        device: Device = "cpu",
        group: RankGroup = ALONE,
        windows: Sequence[int] | None = None,
    ) -> None:
        """Copy the weights of one rank to `device`; `config` is the engine's, `layers` those of the rank's stage.

        `windows` are max_attention_window: the number of tokens that the layers see, repeated over the layers. Shorter
        windows of the model itself stay.
        """
        build, sizes = config.build, Sizes.of(config.model)
        self.device = device
        self._group = group
        self.kv_memory_fraction = MOST_FREE_FRACTION if device == "cuda" else DEFAULT_FREE_FRACTION
        self.vocab_size = sizes.vocab
        self.hidden_size = sizes.hidden
        self.max_position = build.max_seq_len
        self.max_prompt_table = build.max_prompt_embedding_table_size
        self.tokens_per_block = build.plugin_config.tokens_per_block or 0
        self.lora = lora_shape(config)
        beyond = None if decoder.long_rope is None else decoder.long_rope.beyond
        self.long_rope_beyond = beyond if beyond is not None and self.max_position > beyond else None
        with torch.inference_mode():
            self.decoder = TorchDecoder(
                decoder,
                sizes,
                weights,
                operations_for(device),
                group,
                layers=layers,
                max_position=self.max_position,
                windows=layer_windows(decoder.windows, windows, self.max_position, chunked=decoder.chunked),
                narrow_cache=config.trtserve.kv_precision == "fp8",
            )
        self.adapters: AdapterStore | None = None
        if self.lora is not None:
            # A stack has up to four times the adapters of a step.
            places = 4 * max_rows(config)
            self.adapters = AdapterStore(
                self.lora, weights, layers, most=places, dtype=self.decoder.dtype, device=device
            )
        self._layers = layers
        self._mixers = {layer: mixer for layer in layers if (mixer := decoder.mixer_of(layer)) is not None}
        without = decoder.mlp_layers | (frozenset() if decoder.mixer_beside else decoder.mixer_layers)
        self._attending = [layer for layer in layers if layer not in without]
        self._key_layers = {layer: decoder.key_layer(layer) for layer in self._attending}
        numbers = (math.prod(self._block_shape(layer)) for layer in set(self._key_layers.values()))
        self.bytes_per_block = sum(numbers) * self.decoder.cache_dtype.itemsize
        numbers = (math.prod(table) for mixer in self._mixers.values() for table in mixer.tables)
        self.bytes_per_state = sum(numbers) * torch.float32.itemsize
        self._step_bytes = _step_bytes(config, sizes, self.decoder.dtype.itemsize)
        if device == "cuda":
            from trtserve.executor.torch.graphs import MOST_CAPTURED, captured_bytes

            self._step_bytes += captured_bytes(max_rows(config), sizes.vocab)
            self._step_bytes += MOST_CAPTURED * _token_width(config, sizes) * self.decoder.dtype.itemsize
            self._step_bytes += _gpu_bytes(config, sizes, self.decoder.dtype.itemsize)
        self._warm_lengths = _warm_lengths(config)
        self.caches: list[LayerCache] = []
        self._spare_state = 0
        self.spare_block = 0
        self.faults = StepFaults(device, gpu=torch.cuda.current_device() if device == "cuda" else None)

    def free_memory(self) -> int:
        """Return the free bytes of the memory that holds the KV cache; on a GPU, besides those of the largest step."""
        if self.device == "cpu":
            return free_memory()
        torch.cuda.empty_cache()  # what loading left over is free
        return max(0, int(torch.cuda.mem_get_info()[0]) - self._step_bytes)

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache; one more block is the model's own."""
        self.spare_block = num_blocks
        made = {
            layer: torch.zeros(
                (num_blocks + 1, *self._block_shape(layer)), dtype=self.decoder.cache_dtype, device=self.device
            )
            for layer in set(self._key_layers.values())
        }
        self.caches = [made[self._key_layers[layer]] if layer in self._key_layers else [] for layer in self._layers]
        self.allocate_states(0)

    def _block_shape(self, layer: int) -> tuple[int, int, int, int]:
        return self.decoder.cache_parts, self.tokens_per_block, *self.decoder.cache_shape(layer)

    def allocate_states(self, num_states: int) -> None:
        """Allocate the rows of states in float32; one more row is the model's own."""
        self._spare_state = num_states
        for place, layer in enumerate(self._layers):
            if layer in self._mixers:
                tables = [
                    torch.zeros((num_states + 1, *table), device=self.device) for table in self._mixers[layer].tables
                ]
                keys = keys_of(self.caches[place])
                self.caches[place] = tables if keys is None else (keys, tables)

    def warm_up(self) -> None:
        """Run prompts and a decode step in the spare block."""
        for new in (*self._warm_lengths, 1):
            blocks = [self.spare_block] * -(-new // self.tokens_per_block)
            step = single_sequence([0] * new, blocks, rows=[new - 1])
            self.forward(step)
            if self.adapters is not None:
                with self.faults, torch.inference_mode():
                    nothing = self._copy(np.zeros((1, 3), np.int32))
                    self.compute(replace(self.inputs(step), adapters=Adapters(self.adapters, nothing)))

    def forward(self, step: StepInputs) -> Logits:
        with self.faults, torch.inference_mode():
            return self._fetch_logits(self.compute(self.inputs(step)))

    def compute(self, inputs: Inputs) -> Tensor:
        """Return the logits of a step, on the device: f32[r, vocab]; on stages before the last f32[0, vocab]."""
        group = self._group
        if group.stage:
            hidden = torch.empty(
                (len(inputs.token_ids), self.hidden_size), dtype=self.decoder.dtype, device=self.device
            )
            inputs = replace(inputs, hidden=group.receive(hidden))
        output = self.compute_stage(inputs)
        if group.last_stage:
            return output
        group.send(output)
        return torch.empty((0, self.vocab_size), dtype=torch.float32, device=self.device)

    def compute_stage(self, inputs: Inputs) -> Tensor:
        """Return what `TorchDecoder.forward` gives; `inputs` have what the stage before computed."""
        return self.decoder.forward(inputs, self.caches)

    def inputs(self, step: StepInputs) -> Inputs:
        """Return the inputs of a step as tensors on the device."""
        begins, past = step.subsequence_begins, step.past_lens
        new = np.diff(begins)
        positions, tables, cache_places = self.places(step)
        return Inputs(
            token_ids=self._copy(step.token_ids),
            positions=self._copy(positions),
            cache_places=self._copy(cache_places),
            block_tables=self._copy(tables),
            past_lengths=self._copy(past),
            lengths=self._copy(past + new),
            begins=self._copy(begins),
            most_new=int(new.max()),
            decoding=decoding_apart(new, past),
            rows=self._copy(step.rows.astype(np.int64)),
            prompt_table=None if step.prompt_table is None else self._copy(step.prompt_table),
            adapters=self._adapters_of(step),
            states=self._states(step) if self._mixers else None,
        )

    def places(self, step: StepInputs) -> tuple[npt.NDArray[Any], Int32s, npt.NDArray[np.int64]]:
        """Return positions [t] for the rotation, block tables [s, m] and the places of the tokens in the cache [t]."""
        begins, new, positions = step.subsequence_begins, np.diff(step.subsequence_begins), step.positions
        tables = _block_tables(step.block_indices, step.block_indices_begins)
        owners = np.repeat(np.arange(len(new)), new)
        places = np.arange(len(step.token_ids)) - np.repeat(begins[:-1] - step.past_lens, new)
        blocks, offsets = np.divmod(places, self.tokens_per_block)
        if step.long_sequences is not None and self.long_rope_beyond is not None:
            positions = positions + np.where(step.long_sequences[owners], self.max_position, 0)
        return positions, tables, tables[owners, blocks].astype(np.int64) * self.tokens_per_block + offsets

    def _states(self, step: StepInputs) -> StepStates:
        begins = step.subsequence_begins.tolist()
        rows = np.full(len(step.past_lens), self._spare_state) if step.states is None else step.states
        return StepStates(
            rows=self._copy(rows.astype(np.int64)),
            fresh=self._copy(step.past_lens == 0),
            spans=[] if len(step.token_ids) == len(rows) else list(itertools.pairwise(begins)),
        )

    def _adapters_of(self, step: StepInputs) -> Adapters | None:
        if step.adapters is None or self.adapters is None:
            return None
        places = self.adapters.places(step.adapters)
        return Adapters(self.adapters, *(self._copy(spans_of(each)) for each in (places, places[step.rows])))

    def _copy(self, array: npt.NDArray[Any]) -> Tensor:
        """Return an array on the device. A copy from pinned memory does not wait for what the GPU computes."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self.device == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    def _fetch_logits(self, logits: Tensor) -> Logits:
        """Return logits in memory of the host; copies into pinned memory are several times as fast."""
        if self.device == "cuda":
            pinned = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
            logits = pinned.copy_(logits)
        array: Logits = logits.numpy()
        return array

    def copy_block(self, source: int, target: int) -> None:
        """Copy keys and values of block `source` to block `target`, in every layer."""
        with self.faults:
            for cache in self.caches:
                if (keys := keys_of(cache)) is not None:
                    keys[target] = keys[source]

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `StatefulModel.copy_states`."""
        with self.faults, torch.inference_mode():
            read, written = (self._copy(np.array(rows, np.int64)) for rows in (sources, targets))
            for cache in self.caches:
                for table in tables_of(cache):
                    table[written] = table[read]


def operations_for(device: Device) -> Operations:
    if device == "cuda":
        from trtserve.executor.torch import kernels

        return kernels
    from trtserve.executor.torch import plain_operations

    return plain_operations


def load_model(
    engine: Path,
    windows: Sequence[int] | None,
    group: RankGroup = ALONE,
    model_class: type[TorchModel] = TorchModel,
    gpu: int | None = None,
) -> TorchModel:
    """Load the rank of `group` from the engine's folder; `gpu` becomes the current GPU of this process."""
    config = read_engine_config(engine)
    model, device = config.model, config.trtserve.device
    _require_ranks(engine, model, group)
    _require_device(device)
    if gpu is not None and device == "cuda":
        use_gpu(gpu)
    weights = EngineWeights(engine, model, group, device)
    decoder = family(model.architecture).decoder(model)
    return model_class(config, decoder, weights, layers=weights.layers, device=device, group=group, windows=windows)


def use_gpu(number: int) -> None:
    """Make a GPU the current one of this thread. Raises RuntimeError when this process does not see it."""
    if not 0 <= number < torch.cuda.device_count():
        raise RuntimeError(
            f"gpu_device_ids names GPU {number}; this process sees {torch.cuda.device_count()}, numbered from 0"
        )
    torch.cuda.set_device(number)


def check_ranks(engine: Path) -> None:
    """Raise CorruptFileError when a rank's file lacks a tensor, or has one of another shape than its config says."""
    model = read_engine_config(engine).model
    mapping = model.mapping
    for stage, tp_rank in itertools.product(range(mapping.pp_size), range(mapping.tp_size)):
        EngineWeights(engine, model, RankGroup(mapping.tp_size, tp_rank, mapping.pp_size, stage), "cpu").check()


def max_rows(config: EngineConfig) -> int:
    """Return the most sequences of a step: every beam is one."""
    return config.build.max_batch_size * config.build.max_beam_width


def _step_bytes(config: EngineConfig, sizes: Sizes, item: int) -> int:
    """Return the bytes of intermediate values in a step of the most tokens, and of its logits in two types."""
    tokens, width = config.build.max_num_tokens, _token_width(config, sizes)
    rows = max_rows(config)
    rows = tokens if config.build.gather_context_logits else rows
    return tokens * width * item + rows * sizes.vocab * (item + 4)


def _token_width(config: EngineConfig, sizes: Sizes) -> int:
    """Return how many intermediate values of a token there are at once."""
    of_layers = [sizes.of_layer(full=full) for full in (False, True)]
    heads = max((each.heads + 2 * each.kv_heads) * each.head for each in of_layers)
    # Of latent attention, queries and what they attend to have the size of its key.
    heads *= 3 if config.model.own("kv_lora_rank", 0) else 2
    return 4 * sizes.hidden + heads + 3 * config.model.intermediate_size


def _warm_lengths(config: EngineConfig) -> list[int]:
    """Return the lengths of prompts for which all kernels of prompts are compiled.

    On GPUs products have other kernels for up to 16, 32 and 64 rows, and norms beyond 64. Experts have others where
    more pairs of token and expert come to each expert, and codes are widened for more than 256 rows.
    """
    moe, most = config.model.moe, min(config.build.max_num_tokens, config.build.max_seq_len)
    lengths = [min(_WARM_TOKENS, config.build.plugin_config.tokens_per_block or 1, most)]
    if config.trtserve.device == "cuda":
        lengths += sorted({min(each, most) for each in (32, 64, 80)})
    if moe.num_experts:
        lengths += sorted({min(each * moe.num_experts // max(1, moe.top_k) + 1, most) for each in _EXPERT_TILES})
    elif config.model.quantization.algorithm is not None:
        lengths.append(min(257, most))
    return lengths


def _gpu_bytes(config: EngineConfig, sizes: Sizes, item: int) -> int:
    """Return the further bytes of a step on a GPU: cuBLAS's workspaces, and the buffers of FP8, codes and experts."""
    tokens, model = config.build.max_num_tokens, config.model
    found = _WORKSPACES * _WORKSPACE_BYTES
    if (model.quantization.algorithm or "").startswith("FP8"):
        # The inputs of the widest matrix in FP8.
        found += tokens * max(sizes.hidden, model.intermediate_size, sizes.heads * sizes.head)
    elif model.quantization.algorithm is not None:
        # The widest matrix as floats, for steps of many rows, and parts of its products in float32.
        hidden, inner = sizes.hidden, 2 * model.intermediate_size
        found += hidden * max(inner, (sizes.heads + 2 * sizes.kv_heads) * sizes.head) * item + 2 * 256 * inner * 4
    if experts := model.moe.num_experts:
        pairs = tokens * max(1, model.moe.top_k)
        inside = model.moe_intermediate_size or model.intermediate_size
        # Inner values, outputs in float32, and the order of the pairs; the router's numbers, and the sum.
        found += pairs * (4 * inside + 4 * sizes.hidden + 4 * 8) + tokens * (3 * 4 * experts + 2 * 4 * sizes.hidden)
    return found


def decoding_apart(new: Int32s, past: Int32s) -> int:
    """Return how many of the last sequences decode and see enough tokens for attention of their own to be faster."""
    count = int(np.logical_and.accumulate(new[::-1] == 1).sum())
    return count if past[len(past) - count :].sum() >= _OWN_ATTENTION else 0


def _block_tables(indices: Int32s, begins: Int32s) -> Int32s:
    """Return the blocks of each sequence as rows i32[s, most blocks], padded with zeros."""
    counts = np.diff(begins)
    tables = np.zeros((len(counts), int(counts.max())), np.int32)
    tables[np.arange(tables.shape[1]) < counts[:, None]] = indices[: begins[-1]]
    return tables


def _require_ranks(engine: Path, model: CheckpointConfig, group: RankGroup) -> None:
    tp_size, stages = model.mapping.tp_size, model.mapping.pp_size
    if (tp_size, stages) != (group.tp_size, group.stages):
        raise ArtifactError(
            f"{engine} has {tp_size} tensor-parallel ranks and {stages} pipeline stages, but {group.tp_size} and "
            f"{group.stages} were started.",
            hint="`trtserve start` starts a process for each rank; for one process convert the model with --tp-size 1.",
        )


def _require_device(device: Device) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingDependencyError(
            f"The engine was built for NVIDIA GPUs, but PyTorch {torch.__version__} finds none.",
            hint="Run `trtserve doctor`, or build the engine with --device cpu.",
        )


# Errors after which every call of CUDA in this process fails (the CUDA runtime's documentation of cudaError_t says so),
# and those of ranks, which then no longer compute the same.
_LOST = re.compile(
    r"CUDA.*(illegal memory access|illegal instruction|misaligned address|invalid program counter|illegal address"
    r"|device-side assert|unspecified launch failure|launch timed out|uncorrectable|hardware stack error"
    r"|busy or unavailable|unknown error)|NCCL|another rank of this model has ended",
    re.IGNORECASE,
)
_WITHOUT_MEMORY = re.compile(r"out of memory|can't allocate memory|STATUS_ALLOC_FAILED", re.IGNORECASE)


class StepFaults:
    """`with` this around a step, exceptions become what the executor distinguishes; it may be entered again and again.

    An exception that says nothing of its kind may still be the first sign of a lost GPU: then `probe` fails too.
    """

    def __init__(self, device: Device, probe: Callable[[], None] | None = None, *, gpu: int | None = None) -> None:
        self._gpu = gpu
        self._probe = probe if probe is not None or device == "cpu" else _use_gpu

    def __enter__(self) -> None:
        """Choose the model's GPU: which one is current belongs to a thread, and the executor has its own."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Raise MemoryError or FatalModelError instead of an exception that means it."""
        if not isinstance(error, Exception) or isinstance(error, (FatalModelError, MemoryError)):
            return
        if isinstance(error, torch.OutOfMemoryError) or _WITHOUT_MEMORY.search(_first_line(error)):
            raise MemoryError(_first_line(error)) from error
        if self._lost(error):
            raise FatalModelError(_cause(error)) from error
        if self._probe is None:
            return
        try:
            self._probe()
        except Exception as found:  # noqa: BLE001 - whatever it is, it says how the GPU is
            if isinstance(found, torch.OutOfMemoryError) or _WITHOUT_MEMORY.search(_first_line(found)):
                return  # the GPU answers
            raise FatalModelError(f"{_cause(error)}; then the GPU did not answer either: {_cause(found)}") from error

    def _lost(self, error: Exception) -> bool:
        """Return whether the exception alone shows that the GPU, or another rank, is lost."""
        if isinstance(error, getattr(torch.distributed, "DistError", FatalModelError)):
            return True
        return isinstance(error, RuntimeError) and _LOST.search(_first_line(error)) is not None


def _use_gpu() -> None:
    """Wait for the current GPU and let it compute something: that fails once its context is lost."""
    torch.cuda.synchronize()
    torch.ones(1, device="cuda").add_(1).item()


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text; PyTorch adds hints for programmers."""
    return str(error).strip().partition("\n")[0]
