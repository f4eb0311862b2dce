"""Checkpoints that NVIDIA's own tools make: convert_checkpoint.py of TensorRT-LLM, and ModelOpt through quantize.py."""

from __future__ import annotations

from trtserve.upstream.commands import needs_calibration, tool_command
from trtserve.upstream.running import ToolMemory, run_tool
from trtserve.upstream.toolkit import Toolkit, find_toolkit

__all__ = ["ToolMemory", "Toolkit", "find_toolkit", "needs_calibration", "run_tool", "tool_command"]
