"""A stand-in for the process that tries guides, for tests that start no process: it has no bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtserve.executor.engine.guide_trial import read_tokenizer, try_guide
from trtserve.executor.engine.limits import GuideTokenizer
from trtserve.executor.engine.requests import GuideType


class TrialInThisProcess:
    """Answers as the process of `guide_trial` does."""

    def __init__(self, settings: GuideTokenizer) -> None:
        self._tokenizer = read_tokenizer(settings)

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Return the answer; this process has grown for many reasons, so the guide is said to take nothing."""
        answer = try_guide(self._tokenizer, GuideType[request["kind"]], request["guide"])
        return {**answer, "bytes": 0}

    def close(self) -> None:
        """Do nothing."""
