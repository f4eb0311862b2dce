"""What the gateway lets through to Triton, and what it refuses."""

from __future__ import annotations

import functools
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient import http as tritonclient

from trtserve.gateway.asgi import RefusedError, inflate
from trtserve.gateway.guard import CheckedBody, check_control, check_generate, check_infer
from trtserve.gateway.relay import _BINARY_TYPES, _JSON_TYPES, _require_type, _status
from trtserve.gateway.settings import RequestLimits
from trtserve.gateway.triton import GROUPS, find_target

LIMITS = RequestLimits()
SMALL = RequestLimits(body_bytes=1000, json_bytes=500, elements=100, strings=4)
DATATYPES = {
    "text_input": "BYTES",
    "max_tokens": "INT32",
    "temperature": "FP32",
    "seed": "UINT64",
    "stop_words": "BYTES",
}


def tensor(shape: Any = (2,), data: Any = (1, 2), datatype: Any = "INT32", **more: Any) -> dict[str, Any]:
    content = {} if data is None else {"data": data}
    return {"name": "a", "shape": shape, "datatype": datatype, **content, **more}


def infer_body(*inputs: Any, **more: Any) -> bytes:
    return json.dumps({"inputs": inputs, **more}).encode()


def with_binary(entry: dict[str, Any], content: bytes) -> tuple[bytes, int]:
    head = infer_body({**entry, "parameters": {"binary_data_size": len(content)}})
    return head + content, len(head)


def status_of(check: Callable[[], object]) -> int:
    with pytest.raises(RefusedError) as refused:
        check()
    return refused.value.status


@pytest.mark.parametrize(
    "shape",
    [
        [9223372036854775807, 2],
        [4611686018427387904],
        [100000000000],
        [0, 2147483647, 2147483647],
        [65536, 65536],
        [-1],
        [1.5],
        [True],
        ["2"],
        "2",
        None,
        [1] * 17,
    ],
)
def test_a_shape_that_triton_would_allocate_for_is_refused(shape: Any) -> None:
    assert status_of(lambda: check_infer(infer_body(tensor(shape)), None, LIMITS)) in (400, 413)


def test_a_dimension_of_0_hides_no_others() -> None:
    check_infer(infer_body(tensor([0, 10], data=[])), None, LIMITS)
    assert status_of(lambda: check_infer(infer_body(tensor([0, 1 << 30, 1 << 30], data=[])), None, LIMITS)) == 413


def test_bytes_after_the_last_tensor_are_refused() -> None:
    body, length = with_binary(tensor(data=None), b"\1\0\0\0" * 2)
    check_infer(body, length, LIMITS)
    with pytest.raises(RefusedError, match="9 bytes follow the JSON, and the inputs' binary_data_size add up to 8"):
        check_infer(body + b"x", length, LIMITS)
    assert status_of(lambda: check_infer(infer_body(tensor()) + b"x", len(infer_body(tensor())), LIMITS)) == 400


@pytest.mark.parametrize(
    "entry",
    [
        tensor(datatype="INT33"),
        tensor(datatype=None),
        tensor(data=[1]),
        tensor(data=[1, "2"]),
        tensor(data=[1, [2]]),
        tensor(data={"0": 1}),
        tensor(data=None),
        tensor(data=[1, 2**31]),
        tensor(data=[1, -1], datatype="UINT8"),
        tensor(data=["a", 1], datatype="BYTES"),
        tensor(name=""),
        tensor(name=7),
        tensor(name="n" * 2000),
        tensor(parameters=[]),
        tensor(parameters={"a": {}}),
        tensor(parameters={"binary_data_size": 8}),
        tensor(data=None, parameters={"binary_data_size": -1}),
        tensor(data=None, parameters={"binary_data_size": 10**30}),
        tensor(data=None, parameters={"shared_memory_region": "stub", "shared_memory_byte_size": 8}),
        tensor(parameters={"big": 2**63}),
        "a",
    ],
)
def test_an_input_that_contradicts_itself_is_refused(entry: Any) -> None:
    assert status_of(lambda: check_infer(infer_body(entry), None, LIMITS)) in (400, 403)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'"text"',
        b"{",
        b"{}",
        b'{"inputs":{}}',
        b'{"inputs":[]}',
        b'{"inputs":[1]}',
        b'{"inputs":[' + b"[" * 50_000 + b"]" * 50_000 + b"]}",
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"inputs":[' + b"9" * 5000 + b"]}",
        b'{"inputs":NaN}',
        b'\xff\xfe{"inputs":[]}',
        infer_body(tensor(), id=[1]),
        infer_body(tensor(), outputs={"name": "b"}),
        infer_body(tensor(), outputs=[{"name": "b", "parameters": {"classification": 10**12}}]),
        infer_body(tensor(), outputs=[{"name": "b", "parameters": {"binary_data": 1}}]),
        infer_body(tensor(), parameters={"binary_data_output": "true"}),
        infer_body(tensor(), parameters={"priority": True}),
        infer_body(*[tensor()] * 300),
        infer_body(tensor([1, 1, 1], [[[[1]]]]) | {"data": json.loads("[" * 30 + "1" + "]" * 30)}),
    ],
    ids=range(22),
)
def test_a_body_that_is_no_infer_request_is_refused(body: bytes) -> None:
    assert status_of(lambda: check_infer(body, None, LIMITS)) == 400


