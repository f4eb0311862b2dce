"""Clients of a Triton server: one request and its tensors, over gRPC, HTTP and OpenAI's API."""
