"""The plan of a conversion: which tensor goes where, how large the checkpoint becomes, and where it is published."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.artifacts import (
    Checkpoint,
    Manifest,
    Model,
    fingerprint,
)
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint import architectures
from trtserve.checkpoint.placement import (
    Packed,
    Placement,
    excused,
    match,
    moves,
    unknown_sources,
)
from trtserve.checkpoint.quantized_source import SourceQuantization, source_quantization
from trtserve.checkpoint.source import read_hf_config, read_source, vision_bytes
from trtserve.checkpoint.streaming import Move, buffered_bytes, needs_numpy, process_count
from trtserve.checkpoint.tensor_files import CODES, numpy_dtype
from trtserve.checkpoint.unified import HEAD
from trtserve.errors import UnsupportedModelError, UsageError, listing
from trtserve.nvidia.releases.converters import convertible_family
from trtserve.nvidia.releases.loaders import loading_releases, name_in_release
from trtserve.pipeline.checkpoint_config import (
    checkpoint_config,
    expected_config,
    resolve_dtype,
    resolve_release,
)
from trtserve.specs import CheckSpec, ConvertSpec
from trtserve.store import Store, require_name, reusable

if TYPE_CHECKING:
    from trtserve.checkpoint.architectures.base import Target
    from trtserve.checkpoint.repacking import Repack
    from trtserve.checkpoint.source import SourceTensor
    from trtserve.nvidia.converters import Toolkit

SCHEMA = 5
# Fields of ConvertSpec that decide what our own converter writes.
_OWN_SETTINGS = ("tp_size", "pp_size", "moe_tp_size", "moe_ep_size", "dtype", "quantize", "gpu_sm")
# These count only where they are set, so that checkpoints from before they existed are found again.
_LATER_SETTINGS = ("trtllm_version", "use_parallel_embedding", "embedding_sharding_dim", "ignore_tensors")

# Anonymous memory, measured (Python 3.11, NumPy 1.26, PyTorch 2.13): the first process, and each further one's private
# copy of pages that it writes to.
_CONVERT_PROCESS = 16.3 * 2**20
_FORKED = 3.6 * 2**20
_NUMPY = 8.3 * 2**20
_UNPICKLING = 130 * 2**20  # PyTorch, which imports NumPy


@dataclass(frozen=True, kw_only=True)
class ConversionPlan:
    """The plan of a conversion by our own converter or, with a `toolkit`, by NVIDIA's."""

    asked: ConvertSpec  # as the user gave it
    spec: ConvertSpec  # with dtype and release decided, and without what makes no difference
    model: Model
    name: str
    store: Store
    path: Path  # of the checkpoint
    reused: bool  # it exists
    fingerprint: str
    config: CheckpointConfig  # of the checkpoint; what is expected of NVIDIA's tools
    sizes: Sequence[int]  # bytes of each rank's file; what is expected of NVIDIA's tools
    verify: CheckSpec | None = None  # compare the checkpoint with the model before it is published, or reused
    toolkit: Toolkit | None = None
    headers: Sequence[bytes] = ()  # of each rank's file
    moves: Sequence[Move] = ()  # tensors that are copied or cast
    packed: Sequence[Packed] = ()  # tensors that need more work than that
    placement: Placement | None = None
    vision_bytes: int = 0  # tensors for images, which are left out
    narrow_cache: bool = False  # the model has an 8-bit KV cache, whose scales are left out
    left_out: Sequence[str] = ()  # tensors that the index does not name, or that --ignore-tensors matches
    tied: tuple[SourceTensor, SourceTensor] | None = None  # the embedding and a stored head that it replaces

    @property
    def total_bytes(self) -> int:
        """Bytes of all rank files."""
        return sum(self.sizes)

    @property
    def source_bytes(self) -> int:
        """Bytes of all source tensors that are read."""
        return sum(move.source.entry.size for move in self.moves) + sum(work.source_bytes for work in self.packed)

    @property
    def parameters(self) -> int:
        """Number of parameters; tied matrices and packed numbers count once."""
        packed = (work.target.shape for work in self.packed)
        return sum(map(math.prod, itertools.chain((move.source.entry.shape for move in self.moves), packed)))

    @property
    def memory_bytes(self) -> int:
        """Peak memory of the conversion's processes."""
        return convert_memory(self.moves, self.spec.dtype, repacking=[work.memory_bytes for work in self.packed])

    @property
    def largest_tensor(self) -> int:
        """Bytes of the largest source tensor."""
        packed = (work.largest_source for work in self.packed)
        return max(itertools.chain((move.source.entry.size for move in self.moves), packed), default=0)

    @property
    def releases(self) -> str:
        """The releases of TensorRT-LLM that load the checkpoint: one, a range, or "(no release)"."""
        if self.spec.trtllm_version is not None:
            return self.spec.trtllm_version
        found = loading_releases(self.config)
        return f"{found[0]} … {found[-1]}" if found else "(no release)"

    @property
    def manifest(self) -> Manifest:
        """Manifest of the checkpoint; a run adds what it measures."""
        facts: dict[str, Any] = {"model": str(self.model.path.absolute())}
        if self.toolkit is not None:
            spec, tools = _all_settings(self.spec), {"tensorrt_llm": self.toolkit.version}
        else:
            spec, tools = _own_settings(self.spec), {"checkpoint format": f"TensorRT-LLM {self.releases}"}
            facts |= {
                "bytes": self.total_bytes,
                "parameters": self.parameters,
                "largest_tensor": self.largest_tensor,
                **({"left_out": list(self.left_out)} if self.left_out else {}),
            }
        return Manifest(
            kind="checkpoint",
            name=self.name,
            fingerprint=self.fingerprint,
            inputs={self.model.name: self.model.fingerprint},
            spec=spec,
            tools=tools,
            facts=facts,
        )

    @property
    def artifact(self) -> Checkpoint:
        """The Checkpoint that `run_conversion` returns; it need not exist yet."""
        return Checkpoint(path=self.path, manifest=self.manifest)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The inputs of both converters."""

    spec: ConvertSpec
    model: Model
    name: str
    out: Path | None
    store: Store
    verify: CheckSpec | None

    def destination(self, digest: str) -> tuple[Path, bool]:
        """Return the checkpoint's folder, and whether the checkpoint exists."""
        path = (self.out or self.store.destination(Checkpoint, self.name, digest)).absolute()
        return path, reusable(Checkpoint, path, digest) is not None


