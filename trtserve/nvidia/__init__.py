"""What NVIDIA's own tools need: facts about releases, converters, builder, containers, the LLM API."""
