"""A conversion before its first byte is written: what goes where, how large it becomes, and where it will lie."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve import architectures
from trtserve.architectures.checkpoint import HEAD
from trtserve.architectures.placement import Packed, Placement, match, moves
from trtserve.architectures.quantized_source import SourceQuantization, source_quantization
from trtserve.architectures.source import read_hf_config, read_source, vision_bytes
from trtserve.architectures.streaming import Move
from trtserve.architectures.tensor_files import CODES, numpy_dtype
from trtserve.artifacts import Checkpoint, Model, fingerprint
from trtserve.capacity.converting import convert_memory
from trtserve.convert.config import checkpoint_config, expected_config, resolve_dtype, resolve_release
from trtserve.convert.leftovers import without_leftovers
from trtserve.errors import UnsupportedModelError, UsageError
from trtserve.specs import ConvertSpec
from trtserve.store import Store, require_name, reusable

if TYPE_CHECKING:
    from trtserve.architectures.base import Target
    from trtserve.architectures.repacking import Repack
    from trtserve.architectures.source import SourceTensor
    from trtserve.upstream import Toolkit

SCHEMA = 4
_OWN_WISHES = ("tp_size", "pp_size", "moe_tp_size", "moe_ep_size", "dtype", "quantize", "gpu_sm")
# Others count only where they are given, so that checkpoints which were made before they existed are found again.
_RARE_WISHES = ("trtllm_version", "use_parallel_embedding", "embedding_sharding_dim", "ignore_tensors")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A conversion before its first byte is written: what goes where, and how large it becomes.

    `headers` and `sizes` are the header bytes and file sizes in bytes by rank; `source_bytes` is what is read. With a
    `toolkit` NVIDIA's tools do it: config and sizes are what is expected of them, and there are no moves. `packed` are
    the tensors that are no mere moves; `vision_bytes` are those of tensors for images, which are left out, as is what
    belongs to an 8-bit KV cache of the model's (`narrow_cache`). `left_out`
    are the names of tensors that were not in the index of the files, or were to be ignored.
    """

    spec: ConvertSpec
    config: Mapping[str, Any]
    moves: Sequence[Move]
    headers: Sequence[bytes]
    sizes: Sequence[int]
    fingerprint: str
    packed: Sequence[Packed] = ()
    placement: Placement | None = None
    toolkit: Toolkit | None = None
    vision_bytes: int = 0
    narrow_cache: bool = False
    left_out: Sequence[str] = ()

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
        """Numbers of the model, each quantised one counted as one."""
        packed = (work.target.shape for work in self.packed)
        return sum(map(math.prod, itertools.chain((move.source.entry.shape for move in self.moves), packed)))

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory at the peak of the conversion's process."""
        return convert_memory(self.moves, self.spec.dtype, repacking=[work.memory_bytes for work in self.packed])

    @property
    def largest_tensor(self) -> int:
        """Bytes of the largest source tensor."""
        packed = (work.largest_source for work in self.packed)
        return max(itertools.chain((move.source.entry.size for move in self.moves), packed), default=0)


def plan_conversion(model: Model, spec: ConvertSpec, *, headers_only: bool = False) -> Plan:
    """Everything that can be known from configs and headers; all errors but those in the values come from here.

    `headers_only`: the model's files hold no values.
    """
    hf: Mapping[str, Any] = read_hf_config(model.path)
    if spec.upstream:
        return _plan_upstream(model, spec, hf)
    hf = architectures.text_model(hf)
    family = architectures.supported(hf)
    stored = source_quantization(hf)
    spec = _resolved(spec, hf, stored)
    config = checkpoint_config(hf, spec)
    sources = read_source(model.path, family.BASE_PREFIX)
    described = architectures.described(hf, config)
    wanted = family.targets(described)
    targets, packed, moved, config = _divided(wanted, sources, config, spec, stored, headers_only=headers_only)
    placement = _placement(targets, packed, config, spec)
    unused = family.unused(described)
    moved, left_out = without_leftovers(targets, moved, unused, spec.ignore_tensors)
    return Plan(
        spec=spec,
        config=config,
        moves=moves(match(targets, moved, unused), placement, moved),
        headers=placement.headers,
        sizes=placement.sizes,
        packed=packed,
        placement=placement,
        vision_bytes=vision_bytes(sources),
        narrow_cache=stored is not None and _narrow_cache(stored, sources),
        left_out=left_out,
        fingerprint=fingerprint(stage="convert", schema=SCHEMA, spec=own_wishes(spec), model=model.fingerprint),
    )


def _narrow_cache(stored: SourceQuantization, sources: Iterable[str]) -> bool:
    """Whether the model was calibrated for a KV cache of 8 bits."""
    from trtserve.architectures.quantized_tensors import is_cache_scale

    return stored.narrow_cache or any(map(is_cache_scale, sources))


def _resolved(spec: ConvertSpec, hf: Mapping[str, Any], stored: SourceQuantization | None) -> ConvertSpec:
    """`spec` with nothing left to the model, and without what makes no difference to it."""
    spec = replace(spec, dtype=resolve_dtype(spec, hf), trtllm_version=resolve_release(spec))
    if stored is None or stored.method == "fp8":
        # Only 4-bit weights are put into an order of some GPU: a checkpoint without them is the same for all.
        spec = replace(spec, gpu_sm=ConvertSpec().gpu_sm)
    return spec


