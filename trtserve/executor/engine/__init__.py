"""The engine: scheduler, KV cache, steps, sampling, guides and adapters."""
