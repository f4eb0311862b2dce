"""The checks of request bodies: what passes them cannot harm Triton 2.51.

Triton allocates what a request's shape claims before it looks at the data, copies chunks and nested arrays on its
stack, and inflates compressed bodies without a bound. So a body is received whole, inflated and parsed here, and Triton
gets the JSON that was checked, written anew: a second parser could read duplicate keys differently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Final

from pydantic_core import from_json, to_json

from trtserve.client.spec import DEFAULT_MAX_TOKENS
from trtserve.gateway.asgi import RefusedError, require_few
from trtserve.gateway.settings import RequestLimits

INT64 = 1 << 63
_MAX_NAME = 1024
# The protocol's own parameters: Triton answers 500 to another type.
_TYPES: dict[str, type] = {
    "binary_data": bool,
    "binary_data_output": bool,
    "sequence_start": bool,
    "sequence_end": bool,
    "priority": int,
    "timeout": int,
    "shared_memory_region": str,
}
_MAX_RANK = 16
_MAX_DIM = (1 << 31) - 1
_MAX_TENSORS = 256
_MAX_PARAMETERS = 1024
_MAX_CLASSES = 1 << 20
# Bytes of one element; a string has its length in front.
_SIZES: Final = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
    "BYTES": 4,
}
_RANGES: Final = {
    name: (0, 1 << 8 * size) if name.startswith("U") else (-(1 << 8 * size - 1), 1 << 8 * size - 1)
    for name, size in _SIZES.items()
    if "INT" in name
}
_SCALARS: Final = frozenset({str, int, float, bool})


@dataclass(frozen=True, kw_only=True)
class CheckedBody:
    """A body that Triton may see."""

    content: bytes
    json_length: int | None = None
    """Length of the JSON part when binary tensors follow it."""
    request_id: str = ""
    adapter: str = ""
    """LoRA adapter that it names."""

    def with_id(self, request_id: str) -> CheckedBody:
        """Return the body with this id as the first key of its JSON, which must not have an id."""
        added = b'{"id":' + to_json(request_id)
        content = added + (b"}" if self.content == b"{}" else b"," + self.content.removeprefix(b"{"))
        length = None if self.json_length is None else self.json_length + len(content) - len(self.content)
        return replace(self, content=content, json_length=length, request_id=request_id)


def check_infer(
    body: bytes, json_length: int | None, limits: RequestLimits, *, shared_memory: bool = False
) -> CheckedBody:
    """Check the body of `infer`: JSON, followed by binary tensors when `json_length` says where they begin.

    `shared_memory` lets tensors name a region instead of bringing their data.
    """
    if json_length == 0:  # one raw tensor, whose shape Triton takes from the length of the body
        return CheckedBody(content=body, json_length=0)
    length = len(body) if json_length is None else json_length
    if not 0 < length <= len(body):
        raise RefusedError(400, f"Inference-Header-Content-Length is {length}, and the body has {len(body)} bytes")
    head = parse_object(body[:length], limits)
    tail = memoryview(body)[length:]
    inputs = _objects(head, "inputs", required=True)
    used = strings = 0
    for each in inputs:
        tensor = _described(each, limits)
        strings += tensor.strings
        _require_few_strings(strings, limits)
        used += _check_content(each, tensor, tail[used:], shared_memory=shared_memory)
    if used != len(tail):
        raise RefusedError(400, f"{len(tail)} bytes follow the JSON, and the inputs' binary_data_size add up to {used}")
    for each in _objects(head, "outputs"):
        _check_output(each, shared_memory=shared_memory)
    _check_parameters(head)
    request_id = _request_id(head)
    content = _written(head)
    binary = json_length is not None
    return CheckedBody(
        content=b"".join((content, tail)) if binary else content,
        json_length=len(content) if binary else None,
        request_id=request_id,
    )


def check_generate(body: bytes, limits: RequestLimits, datatypes: Mapping[str, str]) -> CheckedBody:
    """Check the body of `generate` and `generate_stream`: one value or one flat list for each input.

    `datatypes` are those of the model's inputs: a key that is none of them is an error, which Triton would ignore.
    """
    head = parse_object(body, limits)
    if "parameters" not in datatypes:
        _check_parameters(head)
    if "max_tokens" in datatypes:  # Triton's own answer names no default, only a missing input
        head.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    strings = 0
    for name, value in head.items():
        if name in ("id", "parameters") and name not in datatypes:
            continue
        if name not in datatypes:
            similar = get_close_matches(name[:_MAX_NAME], datatypes, n=1)
            suggestion = f"; did you mean {similar[0]!r}?" if similar else f"; it has {', '.join(sorted(datatypes))}"
            raise RefusedError(400, f"the model has no input {name[:_MAX_NAME]!r}{suggestion}")
        values = value if type(value) is list else [value]
        strings += len(values) if datatypes[name] == "BYTES" else 0
        _require_few_strings(strings, limits)
        if not set(map(type, values)) <= _kinds(datatypes[name]):
            raise RefusedError(400, f"{name!r} must be one value of the type {datatypes[name]}, or a flat list of them")
        _check_range(name, datatypes[name], values)
    adapter = head.get("lora_name", "")
    adapter = adapter[0] if type(adapter) is list and adapter else adapter
    name = adapter[:_MAX_NAME] if isinstance(adapter, str) else ""
    request_id = _request_id(head)
    return CheckedBody(content=_written(head), request_id=request_id, adapter=name)


def check_control(body: bytes, limits: RequestLimits) -> CheckedBody:
    """Check the body of an operation other than inference: nothing, or a small JSON object."""
    return CheckedBody(content=_written(parse_object(body, limits)) if body else b"")


def parse_object(text: bytes, limits: RequestLimits) -> dict[str, Any]:
    """Return a JSON object. Raises RefusedError for anything else; nesting is limited by the parser."""
    if len(text) > limits.json_bytes:
        raise RefusedError(413, f"the JSON has {len(text)} bytes; at most {limits.json_bytes} are allowed")
    require_few(text, len(text))
    try:
        content = from_json(text, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise RefusedError(400, f"failed to parse the request JSON: {str(error)[:200]}") from None
    if type(content) is not dict:
        raise RefusedError(400, "the request must be a JSON object")
    return content


def _written(head: Mapping[str, Any]) -> bytes:
    # Numbers beyond the range of a float are infinite here, which JSON does not have.
    return to_json(head, inf_nan_mode="null")


def _objects(head: Mapping[str, Any], key: str, *, required: bool = False) -> Sequence[dict[str, Any]]:
    found = head.get(key)
    if found is None and not required:
        return ()
    if type(found) is not list or (required and not found) or not all(type(each) is dict for each in found):
        raise RefusedError(400, f"{key!r} must be a list of objects")
    if len(found) > _MAX_TENSORS:
        raise RefusedError(400, f"{key!r} has {len(found)} entries; at most {_MAX_TENSORS} are allowed")
    return found


@dataclass(frozen=True)
class _Tensor:
    """What an input says about itself."""

    name: str
    datatype: str
    elements: int

    @property
    def strings(self) -> int:
        return self.elements if self.datatype == "BYTES" else 0


def _described(tensor: Mapping[str, Any], limits: RequestLimits) -> _Tensor:
    name = _name(tensor)
    datatype = tensor.get("datatype")
    if type(datatype) is not str or datatype not in _SIZES:
        raise RefusedError(400, f"input {name!r} has an unknown datatype; expected one of {', '.join(_SIZES)}")
    return _Tensor(name, datatype, _elements(name, tensor.get("shape"), limits))


def _require_few_strings(count: int, limits: RequestLimits) -> None:
    if count > limits.strings:
        raise RefusedError(413, f"the request has {count} strings or more; at most {limits.strings} are allowed")


def _check_content(given: Mapping[str, Any], tensor: _Tensor, rest: memoryview, *, shared_memory: bool) -> int:
    """Check where the values of an input are, and the values; return how many bytes of `rest` they are."""
    parameters = _check_parameters(given)
    if any(key.startswith("shared_memory_") for key in parameters):
        _check_region(tensor.name, parameters, allowed=shared_memory)
        return 0
    size = parameters.get("binary_data_size")
    if size is None:
        _check_data(tensor.name, tensor.datatype, tensor.elements, given.get("data"))
        return 0
    if type(size) is not int or not 0 <= size <= len(rest):
        raise RefusedError(400, f"input {tensor.name!r} has a binary_data_size beyond the body")
    if "data" in given:
        raise RefusedError(400, f"input {tensor.name!r} has both data and a binary_data_size")
    _check_binary(tensor.name, tensor.datatype, tensor.elements, rest[:size])
    return size


def _elements(name: str, shape: Any, limits: RequestLimits) -> int:
    if type(shape) is not list or len(shape) > _MAX_RANK or not set(map(type, shape)) <= {int}:
        raise RefusedError(400, f"the shape of input {name!r} must be a list of at most {_MAX_RANK} integers")
    if any(not 0 <= size <= _MAX_DIM for size in shape):
        raise RefusedError(400, f"the shape of input {name!r} must have dimensions from 0 to {_MAX_DIM}")
    elements = math.prod(shape)
    # A dimension of 0 must not hide the others: Triton may multiply them first.
    if math.prod(size for size in shape if size) > limits.elements:
        raise RefusedError(413, f"input {name!r} has too many elements; at most {limits.elements} are allowed")
    return elements


def _check_data(name: str, datatype: str, elements: int, data: Any) -> None:
    """Check the values of a tensor in JSON, which may be nested: as many as the shape says, of the right kind."""
    if type(data) is not list:
        raise RefusedError(400, f"input {name!r} must have its data in a list, or a binary_data_size")
    lists, found = [data], 0
    for _ in range(_MAX_RANK + 1):
        inner: list[list[Any]] = []
        for each in lists:
            types = set(map(type, each))
            if types == {list}:
                inner += each
                continue
            if not types <= _kinds(datatype):
                raise RefusedError(400, f"input {name!r} has values that are not {datatype}")
            found += len(each)
            _check_range(name, datatype, each)
        lists = inner
        if not lists:
            break
    else:
        raise RefusedError(400, f"the data of input {name!r} is nested too deeply")
    if found != elements:
        raise RefusedError(400, f"input {name!r} has {found} values, and its shape is for {elements}")


def _kinds(datatype: str) -> frozenset[type]:
    """Return the Python types of a datatype's values in JSON."""
    if datatype == "BYTES":
        return frozenset({str})
    if datatype == "BOOL":
        return frozenset({bool})
    return frozenset({int}) if datatype in _RANGES else frozenset({int, float})


