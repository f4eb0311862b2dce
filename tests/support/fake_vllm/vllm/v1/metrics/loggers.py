"""The base of what takes statistics."""

from abc import ABC, abstractmethod
from typing import Any


class StatLoggerBase(ABC):
    @abstractmethod
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None: ...

    @abstractmethod
    def log_engine_initialized(self) -> None: ...
