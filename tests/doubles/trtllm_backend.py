"""Backend `tensorrtllm` of the tritonserver double: parameters, engine, ranks, devices.

Rules and texts are those of inflight_batcher_llm/src/{model_state,model_instance_state}.cc of tensorrtllm_backend
v0.12.0 … v0.19.0. Stricter where the real one only warns: a value that cannot be read is an error here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.doubles.containers import Versions
from tests.doubles.core_tensors import check_parameter_names, check_tensors
from tests.doubles.engine import EngineError, read_engine, read_engine_config
from tests.doubles.model_configs import LoadError, Model
from tests.doubles.mounts import resolve
from tests.doubles.settings import Settings

_TYPES = frozenset({"V1", "v1", "inflight_batching", "inflight_fused_batching"})
_NUMBERS = {
    "int": [
        "max_beam_width",
        "max_tokens_in_paged_kv_cache",
        "sink_token_length",
        "kv_cache_host_memory_bytes",
        "num_nodes",
        "cancellation_check_period_ms",
        "stats_check_period_ms",
        "iter_stats_max_iterations",
        "request_stats_max_iterations",
        "lora_cache_optimal_adapter_size",
        "lora_cache_max_adapter_size",
        "lora_cache_host_memory_bytes",
        "cuda_graph_cache_size",
        "lookahead_window_size",
        "lookahead_ngram_size",
        "lookahead_verification_set_size",
    ],
    "float": [
        "kv_cache_free_gpu_mem_fraction",
        "cross_kv_cache_fraction",
        "lora_cache_gpu_memory_fraction",
        "gpu_weights_percent",
    ],
}
_BOOLEANS = [
    "kv_cache_onboard_blocks",
    "exclude_input_in_output",
    "enable_kv_cache_reuse",
    "normalize_log_probs",
    "enable_chunked_context",
    "enable_context_fmha_fp32_acc",
    "multi_block_mode",
    "cuda_graph_mode",
    "speculative_decoding_fast_logits",
]
_WORDS = frozenset({"True", "true", "TRUE", "1", "False", "false", "FALSE", "0"})
_POLICIES = frozenset({"max_utilization", "guaranteed_no_evict"})
_MODES = ["top_k", "top_p", "top_k_top_p", "beam_search", "medusa"]
# Keys whose absence is an error since 0.19: GetParameter without a catch.
_NEEDED_KEYS = ("tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend")
_PREFIX = "unexpected error when creating modelInstanceState: "


@dataclass(frozen=True, kw_only=True)
class World:
    """MPI as this process sees it, and the orchestrator's variables."""

    rank: int
    size: int
    orchestrator: bool
    spawn: bool


@dataclass
class Devices:
    """GPUs and participants that the models loaded so far took, by model."""

    gpus: dict[int, str] = field(default_factory=dict)
    participants: dict[int, str] = field(default_factory=dict)


def world() -> World:
    """Read MPI's and the orchestrator's variables; Slurm counts only where srun offers MPI by pmix."""
    environment = os.environ
    rank, size = 0, 1
    if "OMPI_COMM_WORLD_RANK" in environment:
        rank, size = int(environment["OMPI_COMM_WORLD_RANK"]), int(environment["OMPI_COMM_WORLD_SIZE"])
    elif "PMIX_RANK" in environment:
        rank, size = int(environment["PMIX_RANK"]), int(environment["SLURM_NTASKS"])
    return World(
        rank=rank,
        size=size,
        orchestrator=_number(environment.get("TRTLLM_ORCHESTRATOR", "0")) != 0,
        spawn=_number(environment.get("TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES", "1")) != 0,
    )


def _number(text: str) -> int:
    """std::atoi: leading digits, else 0."""
    digits = text.strip()
    return int(digits) if digits.lstrip("-").isdigit() else 0


def _assertion(text: str) -> LoadError:
    return LoadError(f"{_PREFIX}[TensorRT-LLM][ERROR] Assertion failed: {text}")


def _read_list(model: Model, name: str) -> list[list[int]] | None:
    text = model.parameter(name)
    if text is None:
        return None
    try:
        return [[int(number) for number in group.split(",")] for group in text.split(";")]
    except ValueError:
        raise LoadError(f"{_PREFIX}(strict double) {name} is no list of numbers: {text}") from None


def _check_numbers(model: Model) -> None:
    for kind, names in _NUMBERS.items():
        for name in names:
            text = model.parameter(name)
            if text is None:
                continue
            try:
                value = float(text) if kind == "float" else int(text)
            except ValueError:
                raise LoadError(f"{_PREFIX}(strict double) {name} is not {kind}: {text}") from None
            if value < 0 or (kind == "float" and value > 1):
                raise LoadError(f"{_PREFIX}(strict double) {name} is out of its range: {text}")
    for name in _BOOLEANS:
        text = model.parameter(name)
        if text is not None and text not in _WORDS:
            raise LoadError(f"{_PREFIX}(strict double) Cannot convert {text} to a boolean: {name}")


