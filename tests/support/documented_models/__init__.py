"""A core model written from the documentation of TensorRT-LLM's executor interface and of Triton's Python backend."""
