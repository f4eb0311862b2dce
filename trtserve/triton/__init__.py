"""Everything that knows Triton Inference Server: configuration, models, the server process and its clients."""