def plan_conversion(
    model: Model,
    spec: ConvertSpec,
    *,
    name: str | None = None,
    out: Path | None = None,
    store: Store | None = None,
    verify: CheckSpec | None = None,
    files: Path | None = None,
    headers_only: bool = False,
) -> ConversionPlan:
    """Plan a conversion from configs and headers; only errors in the values of tensors are found later.

    `files` is the folder to read from, where the model is not published yet; with `headers_only` its files hold
    no values. UnsupportedModelError, ConversionError, CorruptFileError, or UsageError for sizes that do not divide.
    """
    job = _Job(spec=spec, model=model, name=name or model.name, out=out, store=store or Store(), verify=verify)
    require_name(job.name)
    files = files or model.path
    hf: Mapping[str, Any] = read_hf_config(files)
    if spec.upstream:
        return _plan_nvidia_conversion(job, hf)
    return _plan_own_conversion(job, hf, files, headers_only=headers_only)


def _plan_own_conversion(job: _Job, hf: Mapping[str, Any], files: Path, *, headers_only: bool) -> ConversionPlan:
    hf = architectures.text_model(hf)
    family = convertible_family(hf)
    stored, spec = source_quantization(hf), job.spec
    spec = replace(spec, dtype=resolve_dtype(spec, hf), trtllm_version=resolve_release(spec))
    if stored is None or stored.method == "fp8":
        # The GPU decides the order of 4-bit weights only: a checkpoint without them is the same for all.
        spec = replace(spec, gpu_sm=ConvertSpec().gpu_sm)
    config = checkpoint_config(hf, spec)
    sources = read_source(files, family.BASE_PREFIX)
    described = architectures.described(hf, config)
    wanted = [
        replace(target, name=name_in_release(target.name, config.architecture, spec.trtllm_version))
        for target in family.targets(described)
    ]
    targets, packed, moved, config = _split_targets(wanted, sources, config, spec, stored, headers_only=headers_only)
    placement = Placement(
        targets,
        layers=config.num_hidden_layers,
        tp_size=spec.tp_size,
        pp_size=spec.pp_size,
        dtype=spec.dtype,
        ep_size=config.mapping.moe_ep_size,
        packed=packed,
    )
    unused = family.unused(described)
    moved, left_out = _without_unused(targets, moved, unused, spec.ignore_tensors)
    narrow_cache = False
    if stored is not None:
        from trtserve.checkpoint.quantized_tensors import is_cache_scale

        narrow_cache = stored.narrow_cache or any(map(is_cache_scale, sources))
    digest = fingerprint(stage="convert", schema=SCHEMA, spec=_own_settings(spec), model=job.model.fingerprint)
    path, reused = job.destination(digest)
    return ConversionPlan(
        asked=job.spec,
        spec=spec,
        model=job.model,
        name=job.name,
        store=job.store,
        path=path,
        reused=reused,
        fingerprint=digest,
        config=config,
        sizes=placement.sizes,
        verify=job.verify,
        headers=placement.headers,
        moves=moves(match(targets, moved, unused), placement, moved),
        packed=packed,
        placement=placement,
        vision_bytes=vision_bytes(sources),
        narrow_cache=narrow_cache,
        left_out=left_out,
        tied=_tied(wanted, sources),
    )


