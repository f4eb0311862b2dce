"""The executor's model on PyTorch: NVIDIA GPUs, or the same code on a CPU. Only loading an engine imports it."""
