"""TensorRT-LLM's executor interface on OpenVINO: requests in, tokens out, many at once."""