def _check_range(name: str, datatype: str, values: Sequence[Any]) -> None:
    """Refuse integers that Triton would cut to the tensor's type, and numbers that no type holds."""
    integers = [value for value in values if type(value) is int]
    low, high = _RANGES.get(datatype, (-INT64, 2 * INT64))
    if integers and (min(integers) < low or max(integers) >= high):
        raise RefusedError(400, f"{name!r} has a value out of range for {datatype}: {low} … {high - 1}")
    if any(type(value) is float and math.isinf(value) for value in values):
        raise RefusedError(400, f"{name!r} has a number that is too large")


def _check_binary(name: str, datatype: str, elements: int, content: memoryview) -> None:
    if datatype != "BYTES":
        if len(content) != elements * _SIZES[datatype]:
            expected = elements * _SIZES[datatype]
            raise RefusedError(400, f"input {name!r} has {len(content)} bytes, and its shape is for {expected}")
        return
    start = found = 0
    while start < len(content):
        if found == elements or start + 4 > len(content):
            break
        start += 4 + int.from_bytes(content[start : start + 4], "little")
        found += 1
    if start != len(content) or found != elements:
        raise RefusedError(400, f"input {name!r} does not hold {elements} strings, each with its length in front")


def _check_region(name: str, parameters: Mapping[str, Any], *, allowed: bool) -> None:
    if not allowed:
        raise RefusedError(403, f"{name!r} is in shared memory, which is closed: start with --open-api shared-memory")
    sizes = [parameters.get("shared_memory_byte_size"), parameters.get("shared_memory_offset", 0)]
    if any(type(size) is not int or not 0 <= size < INT64 for size in sizes):
        raise RefusedError(400, f"{name!r} needs a shared_memory_byte_size and an offset that are not negative")


