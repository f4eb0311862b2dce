"""Files of tensors: safetensors, and what `torch.save` writes (`pytorch_model.bin`).

A safetensors file has 8 bytes of header length (little endian), a JSON header, then the tensors' bytes (the safetensors
README, section "Format"). It is read with positional reads and never mapped, so a process uses only the memory that it
allocates.

A file of `torch.save` is an uncompressed zip archive: a pickle of names, types and shapes, plus the bytes of the
storages. PyTorch reads the pickle with `weights_only`, so no code in it runs, and maps the storages into memory; we
then read their bytes from the file like those of a safetensors file. Format: PyTorch's serialization notes and the zip
format (a local header has 30 bytes, followed by a name and extra fields).
"""

from __future__ import annotations

import json
import math
import os
import pickle
import shlex
import struct
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.errors import CorruptFileError, MissingDependencyError, UnsupportedModelError
from trtserve.files import open_file
from trtserve.host.machine import install_command


class LazyModule:
    """A module that is imported when it is first used: NumPy costs every command a quarter of a second."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value


if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = LazyModule("numpy")

# safetensors type → TensorRT-LLM config type.
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
CODES = {name: code for code, name in DTYPES.items()} | {"float8_e4m3": "F8_E4M3"}
# NumPy types of quantised tensors; FP8 values are read as their bits.
_STORED = {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"}
_STORED |= dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0"), "uint8")
# All types of the format, with the bits of a value, by which sizes are checked.
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64, "BOOL": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
# About 90,000 tensors in one file. The format allows 100 MB, the client of the hub reads 25 MB.
_MAX_HEADER = 10_000_000
# As NumPy has them. The product of more or larger numbers would take minutes.
_MAX_DIMENSIONS = 64
_MAX_NUMBER = 1 << 63
_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor's place: `begin` and `size` in bytes, from the start of the file; `code` is its safetensors type."""

    code: str
    shape: tuple[int, ...]
    begin: int
    size: int


def item_size(code: str) -> int:
    """Return the bytes per value of a safetensors type that is stored in whole bytes."""
    return _BITS[code] // 8


def numpy_dtype(code: str) -> np.dtype[Any]:
    """Return the NumPy type of a floating-point safetensors type. Raises UnsupportedModelError for any other type."""
    import ml_dtypes

    if code not in DTYPES:
        raise UnsupportedModelError(f"Weights of type {code} cannot be read; expected {', '.join(DTYPES)}.")
    return np.dtype(ml_dtypes.bfloat16 if code == "BF16" else DTYPES[code])


def stored_dtype(code: str) -> np.dtype[Any]:
    """Return the NumPy type of stored values, FP8 bits included."""
    return np.dtype(_STORED[code]) if code in _STORED else numpy_dtype(code)


class TensorFile:
    """A safetensors file. Raises CorruptFileError when header, sizes and file disagree.

    Only the header is kept in memory. Each read opens the file, so there is nothing to close. `libraries` are the
    modules that reading imports.
    """

    libraries: tuple[str, ...] = ("numpy",)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = _read_header(path)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """The file's descriptor, open for reading."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def tensor(self, name: str) -> npt.NDArray[Any]:
        entry = self.entries[name]
        return self._read(entry, np.empty(entry.shape, dtype=numpy_dtype(entry.code)))

    def stored(self, entry: Entry) -> npt.NDArray[Any]:
        """Read one tensor of any type: integers and floats as stored, FP8 as bits."""
        return self._read(entry, np.empty(entry.shape, dtype=stored_dtype(entry.code)))

    def _read(self, entry: Entry, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        with self.opened() as descriptor:
            read_into(descriptor, values, entry.begin)
        return values


def read_into(descriptor: int, values: npt.NDArray[Any], offset: int, what: str = "A weight file") -> None:
    """Fill the contiguous array `values` from byte `offset` of the file; errors as in `read_bytes`."""
    read_bytes(descriptor, values.reshape(-1).view(np.uint8).data, offset, what)


def read_bytes(descriptor: int, buffer: memoryview, offset: int, what: str = "A weight file") -> None:
    """Fill `buffer` from byte `offset` of the file `what`. Raises CorruptFileError when the file ends early."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            raise CorruptFileError(f"{what} ended at byte {offset + done} while being read.")
        done += count


