"""The compiled part of TensorRT-LLM."""
