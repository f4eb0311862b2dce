"""Placement: which block of which source tensor goes to which byte of which rank file."""

from __future__ import annotations

import bisect
import fnmatch
import itertools
import shlex
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trtserve.checkpoint.architectures.base import Target
from trtserve.checkpoint.sharding import Piece, Shard, matrix, name_in_stage, shard, stage_layers, stage_of
from trtserve.checkpoint.source import SourceTensor
from trtserve.checkpoint.streaming import Block, Move
from trtserve.checkpoint.tensor_files import CODES, DTYPES, Entry, item_size, layout
from trtserve.errors import ConversionError, UnsupportedModelError, listing


@dataclass(frozen=True, kw_only=True)
class Use:
    """Rows of a source tensor from `source_row` on that become rows `first_row` … `first_row + rows` of a target."""

    source: SourceTensor
    target: Target
    first_row: int
    rows: int
    source_row: int = 0


@dataclass(frozen=True, kw_only=True)
class Packed(ABC):
    """A checkpoint matrix with its own writer: quantised, or a product. `target` is the matrix as a float target."""

    target: Target

    @property
    @abstractmethod
    def source_sizes(self) -> list[int]:
        """Bytes of each source tensor."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Peak memory in bytes."""

    @abstractmethod
    def write(self, placement: Placement, files: Sequence[int]) -> None:
        """Write the matrix to all rank files that hold a part of it."""

    @abstractmethod
    def shapes(self, held: tuple[int, ...], dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return names (unsharded), shapes and types of a rank's tensors, given the shape of its float matrix."""


class Placement:
    """The position of every target in the rank files of a checkpoint."""

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        layers: int,
        tp_size: int,
        pp_size: int,
        dtype: str,
        ep_size: int = 1,
        packed: Sequence[Packed] = (),
    ) -> None:
        self._tp_size = tp_size
        self._ep_size = ep_size
        self._stages = stage_layers(layers, pp_size)
        self.dtype = dtype
        own = {name_in_stage(target, self._stages): target.dtype for target in targets if target.dtype}
        laid_out = []
        for rank in range(tp_size * pp_size):
            beside = self._packed_shapes(packed, rank)
            shapes = self._shapes(targets, rank) | {name: shape for name, (shape, _) in beside.items()}
            laid_out.append(layout(shapes, dtype, own | {name: kind for name, (_, kind) in beside.items()}))
        self.headers: list[bytes] = [header for header, _ in laid_out]
        self._entries: list[dict[str, Entry]] = [entries for _, entries in laid_out]
        self._placed: dict[str, dict[int, list[_Place]]] = {}

    @property
    def sizes(self) -> list[int]:
        """Size of each rank's file in bytes."""
        return [
            len(header) + sum(entry.size for entry in entries.values())
            for header, entries in zip(self.headers, self._entries, strict=True)
        ]

    def _shapes(self, targets: Sequence[Target], rank: int) -> dict[str, tuple[int, ...]]:
        stage, tp_rank = divmod(rank, self._tp_size)
        return {
            name_in_stage(target, self._stages): self.shard(target, tp_rank).shape
            for target in targets
            if stage_of(target, self._stages) == stage
        }

    def _packed_shapes(self, packed: Sequence[Packed], rank: int) -> dict[str, tuple[tuple[int, ...], str]]:
        stage, tp_rank = divmod(rank, self._tp_size)
        return {
            name_in_stage(replace(work.target, name=name), self._stages): shape
            for work in packed
            if stage_of(work.target, self._stages) == stage
            for name, shape in work.shapes(self.shard(work.target, tp_rank).shape, self.dtype).items()
        }

    def shard(self, target: Target, tp_rank: int) -> Shard:
        """Return the part of a target that a tensor-parallel rank holds."""
        return shard(target, self._tp_size, tp_rank, self._ep_size)

    def ranks(self, target: Target) -> list[tuple[int, int]]:
        """Return the ranks that hold a part of a target, each with its tensor-parallel rank."""
        first = stage_of(target, self._stages) * self._tp_size
        return [(first + tp_rank, tp_rank) for tp_rank in range(self._tp_size)]

    def place(self, rank: int, target: Target, name: str) -> int:
        """Return the byte offset in a rank's file of tensor `name`, which belongs to `target`."""
        return self._entries[rank][name_in_stage(replace(target, name=name), self._stages)].begin

    def blocks(self, use: Use) -> Iterator[Block]:
        """Return all destinations of a source tensor, over all ranks of its stage."""
        for rank, places in self._places(use.target).items():
            # Index pieces by row: a tensor of experts has hundreds of pieces and as many sources.
            first = bisect.bisect_right(
                places, use.first_row, key=lambda place: place.piece.first_row + place.piece.rows
            )
            for place in itertools.islice(places, first, None):
                if place.piece.first_row >= use.first_row + use.rows:
                    break
                yield _block(use, place, rank)

    def _places(self, target: Target) -> dict[int, list[_Place]]:
        """Return the pieces of a target on each rank that holds it."""
        if target.name not in self._placed:
            first = stage_of(target, self._stages) * self._tp_size
            self._placed[target.name] = {first + rank: self._pieces(target, rank) for rank in range(self._tp_size)}
        return self._placed[target.name]

    def _pieces(self, target: Target, tp_rank: int) -> list[_Place]:
        rank = stage_of(target, self._stages) * self._tp_size + tp_rank
        item = item_size(CODES[target.dtype or self.dtype])
        pieces = self.shard(target, tp_rank).pieces
        sizes = [piece.rows * piece.columns * item for piece in pieces]
        begin = self._entries[rank][name_in_stage(target, self._stages)].begin
        offsets = itertools.accumulate(sizes, initial=begin)
        return [_Place(piece=piece, offset=offset, item=item) for piece, offset in zip(pieces, offsets, strict=False)]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A piece that starts at byte `offset` of its file, with `item` bytes per value."""

    piece: Piece
    offset: int
    item: int


def _block(use: Use, place: _Place, rank: int) -> Block:
    """Return the rows of a piece that this source provides."""
    piece = place.piece
    start = max(piece.first_row, use.first_row)
    stop = min(piece.first_row + piece.rows, use.first_row + use.rows)
    return Block(
        rank=rank,
        offset=place.offset + (start - piece.first_row) * piece.columns * place.item,
        first_row=use.source_row + start - use.first_row,
        rows=stop - start,
        first_column=piece.first_column,
        columns=piece.columns,
    )


def moves(uses: Iterable[Use], placement: Placement, order: Iterable[str]) -> list[Move]:
    """Return one move per source tensor, in file `order`, so that each is read once and sequentially."""
    grouped: dict[str, list[Use]] = defaultdict(list)
    for use in uses:
        grouped[use.source.name].append(use)
    return [_move(grouped[name], placement) for name in order if name in grouped]


def _move(uses: Sequence[Use], placement: Placement) -> Move:
    source, target = uses[0].source, uses[0].target
    _, columns = matrix(target.shape)
    return Move(
        source=source,
        shape=(source.entry.shape[-1 if target.transpose else 0], columns),
        transpose=target.transpose,
        offset=target.offset,
        dtype=target.dtype,
        blocks=[block for use in uses for block in placement.blocks(use)],
    )


_WAY_ON = " What the model does without can be left out: --ignore-tensors {} (or a pattern)."


def match(targets: Sequence[Target], sources: Mapping[str, SourceTensor], unused: Sequence[str]) -> list[Use]:
    """Find every source of every target.

    ConversionError lists targets with two sources, missing sources, unused sources that no pattern in `unused`
    (fnmatch) excuses, and wrong shapes. UnsupportedModelError names a source that does not hold floats.
    """
    _refuse(
        "The architecture file produces checkpoint tensors twice",
        [name for name, count in Counter(target.name for target in targets).items() if count > 1],
    )
    missing = sorted({name for target in targets for name in target.sources} - sources.keys())
    unknown = sorted(unknown_sources(targets, sources, unused))
    refuse_weights(
        [*(f"missing: {name}" for name in missing), *(f"not known: {name}" for name in unknown)],
        "" if missing or not unknown else _WAY_ON.format(shlex.quote(unknown[0])),
    )
    uses = [use for target in targets for use in _uses(target, sources)]
    _refuse("Tensors have other shapes than config.json calls for", _misshaped(uses))
    for use in uses:
        if use.source.entry.code not in DTYPES:
            raise UnsupportedModelError(
                f"{use.source.name} has type {use.source.entry.code}; expected {', '.join(DTYPES)}.",
                hint="Save the model again in one of these types (transformers: save_pretrained).",
            )
    return uses


def unknown_sources(targets: Sequence[Target], sources: Mapping[str, SourceTensor], unused: Sequence[str]) -> list[str]:
    """Return source names that no target uses and no pattern in `unused` (fnmatch) excuses."""
    wanted = {name for target in targets for name in target.sources}
    return [name for name in sources if name not in wanted and not excused(name, unused)]


def refuse_weights(problems: Iterable[str], advice: str = "") -> None:
    """Raise ConversionError when tensors are missing, unknown or of the wrong shape."""
    _refuse("The weights are not those of the model that config.json describes", list(problems), advice)


def excused(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern (fnmatch) matches a tensor's name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _uses(target: Target, sources: Mapping[str, SourceTensor]) -> Iterator[Use]:
    first = 0
    for name, start, count in runs(target):
        source, shape = sources[name], sources[name].entry.shape
        if len(target.shape) == 1 and len(shape) == 2 and shape[0] == 1:
            source = replace(source, entry=replace(source.entry, shape=shape[1:]))  # a row where a list is expected
        yield Use(source=source, target=target, first_row=first, rows=count, source_row=start)
        first += count


def runs(target: Target) -> Iterator[tuple[str, int, int]]:
    """Return a target's rows in order: source, its first row, and the number of consecutive rows."""
    if target.runs:
        yield from ((target.sources[number], start, count) for number, start, count in target.runs)
    elif target.order:
        yield from ((name, start, count) for name in target.sources for start, count in target.order)
    else:
        rows = target.parts if len(target.sources) > 1 else target.shape[:1]
        yield from ((name, 0, count) for name, count in zip(target.sources, rows, strict=True))


