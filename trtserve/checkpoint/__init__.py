"""TensorRT-LLM checkpoints: read source weights, map, cast and shard them, and write rank files."""
