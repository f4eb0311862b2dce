"""Layers with a gated delta rule in GGUF files: Qwen3-Next, Qwen3.5 and Qwen3.6.

llama.cpp keeps the rows of Qwen3-Next's queries, keys and values in one tensor and the gates in another, each with all
heads of a kind together; transformers has the rows of a key head side by side. Of Qwen3.5 it keeps value heads in
turns: the first of every key head, then the second, where transformers has all of a key head together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtserve.checkpoint.encodings import Encoding, StoredTensor
from trtserve.checkpoint.gguf import GgufRows, Joined
from trtserve.checkpoint.gguf_metadata import AGAIN, Metadata
from trtserve.errors import CorruptFileError

DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe")
"""llama.cpp's names of the architectures."""


@dataclass(frozen=True, kw_only=True)
class DeltaNetSizes:
    """Heads of keys and values, and the numbers of a key and of a value."""

    key_heads: int
    value_heads: int
    key: int
    value: int

    @classmethod
    def of(cls, data: Metadata) -> DeltaNetSizes:
        """Read the sizes. Raises CorruptFileError for a key that is absent, and for sizes that do not fit."""
        keys, values = data.size("ssm.group_count"), data.size("ssm.time_step_rank")
        inner = data.size("ssm.inner_size")
        if values % keys or inner % values:
            raise CorruptFileError(
                f"{data.file.path}: {data.architecture} has {inner} numbers in {values} value heads, and {keys} key "
                "heads; expected multiples.",
                hint=AGAIN,
            )
        return cls(key_heads=keys, value_heads=values, key=data.size("ssm.state_size"), value=inner // values)

    @property
    def each(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def keys(self) -> int:
        """Numbers of all keys."""
        return self.key_heads * self.key

    @property
    def values(self) -> int:
        """Numbers of all values."""
        return self.value_heads * self.value


def with_gates(stored: StoredTensor, gates: StoredTensor, data: Metadata) -> Joined:
    """Return queries, keys, values and gates of Qwen3-Next, the rows of a key head side by side."""
    sizes = DeltaNetSizes.of(data)
    _require_rows(stored, 2 * sizes.keys + sizes.values)
    _require_rows(gates, sizes.values)
    per_key = sizes.each * sizes.value
    parts: list[GgufRows] = []
    for head in range(sizes.key_heads):
        parts += [
            _slice(stored, head * sizes.key, sizes.key),
            _slice(stored, sizes.keys + head * sizes.key, sizes.key),
            _slice(stored, 2 * sizes.keys + head * per_key, per_key),
            _slice(gates, head * per_key, per_key),
        ]
    return Joined(codes=stored, parts=tuple(parts))


def in_order(stored: StoredTensor, data: Metadata, module: str) -> Encoding | None:
    """Return a tensor of Qwen3.5 with its value heads in transformers' order; None: it has no value heads."""
    sizes = DeltaNetSizes.of(data)
    outer = {"attn_qkv": 2 * sizes.keys, "ssm_conv1d": 2 * sizes.keys, "attn_gate": 0}
    if module == "ssm_out":
        if stored.entry.shape[-1] != sizes.values:
            raise _misfit(stored, sizes.values, "columns")
        return GgufRows(codes=stored, in_turns=(sizes.key_heads, sizes.each))
    if module in ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"):
        first, size = 0, 1
    elif module in outer:
        first, size = outer[module], sizes.value
    else:
        return None
    _require_rows(stored, first + sizes.value_heads * size)
    parts = [_slice(stored, 0, first)] if first else []
    parts += [
        _slice(stored, first + (turn * sizes.key_heads + head) * size, size)
        for head in range(sizes.key_heads)
        for turn in range(sizes.each)
    ]
    return Joined(codes=stored, parts=tuple(parts))


def _slice(stored: StoredTensor, first: int, rows: int) -> GgufRows:
    entry = stored.entry
    each = entry.size // entry.shape[0]
    part = replace(entry, shape=(rows, *entry.shape[1:]), begin=entry.begin + first * each, size=rows * each)
    return GgufRows(codes=replace(stored, entry=part), logarithms=stored.name.endswith(".ssm_a"))


def _require_rows(stored: StoredTensor, rows: int) -> None:
    if stored.entry.shape[0] != rows:
        raise _misfit(stored, rows, "rows")


def _misfit(stored: StoredTensor, count: int, what: str) -> CorruptFileError:
    return CorruptFileError(
        f"{stored.where} has {list(stored.entry.shape)}; the sizes of its file's heads call for {count} {what}.",
        hint=AGAIN,
    )
