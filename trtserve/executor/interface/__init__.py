"""The names of `tensorrt_llm.bindings.executor`, at the edge of the engine."""
