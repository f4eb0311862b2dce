"""Checkpoints that NVIDIA's own tools make: convert_checkpoint.py of TensorRT-LLM, and ModelOpt through quantize.py."""

from __future__ import annotations

from trtserve.nvidia.converters.commands import needs_calibration, tool_command
from trtserve.nvidia.converters.running import ToolMemory, run_tool
from trtserve.nvidia.converters.toolkit import Toolkit, find_toolkit

__all__ = ["ToolMemory", "Toolkit", "find_toolkit", "needs_calibration", "run_tool", "tool_command"]
