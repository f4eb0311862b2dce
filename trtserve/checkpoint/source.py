"""Weights of a Hugging Face folder, one file or an indexed set, as a single table of tensors.

Files are safetensors, or `torch.save` files when there are none.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtserve.checkpoint.architectures.parts.text_halves import VISION
from trtserve.checkpoint.encoded_tensors import Widening, encoded
from trtserve.checkpoint.encodings import Encoding, StoredTensor, Turned
from trtserve.checkpoint.supported import widened_by
from trtserve.checkpoint.tensor_files import PICKLED_INDEX, PICKLED_SINGLE, PickledFile, TensorFile
from trtserve.errors import ConversionError, CorruptFileError, ModelNotFoundError, UnsupportedModelError, listing
from trtserve.files import LARGEST_TEXT, is_below, read_json_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GGUF = "model.gguf"  # weights of a folder that was made of a GGUF file
# Older exports of ModelOpt and AutoGPTQ describe the quantisation in a separate file.
_QUANTISATION_BESIDE = (("hf_quant_config.json", "modelopt"), ("quantize_config.json", "gptq"))

# Prefixes of text tensors in multimodal models: as published, and since transformers 4.52.
_TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("backbone.", "model."),  # Nemotron-H
)

_AGAIN = "Import the model again, or download the file again."
_PART = 8 << 20  # bytes compared at a time
# Suffixes of weight formats that are not read here.
_FOREIGN = ("*.bin", "*.pth", "*.pt", "*.gguf", "*.h5", "*.msgpack", "*.nemo", "*.safetensors")


@dataclass(frozen=True, kw_only=True)
class SourceTensor(StoredTensor):
    """A source tensor: its name in the model, and its file and entry.

    `indexed` is False when the index does not list it. With an `encoding` the type and shape of the entry are those of
    the values, and its place is that of the codes.
    """

    indexed: bool = True
    encoding: Encoding | None = None


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a Hugging Face folder, merged with a quantisation file.

    Raises ModelNotFoundError if it has none.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFoundError(
            f"{folder} has no config.json: it is not a Hugging Face model folder.",
            hint="Give a folder with config.json and model.safetensors, or run trtserve import first.",
        )
    config = _json_object(path)
    for name, method in _QUANTISATION_BESIDE:
        if not config.get("quantization_config") and (folder / name).is_file():
            config["quantization_config"] = {"quant_method": method, **_json_object(folder / name)}
    return config


def _json_object(path: Path) -> dict[str, Any]:
    return read_json_object(path, CorruptFileError, hint=_AGAIN)


def weight_map(path: Path) -> dict[str, str]:
    """Read a weight index (tensor → file). Raises CorruptFileError when it is invalid.

    Files must be inside the index's folder.
    """
    places = read_json_object(path, CorruptFileError, hint=_AGAIN, limit=LARGEST_TEXT).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CorruptFileError(f"{path} is not a weight index: it has no weight_map.", hint=_AGAIN)
    for name, file in places.items():
        if not is_below(file):
            raise CorruptFileError(f"{path} is not a valid weight index: {name} is in {file!r}.", hint=_AGAIN)
    return places


def read_source(folder: Path, base_prefix: str) -> dict[str, SourceTensor]:
    """Return all tensors of a folder by their names in the model, in file and offset order.

    `base_prefix` is added to names saved without the head; prefixes of multimodal models are removed from text tensors.
    Raises CorruptFileError when files and index disagree; ConversionError lists tensors stored twice with different
    values.
    """
    config = read_hf_config(folder) if (folder / "config.json").is_file() else {}
    read = widened_by(config)
    if read is not None and read.method == "gguf" and (folder / GGUF).is_file():
        return _of_gguf(folder / GGUF)
    stored = [replace(tensor, name=_own_name(tensor.name)) for tensor in _tensors(folder)]
    apart = _Apart.of(config)
    tensors = [each for tensor in _widened(stored, read) for each in _of_each_expert(tensor, apart)]
    bare = not any(tensor.name.startswith(base_prefix) for tensor in tensors)
    named: dict[str, SourceTensor] = {}
    twice = []
    for tensor in tensors:
        name = base_prefix + tensor.name if bare and not tensor.name.startswith("lm_head.") else tensor.name
        if name not in named:
            named[name] = replace(tensor, name=name)
        elif not same_values(named[name], tensor):
            twice.append(f"{name} ({named[name].file.path.name}, {tensor.file.path.name})")
    if twice:
        raise ConversionError(
            f"{folder} stores tensors twice with different values: {listing(twice)}.", hint="Fetch the model again."
        )
    return named


def _of_gguf(path: Path) -> dict[str, SourceTensor]:
    from trtserve.checkpoint.gguf import GgufFile
    from trtserve.checkpoint.gguf_model import tensors_of

    found = dict[str, SourceTensor]()
    for stored, encoding in tensors_of(GgufFile(path)):
        entry = replace(stored.entry, code=encoding.code, shape=encoding.shape)
        found[stored.name] = SourceTensor(name=stored.name, file=stored.file, entry=entry, encoding=encoding)
    return found


_STACKED = re.compile(
    r"(?P<prefix>.*\.experts)\.(?P<part>gate_up_proj|down_proj)(?P<bias>_bias)?$"
    r"|(?P<granite>.*\.block_sparse_moe)\.(?P<matrix>input_linear|output_linear)\.weight$"
)
# Model types whose files have the experts in one tensor or one by one: Qwen3.5's in FP8 and of fine-tunes are apart.
_APART = ("qwen3_5_moe", "qwen3_vl_moe")


@dataclass(frozen=True, kw_only=True)
class _Apart:
    """How the tensors of all experts become those of files that have the experts one by one."""

    hidden: int  # inputs of an expert

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Apart | None:
        """Return it for `_APART`; None: gate and factor stay one tensor."""
        text = config.get("text_config", config)
        hidden = text.get("hidden_size") if isinstance(text, Mapping) else None
        apart = str(config.get("model_type")).startswith(_APART)
        return cls(hidden=hidden) if apart and isinstance(hidden, int) else None

    def turned(self, tensor: SourceTensor, part: str) -> bool:
        """Return whether the matrices are stored [in, out]: Qwen3-VL's are, unless transformers 5 has saved them."""
        _, first, last = tensor.entry.shape
        inputs = first if part == "gate_up_proj" else last
        return first != last and (inputs == self.hidden)


