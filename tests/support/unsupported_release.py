"""A release of TensorRT-LLM that has no engines any more: trtserve serves it through the LLM API alone."""

from __future__ import annotations

from trtserve.nvidia.releases import LAST_WITH_ENGINES, order

_major, _minor = order(LAST_WITH_ENGINES)

ENGINELESS_RELEASE = f"{_major}.{_minor + 1}"
ENGINELESS = f"{ENGINELESS_RELEASE}.0"
