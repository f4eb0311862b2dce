"""Weights that `torch.save` wrote (`pytorch_model.bin`): where each tensor lies in the file.

Such a file is a zip archive that compresses nothing: a pickle of names, types and shapes, and the bytes of storages.
PyTorch reads the pickle with `weights_only`, so that no code in it is run, and maps the storages into memory; their
bytes are then read from the file as those of a safetensors file are. Source of the format: PyTorch's notes on
serialization, and the zip format (a local header has 30 bytes, then a name, then extra fields).
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtserve.architectures.tensor_files import Entry, TensorFile
from trtserve.errors import CorruptFileError, MissingDependencyError, UnsupportedModelError

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"

_LOCAL_HEADER = 30
_AGAIN = "Fetch the file again, or choose a revision with safetensors."
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}


def require_torch() -> None:
    """MissingDependencyError when PyTorch, which reads these files, is not installed."""
    if find_spec("torch") is None:
        raise MissingDependencyError(
            f"The weights are .bin files ({SINGLE}), which only PyTorch can read, and it is not installed.",
            hint="pip install 'trtserve[oracle]' (or torch), or choose a revision with safetensors.",
        )


class PickledFile(TensorFile):
    """A file of `torch.save`, seen as a safetensors file; its storages lie in it as they are in memory."""

    def __init__(self, path: Path) -> None:
        require_torch()
        self.path = path
        self.entries = _entries(path, _load(path))


def _load(path: Path) -> Mapping[str, Any]:
    import torch

    try:
        tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsupportedModelError(
            f"{path} holds more than tensors, and what else it holds could run code: it is not read.",
            hint="Choose a revision with safetensors.",
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptFileError(f"PyTorch cannot read {path}: {reason}", hint=_AGAIN) from error
    if not isinstance(tensors, Mapping) or not all(isinstance(each, torch.Tensor) for each in tensors.values()):
        raise UnsupportedModelError(f"{path} is no table of tensors.", hint="Choose a revision with safetensors.")
    return tensors


def _entries(path: Path, tensors: Mapping[str, Any]) -> dict[str, Entry]:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    places = _places(path, storages)
    return {name: _entry(path, name, tensor, places) for name, tensor in tensors.items()}


def _places(path: Path, storages: Mapping[int, int]) -> dict[int, int]:
    """Where the storages, known by address and size, begin in the file: all are as far apart in both."""
    records = _records(path)
    addresses = sorted(storages)
    for begin in records:
        shift = begin - addresses[0] if addresses else 0
        if all(records.get(address + shift) == storages[address] for address in addresses):
            return {address: address + shift for address in addresses}
    raise CorruptFileError(f"{path} does not hold its tensors as PyTorch lays them out.", hint=_AGAIN)


def _records(path: Path) -> dict[int, int]:
    """Begin and size of what lies under `data/` in the archive; CorruptFileError when it is compressed."""
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


def _entry(path: Path, name: str, tensor: Any, places: Mapping[int, int]) -> Entry:
    code = _CODES.get(str(tensor.dtype).removeprefix("torch."))
    if code is None or not tensor.is_contiguous():
        what = f"of type {tensor.dtype}" if code is None else "not stored row after row"
        raise UnsupportedModelError(f"{name} in {path} is {what}.", hint="Choose a revision with safetensors.")
    begin = places[tensor.untyped_storage().data_ptr()] + tensor.storage_offset() * tensor.element_size()
    return Entry(code=code, shape=tuple(tensor.shape), begin=begin, size=tensor.numel() * tensor.element_size())