def _read_header(path: Path) -> dict[str, Entry]:
    with open_file(path, CorruptFileError) as handle:
        size = os.fstat(handle.fileno()).st_size
        start = handle.read(8)
        if start.startswith(b"version "):
            raise _corrupt(path, "it is a Git LFS pointer, not the file itself")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= size - 8:
            raise _corrupt(path, f"its header claims {length} bytes, but the file has {size}")
        if length > _MAX_HEADER:
            raise UnsupportedModelError(
                f"The header of {path} has {length} bytes; at most {_MAX_HEADER} are read.",
                hint="No known model has so many tensors in one file. Divide it into several files.",
            )
        text = handle.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        entries = {name: _entry(value, 8 + length) for name, value in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _corrupt(path, f"its header is not valid ({error})") from error
    _check(path, entries, 8 + length, size)
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of the header. Raises ValueError for a name used twice: readers differ in which counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"it names {twice!r:.100} twice")
    return found


def _entry(value: Mapping[str, Any], data: int) -> Entry:
    code, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    if code not in _BITS or not isinstance(shape, list):
        raise TypeError(f"a tensor of type {code!r:.40} and shape {shape!r:.100}")
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"a tensor of {len(shape)} dimensions")
    for number in (*shape, begin, end):
        if type(number) is not int or not 0 <= number < _MAX_NUMBER:
            raise ValueError(f"a tensor of shape {shape!r:.100} from {begin!r:.40} to {end!r:.40}")
    return Entry(code=code, shape=tuple(shape), begin=data + begin, size=end - begin)


def _check(path: Path, entries: Mapping[str, Entry], data: int, size: int) -> None:
    """Check that tensors fill the file without gaps or overlaps, and that sizes match shapes and types."""
    expected = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].size)):
        if entry.begin + entry.size > size:
            raise _corrupt(
                path, f"tensor {name:.100} ends at byte {entry.begin + entry.size}, but the file has {size} bytes"
            )
        bits = math.prod(entry.shape) * _BITS[entry.code]
        if bits != 8 * entry.size:
            raise _corrupt(
                path, f"tensor {name:.100} has {8 * entry.size} bits; {entry.code} {list(entry.shape)} needs {bits}"
            )
        if entry.begin != expected:
            raise _corrupt(path, f"tensor {name:.100} begins at byte {entry.begin}; expected {expected}")
        expected += entry.size
    if expected != size:
        raise _corrupt(path, f"it has {size} bytes; its header describes {expected}")


def _corrupt(path: Path, what: str) -> CorruptFileError:
    return CorruptFileError(f"{path} is damaged: {what}.", hint="Import the model again, or check the disk.")


