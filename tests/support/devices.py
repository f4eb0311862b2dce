"""Where tests of the torch runtime run: on the CPU, or with TRTSERVE_TEST_DEVICE=cuda on GPUs (`make gpu-test`)."""

from __future__ import annotations

import os

from trtserve.specs.build import Device

DEVICE: Device = "cuda" if os.environ.get("TRTSERVE_TEST_DEVICE") == "cuda" else "cpu"
