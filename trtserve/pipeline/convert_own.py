"""Our own converter: Hugging Face model → TensorRT-LLM unified checkpoint.

It streams: every source tensor is read once, cut for all ranks, and written to its place.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trtserve.artifacts import Model
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint import architectures
from trtserve.checkpoint.placement import Packed, Placement, excused, match, moves, unknown_sources
from trtserve.checkpoint.quantized import AWQ, FP8, GPTQ
from trtserve.checkpoint.source import read_hf_config, read_source, same_values, vision_bytes
from trtserve.checkpoint.streaming import (
    Move,
    buffered_bytes,
    carry_out,
    created,
    load_types,
    needs_numpy,
    process_count,
)
from trtserve.checkpoint.supported import SourceQuantization, source_quantization, widened_by
from trtserve.checkpoint.tensor_files import DTYPES, TensorFile
from trtserve.checkpoint.unified import HEAD
from trtserve.errors import ConversionError, UsageError, counted, listing
from trtserve.host.machine import format_bytes, require_disk, require_memory, to_be_mapped
from trtserve.nvidia.releases import NEWEST, RELEASES
from trtserve.nvidia.releases.converters import convertible_family
from trtserve.nvidia.releases.loaders import loading_releases, name_in_release, problems
from trtserve.pipeline import MANIFEST_BYTES, StageNeeds
from trtserve.pipeline.checkpoint_config import checkpoint_config, resolve_dtype, resolve_release
from trtserve.progress import Progress
from trtserve.specs import ConvertSpec
from trtserve.store import Store, expected_seconds, read_rates, timed

if TYPE_CHECKING:
    from trtserve.checkpoint.architectures.base import Target
    from trtserve.checkpoint.repacking import Repack
    from trtserve.checkpoint.source import SourceTensor

# Fields of ConvertSpec that decide what our own converter writes.
_OWN_SETTINGS = ("tp_size", "pp_size", "moe_tp_size", "moe_ep_size", "dtype", "quantize", "gpu_sm")
# These count only where they are set, so that checkpoints from before they existed are found again.
_LATER_SETTINGS = ("trtllm_version", "use_parallel_embedding", "embedding_sharding_dim", "ignore_tensors", "keep_fp8")

# Anonymous memory, measured (Python 3.11, NumPy 1.26, PyTorch 2.13): the first process, and each further one's private
# copy of pages that it writes to.
_CONVERT_PROCESS = 16.3 * 2**20
_FORKED = 3.6 * 2**20
_NUMPY = 8.3 * 2**20
_UNPICKLING = 130 * 2**20  # PyTorch, which imports NumPy


@dataclass(frozen=True, kw_only=True)
class OwnConversion:
    """What our own converter makes of a model: every source tensor is read once, cut for all ranks, and written."""

    BY_NVIDIA: ClassVar[bool] = False

    asked: ConvertSpec  # as the user gave it
    spec: ConvertSpec  # with dtype and release decided, and without what makes no difference
    config: CheckpointConfig
    sizes: Sequence[int]  # bytes of each rank's file
    left_out: Sequence[str]  # tensors that the index does not name, or that --ignore-tensors matches

    headers: Sequence[bytes]  # of each rank's file
    moves: Sequence[Move]  # tensors that are copied or cast
    packed: Sequence[Packed]  # tensors that need more work than that
    placement: Placement
    vision_bytes: int = 0  # tensors for images, which are left out
    narrow_cache: bool = False  # the model has an 8-bit KV cache, whose scales are left out
    untied: bool = False  # config.json ties the head to the embedding, but the files hold another one

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the checkpoint, besides the model."""
        return {"spec": _own_settings(self.spec)}

    @property
    def source(self) -> str:
        """What is converted, in words."""
        return f"{len(self.moves) + len(self.packed)} tensors, {format_bytes(self.source_bytes)}"

    @property
    def source_bytes(self) -> int:
        """Bytes of all source tensors that are read."""
        return sum(move.source.entry.size for move in self.moves) + sum(sum(work.source_sizes) for work in self.packed)

    @property
    def parameters(self) -> int:
        """Number of parameters; tied matrices and packed numbers count once."""
        packed = (work.target.shape for work in self.packed)
        return sum(map(math.prod, itertools.chain((move.source.entry.shape for move in self.moves), packed)))

    @property
    def largest_tensor(self) -> int:
        """Bytes of the largest source tensor."""
        packed = (max(work.source_sizes) for work in self.packed)
        return max(itertools.chain((move.source.entry.size for move in self.moves), packed), default=0)

    @property
    def memory_bytes(self) -> int:
        """Peak memory of the conversion's processes."""
        return convert_memory(self.moves, self.spec.dtype, repacking=[work.memory_bytes for work in self.packed])

    def needs(self, store: Store) -> StageNeeds:
        """Return disk, memory and time of the conversion."""
        return StageNeeds(
            stage="convert",
            disk=sum(self.sizes) + MANIFEST_BYTES,
            memory=self.memory_bytes,
            seconds=expected_seconds(read_rates(store), "convert", self.source_bytes),
        )

    @cached_property
    def loading(self) -> list[str]:
        """The releases of TensorRT-LLM that load the checkpoint of a model without --trtllm-version."""
        return loading_releases(self.config)

    @property
    def releases(self) -> str:
        """The releases of TensorRT-LLM that load the checkpoint: one, a range, or "(no release)"."""
        if self.spec.trtllm_version is not None:
            return self.spec.trtllm_version
        found = self.loading
        return f"{found[0]} … {found[-1]}" if found else "(no release)"

    def command(self, folder: Path) -> None:
        """Return None: no external command is run."""

    def recorded(self) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
        """Return the settings, tools and facts of the checkpoint's manifest."""
        facts: dict[str, Any] = {
            "bytes": sum(self.sizes),
            "parameters": self.parameters,
            "largest_tensor": self.largest_tensor,
            **({"left_out": list(self.left_out)} if self.left_out else {}),
        }
        return _own_settings(self.spec), {"checkpoint format": f"TensorRT-LLM {self.releases}"}, facts

    def report(self, progress: Progress, *, reused: bool) -> None:
        """Report what a user may not expect."""
        if self.asked.gpu_sm != ConvertSpec().gpu_sm and "trtserve" not in self.config.content:
            progress.step("--gpu-sm makes no difference: it orders 4-bit weights (AWQ, GPTQ), and this model has none")
        if self.asked.dtype == "auto" and not reused:
            _report_cast(self, progress)
        if self.left_out:
            progress.step(f"Left out of the checkpoint, as the model works without them: {listing(self.left_out)}")
        if self.vision_bytes:
            progress.step(
                f"The model's vision tensors are left out ({format_bytes(self.vision_bytes)}): it reads text only"
            )
        if self.spec.trtllm_version is None:
            _report_releases(self, progress)
        if self.untied and not reused:
            progress.warn(
                "The output head differs from the embedding, but config.json ties them: the stored head is used, as in "
                "transformers 5. Earlier releases, TensorRT-LLM's converters and vLLM use the embedding; for the same "
                "answers everywhere set tie_word_embeddings to false in config.json, or remove the head."
            )
        if any(move.source.encoding is not None for move in self.moves) and not reused:
            progress.step(
                f"The model's quantised matrices are read exactly and stored as {self.spec.dtype} (--quantize int8 or "
                "int4 makes the engine small again)"
            )
        if self.narrow_cache:
            progress.step(
                f"The model's 8-bit KV cache is left out: keys and values of a GPU engine are {self.spec.dtype}"
            )

    def write(
        self, folder: Path, store: Store, log: Path, progress: Progress
    ) -> tuple[CheckpointConfig, dict[str, Any]]:
        """Fill `folder`; return the checkpoint's config, and facts for its manifest."""
        require_memory(
            self.memory_bytes,
            "This conversion needs",
            lambda _: "Free some memory: no setting needs less.",
            mapped=to_be_mapped(*convert_libraries(self.moves)),
        )
        require_disk(folder.parent, sum(self.sizes), "The checkpoint", smaller=smaller_checkpoint(self.spec.dtype))
        ranks = counted(len(self.sizes), "rank")
        text = f"Converting to {self.spec.dtype}, {ranks}, {format_bytes(sum(self.sizes))}"
        if self.spec.quantize != "none":
            progress.step(f"The {self.spec.quantize} weights are made when the engine is built")
        load_types(self.moves, self.spec.dtype)
        with (
            timed(store, "convert", self.source_bytes),
            created(folder, self.headers, self.sizes) as files,
            progress.task(text, total=self.source_bytes, unit="bytes") as task,
        ):
            carry_out(self.moves, files, self.spec.dtype, task.advance)
            for work in self.packed:
                work.write(self.placement, files)
                task.advance(sum(work.source_sizes))
        (folder / "config.json").write_text(json.dumps(self.config.content, indent=4) + "\n", encoding="utf-8")
        # Read the headers back as a loader would, before the checkpoint counts as complete.
        for rank, size in enumerate(self.sizes):
            path = folder / f"rank{rank}.safetensors"
            if path.stat().st_size != size or not TensorFile(path).entries:
                raise ConversionError(f"{path.name} has {path.stat().st_size} bytes after writing; expected {size}.")
        return self.config, {}


