"""What the modules of the package `tensorrt_llm` hold; the files of a bindings environment import it from here."""

from __future__ import annotations

import logging
from typing import Any

from trtserve.executor.interface.releases import for_release


class _Logger(logging.Logger):
    def set_level(self, level: str) -> None:
        """Set the level by its name, as TensorRT-LLM's logger does."""
        self.setLevel(level.upper())


logger = _Logger("tensorrt_llm", logging.WARNING)
logger.addHandler(logging.StreamHandler())


def executor_names(release: str) -> dict[str, Any]:
    """Return name → class of `tensorrt_llm.bindings.executor` in a release."""
    return vars(for_release(release))


def tokenizer_info(tokenizer: Any) -> dict[str, Any]:
    """Return the keywords of GuidedDecodingConfig that describe a tokenizer of transformers."""
    ids = tokenizer.get_vocab()
    ends = tokenizer.eos_token_id
    return {
        "encoded_vocab": sorted(ids, key=lambda token: ids[token]),
        "tokenizer_str": tokenizer.backend_tokenizer.to_str(),
        "stop_token_ids": [ends] if isinstance(ends, int) else list(ends or ()),
    }