def _check_words(model: Model, found: Versions) -> None:
    if model.parameter("gpt_model_type") not in _TYPES:
        raise LoadError(f"{_PREFIX}Invalid gpt_model_type. Must be v1/inflight_batching/inflight_fused_batching.")
    if (policy := model.parameter("batch_scheduler_policy")) is not None and policy not in _POLICIES:
        raise LoadError(f"{_PREFIX}(strict double) batch_scheduler_policy parameter is invalid: {policy}")
    modes = _MODES + (["redrafter", "lookahead", "eagle"] if found.release >= (0, 16) else [])
    if (mode := model.parameter("decoding_mode")) is not None and mode not in modes:
        raise LoadError(f"{_PREFIX}(strict double) decoding_mode parameter is invalid: {mode}")
    dropped = ("worker_path", "max_num_sequences", *(("enable_trt_overlap",) if found.release < (1, 0) else ()))
    for name in dropped:
        if model.parameter(name) is not None:
            raise LoadError(f"{_PREFIX}(strict double) {name} was dropped and has no effect")


def _check_keys(model: Model) -> None:
    """Check keys that 0.19 reads without a default, and the one whose placeholder it takes for a folder."""
    for name in _NEEDED_KEYS:
        if name not in model.config.parameters:
            raise LoadError(f"{_PREFIX}Cannot find parameter with name: {name}")
    if "lora_prefetch_dir" in model.config.parameters:
        text = model.config.parameters["lora_prefetch_dir"].string_value
        if text and not resolve(text).is_dir():  # an unfilled placeholder is passed on as it stands
            raise _assertion(f"lora_prefetch_dir {text} does not exist")


def check_parameters(model: Model, found: Versions) -> None:
    """Check a core model's parameters on their own; LoadError with the text of the failure."""
    _check_words(model, found)
    _check_numbers(model)
    if found.release >= (0, 19) and model.backend == "tensorrtllm":
        _check_keys(model)
    check_parameter_names(model, found.release)
    check_tensors(model, found.release)
    if model.backend == "tensorrtllm" and not model.config.HasField("model_transaction_policy"):
        raise LoadError(f"{_PREFIX}(strict double) no model_transaction_policy")


def _engine_folder(model: Model) -> Path:
    """Relative to the working directory, as the C++ backend resolves it; the Python variant also to its repository."""
    text = model.parameter("gpt_model_path")
    if text is None:
        raise _assertion("Both encoder and decoder model paths are empty")
    bases = [Path()]
    if model.backend == "python":
        bases += [model.folder.parent, model.folder / "1"]
    for base in bases:
        if (base / resolve(text)).exists():
            return base / resolve(text)
    raise _assertion(f"Decoder (GPT) model path at {text} does not exist.")


def _size(mapping: dict[str, Any]) -> int:
    return int(mapping.get("tp_size", 1)) * int(mapping.get("pp_size", 1)) * int(mapping.get("cp_size", 1))


def _participants(model: Model, instance: int, world: World, size: int) -> list[int]:
    """Ranks of the world that run this instance of a model."""
    groups = _read_list(model, "participant_ids")
    if groups is None and world.orchestrator and not world.spawn:
        raise LoadError(
            f"{_PREFIX}[TensorRT-LLM][ERROR] Spawning of processes was disabled in orchestrator mode, but participant "
            "IDs is missing."
        )
    if groups is None:
        if world.orchestrator:
            if world.size != 1:
                raise _assertion("MPI worldSize is expected to be 1 in orchestrator mode when processes are spawned")
            return [0]
        if world.size != size:
            raise _assertion(
                "With communicationMode kLEADER, MPI worldSize is expected to be equal to tp*pp when participantIds "
                "are not specified"
            )
        return list(range(size))
    if world.orchestrator and world.spawn:
        raise _assertion("participantIds must not be specified when processes are spawned")
    ids = groups[instance % len(groups)]
    if len(ids) != size or len(set(ids)) != size:
        raise _assertion(f"Number of participants {ids} is expected to be tp*pp = {size}")
    if world.orchestrator and 0 in ids:
        raise _assertion("Rank 0 is the orchestrator and cannot be a participant")
    if max(ids) >= world.size:
        raise _assertion(f"participantIds {ids} are beyond the MPI world of size {world.size}")
    return ids


def _take(taken: dict[int, str], numbers: list[int], owner: str, what: str) -> None:
    for number in numbers:
        if taken.setdefault(number, owner) != owner:
            raise LoadError(f"{_PREFIX}(strict double) {what} {number} is used by {taken[number]} and by {owner}")


def _nodes() -> int:
    return int(os.environ.get("SLURM_NNODES") or os.environ.get("LWS_GROUP_SIZE") or "1")