def _check_output(output: Mapping[str, Any], *, shared_memory: bool) -> None:
    name, parameters = _name(output), _check_parameters(output)
    if any(key.startswith("shared_memory_") for key in parameters):
        _check_region(name, parameters, allowed=shared_memory)
    classes = parameters.get("classification", 0)
    if type(classes) is not int or not 0 <= classes <= _MAX_CLASSES:
        raise RefusedError(400, f"output {name!r} asks for a classification out of range")


def _check_parameters(holder: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of a request or tensor: a flat object of texts, numbers and switches."""
    parameters = holder.get("parameters", {})
    if type(parameters) is not dict or not set(map(type, parameters.values())) <= _SCALARS:
        raise RefusedError(400, "'parameters' must be an object of texts, numbers and switches")
    if len(parameters) > _MAX_PARAMETERS:
        raise RefusedError(400, f"at most {_MAX_PARAMETERS} parameters are allowed")
    _check_range("parameters", "INT64", list(parameters.values()))
    for name in _TYPES.keys() & parameters.keys():
        if type(parameters[name]) is not _TYPES[name]:
            expected = {bool: "true or false", int: "a whole number", str: "a text"}[_TYPES[name]]
            raise RefusedError(400, f"the parameter {name!r} must be {expected}")
    return parameters


def _name(tensor: Mapping[str, Any]) -> str:
    name = tensor.get("name")
    if type(name) is not str or not 0 < len(name) <= _MAX_NAME:
        raise RefusedError(400, f"every tensor needs a name of at most {_MAX_NAME} characters")
    return name


def _request_id(head: dict[str, Any]) -> str:
    """Return the request's id. A number, which Triton 2.51 answers with status 500, becomes a text in `head`."""
    found = head.get("id", "")
    if type(found) is int and abs(found) < INT64:
        found = head["id"] = str(found)
    if type(found) is not str or len(found) > _MAX_NAME:
        raise RefusedError(400, f"'id' must be a text of at most {_MAX_NAME} characters")
    return found
