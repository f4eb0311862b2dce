"""One round trip of strings and integers through a real Triton, which proves that its Python stub works."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

from trtserve.errors import TrtserveError
from trtserve.host.ports import free_ports
from trtserve.process import spawn
from trtserve.server.triton.installation import Triton, prepare_backends
from trtserve.server.triton.tritonserver import Address, server_command, stop_triton, unique_prefix, wait_until_ready
from trtserve.store import Store

_HOST = "127.0.0.1"
_READY_TIMEOUT = 30.0
_MODEL = "probe"
_STRINGS = ["ein", "Wörter", ""]
_INTEGERS = [1, -2, 3]
_CONFIG = """\
name: "probe"
backend: "python"
input [
  { name: "STRINGS" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "INTEGERS" data_type: TYPE_INT32 dims: [ -1 ] }
]
output [
  { name: "STRINGS_BACK" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "INTEGERS_BACK" data_type: TYPE_INT32 dims: [ -1 ] }
]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
_PROGRAM = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        names = ("STRINGS", "INTEGERS")
        arrays = [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in names]
        tensors = [pb_utils.Tensor(f"{name}_BACK", array) for name, array in zip(names, arrays)]
        return pb_utils.InferenceResponse(tensors)
"""


def round_trip(folder: Path, store: Store, triton: Triton) -> str:
    """Start `triton` in `folder` with a model that returns its inputs; return what went wrong, or an empty text."""
    repository = write_probe_repository(folder / "repository")
    address = Address(
        **dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(_HOST, 3), strict=True)), host=_HOST
    )
    prefix = unique_prefix("doctor")
    command = server_command(triton, repository, address, backends=prepare_backends(triton, store), shm_prefix=prefix)
    log = folder / "triton.log"
    identity = spawn(command, log=log, bound=True)
    try:
        wait_until_ready(identity, address, log, timeout=_READY_TIMEOUT)
        return _compare(address)
    except (TrtserveError, OSError, http.client.HTTPException) as error:
        return str(error).rstrip(".")
    finally:
        # The model holds nothing that needs an orderly end, which would take Triton four seconds.
        stop_triton([identity], prefix, urgent=lambda: True)


def write_probe_repository(repository: Path) -> Path:
    """Write a repository with one Python model that returns its inputs."""
    program = repository / _MODEL / "1" / "model.py"
    program.parent.mkdir(parents=True)
    program.write_text(_PROGRAM, encoding="utf-8")
    (repository / _MODEL / "config.pbtxt").write_text(_CONFIG, encoding="utf-8")
    return repository


def _compare(address: Address) -> str:
    sent: dict[str, list[str] | list[int]] = {"STRINGS": _STRINGS, "INTEGERS": _INTEGERS}
    types = {"STRINGS": "BYTES", "INTEGERS": "INT32"}
    inputs = [
        {"name": name, "shape": [len(data)], "datatype": types[name], "data": data} for name, data in sent.items()
    ]
    connection = http.client.HTTPConnection(_HOST, address.http_port, timeout=10)
    try:
        connection.request("POST", f"/v2/models/{_MODEL}/infer", json.dumps({"inputs": inputs}))
        reply = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if "outputs" not in reply:
        return f"the stub refused the request: {reply.get('error', reply)}"
    back = {output["name"].removesuffix("_BACK"): output["data"] for output in reply["outputs"]}
    wrong = [f"{name} {data} came back as {back.get(name)}" for name, data in sent.items() if back.get(name) != data]
    return "; ".join(wrong)
