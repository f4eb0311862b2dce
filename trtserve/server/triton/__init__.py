"""The tritonserver process: where it is, how it starts, and what its log says."""