def test_nested_data_passes() -> None:
    body = infer_body(tensor([2, 2], [[1, 2], [3, 4]]), tensor([1], ["ä"], "BYTES"), id="7", parameters={"priority": 1})
    checked = check_infer(body, None, LIMITS)
    assert json.loads(checked.content) == json.loads(body)
    assert checked.request_id == "7"


@pytest.mark.parametrize("size", [0, 7, 9])
def test_binary_data_that_does_not_fit_the_shape_is_refused(size: int) -> None:
    body, length = with_binary(tensor(data=None), b"\0" * size)
    assert status_of(lambda: check_infer(body, length, LIMITS)) == 400


@pytest.mark.parametrize(
    "content", [b"", b"\x01\0\0", b"\xff\xff\xff\xffa", b"\x01\0\0\0a" * 3, b"\x01\0\0\0a\x02\0\0\0b", b"\0\0\0\0"]
)
def test_strings_whose_lengths_do_not_add_up_are_refused(content: bytes) -> None:
    body, length = with_binary(tensor(data=None, datatype="BYTES"), content)
    assert status_of(lambda: check_infer(body, length, LIMITS)) == 400


@pytest.mark.parametrize("length", [-1, 1, 5, 10**9])
def test_a_wrong_length_of_the_json_part_is_refused(length: int) -> None:
    body, _ = with_binary(tensor(data=None), b"\0" * 8)
    assert status_of(lambda: check_infer(body, length, LIMITS)) == 400


def test_what_tritonclient_sends_passes_unchanged() -> None:
    inputs = []
    for name, values in {
        "numbers": np.arange(6, dtype=np.int32).reshape(2, 3),
        "texts": np.array([[b"one"], [b""], [b"drei"]], dtype=np.object_),
        "halves": np.ones((4,), dtype=np.float16),
    }.items():
        kind = {"i": "INT32", "O": "BYTES", "f": "FP16"}[values.dtype.kind]
        inputs.append(tritonclient.InferInput(name, values.shape, kind))
        inputs[-1].set_data_from_numpy(values, binary_data=True)
    body, length = tritonclient.InferenceServerClient.generate_request_body(inputs, request_id="4")
    assert length is not None
    checked = check_infer(body, length, LIMITS)
    assert checked.json_length is not None
    assert json.loads(checked.content[: checked.json_length]) == json.loads(body[:length])
    assert checked.content[checked.json_length :] == body[length:]
    added = check_infer(body, length, LIMITS).with_id("new")
    assert json.loads(added.content[: added.json_length])["inputs"] == json.loads(body[:length])["inputs"]


def test_a_second_key_of_the_same_name_does_not_reach_triton() -> None:
    body = infer_body(tensor()).replace(b'"shape": [2]', b'"shape": [9223372036854775807], "shape": [2]')
    assert b"9223372036854775807" in body
    assert b"9223372036854775807" not in check_infer(body, None, LIMITS).content


def test_a_number_as_id_is_a_text_for_triton() -> None:
    """Triton 2.51 answers 500 to a number."""
    checked = check_generate(b'{"text_input": "a", "id": 7}', LIMITS, DATATYPES)
    assert (json.loads(checked.content)["id"], checked.request_id) == ("7", "7")
    checked = check_infer(infer_body(tensor(), id=7), None, LIMITS)
    assert (json.loads(checked.content)["id"], checked.request_id) == ("7", "7")
    assert status_of(lambda: check_infer(infer_body(tensor(), id=10**30), None, LIMITS)) == 400


def test_generate_takes_values_and_flat_lists() -> None:
    body = {"text_input": "Hi", "max_tokens": 3, "temperature": 0.5, "stop_words": ["a", "b"], "id": "1"}
    checked = check_generate(json.dumps(body).encode(), LIMITS, DATATYPES)
    assert json.loads(checked.content) == body
    assert checked.request_id == "1"
    assert json.loads(check_generate(b"{}", LIMITS, {}).with_id("7").content) == {"id": "7"}


