"""Clients of a Triton server: one request and its tensors, over gRPC and HTTP."""