def _misshaped(uses: Iterable[Use]) -> list[str]:
    """Return sources whose shapes do not fit their targets."""
    used = list(uses)
    expected = source_shapes({use.target.name: use.target for use in used}.values())  # a target has a use for each run
    sources = {use.source.name: use.source for use in used}
    return [
        f"{name} is {list(source.entry.shape)}, expected {list(expected[name])}"
        for name, source in sources.items()
        if _without_middle(source.entry.shape) != expected[name]
    ]


def _without_middle(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without dimensions of 1 between the first and the last: those of convolutions by channel."""
    return (*shape[:1], *(size for size in shape[1:-1] if size != 1), *shape[1:][-1:])


def source_shapes(targets: Iterable[Target]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every source tensor; an `order` may leave out rows at the end."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets:
        for name, start, count in runs(target):
            shape = (start + count, *target.shape[1:][-1:])
            shape = shape[::-1] if target.transpose else shape
            shapes[name] = max(shape, shapes.get(name, shape))
    return shapes


def _refuse(what: str, problems: Sequence[str], advice: str = "") -> None:
    if problems:
        raise ConversionError(
            f"{what} ({len(problems)}): {listing(problems, '; ')}.",
            hint=f"Use config.json and weights from the same revision of the model.{advice}",
        )
