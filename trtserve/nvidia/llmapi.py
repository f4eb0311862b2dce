"""The runtime without engines: TensorRT-LLM's PyTorch backend loads the Hugging Face model."""

from __future__ import annotations

from trtserve.specs.runtime import Runtime


class LlmapiRuntime(Runtime):
    """TensorRT-LLM's LLM API, in a Triton model of its own."""

    name = "llmapi"
    requirements = frozenset({"gpu", "tensorrt_llm", "llm_api"})
    folder_loader = "TensorRT-LLM's PyTorch backend"
