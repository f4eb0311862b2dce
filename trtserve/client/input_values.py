"""`--input NAME=VALUE`: convert a text to a tensor of the type and shape that the model declares."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.client.base import ModelDescription
from trtserve.client.tensors import Tensor, TensorDescription, numpy_type
from trtserve.errors import UsageError
from trtserve.files import parse_json

if TYPE_CHECKING:
    import numpy.typing as npt

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


def split_input(text: str) -> tuple[str, str]:
    """Split `NAME=VALUE` into name and value."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UsageError(f"--input is {text!r}; expected NAME=VALUE, such as temperature=0.5.")
    return name.strip(), value


def input_tensor(model: ModelDescription, name: str, text: str, *, rows: int) -> Tensor:
    """Parse `text` as the tensor of this input; it is repeated for every row of the batch unless it has all rows.

    Accepted: a scalar, a comma list, a JSON list (nested for several dimensions), @FILE.npy, @FILE.json; for STRING
    inputs the text itself, a JSON list of texts, or @FILE. UsageError names the declared type and shape.
    """
    declared = model.input(name)
    array = _parse(declared, text)
    if array.ndim == len(declared.dims) + 1 and array.shape[0] == rows and _fits(declared, array.shape[1:]):
        return Tensor(name=name, datatype=declared.datatype, shape=array.shape, values=array)
    if array.ndim == 0:
        array = array.reshape((1,) * len(declared.dims))
    if not _fits(declared, array.shape):
        raise UsageError(f"--input {name} has shape {list(array.shape)}; the model {model.name!r} expects {declared}.")
    return model.tensor(name, array, rows=rows)


def file_array(path: Path, what: str) -> npt.NDArray[Any]:
    """Read the array of an npy file."""
    from trtserve.programs.shared.arrays import read_array

    try:
        return read_array(path)
    except ValueError as error:
        raise UsageError(f"{what}: {error}.") from None


def as_declared(declared: TensorDescription, array: npt.NDArray[Any], what: str) -> npt.NDArray[Any]:
    """Convert `array` to the declared type. Raises UsageError if values do not fit it (2.5 or 2**40 as INT32)."""
    import numpy as np

    target = numpy_type(declared.datatype)
    if declared.datatype == "BYTES":
        return array.astype(object)
    kinds = {"b": "b", "u": "bui", "i": "bui"}.get(target.kind, "buif")
    if array.dtype.kind not in kinds and array.dtype.name != "bfloat16":
        raise UsageError(f"{what} has values of type {array.dtype}; expected {declared}.")
    if target.kind in "ui" and array.size:
        limits = np.iinfo(target)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise UsageError(f"{what} has values outside {limits.min} … {limits.max}; expected {declared}.")
    return array.astype(target)


def read_text(path: Path, what: str) -> str:
    """Read a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{what}: {path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{what}: {path} is not UTF-8 text: {error.reason} at byte {error.start}.") from None


def _fits(declared: TensorDescription, shape: tuple[int, ...]) -> bool:
    sizes = zip(declared.dims, shape, strict=False)
    return len(shape) == len(declared.dims) and all(dim in (-1, size) for dim, size in sizes)


def _parse(declared: TensorDescription, text: str) -> npt.NDArray[Any]:
    import numpy as np

    what = f"--input {declared.name}"
    if text.startswith("@"):
        return _parse_file(declared, Path(text[1:]), what)
    if text.startswith("["):
        listed = _parse_json_list(declared, text, what)
        if listed is not None:
            return listed
    if declared.datatype == "BYTES":
        return np.array([text], dtype=object)
    items = [_parse_number(declared, item.strip(), what) for item in text.split(",")]
    return as_declared(declared, _numeric_array(items, declared, what), what)


def _parse_file(declared: TensorDescription, path: Path, what: str) -> npt.NDArray[Any]:
    import numpy as np

    if path.suffix == ".npy":
        return as_declared(declared, file_array(path, what), what)
    content = read_text(path, what)
    if path.suffix == ".json":
        listed = _parse_json_list(declared, content, what)
        if listed is not None:
            return listed
    if declared.datatype == "BYTES":
        return np.array([content], dtype=object)
    return _parse(declared, content.strip())


def _parse_json_list(declared: TensorDescription, text: str, what: str) -> npt.NDArray[Any] | None:
    """Parse a JSON list, or None for a STRING input whose text is to be sent as it is."""
    try:
        content = parse_json(text)
    except ValueError:
        if declared.datatype == "BYTES":
            return None
        raise UsageError(f"{what} is not a JSON list; expected {declared}.") from None
    if declared.datatype == "BYTES":
        return _text_array(content)
    return as_declared(declared, _numeric_array(content, declared, what), what)


def _text_array(content: Any) -> npt.NDArray[Any] | None:
    """Return an array [n] or [rows, n] of texts, or None for other JSON, such as the schema of a guide."""
    import numpy as np

    rows = content if isinstance(content, list) and all(isinstance(row, list) for row in content) else [content]
    if not all(isinstance(row, list) and row and all(isinstance(item, str) for item in row) for row in rows):
        return None
    array = np.array(rows, dtype=object)
    return array if rows is content else array[0]


def _numeric_array(items: Any, declared: TensorDescription, what: str) -> npt.NDArray[Any]:
    import numpy as np

    try:
        array = np.array(items)
    except ValueError:
        raise UsageError(f"{what} has lists of different lengths; expected {declared}.") from None
    if array.dtype == object or array.dtype.kind in "US":
        raise UsageError(f"{what} has values that are not numbers of one type; expected {declared}.")
    if array.size == 0:
        return array.astype(numpy_type(declared.datatype))
    return array


def _parse_number(declared: TensorDescription, text: str, what: str) -> Any:
    try:
        if declared.datatype == "BOOL":
            return {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}[text.lower()]
        return float(text) if declared.datatype.startswith(("FP", "BF")) else int(text)
    except (ValueError, KeyError):
        raise UsageError(f"{what} is {text!r}; expected {declared}.") from None
