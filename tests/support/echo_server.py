"""A real tritonserver with models that do no arithmetic, for tests of everything that sends requests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.servers import running_server
from trtserve.client.endpoint import Endpoint

SOURCES = Path(__file__).parent / "echo_models"

CORE_INPUTS = {
    "input_ids": "TYPE_INT32 -1",
    "input_lengths": "TYPE_INT32 1",
    "request_output_len": "TYPE_INT32 1",
    "streaming": "TYPE_BOOL 1 optional",
    "stop": "TYPE_BOOL 1 optional",
}
CORE_OUTPUTS = {"output_ids": "TYPE_INT32 -1,-1", "sequence_length": "TYPE_INT32 -1"}
OLD_TEXT_INPUTS = {
    "text_input": "TYPE_STRING 1",
    "max_tokens": "TYPE_INT32 1",
    "stop_words": "TYPE_STRING -1 optional",
    "bad_words": "TYPE_STRING -1 optional",
    "temperature": "TYPE_FP32 1 optional",
    "top_k": "TYPE_INT32 1 optional",
    "top_p": "TYPE_FP32 1 optional",
    "random_seed": "TYPE_UINT64 1 optional",
    "stream": "TYPE_BOOL 1 optional",
}
TEXT_INPUTS = {
    **{name: declared for name, declared in OLD_TEXT_INPUTS.items() if name != "random_seed"},
    "seed": "TYPE_UINT64 1 optional",
    "exclude_input_in_output": "TYPE_BOOL 1 optional",
}


def write_echo_repository(root: Path) -> Path:
    """Write all models of the tests to one repository; they log their requests to `<root>/trace`."""
    repository, trace = root / "echo", str(root / "trace")
    for name, decoupled, parameters in (
        ("tensorrt_llm", True, {"trace": trace}),
        ("core_plain", False, {}),
        ("core_failing", True, {"fail_every": "4"}),
        ("core_slow", True, {"delay_ms": "20", "trace": trace}),
    ):
        _write(repository, name, "core", decoupled, CORE_INPUTS, CORE_OUTPUTS, parameters)
    for name, decoupled, inputs, parameters in (
        ("echo", True, TEXT_INPUTS, {"trace": trace}),
        ("text_plain", False, OLD_TEXT_INPUTS, {"trace": trace}),
        ("text_accumulating", True, TEXT_INPUTS, {"trace": trace, "accumulate_tokens": "true"}),
    ):
        _write(repository, name, "text", decoupled, inputs, {"text_output": "TYPE_STRING -1"}, parameters)
    return repository


def _write(
    repository: Path,
    name: str,
    source: str,
    decoupled: bool,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    parameters: Mapping[str, str],
) -> None:
    (repository / name / "1").mkdir(parents=True)
    shutil.copy(SOURCES / f"{source}.py", repository / name / "1" / "model.py")
    lines = [f'name: "{name}"', 'backend: "python"', "max_batch_size: 8"]
    lines.append(f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}")
    lines += [_tensor("input", tensor, declared) for tensor, declared in inputs.items()]
    lines += [_tensor("output", tensor, declared) for tensor, declared in outputs.items()]
    entries = {"kind": source, **parameters}
    lines += [f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in entries.items()]
    lines.append("instance_group { count: 1 kind: KIND_CPU }")
    (repository / name / "config.pbtxt").write_text("\n".join(lines) + "\n")


def _tensor(side: str, name: str, declared: str) -> str:
    datatype, dims, *rest = declared.split()
    optional = "optional: true" if rest else ""
    return f'{side} {{ name: "{name}" data_type: {datatype} dims: [{dims}] {optional} }}'


@contextmanager
def running_echo_server(root: Path, *flags: str) -> Iterator[Endpoint]:
    """Serve the models of `write_echo_repository`; the server is recorded below `<root>/home` under the name `echo`.

    `flags` go to tritonserver.
    """
    with running_server(write_echo_repository(root), home=root / "home", name="echo", flags=flags) as server:
        yield Endpoint(http_port=server.address.http_port, grpc_port=server.address.grpc_port, model=server.model)
