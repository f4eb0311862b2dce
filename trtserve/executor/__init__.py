"""TensorRT-LLM's executor interface on OpenVINO and PyTorch: continuous batching of requests over one engine."""

import sys

# With this package OpenVINO reports each import to Google Analytics and leaves files in ~/intel.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
