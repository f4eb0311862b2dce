"""Stands in for the C++ backend `tensorrtllm`: run by Triton in Python, and as strict as the reference says.

It pushes its answers, knows nothing of request parameters, refuses what the C++ code refuses, and reads its
config.pbtxt as that does: paths relative to the working directory, keys that must exist. Its language counts on from
the last id.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_SECONDS_PER_TOKEN = 0.002
_MUST_EXIST = ("tokenizer_dir", "guided_decoding_backend", "xgrammar_tokenizer_info_path")  # release 0.19 and later


class TritonPythonModel:
    """One model of the backend."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Nothing is completed."""
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Refuse what the C++ backend does not load."""
        config = json.loads(args["model_config"])
        given = {name: entry["string_value"] for name, entry in config["parameters"].items()}
        engine = json.loads((Path(given["gpt_model_path"]) / "config.json").read_text(encoding="utf-8"))
        if given["gpt_model_type"] not in ("V1", "v1", "inflight_batching", "inflight_fused_batching"):
            raise pb_utils.TritonModelException("Invalid gpt_model_type")
        if "gpu_device_ids" in given and not given["gpu_device_ids"]:
            raise pb_utils.TritonModelException("an empty list of GPUs")
        if tuple(map(int, engine["version"].split(".")[:2])) >= (0, 19):
            lacking = [name for name in _MUST_EXIST if name not in given]
            if lacking:
                raise pb_utils.TritonModelException(f"Cannot find parameter with name: {lacking[0]}")
        self._vocab_size = engine["pretrained_config"]["vocab_size"]
        self._excludes = given.get("exclude_input_in_output", "").lower() in ("true", "1")
        self._decoupled = config["model_transaction_policy"]["decoupled"]
        self._stopped: set[str] = set()

    def execute(self, requests: list[Any]) -> None:
        """Each request in a thread: all of them are in flight at once."""
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            arguments = (request.request_id(), inputs, request.get_response_sender(), request.requested_output_names())
            threading.Thread(target=self._serve, args=arguments, daemon=True).start()

    def _serve(self, request_id: str, inputs: dict[str, Any], sender: Any, wanted: list[str]) -> None:
        try:
            if np.any(inputs.get("stop", False)):
                self._stop(request_id, sender)
                return
            self._check(inputs, wanted)
            for row, ids in enumerate(inputs["input_ids"]):
                last = row == len(inputs["input_ids"]) - 1
                count = int(inputs["request_output_len"].reshape(-1)[row])
                self._generate(ids.tolist(), count, inputs, request_id, sender, last=last)
        except ValueError as error:
            sender.send(pb_utils.InferenceResponse([], pb_utils.TritonError(str(error))), flags=FINAL)

    def _stop(self, request_id: str, sender: Any) -> None:
        if not request_id:
            raise ValueError("Trying to stop a request but request ID is not provided")
        self._stopped.add(request_id)
        sender.send(flags=FINAL)

    def _check(self, inputs: dict[str, Any], wanted: list[str]) -> None:
        if not {"output_ids", "sequence_length"} <= set(wanted):
            raise ValueError("output_ids and sequence_length must be among the requested outputs")
        if np.any(inputs.get("streaming", False)) and not self._decoupled:
            raise ValueError("Streaming is only supported in decoupled mode.")
        if len(inputs["input_ids"]) > 1 and not self._decoupled:
            raise ValueError("Batch size > 1 requires the decoupled transaction policy")

    def _generate(
        self, ids: list[int], count: int, inputs: dict[str, Any], request_id: str, sender: Any, *, last: bool
    ) -> None:
        streamed = bool(np.any(inputs.get("streaming", False)))
        excluded = bool(np.any(inputs.get("exclude_input_in_output", self._excludes)))
        made: list[int] = []
        while len(made) < count and request_id not in self._stopped:
            time.sleep(_SECONDS_PER_TOKEN)
            made.append(((made or ids)[-1] + 1) % self._vocab_size)
            if streamed and len(made) < count:
                sender.send(_answer(made[-1:]))
        ended = request_id in self._stopped
        tokens = ([] if ended else made[-1:]) if streamed else made if excluded else ids + made
        sender.send(_answer(tokens), **({"flags": FINAL} if last else {}))


def _answer(ids: list[int]) -> Any:
    tokens = np.array(ids, dtype=np.int32).reshape(1, 1, len(ids))
    lengths = np.array([[len(ids)]], dtype=np.int32)
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor("output_ids", tokens), pb_utils.Tensor("sequence_length", lengths)]
    )