def _widened(tensors: Sequence[SourceTensor], quantization: Widening | None) -> Iterator[SourceTensor]:
    """Return each quantised matrix as one tensor of floats, without the tensors that belong to it."""
    matrices, used = encoded({tensor.name: tensor for tensor in reversed(tensors)}, quantization)
    for tensor in tensors:
        if tensor.name in matrices:
            matrix, encoding = matrices[tensor.name]
            entry = replace(tensor.entry, code=encoding.code, shape=encoding.shape)
            yield replace(tensor, name=matrix, entry=entry, encoding=encoding)
        elif tensor.name not in used:
            yield tensor


def _of_each_expert(tensor: SourceTensor, apart: _Apart | None) -> Iterator[SourceTensor]:
    """Return a tensor of all experts as one of each, with the expert's number in its name; biases are columns.

    With `apart` the rows of gate and factor in one tensor become two.
    """
    found = _STACKED.match(tensor.name)
    if found is None or len(tensor.entry.shape) < 2:
        yield tensor
        return
    count, rows, *columns = tensor.entry.shape
    entry, encoding = tensor.entry, tensor.encoding
    prefix, part = found["prefix"] or f"{found['granite']}.experts", found["part"] or found["matrix"]
    column, kind = ((1,), "bias") if found["bias"] else ((), "weight")
    parts = ("gate_proj", "up_proj") if apart and part == "gate_up_proj" else (part,)
    if apart and encoding is None and len(tensor.entry.shape) == 3 and apart.turned(tensor, part):
        encoding = Turned(codes=replace(tensor))
        entry, (count, rows, *columns) = replace(entry, shape=encoding.shape), encoding.shape
    rows, size = rows // len(parts), entry.size // (count * len(parts))
    for number in range(count * len(parts)):
        yield replace(
            tensor,
            name=f"{prefix}.{number // len(parts)}.{parts[number % len(parts)]}.{kind}",
            entry=replace(entry, shape=(rows, *columns, *column), begin=entry.begin + number * size, size=size),
            encoding=encoding and replace(encoding, first_row=number * rows),
        )


