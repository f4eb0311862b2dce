"""The name that model repositories made before 0.1.0 import."""

from trtserve.nvidia.releases import NEWEST

__all__ = ["NEWEST"]
