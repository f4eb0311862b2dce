"""The names of `tensorrt_llm.bindings.executor`, implemented by the embedded executor.

The classes accept the keywords of every release, and have the newest defaults.
"""

# ruff: noqa: I001 - in rows

from __future__ import annotations

import sys
from types import ModuleType

from trtserve.executor.engine.limits import CapacitySchedulerPolicy, ContextChunkingPolicy
from trtserve.executor.engine.requests import FinishReason, RequestStage
from trtserve.executor.interface.configs import (
    AdditionalModelOutput, BatchingType, CacheTransceiverConfig, CommunicationMode, CommunicationType, DebugConfig,
    DecodingConfig, DecodingMode, DynamicBatchConfig, EagleConfig, ExecutorConfig, ExtendedRuntimePerfKnobConfig,
    GuidedDecodingConfig, KvCacheConfig, KvCacheTransferMode, LogitsPostProcessorConfig, LookaheadDecodingConfig,
    ModelType, OrchestratorConfig, ParallelConfig, PeftCacheConfig, RequestType, RuntimeDefaults, SchedulerConfig,
    SpeculativeDecodingConfig,
)  # fmt: skip
from trtserve.executor.interface.executor import Executor
from trtserve.executor.interface.requests import (
    ContextPhaseParams, ExternalDraftTokensConfig, GuidedDecodingParams, KvCacheRetentionConfig, LoraConfig,
    MropeConfig, MultimodalInput, OutputConfig, PromptTuningConfig, Request, SamplingConfig,
)  # fmt: skip
from trtserve.executor.interface.results import (
    DebugTensorsPerIteration, DisServingRequestStats, InflightBatchingStats, IterationStats, KvCacheMetrics,
    KvCacheStats, RequestPerfMetrics, RequestStats, RequestStatsPerIteration, Response, Result, SpecDecodingStats,
    SpeculativeDecodingMetrics, StaticBatchingStats, TimingMetrics,
)  # fmt: skip

__all__ = [
    "AdditionalModelOutput", "BatchingType", "CacheTransceiverConfig", "CapacitySchedulerPolicy", "CommunicationMode",
    "CommunicationType", "ContextChunkingPolicy", "ContextPhaseParams", "DebugConfig", "DebugTensorsPerIteration",
    "DecodingConfig", "DecodingMode", "DisServingRequestStats", "DynamicBatchConfig", "EagleConfig", "Executor",
    "ExecutorConfig", "ExtendedRuntimePerfKnobConfig", "ExternalDraftTokensConfig", "FinishReason",
    "GuidedDecodingConfig", "GuidedDecodingParams", "InflightBatchingStats", "IterationStats", "KvCacheConfig",
    "KvCacheMetrics", "KvCacheRetentionConfig", "KvCacheStats", "KvCacheTransferMode", "LogitsPostProcessorConfig",
    "LookaheadDecodingConfig", "LoraConfig", "ModelType", "MropeConfig", "MultimodalInput", "OrchestratorConfig",
    "OutputConfig", "ParallelConfig", "PeftCacheConfig", "PromptTuningConfig", "Request", "RequestPerfMetrics",
    "RequestStage", "RequestStats", "RequestStatsPerIteration", "RequestType", "Response", "Result", "RuntimeDefaults",
    "SamplingConfig", "SchedulerConfig", "SpecDecodingStats", "SpeculativeDecodingConfig",
    "SpeculativeDecodingMetrics", "StaticBatchingStats", "TimingMetrics",
]  # fmt: skip


def for_release(release: str) -> ModuleType:
    """Return this module: repositories of earlier versions ask for the names of a release."""
    del release
    return sys.modules[__name__]
