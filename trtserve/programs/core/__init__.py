"""Model `tensorrt_llm`: token ids in and out, on TensorRT-LLM's executor or the embedded one."""