def plan_own_conversion(
    model: Model, spec: ConvertSpec, *, files: Path | None = None, headers_only: bool = False
) -> OwnConversion:
    """Plan a conversion by our own converter.

    `files` is the folder to read from, where the model is not published yet; with `headers_only` they hold no values.
    """
    asked, files = spec, files or model.path
    hf = architectures.text_model(read_hf_config(files))
    base_prefix = convertible_family(hf).prefix
    stored = source_quantization(hf)
    spec = replace(
        spec, dtype=resolve_dtype(spec, hf), trtllm_version=resolve_release(spec), keep_fp8=spec.keep_fp8 or None
    )
    if stored is None or stored.method == "fp8":
        # The GPU decides the order of 4-bit weights only: a checkpoint without them is the same for all.
        spec = replace(spec, gpu_sm=ConvertSpec().gpu_sm)
    config = checkpoint_config(hf, spec)
    sources = read_source(files, base_prefix)
    read = widened_by(hf)
    described, untied = architectures.described(hf, config), False
    if not headers_only and _has_other_head(architectures.checkpoint_targets(described), sources):
        hf, untied = {**hf, "tie_word_embeddings": False}, True
        config = checkpoint_config(hf, spec)
        described = architectures.described(hf, config)
    wanted = [
        replace(target, name=name_in_release(target.name, config.architecture, spec.trtllm_version))
        for target in architectures.checkpoint_targets(described)
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
    unused = architectures.unused_tensors(described)
    if read is not None and read.method == "gptq" and not headers_only:
        moved = _without_zero_biases(targets, moved, unused)
    moved, left_out = _without_unused(targets, moved, unused, spec.ignore_tensors)
    narrow_cache = False
    if stored is not None:
        from trtserve.checkpoint.quantized_tensors import is_cache_scale

        narrow_cache = stored.narrow_cache or any(map(is_cache_scale, sources))
    return OwnConversion(
        asked=asked,
        spec=spec,
        config=config,
        sizes=placement.sizes,
        headers=placement.headers,
        moves=moves(match(targets, moved, unused), placement, moved),
        packed=packed,
        placement=placement,
        vision_bytes=vision_bytes(sources),
        narrow_cache=narrow_cache,
        left_out=left_out,
        untied=untied,
    )


def _has_other_head(targets: Sequence[Target], sources: Mapping[str, SourceTensor]) -> bool:
    """Return whether the files of a tied model hold a head that differs from the embedding."""
    head = next((name for name in ("lm_head.weight", "embed_out.weight") if name in sources), None)
    embedding = next((target.sources[0] for target in targets if target.name == HEAD), None)
    if head is None or embedding in (None, head) or embedding not in sources:
        return False
    return not same_values(sources[embedding], sources[head])


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
    if spec.keep_fp8:
        from trtserve.checkpoint.kept_fp8 import keep_fp8

        targets, kept, sources, config = keep_fp8(targets, sources, config, spec.pp_size)
        packed += kept
    if any(target.factor is not None for target in targets):
        from trtserve.checkpoint.products import split_products

        targets, products, sources = split_products(targets, sources)
        packed += products
    return list(targets), packed, sources, config


def _without_zero_biases(
    targets: Sequence[Target], sources: Mapping[str, SourceTensor], unused: Sequence[str]
) -> dict[str, SourceTensor]:
    """Return the sources without the biases of zeros that AutoGPTQ gives to matrices that have none."""
    unknown = {name for name in unknown_sources(targets, sources, unused) if name.endswith(".bias")}
    zeros = {name for name in unknown if not sources[name].values().any()}
    return {name: tensor for name, tensor in sources.items() if name not in zeros}


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
    default = ConvertSpec()
    later = [key for key in _LATER_SETTINGS if getattr(spec, key) != getattr(default, key)]
    settings = {**asdict(spec), "ignore_tensors": list(spec.ignore_tensors)}
    return {key: value for key, value in settings.items() if key in (*_OWN_SETTINGS, *later)}


def _report_releases(plan: OwnConversion, progress: Progress) -> None:
    """Report releases of TensorRT-LLM that do not load a checkpoint which is made for all of them."""
    served, others = plan.loading, loading_releases(plan.config, named_in=RELEASES[0])
    if plan.config.superset:
        progress.step(
            f"This checkpoint is for the runtimes openvino and torch: TensorRT-LLM's format lacks "
            f"{listing(plan.config.superset)}"
        )
    elif not served:
        problem = problems(plan.config, NEWEST)[0]
        progress.warn(f"No release of TensorRT-LLM loads this checkpoint: {problem.what}. {problem.fix}")
    elif others and others != served:
        progress.step(
            f"This checkpoint loads in TensorRT-LLM {served[0]} … {served[-1]}; {others[0]} … {others[-1]} name "
            "some tensors otherwise: add --trtllm-version for one of these"
        )


def _report_cast(plan: OwnConversion, progress: Progress) -> None:
    """Report weights whose type changes because config.json names another one."""
    plain = (move.source for move in plan.moves if move.dtype is None and move.source.encoding is None)
    types = sorted({DTYPES[source.entry.code] for source in plain})
    if not types or types == [plan.spec.dtype]:
        return
    wide = types[0] if len(types) == 1 else "float32"
    # Models that are quantised already have no float32 checkpoint.
    quantised = plan.config.quantization.quant_algo in (GPTQ, AWQ, FP8)
    keeps = "" if quantised and wide == "float32" else f" (--dtype {wide} keeps them)"
    progress.step(f"The model is {' and '.join(types)}: its weights become {plan.spec.dtype}{keeps}")


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
