"""Model `llmapi`: text in and out, on TensorRT-LLM's LLM API."""
