"""The runtime on vLLM: its engine in a child process, behind TensorRT-LLM's executor interface."""