def same_values(one: SourceTensor, other: SourceTensor) -> bool:
    """Return whether two tensors have equal type, shape and values, comparing a part at a time."""
    if (one.entry.code, one.entry.shape) != (other.entry.code, other.entry.shape):
        return False
    with one.file.opened() as first, other.file.opened() as second:
        parts = ((done, min(_PART, one.entry.size - done)) for done in range(0, one.entry.size, _PART))
        return all(
            os.pread(first, count, one.entry.begin + done) == os.pread(second, count, other.entry.begin + done)
            for done, count in parts
        )


_VISION = re.compile("|".join(map(fnmatch.translate, VISION)))


def vision_tensors(sources: Mapping[str, SourceTensor]) -> list[SourceTensor]:
    return [tensor for name, tensor in sources.items() if _VISION.match(name)]


def vision_bytes(sources: Mapping[str, SourceTensor]) -> int:
    """Return the total bytes of vision tensors."""
    return sum(tensor.entry.size for tensor in vision_tensors(sources))


def _own_name(name: str) -> str:
    """Return a tensor's name in the text-only model."""
    for outer, own in _TEXT_PREFIXES:
        if name.startswith(outer):
            return own + name.removeprefix(outer)
    return name


def _tensors(folder: Path) -> Iterator[SourceTensor]:
    for path, indexed in _weight_files(folder).items():
        file = _opened(path)
        for name, entry in sorted(file.entries.items(), key=lambda item: item[1].begin):
            yield SourceTensor(name=name, file=file, entry=entry, indexed=indexed is None or name in indexed)


def _opened(path: Path) -> TensorFile:
    return TensorFile(path) if path.suffix == ".safetensors" else PickledFile(path)


def _weight_files(folder: Path) -> dict[Path, frozenset[str] | None]:
    """Return the weight files that transformers would load, with the names in the index (None without one)."""
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    if (folder / INDEX).is_file():
        return _indexed_files(folder, INDEX)
    if (folder / SINGLE).is_symlink():
        raise CorruptFileError(
            f"{folder / SINGLE} links to {(folder / SINGLE).readlink()}, which does not exist.",
            hint="Restore the file, or import the model again from its new location.",
        )
    if (folder / PICKLED_INDEX).is_file():
        return _indexed_files(folder, PICKLED_INDEX)
    if (folder / PICKLED_SINGLE).is_file():
        return {folder / PICKLED_SINGLE: None}
    if foreign := sorted(path.name for pattern in _FOREIGN for path in folder.glob(pattern) if path.is_file()):
        (*others, last) = foreign
        raise UnsupportedModelError(
            f"{folder} has weights in unsupported files: {listing(foreign)}; expected {SINGLE} or "
            f"{PICKLED_SINGLE}, or an index file.",
            hint=f"If {last} is the whole model, rename it, or link it, to {SINGLE}: its old tool named it so."
            if not others and last.endswith(".safetensors")
            else "Save the model with safetensors (transformers: save_pretrained), or choose a revision that has them.",
        )
    raise ModelNotFoundError(
        f"{folder} has no weights: neither {SINGLE} nor {INDEX}, nor {PICKLED_SINGLE}.", hint="Import the model again."
    )


def _indexed_files(folder: Path, index: str) -> dict[Path, frozenset[str] | None]:
    """Return the files of an index in name order, checked against it, with their tensor names."""
    places = weight_map(folder / index)
    wanted: dict[str, set[str]] = {file: set() for file in sorted(set(places.values()))}
    for name, file in places.items():
        wanted[file].add(name)
    for file, names in wanted.items():
        path = folder / file
        if not path.is_file():
            raise CorruptFileError(f"{path} is missing, but {index} lists it.", hint="Import the model again.")
        absent = sorted(names - _opened(path).entries.keys())
        if absent:
            raise CorruptFileError(
                f"{path} lacks tensors that {index} lists for it: {listing(absent)}.", hint="Import the model again."
            )
    return dict.fromkeys((folder / file for file in wanted), frozenset(places))
