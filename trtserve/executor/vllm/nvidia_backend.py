"""NVIDIA's Triton backend `vllm` on our engine side: text in and out, with vLLM's own parameters as JSON.

A model of it has `backend: "vllm"` and the arguments of vLLM's engine in `1/model.json`. Its inputs and outputs follow
docs/README of triton-inference-server/vllm_backend (26.01). Where Triton has no such backend, `prepare_backends` makes
one that loads this module.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from trtserve.executor.vllm.arguments import ADAPTERS, MODEL_JSON, PYTHON, ModelJson, read_adapters
from trtserve.executor.vllm.engine import VllmProcess
from trtserve.executor.vllm.installation import require_installation
from trtserve.programs.shared.arrays import encoded
from trtserve.programs.shared.engine_model import EngineModel
from trtserve.programs.shared.run_folder import STOPPED
from trtserve.programs.shared.senders import GuardedSender, error_response

_TEXTS = ("text_input", "sampling_parameters", "image", "embedding_request")
_RETURNED = {
    "finish_reason": "TYPE_STRING",
    "cumulative_logprob": "TYPE_FP32",
    "logprobs": "TYPE_STRING",
    "num_input_tokens": "TYPE_UINT32",
    "num_output_tokens": "TYPE_UINT32",
}
_SWITCHES = ("stream", "exclude_input_in_output", *(f"return_{name}" for name in _RETURNED))
_ELSEWHERE = "is for NVIDIA's own backend: trtserve start --container 26.08"
_MOST_SEQUENCES = 1024
_CANCEL_PERIOD = 0.1

Inputs = Mapping[str, NDArray[Any]]


class TextRequest:
    """A request of one prompt, and the answers that it gets."""

    number = 0  # its number in the engine

    def __init__(self, inputs: Inputs, parameters: str, sender: GuardedSender, adapters: Mapping[str, str]) -> None:
        """`parameters`: those of the request itself, which the input sampling_parameters replaces.

        Raises ValueError or TypeError, which says what is wrong, for what this backend cannot do too.
        """
        if "image" in inputs and inputs["image"].size:
            raise ValueError(f"image {_ELSEWHERE}")
        if "text_input" not in inputs or inputs["text_input"].size != 1:
            raise ValueError("text_input must have one prompt")
        self.sender, self._prompt = sender, _text(inputs["text_input"])
        set_ = {name for name in _SWITCHES if name in inputs and bool(inputs[name].reshape(-1)[0])}
        stream, excludes = "stream" in set_, "exclude_input_in_output" in set_
        if stream and not excludes and "exclude_input_in_output" in inputs:
            raise ValueError("a stream cannot begin with the prompt: leave exclude_input_in_output out, or set it")
        self._repeats = not stream and not excludes
        self._returned = [name for name in _RETURNED if f"return_{name}" in set_]
        given = "sampling_parameters" in inputs
        sampling = json.loads(_text(inputs["sampling_parameters"]) if given else parameters or "{}")
        if not isinstance(sampling, dict):
            raise TypeError("sampling_parameters must be a JSON object with the parameters of vLLM's SamplingParams")
        own = () if given else ("id", "triton_enable_empty_final_response")  # Triton's own
        sampling = {name: value for name, value in sampling.items() if value is not None and name not in own}
        self._count = int(sampling.get("n", 1))
        if not 1 <= self._count <= _MOST_SEQUENCES:
            raise ValueError(f"n is {self._count}; expected 1 … {_MOST_SEQUENCES}")
        self.asked: dict[str, Any] = {"text": self._prompt, "stream": stream, "sampling": sampling}
        if (guide := sampling.pop("structured_outputs", sampling.pop("guided_decoding", None))) is not None:
            self.asked["guide"] = json.loads(guide) if isinstance(guide, str) else guide
        if (name := sampling.pop("lora_name", None)) is not None:
            if name not in adapters:
                raise ValueError(f"LoRA {name} is not in {ADAPTERS}, which has {', '.join(adapters) or 'none'}")
            self.asked["lora"] = (name, list(adapters).index(name) + 1, adapters[name])

    def send(self, news: Mapping[str, Any]) -> None:
        """Send what is new; a sequence without news has an empty text."""
        rows: list[Mapping[str, Any]] = [{"text": "", "tokens": 0, "cumulative": np.nan}] * self._count
        for each in news["sequences"]:
            rows[each["index"]] = each
        before = self._prompt if self._repeats else ""
        found = {"text_output": encoded([before + row["text"] for row in rows])}
        columns: dict[str, Callable[[], NDArray[Any]]] = {
            "finish_reason": lambda: encoded([str(row.get("reason")) for row in rows]),
            "cumulative_logprob": lambda: np.array([row["cumulative"] for row in rows], np.float32),
            "logprobs": lambda: encoded([json.dumps(row.get("logprobs")) for row in rows]),
            "num_input_tokens": lambda: np.array([news["prompt_tokens"]], np.uint32),
            "num_output_tokens": lambda: np.array([row["tokens"] for row in rows], np.uint32),
        }
        found |= {name: columns[name]() for name in self._returned}
        tensors = [pb_utils.Tensor(name, array) for name, array in found.items()]
        self.sender.send(pb_utils.InferenceResponse(output_tensors=tensors), final=news["finished"])


class EmbeddingRequest:
    """A request for the vector of one text: JSON with `input`, a text or token ids, and `pooling_params`.

    The gateway ranks documents with two more keys: `ranks`, for a query, is answered with null by a model that reads
    query and document together; that is then asked with `query` and each document as `input`.
    """

    number = 0  # its number in the engine

    def __init__(self, inputs: Inputs, sender: GuardedSender) -> None:
        """Raises ValueError or TypeError, which says what is wrong."""
        self.sender = sender
        given = json.loads(_text(inputs["embedding_request"])) if "embedding_request" in inputs else None
        if not isinstance(given, dict) or not isinstance(given.get("pooling_params", {}), dict):
            raise TypeError("embedding_request must be a JSON object with input, and maybe pooling_params")
        prompt = given.get("input")
        if not (isinstance(prompt, str) or (isinstance(prompt, list) and all(type(each) is int for each in prompt))):
            raise TypeError("input of embedding_request must be a text or a list of token ids")
        if not prompt:
            raise ValueError("input of embedding_request is empty")
        query = given.get("query")
        if query is not None and not (isinstance(query, str) and query and isinstance(prompt, str)):
            raise TypeError("query of embedding_request must be a text, beside a text as input")
        words = {name: value for name, value in given.get("pooling_params", {}).items() if value is not None}
        if isinstance(words.get("dimensions"), list) and words["dimensions"]:  # as NVIDIA's front end writes it
            words["dimensions"] = words["dimensions"][0]
        if unknown := words.keys() - {"dimensions"}:
            raise ValueError(f"pooling_params has {min(unknown)}; this backend knows dimensions")
        self.asked: dict[str, Any] = {"pooling": words, "text" if isinstance(prompt, str) else "prompt": prompt}
        self.asked |= {"query": query, "ranks": given.get("ranks") is True}

    def send(self, news: Mapping[str, Any]) -> None:
        """Send the vector as JSON, and the tokens of its text."""
        tensors = [
            pb_utils.Tensor("text_output", encoded([json.dumps(news["vector"])])),
            pb_utils.Tensor("num_input_tokens", np.array([news["prompt_tokens"]], np.uint32)),
        ]
        self.sender.send(pb_utils.InferenceResponse(output_tensors=tensors), final=news["finished"])


class TextEngine(VllmProcess):
    """The open requests of one model."""

    _open: dict[int, TextRequest | EmbeddingRequest]

    def opened(self) -> list[TextRequest | EmbeddingRequest]:
        """Return the requests that vLLM works on."""
        with self._lock:
            return list(self._open.values())

    def submit(self, request: TextRequest | EmbeddingRequest) -> None:
        """Hand a request to vLLM. Raises RuntimeError when vLLM is dead."""
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            request.number, self._next_id = self._next_id, self._next_id + 1
            self._submit(request.number, request, request.asked)

    def cancel(self, request: TextRequest | EmbeddingRequest) -> None:
        """Cancel a request, unless it has ended."""
        with self._lock:
            found = self._open.pop(request.number, None)
            self._child.send(["cancel", request.number])
        if found is not None:
            error = pb_utils.TritonError("Request was cancelled", pb_utils.TritonError.CANCELLED)
            _send(found, pb_utils.InferenceResponse(output_tensors=[], error=error))

    def _answered(self, answers: list[tuple[str, int, Any]]) -> None:
        for kind, number, news in answers:
            refused = kind == "refused"
            with self._lock:
                request = self._open.pop(number, None) if refused or news["finished"] else self._open.get(number)
            if request is not None:
                _send(request, error_response(f"{TritonPythonModel.problem}: {news}") if refused else news)

    def _failed(self, message: str) -> None:
        for request in self._open.values():
            _send(request, error_response(message))


class TritonPythonModel(EngineModel):
    """A model of the backend."""

    problem = "Error generating stream"

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Declare the inputs and outputs that config.pbtxt leaves out. Every answer may have many responses."""
        config = auto_complete_model_config
        content = config.as_dict()
        declared = {each["name"] for kind in ("input", "output") for each in content[kind]}
        kinds = {**dict.fromkeys(_TEXTS, "TYPE_STRING"), **dict.fromkeys(_SWITCHES, "TYPE_BOOL")}
        for name, kind in kinds.items():
            dims = [-1] if name == "image" else [1]
            if name not in declared:
                config.add_input({"name": name, "data_type": kind, "dims": dims, "optional": True})
        for name, kind in {"text_output": "TYPE_STRING", **_RETURNED}.items():
            if name not in declared:
                config.add_output({"name": name, "data_type": kind, "dims": [1 if name == "num_input_tokens" else -1]})
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def load(self, args: dict[str, str], config: dict[str, Any]) -> float:
        """Start vLLM with the arguments of model.json."""
        logging.basicConfig(format="%(message)s")
        folder = Path(args["model_repository"], args["model_version"])
        settings = ModelJson.read(folder / MODEL_JSON)
        self._adapters = read_adapters(folder) if settings.adapters else {}
        self._pools = settings.pools
        gpus, named = (config["parameters"].get(key, {}).get("string_value", "") for key in ("GPU_DEVICE_IDS", PYTHON))
        if args["model_instance_kind"] == "GPU":
            gpus = args["model_instance_device_id"]
        environment = {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        model = Path(args["model_repository"]).resolve().parent / settings.model
        # A folder of the repository becomes an absolute path; other folders and names of the hub stay as they are.
        arguments = {**settings.arguments, **({"model": str(model)} if model.is_dir() else {})}
        python = require_installation(recorded=named).python
        # The watch over its steps needs the statistics.
        self._engine = TextEngine(python, {**arguments, "disable_log_stats": False}, environment=environment)
        self._reader = threading.Thread(target=self._engine.run, daemon=True)
        self._reader.start()
        return _CANCEL_PERIOD

    def submit(self, request: Any, sender: GuardedSender) -> None:
        """Hand a request to vLLM."""
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if "embedding_request" not in inputs and not self._pools:
            self._engine.submit(TextRequest(inputs, request.parameters(), sender, self._adapters))
        elif self._pools:
            self._engine.submit(EmbeddingRequest(inputs, sender))
        else:
            raise ValueError('embedding_request needs a pooling model: "runner": "pooling" in model.json')

    def opened(self) -> Sequence[Any]:
        """Return the requests that vLLM works on."""
        return self._engine.opened()

    def cancel(self, request: Any) -> None:
        """Cancel a request in vLLM."""
        self._engine.cancel(request)

    def progress(self) -> int:
        """Return the steps that vLLM has made."""
        return self._engine.progress

    def failure(self) -> str | None:
        """Return why vLLM is dead or hangs."""
        hang = self._engine.hang()
        return self._engine.failure if hang is None else f"{STOPPED}: {hang}"

    def close(self) -> None:
        """Wait for the open requests, then end vLLM."""
        self._engine.terminate()
        self._reader.join()


def _send(request: TextRequest | EmbeddingRequest, answer: Any) -> None:
    """Send an error, or what is new; a client that has gone must not end the thread that serves all."""
    try:
        if isinstance(answer, Mapping):
            request.send(answer)
        else:
            request.sender.send(answer, final=True)
    except Exception as error:  # noqa: BLE001 - Triton's errors have no common class
        pb_utils.Logger.log_error(f"A response could not be sent: {error}")


def _text(tensor: NDArray[Any]) -> str:
    value = tensor.reshape(-1)[0]
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