def _check_devices(
    model: Model, instance: int, positions: Sequence[int], mapping: dict[str, Any], settings: Settings, devices: Devices
) -> None:
    """The GPU of each rank of this process, as WorldConfig finds it: the i-th of its list, counted round.

    Without gpu_device_ids the list is 0 … gpus_per_node - 1 of the engine's mapping.
    """
    size, per_node = _size(mapping), int(mapping.get("gpus_per_node", 8))
    groups = _read_list(model, "gpu_device_ids")
    count = max((group.count for group in model.config.instance_group), default=1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = settings.gpus if visible is None else len([name for name in visible.split(",") if name])
    if groups is None and count > 1 and size > 1:
        raise LoadError(f"{_PREFIX}(strict double) {count} instances of an engine for {size} GPUs share those GPUs")
    if groups is not None and len(groups) != count:
        raise LoadError(f"{_PREFIX}(strict double) gpu_device_ids has {len(groups)} groups for {count} instances")
    ids = list(range(per_node)) if groups is None else groups[instance]
    if groups is not None:
        if size not in (len(ids), len(ids) * int(model.parameter("num_nodes") or _nodes())):
            raise _assertion(f"deviceIds ({len(ids)}) * numNodes ({_nodes()}) must be equal to tp*pp*cp = {size}")
        if len(ids) > per_node or max(ids) >= per_node or min(ids) < 0:
            raise _assertion(f"device IDs {ids} are beyond the GPUs per node {per_node}")
        if positions or _nodes() == 1:  # on another node the same numbers are other GPUs
            _take(devices.gpus, ids, f"{model.name}_{instance}", "GPU")
    for position in positions:
        device = ids[position % len(ids)]
        if device >= present:
            raise _assertion(
                f"CUDA runtime error in cudaSetDevice({device}): invalid device ordinal ({present} GPUs on this node)"
            )
    if len(set(ids)) * _nodes() < size:
        raise LoadError(f"{_PREFIX}(strict double) {size} ranks on {_nodes()} nodes with {len(set(ids))} GPUs each")


def _check_engine(path: Path, position: int, size: int, found: Versions, settings: Settings) -> None:
    """One rank's engine file against this machine: rank, TensorRT version, SM."""
    if not path.exists():
        raise _assertion(f"Error opening engine file: {path}")
    try:
        header = read_engine(path)
    except EngineError as error:
        raise LoadError(f"{_PREFIX}[TensorRT-LLM][ERROR] Error Code 1: Serialization ({error})") from None
    if header.tensorrt != found.tensorrt:
        raise LoadError(
            f"{_PREFIX}[TensorRT-LLM][ERROR] IRuntime::deserializeCudaEngine: Error Code 1: Serialization "
            "(Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed.Version tag does not match. "
            f"Note: Current Version: {_tag(found.tensorrt)}, Serialized Engine Version: {_tag(header.tensorrt)})"
        )
    if header.sm != settings.sm:
        raise LoadError(
            f"{_PREFIX}[TensorRT-LLM][ERROR] IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The "
            f"engine plan file is generated on an incompatible device, expecting compute "
            f"{settings.sm / 10:.1f} got compute {header.sm / 10:.1f}, please rebuild.)"
        )
    if header.tensorrt_llm.split(".")[:2] != found.tensorrt_llm.split(".")[:2]:
        raise LoadError(
            f"{_PREFIX}(strict double) engine of TensorRT-LLM {header.tensorrt_llm} in {found.tensorrt_llm}: its "
            "plugins differ"
        )
    if (header.rank, header.world_size) != (position, size):
        raise _assertion(f"engine file of rank {header.rank} of {header.world_size}, expected {position} of {size}")


def _tag(tensorrt: str) -> int:
    """A number that differs where TensorRT versions differ (the real tags are not published)."""
    major, minor = (int(part) for part in tensorrt.split(".")[:2])
    return 137 + major * 10 + minor


def load_core(model: Model, world: World, found: Versions, settings: Settings, devices: Devices) -> bool:
    """Load a core model on this rank. Returns whether this rank answers its clients (leader or orchestrator)."""
    check_parameters(model, found)
    folder = _engine_folder(model)
    try:
        config = read_engine_config(folder)
        mapping = config["pretrained_config"]["mapping"]
        size = _size(mapping)
    except (OSError, KeyError, ValueError) as error:
        raise LoadError(f"{_PREFIX}[TensorRT-LLM][ERROR] config.json of {folder}: {error!r}") from None
    count = max((group.count for group in model.config.instance_group), default=1)
    leads = world.rank == 0
    for instance in range(count):
        ids = _participants(model, instance, world, size)
        if world.orchestrator and not world.spawn:
            _take(devices.participants, ids, f"{model.name}_{instance}", "rank")
        positions = (
            range(size) if world.orchestrator and world.spawn else [ids.index(r) for r in ids if r == world.rank]
        )
        _check_devices(model, instance, positions, mapping, settings, devices)
        for position in positions:
            _check_engine(folder / f"rank{position}.engine", position, size, found, settings)
    return leads
