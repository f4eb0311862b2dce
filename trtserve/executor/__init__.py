"""TensorRT-LLM's executor interface on our engine (OpenVINO, PyTorch), and on vLLM: continuous batching of requests."""

import sys

# With this package OpenVINO reports each import to Google Analytics and leaves files in ~/intel.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
