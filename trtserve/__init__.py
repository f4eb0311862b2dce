"""From a Hugging Face checkpoint to a served and measured endpoint on Triton Inference Server."""

__version__ = "0.1.0"
