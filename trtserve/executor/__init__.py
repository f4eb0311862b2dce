"""TensorRT-LLM's executor interface on OpenVINO and PyTorch: continuous batching of requests over one engine."""
