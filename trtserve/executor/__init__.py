"""TensorRT-LLM's executor interface on OpenVINO: continuous batching of requests over one engine."""