def layout(
    shapes: Mapping[str, tuple[int, ...]], dtype: str, own: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Entry]]:
    """Return the header bytes for tensors of these shapes in this order, and their entries.

    `own` maps tensors to types other than `dtype`.
    """
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        code = CODES[(own or {}).get(name, dtype)]
        size = math.prod(shape) * item_size(code)
        described[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    del described["__metadata__"]
    return header, {name: _entry(value, len(header)) for name, value in described.items()}


PICKLED_INDEX = "pytorch_model.bin.index.json"
PICKLED_SINGLE = "pytorch_model.bin"

_LOCAL_HEADER = 30
_AGAIN = "Fetch the file again, or choose a revision with safetensors."
_SAVE_AGAIN = "Save the model with safetensors (transformers: save_pretrained), or choose a revision that has them."
# Magic bytes: a zip archive, PyTorch's format before 1.6, and a Git LFS pointer.
_ZIP, _OLD, _POINTER = b"PK", b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", b"version "
_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def require_torch() -> None:
    """Raise MissingDependencyError when PyTorch, which reads these files, is not installed."""
    if find_spec("torch") is None:
        raise MissingDependencyError(
            f"The weights are .bin files ({PICKLED_SINGLE}), which only PyTorch can read, and it is not installed.",
            hint=f"{install_command('oracle')} (or torch), or choose a revision with safetensors.",
        )


class PickledFile(TensorFile):
    """A `torch.save` file with the interface of a safetensors file; storages have the same bytes as in memory."""

    libraries = ("numpy", "torch")

    def __init__(self, path: Path) -> None:
        require_torch()
        self.path = path
        tensors = _load(path)
        for name, tensor in tensors.items():
            _require_plain(path, name, tensor)
        held = [tensor.untyped_storage() for tensor in tensors.values() if tensor.numel()]
        places = _places(path, {storage.data_ptr(): storage.nbytes() for storage in held})
        self.entries = {name: _pickled_entry(tensor, places) for name, tensor in tensors.items()}


def _load(path: Path) -> Mapping[str, Any]:
    import torch

    _require_archive(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsupportedModelError(
            f"{path} contains objects other than tensors, which could run code; it was not loaded.",
            hint="Choose a revision with safetensors.",
        ) from error
    except MemoryError:
        raise
    except Exception as error:
        # A damaged pickle can raise anything: unknown keys, wrong types, missing attributes.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptFileError(f"PyTorch cannot read {path}: {reason}", hint=_AGAIN) from error
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and isinstance(each, torch.Tensor) for name, each in tensors.items()
    ):
        raise UnsupportedModelError(
            f"{path} does not contain a dictionary of tensors.", hint="Choose a revision with safetensors."
        )
    return tensors


def _require_archive(path: Path) -> None:
    """Raise UnsupportedModelError for PyTorch's format before 1.6, CorruptFileError for other formats."""
    with path.open("rb") as handle:
        start = handle.read(len(_OLD))
    if start.startswith(_ZIP):
        return
    if start == _OLD:
        # This command rewrites the file without running code from it.
        code = f"import torch; p = {str(path)!r}; torch.save(torch.load(p, map_location='cpu', weights_only=True), p)"
        raise UnsupportedModelError(
            f"{path} uses PyTorch's format from before 1.6.", hint=f"Save it again: python -c {shlex.quote(code)}"
        )
    what = "it is a Git LFS pointer, not the file itself" if start.startswith(_POINTER) else "torch.save never wrote it"
    raise CorruptFileError(f"{path} is damaged: {what}.", hint=_AGAIN)


def _require_plain(path: Path, name: str, tensor: Any) -> None:
    """Raise UnsupportedModelError unless the tensor is contiguous in the file."""
    import torch

    what = None
    if tensor.layout != torch.strided or tensor.is_meta:
        what = "sparse, or without numbers"
    elif _code(tensor) is None:
        what = f"of type {tensor.dtype}"
    elif not tensor.is_contiguous():
        what = "not stored row after row"
    if what is not None:
        raise UnsupportedModelError(f"{name} in {path} is {what}.", hint=_SAVE_AGAIN)


def _code(tensor: Any) -> str | None:
    return _CODES.get(str(tensor.dtype).removeprefix("torch."))


def _places(path: Path, storages: Mapping[int, int]) -> dict[int, int]:
    """Return where the storages (address → size) begin in the file; offsets between them equal those in memory."""
    if not storages:
        return {}
    try:
        records = _records(path)
    except (zipfile.BadZipFile, struct.error) as error:
        raise CorruptFileError(f"{path} is not a valid archive: {error}.", hint=_AGAIN) from error
    addresses = sorted(storages)
    for begin in records:
        shift = begin - addresses[0]
        if all(records.get(address + shift) == storages[address] for address in addresses):
            return {address: address + shift for address in addresses}
    raise CorruptFileError(f"{path} does not have PyTorch's tensor layout.", hint=_AGAIN)


def _records(path: Path) -> dict[int, int]:
    """Return begin and size of the archive's entries below `data/`. Raises CorruptFileError for compressed ones."""
    found = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as handle:
        for info in archive.infolist():
            if "/data/" not in info.filename:
                continue
            if info.compress_type != zipfile.ZIP_STORED:
                raise CorruptFileError(f"{path} is compressed, which torch.save never does.", hint=_AGAIN)
            handle.seek(info.header_offset)
            name, extra = struct.unpack("<HH", handle.read(_LOCAL_HEADER)[26:])
            found[info.header_offset + _LOCAL_HEADER + name + extra] = info.file_size
    return found


def _pickled_entry(tensor: Any, places: Mapping[int, int]) -> Entry:
    begin = 0
    if tensor.numel():
        begin = places[tensor.untyped_storage().data_ptr()] + tensor.storage_offset() * tensor.element_size()
    return Entry(
        code=_code(tensor) or "", shape=tuple(tensor.shape), begin=begin, size=tensor.numel() * tensor.element_size()
    )