def test_generate_has_a_default_for_the_length() -> None:
    content = json.loads(check_generate(b'{"text_input": "Hi"}', LIMITS, DATATYPES).content)
    assert content == {"text_input": "Hi", "max_tokens": 256}
    assert json.loads(check_generate(b'{"a": 1}', LIMITS, {"a": "INT32"}).content) == {"a": 1}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"text_inptu": "Hi"}', "did you mean 'text_input'"),
        ('{"max_tokens": 4294967297}', "out of range for INT32"),
        ('{"seed": -1}', "out of range for UINT64"),
        ('{"temperature": 1e400}', "too large"),
        ('{"text_input": {"a": 1}}', "flat list"),
        ('{"text_input": 1}', "of the type BYTES"),
        ('{"max_tokens": true}', "of the type INT32"),
        ('{"max_tokens": 1.5}', "of the type INT32"),
        ('{"text_input": [["a"]]}', "flat list"),
        ('{"text_input": null}', "flat list"),
        ('{"parameters": {"a": [1]}}', "parameters"),
        ("[1]", "JSON object"),
        ('{"text_input": ' + "[" * 50_000 + "]" * 50_000 + "}", "recursion"),
        ('{"text_input": ' + "[" * 70_000, "more than 65536 objects, lists and keys"),
    ],
)
def test_a_wrong_generate_body_is_refused(body: str, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        check_generate(body.encode(), LIMITS, DATATYPES)


def test_sizes_are_limited() -> None:
    assert status_of(lambda: check_infer(infer_body(tensor(name="n" * 600)), None, SMALL)) == 413
    assert status_of(lambda: check_infer(infer_body(tensor([101], [1])), None, SMALL)) == 413
    assert status_of(lambda: check_infer(infer_body(tensor([5], ["a"] * 5, "BYTES")), None, SMALL)) == 413


def test_strings_are_counted_over_the_whole_request() -> None:
    one, other = (tensor([3], ["a"] * 3, "BYTES", name=name) for name in ("one", "other"))
    assert check_infer(infer_body(one), None, SMALL).content
    assert status_of(lambda: check_infer(infer_body(one, other), None, SMALL)) == 413
    lists = {"text_input": ["a"] * 3, "stop_words": ["a"] * 3}
    assert status_of(lambda: check_generate(json.dumps(lists).encode(), SMALL, DATATYPES)) == 413
    assert check_generate(json.dumps(lists).encode(), LIMITS, DATATYPES).content


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("", bytes)])
def test_compressed_bodies_are_inflated(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    assert inflate(pack(b'{"a":1}'), encoding, LIMITS) == b'{"a":1}'


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("deflate", zlib.compress(b"\0" * 100_000), 413),
        ("gzip", gzip.compress(b"\0" * 100_000), 413),
        ("gzip", gzip.compress(b"{}")[:-1], 400),
        ("gzip", gzip.compress(b"{}") + b"more", 400),
        ("deflate", b"{}", 400),
        ("br", b"{}", 415),
    ],
    ids=["deflate bomb", "gzip bomb", "cut", "followed by more", "not compressed", "unknown"],
)
def test_bombs_and_damaged_bodies_are_refused(encoding: str, body: bytes, status: int) -> None:
    assert status_of(lambda: inflate(body, encoding, SMALL)) == status


@pytest.mark.parametrize(
    ("method", "path", "operation", "model"),
    [
        ("GET", "/v2", "metadata", None),
        ("GET", "/v2/health/live", "live", None),
        ("GET", "/v2/models/a/ready", "ready", "a"),
        ("GET", "/v2/models/stats", "metadata", None),
        ("GET", "/v2/models/a/versions/1/config", "metadata", "a"),
        ("POST", "/v2/models/a%20b/versions/1/infer", "infer", "a b"),
        ("POST", "/v2/models/a/generate_stream", "generate_stream", "a"),
        ("POST", "/v2/repository/index", "index", None),
    ],
)
def test_paths_of_the_protocol_are_known(method: str, path: str, operation: str, model: str | None) -> None:
    target = find_target(method, path)
    assert target.operation == operation
    assert path == "/v2/models/stats" or target.model == model


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v2/systemsharedmemory/region/r/register", 403),
        ("GET", "/v2/cudasharedmemory/status", 403),
        ("POST", "/v2/logging", 403),
        ("POST", "/v2/models/a/trace/setting", 403),
        ("POST", "/v2/repository/models/a/unload", 403),
        ("GET", "/v2/models/a/infer", 405),
        ("DELETE", "/v2", 405),
        ("GET", "/v2/models/a/../config", 404),
        ("POST", "/v2/models//infer", 404),
        ("POST", "/v2/models/a/infer/", 404),
        ("GET", "/v2/secret", 404),
    ],
)
def test_everything_else_is_closed(method: str, path: str, status: int) -> None:
    assert status_of(lambda: find_target(method, path)) == status