def _tied(targets: Sequence[Target], sources: Mapping[str, SourceTensor]) -> tuple[SourceTensor, SourceTensor] | None:
    """Return the embedding and the head of a tied model whose files hold both."""
    head = next((name for name in ("lm_head.weight", "embed_out.weight") if name in sources), None)
    embedding = next((target.sources[0] for target in targets if target.name == HEAD), None)
    if head is None or embedding in (None, head) or embedding not in sources:
        return None
    return sources[embedding], sources[head]


def _split_targets(
    targets: Sequence[Target],
    sources: Mapping[str, SourceTensor],
    config: CheckpointConfig,
    spec: ConvertSpec,
    stored: SourceQuantization | None,
    *,
    headers_only: bool,
) -> tuple[list[Target], list[Packed], Mapping[str, SourceTensor], CheckpointConfig]:
    """Split the targets into moves and packed tensors; return the sources of the moves and the final config too.

    Raises UsageError where the groups of quantised weights do not divide among the ranks.
    """
    packed = list[Packed]()
    if config.share_embedding_table:
        targets = [target for target in targets if target.name != HEAD]
    # Few models need these modules, which take longer to load than the plan of another model.
    if stored is not None:
        from trtserve.checkpoint.quantized_tensors import excluded_modules, require_divisible, split_targets

        targets, repacks, sources = split_targets(
            targets, sources, stored, gpu_sm=spec.gpu_sm, headers_only=headers_only
        )
        packed += repacks
        excluded = excluded_modules(targets, config.num_hidden_layers, spec.pp_size)
        if stored.method != "fp8":
            quantised: list[Repack] = list(repacks)
            sizes = spec.tp_size, config.mapping.moe_ep_size
            require_divisible((work.target for work in quantised), stored.group_size, *sizes)
        config = config.changed(quantization={**config.content["quantization"], "exclude_modules": excluded})
    if any(target.factor is not None for target in targets):
        from trtserve.checkpoint.products import split_products

        targets, products, sources = split_products(targets, sources)
        packed += products
    return list(targets), packed, sources, config


def _without_unused(
    targets: Sequence[Target], sources: Mapping[str, SourceTensor], unused: Sequence[str], ignored: Sequence[str]
) -> tuple[dict[str, SourceTensor], list[str]]:
    """Return the sources without those that are left out, and the names of these.

    TensorRT-LLM's converters skip every tensor that they do not know, such as the biases of a Llama whose config does
    not mention them. Here a tensor must be used, be known as unused by the family, be absent from the index of the
    files, or match a pattern of `ignored` (fnmatch). Raises UsageError for a pattern that matches no such tensor.
    """
    unknown = unknown_sources(targets, sources, unused)
    for pattern in ignored:
        if not any(excused(name, [pattern]) for name in unknown):
            others = f"unused tensors: {listing(unknown)}" if unknown else "all tensors are used"
            raise UsageError(
                f"--ignore-tensors {pattern} matches no unused tensor ({others}).",
                hint="Give the name of an unused tensor, or a pattern (v_head.*); tensors that the model needs cannot "
                "be ignored.",
            )
    left_out = dict.fromkeys(name for name in unknown if not sources[name].indexed or excused(name, ignored))
    return {name: tensor for name, tensor in sources.items() if name not in left_out}, list(left_out)


