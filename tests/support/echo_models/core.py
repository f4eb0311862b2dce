"""Triton model with the tensors of `tensorrt_llm` and no arithmetic: token i of an answer is prompt token i mod length.

Parameters: `delay_ms` before each token, `max_input_len` (longer prompts are refused), `fail_every` (every n-th request
fails), `trace` (file that receives a line per request that began, that was stopped or cancelled, and per stop request).
"""

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


def _scalar(request: Any, name: str, default: Any) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        values = {key: entry["string_value"] for key, entry in config["parameters"].items()}
        self.decoupled = config["model_transaction_policy"]["decoupled"]
        self.delay = float(values.get("delay_ms", "0")) / 1000
        self.longest = int(values.get("max_input_len", "1000000"))
        self.fail_every = int(values.get("fail_every", "0"))
        self.trace = values.get("trace")
        self.count = 0
        self.stopped: set[str] = set()
        self.threads: list[threading.Thread] = []

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            if _scalar(request, "stop", False):
                self.note(f"stop {request.request_id()}")
                self.stopped.add(request.request_id())
                request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            self.count += 1
            failing = self.fail_every > 0 and self.count % self.fail_every == 0
            thread = threading.Thread(target=self.answer, args=(request, failing))
            thread.start()
            self.threads.append(thread)

    def note(self, text: str) -> None:
        if self.trace:
            with Path(self.trace).open("a") as file:
                file.write(text + "\n")

    def answer(self, request: Any, failing: bool) -> None:
        sender = request.get_response_sender()
        prompt = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy().reshape(-1)
        if failing or len(prompt) > self.longest:
            text = "asked to fail" if failing else f"prompt of {len(prompt)} tokens exceeds the limit {self.longest}"
            error = pb_utils.InferenceResponse(error=pb_utils.TritonError(text))
            sender.send(error, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        self.note(f"began {request.request_id()}")
        tokens = np.resize(prompt, int(_scalar(request, "request_output_len", 1)))
        if _scalar(request, "streaming", False):
            self.stream(request, sender, tokens)
            return
        for _ in tokens:
            time.sleep(self.delay)
        whole = self.response(np.concatenate([prompt, tokens]))
        if self.decoupled:
            sender.send(whole)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        else:
            sender.send(whole, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def stream(self, request: Any, sender: Any, tokens: Any) -> None:
        for token in tokens:
            if self.delay:
                time.sleep(self.delay)
            if sender.is_cancelled() or request.request_id() in self.stopped:
                self.note(f"ended {request.request_id()}")
                break
            sender.send(self.response(np.array([token])))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def response(self, tokens: Any) -> Any:
        ids = pb_utils.Tensor("output_ids", tokens.astype(np.int32).reshape(1, 1, -1))
        length = pb_utils.Tensor("sequence_length", np.array([[len(tokens)]], np.int32))
        return pb_utils.InferenceResponse([ids, length])

    def finalize(self) -> None:
        for thread in self.threads:
            thread.join(timeout=10)