def test_closed_groups_can_be_opened() -> None:
    for path in ("/v2/logging", "/v2/systemsharedmemory/region/r/register", "/v2/repository/models/a/load"):
        assert find_target("POST", path, open_groups=GROUPS).operation == "control"
    body = infer_body(tensor(data=None, parameters={"shared_memory_region": "r", "shared_memory_byte_size": 8}))
    assert check_infer(body, None, LIMITS, shared_memory=True).content
    assert status_of(lambda: check_control(b"[]", LIMITS)) == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)
FIELDS = {
    "name": st.text(min_size=1, max_size=8) | JSON,
    "shape": st.lists(st.integers(min_value=-1, max_value=2**65) | st.integers(0, 3), max_size=4) | JSON,
    "datatype": st.sampled_from(["INT32", "BYTES", "FP32", "BOOL", "FP16", "INT33"]) | JSON,
    "data": st.lists(st.integers(-5, 5), max_size=4) | JSON,
    "parameters": st.dictionaries(st.sampled_from(["binary_data_size", "shared_memory_region"]), JSON) | JSON,
}


def passed(check: Callable[[], CheckedBody]) -> CheckedBody | None:
    """Return what passed, or None for what was refused with a status for the client's mistakes."""
    try:
        return check()
    except RefusedError as refused:
        if not 400 <= refused.status < 500:
            raise
        return None


EXAMPLES = settings(max_examples=int(os.environ.get("TRTSERVE_FUZZ", "100")))  # make fuzz asks for more


@EXAMPLES
@given(st.lists(st.fixed_dictionaries({}, optional=FIELDS), max_size=3), JSON, st.binary(max_size=16), st.integers())
def test_any_infer_body_passes_in_shape_or_is_refused(inputs: Any, more: Any, tail: bytes, length: int) -> None:
    """Whatever passes has shapes whose elements are there."""
    body = json.dumps({"inputs": inputs, "outputs": more, "id": "x"}).encode()
    for given_length, content in ((None, body), (len(body), body + tail), (length, body + tail)):
        checked = passed(functools.partial(check_infer, content, given_length, LIMITS))
        if checked is not None and given_length != 0:
            head = json.loads(checked.content[: checked.json_length])
            assert all(np.prod(each["shape"], dtype=object) <= len(content) for each in head["inputs"])


@EXAMPLES
@given(st.dictionaries(st.sampled_from([*DATATYPES, "id", "parameters"]) | st.text(max_size=5), JSON) | JSON)
def test_any_generate_body_passes_flat_or_is_refused(body: Any) -> None:
    checked = passed(lambda: check_generate(json.dumps(body).encode(), LIMITS, DATATYPES))
    if checked is not None:
        assert set(json.loads(checked.content)) <= {*DATATYPES, "id", "parameters"}


@pytest.mark.parametrize(
    ("given", "types", "words"),
    [
        ("text/html", _JSON_TYPES, "the header Content-Type is 'text/html'; expected application/json"),
        ("Text/HTML; charset=utf-8", _JSON_TYPES, "is 'text/html'; expected application/json"),
        ("a" * 5000, _JSON_TYPES, f"is '{'a' * 100}'; expected application/json"),
        ("text/html", _BINARY_TYPES, "expected application/json or application/octet-stream"),
    ],
)
def test_a_body_of_another_type_is_refused_by_name(given: str, types: tuple[str, ...], words: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(words)) as caught:
        _require_type({"content-type": given}, types)
    assert caught.value.status == 415
    for taken in types:
        _require_type({"content-type": f"{taken.upper()}; charset=utf-8"}, types)


@pytest.mark.parametrize(
    ("text", "given", "status"),
    [
        ("in ensemble 'e', Stub process 'tensorrt_llm_0_0' is not healthy.", 400, 503),
        ("Encountered an error when fetching new request: The executor has stopped working: boom", 400, 503),
        ("Encountered an error in forwardAsync function: the step failed: out of memory", 400, 500),
        ("Maximum queue size of 3 has been reached, please try again later", 400, 400),
        ("The guide is invalid: '#/The executor has stopped working'", 400, 400),
        ("Request for unknown model: 'Stub process' is not found", 404, 404),
    ],
)
def test_only_faults_of_the_server_change_the_status(text: str, given: int, status: int) -> None:
    assert _status(json.dumps({"error": text}).encode(), given) == status
    assert _status(text.encode(), given) == given