def _own_settings(spec: ConvertSpec) -> dict[str, Any]:
    """Settings of our own converter that decide the checkpoint."""
    later = [key for key in _LATER_SETTINGS if getattr(spec, key) != getattr(ConvertSpec(), key)]
    settings = {**asdict(spec), "ignore_tensors": list(spec.ignore_tensors)}
    return {key: value for key, value in settings.items() if key in (*_OWN_SETTINGS, *later)}


def _all_settings(spec: ConvertSpec) -> dict[str, Any]:
    examples = str(spec.trtllm_examples) if spec.trtllm_examples else None
    lists = {name: list(getattr(spec, name)) for name in ("converter_flags", "container_flags", "ignore_tensors")}
    return {**asdict(spec), "trtllm_examples": examples, **lists}


def _plan_nvidia_conversion(job: _Job, hf: Mapping[str, Any]) -> ConversionPlan:
    """Find NVIDIA's tool, check its options, and estimate what it will write."""
    spec, model = job.spec, job.model
    if spec.ignore_tensors:
        raise UsageError(
            "--ignore-tensors is for our own converter; NVIDIA's skip every tensor that they do not know.",
            hint="Leave it out.",
        )
    from trtserve.nvidia.converters import find_toolkit, needs_calibration, tool_command

    toolkit = find_toolkit(
        calibrated=needs_calibration(spec),
        examples=spec.trtllm_examples,
        container=spec.container,
        version=spec.trtllm_version,
    )
    spec = replace(spec, dtype=resolve_dtype(spec, hf))
    tool_command(toolkit, spec, architectures.architecture_of(hf), model.path, model.path)
    config = expected_config(hf, spec)
    try:
        size = architectures.parameter_count(config) * numpy_dtype(CODES[config.dtype]).itemsize
    except UnsupportedModelError:
        size = 0
    ranks = spec.tp_size * spec.pp_size
    where = ("container", "container_flags", "trtllm_version", "trtllm_examples", "ignore_tensors")
    settings = {key: value for key, value in _all_settings(spec).items() if key not in where}
    digest = fingerprint(
        stage="convert",
        schema=SCHEMA,
        spec={**settings, "trtllm_examples": None},
        model=model.fingerprint,
        tool=toolkit.version,
    )
    path, reused = job.destination(digest)
    return ConversionPlan(
        asked=job.spec,
        spec=spec,
        model=model,
        name=job.name,
        store=job.store,
        path=path,
        reused=reused,
        fingerprint=digest,
        config=config,
        sizes=[size // ranks] * ranks,
        verify=job.verify,
        toolkit=toolkit,
    )


def convert_libraries(moves: Sequence[Move]) -> tuple[str, ...]:
    """Return the libraries that a conversion imports: PyTorch when it reads pickled files."""
    return tuple(sorted({"numpy"}.union(*(move.source.file.libraries for move in moves))))


def convert_memory(moves: Sequence[Move], dtype: str, *, repacking: Sequence[int] = ()) -> int:
    """Return the peak of a conversion's processes, which hold one source tensor or quantised matrix at a time."""
    processes = process_count(moves)
    held = [buffered_bytes(move, dtype, processes) for move in moves]
    pickled = "torch" in convert_libraries(moves)
    libraries = _NUMPY if pickled or repacking or any(needs_numpy(move, dtype) for move in moves) else 0
    libraries += _UNPICKLING if pickled else 0
    base = _CONVERT_PROCESS + (processes - 1) * _FORKED + libraries
    return round(base) + max([*held, *repacking], default=0)


def smaller_checkpoint(dtype: str) -> str:
    """Suggest how to make our checkpoint smaller: it stores floats whatever the engine quantises."""
    return "--dtype bfloat16 or float16 makes it half as large." if dtype == "float32" else ""