def _divided(
    targets: Sequence[Target],
    sources: Mapping[str, SourceTensor],
    config: dict[str, Any],
    spec: ConvertSpec,
    stored: SourceQuantization | None,
    *,
    headers_only: bool,
) -> tuple[list[Target], list[Packed], Mapping[str, SourceTensor], dict[str, Any]]:
    """Targets that are mere moves, those that are more, the sources of the former, and the config that follows."""
    packed = list[Packed]()
    if config.get("share_embedding_table"):
        targets = [target for target in targets if target.name != HEAD]
    # Few models have any of these, and their modules take longer to load than the plan of another one.
    if stored is not None:
        from trtserve.architectures.quantized_tensors import split_targets

        targets, repacks, sources = split_targets(
            targets, sources, stored, gpu_sm=spec.gpu_sm, headers_only=headers_only
        )
        packed += repacks
        config = _quantised_config(config, spec, stored, targets, repacks)
    if any(target.factor is not None for target in targets):
        from trtserve.architectures.products import split_products

        targets, products, sources = split_products(targets, sources)
        packed += products
    return list(targets), packed, sources, config


def _placement(
    targets: Sequence[Target], packed: Sequence[Packed], config: Mapping[str, Any], spec: ConvertSpec
) -> Placement:
    return Placement(
        targets,
        layers=config["num_hidden_layers"],
        tp_size=spec.tp_size,
        pp_size=spec.pp_size,
        dtype=spec.dtype,
        ep_size=config["mapping"]["moe_ep_size"],
        packed=packed,
    )


def _quantised_config(
    config: dict[str, Any],
    spec: ConvertSpec,
    stored: SourceQuantization,
    targets: Sequence[Target],
    repacks: Sequence[Repack],
) -> dict[str, Any]:
    """`config` with the modules that stay floats; UsageError where tensor or pipeline ranks do not go with it."""
    from trtserve.architectures.quantized_tensors import excluded_modules, require_divisible

    excluded = excluded_modules(targets, config["num_hidden_layers"], spec.pp_size)
    if stored.method != "fp8":
        sizes = spec.tp_size, config["mapping"]["moe_ep_size"]
        require_divisible((work.target for work in repacks), stored.group_size, *sizes)
    return {**config, "quantization": {**config["quantization"], "exclude_modules": excluded}}


def own_wishes(spec: ConvertSpec) -> dict[str, Any]:
    """What our own converter is asked for."""
    given = [key for key in _RARE_WISHES if getattr(spec, key) != getattr(ConvertSpec(), key)]
    wishes = {**asdict(spec), "ignore_tensors": list(spec.ignore_tensors)}
    return {key: value for key, value in wishes.items() if key in (*_OWN_WISHES, *given)}


def all_wishes(spec: ConvertSpec) -> dict[str, Any]:
    """`spec` as it stands in a manifest."""
    examples = str(spec.trtllm_examples) if spec.trtllm_examples else None
    lists = {name: list(getattr(spec, name)) for name in ("converter_flags", "container_flags", "ignore_tensors")}
    return {**asdict(spec), "trtllm_examples": examples, **lists}


def _upstream_wishes(spec: ConvertSpec) -> dict[str, Any]:
    """What decides the checkpoint beside the tool's version: not where that lies."""
    wishes = {**all_wishes(spec), "trtllm_examples": None}
    unimportant = ("container", "container_flags", "trtllm_version", "ignore_tensors")
    return {key: value for key, value in wishes.items() if key not in unimportant}


def _plan_upstream(model: Model, spec: ConvertSpec, hf: Mapping[str, Any]) -> Plan:
    """What NVIDIA's tools are expected to make; their options are checked."""
    if spec.ignore_tensors:
        raise UsageError(
            "--ignore-tensors is for our own converter: NVIDIA's pass over what they do not know.", hint="Leave it out."
        )
    from trtserve.upstream import find_toolkit, needs_calibration, tool_command  # launches processes and containers

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
        size = architectures.parameter_count(config) * numpy_dtype(CODES[config["dtype"]]).itemsize
    except UnsupportedModelError:
        size = 0
    return Plan(
        spec=spec,
        config=config,
        moves=(),
        headers=(),
        sizes=[size // (spec.tp_size * spec.pp_size)] * (spec.tp_size * spec.pp_size),
        toolkit=toolkit,
        fingerprint=fingerprint(
            stage="convert",
            schema=SCHEMA,
            spec=_upstream_wishes(spec),
            model=model.fingerprint,
            tool=toolkit.version,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where a checkpoint goes, and whether it lies there already."""

    path: Path
    reused: bool


def destination_of(plan: Plan, name: str, *, out: Path | None = None, store: Store | None = None) -> Destination:
    """Place of the checkpoint that `plan` makes; UsageError for what is no name."""
    require_name(name)
    path = (out or (store or Store()).destination(Checkpoint, name, plan.fingerprint)).absolute()
    return Destination(path=path, reused=reusable(Checkpoint, path, plan.fingerprint) is not None)
