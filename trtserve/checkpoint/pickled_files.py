"""Weights written by `torch.save` (`pytorch_model.bin`): the location of each tensor in the file.

The file is an uncompressed zip archive: a pickle of names, types and shapes, plus the bytes of the storages. PyTorch
reads the pickle with `weights_only`, so no code in it runs, and maps the storages into memory; we then read their bytes
from the file like those of a safetensors file. Format: PyTorch's serialization notes and the zip format (a local header
has 30 bytes, followed by a name and extra fields).
"""

from __future__ import annotations

import pickle
import shlex
import struct
import warnings
import zipfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtserve.checkpoint.tensor_files import Entry, TensorFile
from trtserve.errors import CorruptFileError, MissingDependencyError, UnsupportedModelError
from trtserve.host.machine import install_command

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
        self.entries = {name: _entry(tensor, places) for name, tensor in tensors.items()}


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


def _entry(tensor: Any, places: Mapping[int, int]) -> Entry:
    begin = 0
    if tensor.numel():
        begin = places[tensor.untyped_storage().data_ptr()] + tensor.storage_offset() * tensor.element_size()
    return Entry(
        code=_code(tensor) or "",
        shape=tuple(tensor.shape),
        begin=begin,
        size=tensor.numel() * tensor.element_size(),
    )
