"""A decoupled core model on `tensorrt_llm.bindings.executor`, as a user of TensorRT-LLM would write one.

It is copied into a repository as model.py, and knows nothing of trtserve.
"""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import tensorrt_llm.bindings.executor as trtllm
import tensorrt_llm.logger as logger
import triton_python_backend_utils as pb_utils


def _scalar(request: Any, name: str, default: Any) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0].item()


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        config = trtllm.ExecutorConfig(
            max_beam_width=int(parameters["max_beam_width"]["string_value"]),
            kv_cache_config=trtllm.KvCacheConfig(enable_block_reuse=True, max_tokens=2048),
            scheduler_config=trtllm.SchedulerConfig(trtllm.CapacitySchedulerPolicy.MAX_UTILIZATION),
            batching_type=trtllm.BatchingType.INFLIGHT,
        )
        folder = parameters["gpt_model_path"]["string_value"]
        self.executor = trtllm.Executor(folder, trtllm.ModelType.DECODER_ONLY, config)
        self.senders: dict[int, Any] = {}
        self.lock, self.running = threading.Lock(), True
        self.thread = threading.Thread(target=self.answer)
        self.thread.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()[0].tolist()
            log_probs = bool(_scalar(request, "return_log_probs", False))
            wanted = trtllm.Request(
                input_token_ids=ids,
                max_tokens=_scalar(request, "request_output_len", 1),
                streaming=bool(_scalar(request, "streaming", False)),
                sampling_config=trtllm.SamplingConfig(beam_width=_scalar(request, "beam_width", 1)),
                output_config=trtllm.OutputConfig(return_log_probs=log_probs),
            )
            with self.lock:
                self.senders[self.executor.enqueue_request(wanted)] = request.get_response_sender()

    def answer(self) -> None:
        while self.running:
            for response in self.executor.await_responses(timeout=timedelta(milliseconds=50)):
                with self.lock:
                    sender = self.senders[response.request_id]
                if response.has_error():
                    logger.debug(response.error_msg)
                    error = pb_utils.TritonError(response.error_msg)
                    failed = pb_utils.InferenceResponse(output_tensors=[], error=error)
                    sender.send(failed, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                    continue
                result = response.result
                beams = result.output_token_ids
                tensors = [
                    pb_utils.Tensor("output_ids", np.array([beams], dtype=np.int32)),
                    pb_utils.Tensor("sequence_length", np.array([[len(beam) for beam in beams]], dtype=np.int32)),
                ]
                if result.cum_log_probs is not None:
                    tensors.append(pb_utils.Tensor("cum_log_probs", np.array([result.cum_log_probs], dtype=np.float32)))
                final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if result.is_final else 0
                sender.send(pb_utils.InferenceResponse(tensors), flags=final)

    def finalize(self) -> None:
        self.running = False
        self.thread.join()
        self.executor.shutdown()
