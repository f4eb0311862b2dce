"""Triton model with the tensors of `tensorrt_llm_bls` and no model behind it; the prompt decides what happens.

`inputs` is answered with the JSON of all inputs, `fail` with an error, `forever` with a piece every 20 ms until the
request is cancelled (60 s at most), anything else with "Echo: " and the prompt, one word per response. Parameters:
`accumulate_tokens` as in the BLS model, `trace` (file that receives a line per endless request that began or was
cancelled).
"""

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value.item()


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.names = [entry["name"] for entry in config["input"]]
        self.decoupled = config["model_transaction_policy"]["decoupled"]
        values = {key: entry["string_value"] for key, entry in config["parameters"].items()}
        self.accumulate = values.get("accumulate_tokens") == "true"
        self.trace = values["trace"]
        self.ending = threading.Event()
        self.threads: list[threading.Thread] = []

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            thread = threading.Thread(target=self.answer, args=(request,))
            thread.start()
            self.threads.append(thread)

    def answer(self, request: Any) -> None:
        sender = request.get_response_sender()
        inputs = self.inputs(request)
        prompt = inputs["text_input"][0]
        if prompt == "fail":
            error = pb_utils.InferenceResponse(error=pb_utils.TritonError("asked to fail"))
            sender.send(error, flags=FINAL)
        elif prompt == "forever":
            self.babble(request, sender)
        else:
            text = json.dumps(inputs) if prompt == "inputs" else f"Echo: {prompt}"
            lead = "" if "exclude_input_in_output" in inputs else prompt
            self.send_text(sender, text, lead, stream=inputs.get("stream", [False])[0])

    def inputs(self, request: Any) -> dict[str, list[Any]]:
        tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in self.names}
        given = {name: tensor.as_numpy().reshape(-1) for name, tensor in tensors.items() if tensor is not None}
        return {name: [_plain(value) for value in values] for name, values in given.items()}

    def send_text(self, sender: Any, text: str, lead: str, *, stream: bool) -> None:
        if not stream:
            whole = self.response(f"{lead} {text}")
            if self.decoupled:
                sender.send(whole)
                sender.send(flags=FINAL)
            else:
                sender.send(whole, flags=FINAL)
            return
        pieces = [f" {word}" for word in text.split(" ")]
        for index, piece in enumerate(pieces):
            sender.send(self.response("".join(pieces[: index + 1]) if self.accumulate else piece))
        sender.send(flags=FINAL)

    def babble(self, request: Any, sender: Any) -> None:
        self.note(f"began {request.request_id()}")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not self.ending.is_set() and not sender.is_cancelled():
            if self.decoupled:
                sender.send(self.response(" la"))
            self.ending.wait(0.02)
        if sender.is_cancelled():
            self.note(f"cancelled {request.request_id()}")
        if not self.decoupled:
            sender.send(self.response(" la"), flags=FINAL)
        else:
            sender.send(flags=FINAL)

    def note(self, text: str) -> None:
        with Path(self.trace).open("a") as file:
            file.write(text + "\n")

    def response(self, text: str) -> Any:
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([text.encode()], np.object_))])

    def finalize(self) -> None:
        self.ending.set()
        for thread in self.threads:
            thread.join(timeout=5)
