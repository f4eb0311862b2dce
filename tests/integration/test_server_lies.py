"""Servers of strangers, or what changes their answers on the way: `query` ends with an answer or its own error."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.support.http_pages import answering
from tests.support.lies import VALUES, lie
from trtserve.__main__ import prepare_streams
from trtserve.cli import run

TRIALS = 150
INPUTS = {"text_input": "STRING", "max_tokens": "INT32", "stream": "BOOL"}
OUTPUTS = {"text_output": "STRING", "output_ids": "INT32", "sequence_length": "INT32", "batch_index": "INT32"}
CONFIG: dict[str, Any] = {
    "name": "m",
    "max_batch_size": 4,
    "input": [{"name": name, "data_type": f"TYPE_{kind}", "dims": [1]} for name, kind in INPUTS.items()],
    "output": [{"name": name, "data_type": f"TYPE_{kind}", "dims": [-1]} for name, kind in OUTPUTS.items()],
    "model_transaction_policy": {"decoupled": True},
    "parameters": {"accumulate_tokens": {"string_value": "false"}},
}
WHOLE: dict[str, Any] = {
    "model_name": "m",
    "outputs": [
        {"name": "text_output", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 0}},
        {"name": "sequence_length", "datatype": "INT32", "shape": [1, 1], "parameters": {"binary_data_size": 0}},
    ],
    "parameters": {"triton_final_response": True},
}
STREAMED = {"model_name": "m", "text_output": "Hi", "output_ids": [[1, 2]], "sequence_length": 2, "batch_index": 0}


def trials() -> list[tuple[str, str]]:
    """What a server says when it is asked for the configuration, and for an answer."""
    chance, config, answers = random.Random(27), json.dumps(CONFIG), [json.dumps(WHOLE), json.dumps(STREAMED)]
    whole = json.dumps({**CONFIG, "model_transaction_policy": {}})
    lies = [(lie(config, chance), answers[1]) for _ in range(TRIALS)]
    lies += [(whole, lie(answers[0], chance)) for _ in range(TRIALS)]
    lies += [(config, lie(answers[1], chance)) for _ in range(TRIALS)]
    return [*lies, *((said, answers[1]) for said in map(json.dumps, VALUES)), (whole, "[" * 100_000)]


def test_lies_of_a_server_end_with_an_answer_or_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    said: tuple[str, str] = ("", "")
    prepare_streams()
    with answering(
        lambda path: said[0] if path.endswith("/config") else '[{"name": "m"}]' if "index" in path else said[1]
    ) as port:
        for said in trials():
            asked = ["query", "Hi", "--protocol", "http", "--url", f"127.0.0.1:{port}", "--model", "m"]
            code = run([*asked, "--timeout", "10"])
            printed = capsys.readouterr()
            assert code in (0, 2, 41), (said, printed.err)
            assert "\x1b" not in printed.err, said
