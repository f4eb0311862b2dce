"""The names of vLLM that the engine side uses, around a model that counts: its next token is the last one plus one."""

from vllm._version import __version__
from vllm.sampling_params import PoolingParams, SamplingParams

__all__ = ["PoolingParams", "SamplingParams", "__version__"]
