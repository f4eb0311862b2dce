"""Triton containers and the versions in them, from the compatibility page of the Triton server."""

from __future__ import annotations

from dataclasses import dataclass

from tests.doubles.settings import Settings

# tag, TensorRT-LLM, TensorRT, CUDA, Python, Triton (TRITON_VERSION of the server repository's release branches)
_ROWS = """
24.08 0.12.0 10.3.0 12.5.1.007 3.10 2.49.0
24.09 0.13.0 10.4.0 12.5.1.007 3.10 2.50.0
24.10 0.14.0 10.4.0 12.5.1.007 3.10 2.51.0
24.11 0.15.0 10.6.0 12.6.3 3.10 2.52.0
24.12 0.16.0 10.7.0 12.6.3 3.12 2.53.0
25.01 0.17.0 10.8.0.43 12.8.0.038 3.12 2.54.0
25.02 0.17.0.post1 10.8.0.43 12.8.0.038 3.12 2.55.0
25.03 0.18.0 10.9.0.34 12.8.1.012 3.12 2.56.0
25.04 0.18.2 10.9.0.34 12.8.1.012 3.12 2.57.0
25.05 0.19.0 10.9.0.34 12.8.1.012 3.12 2.58.0
25.06 0.20.0 10.10.0.31 12.9.0.036 3.12 2.59.0
25.07 0.20.0 10.10.0.31 12.9.0.036 3.12 2.59.1
25.08 0.21.0 10.11.0.33 12.9.0.043 3.12 2.60.0
25.09 1.0.0 10.11.0.33 12.9.1.010 3.12 2.61.0
25.10 1.0.0 10.11.0.33 12.9.1.010 3.12 2.62.0
25.11 1.0.3.2510 10.13.3.9 13.0.2.006 3.12 2.63.0
25.12 1.1.0 10.13.3.9 13.0.2.006 3.12 2.64.0
26.01 1.1.0 10.13.3.9 13.0.2.006 3.12 2.65.0
26.02 1.1.0 10.13.3.9 13.0.2.006 3.12 2.66.0
26.03 1.2.0 10.14.1.48 13.1.0.036 3.12 2.67.0
26.04 1.2.1 10.14.1.48 13.1.0.036 3.12 2.68.0
26.05 1.2.1 10.14.1.48 13.1.0.036 3.12 2.69.0
26.06 1.2.1 10.14.1.48 13.1.0.036 3.12 2.70.0
26.07 1.2.1 10.14.1.48 13.1.0.036 3.12 2.71.0
"""


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The versions in one container."""

    container: str
    tensorrt_llm: str
    tensorrt: str
    cuda: str
    python: str
    triton: str

    @property
    def release(self) -> tuple[int, int]:
        """TensorRT-LLM's release as two numbers: (0, 18)."""
        major, minor = self.tensorrt_llm.split(".")[:2]
        return int(major), int(minor)


CONTAINERS = {
    row[0]: Versions(container=row[0], tensorrt_llm=row[1], tensorrt=row[2], cuda=row[3], python=row[4], triton=row[5])
    for row in (line.split() for line in _ROWS.strip().splitlines())
}


def versions(settings: Settings) -> Versions:
    """Return the versions of this machine: of its container, or of the first container with the requested version."""
    if not settings.version:
        return CONTAINERS[settings.container]
    return next(row for row in CONTAINERS.values() if row.tensorrt_llm == settings.version)
