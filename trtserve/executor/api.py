"""The names of `tensorrt_llm.bindings.executor`, implemented by the embedded executor.

These classes accept the keywords of every release, with the newest defaults; `for_release` returns one release's.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from trtserve.executor.engine.limits import CapacitySchedulerPolicy, ContextChunkingPolicy
from trtserve.executor.engine.requests import FinishReason, RequestStage
from trtserve.executor.interface.configs import (
    AdditionalModelOutput,
    BatchingType,
    CacheTransceiverConfig,
    CommunicationMode,
    CommunicationType,
    DebugConfig,
    DecodingConfig,
    DecodingMode,
    DynamicBatchConfig,
    EagleConfig,
    ExecutorConfig,
    ExtendedRuntimePerfKnobConfig,
    GuidedDecodingConfig,
    KvCacheConfig,
    KvCacheTransferMode,
    LogitsPostProcessorConfig,
    LookaheadDecodingConfig,
    ModelType,
    OrchestratorConfig,
    ParallelConfig,
    PeftCacheConfig,
    RequestType,
    RuntimeDefaults,
    SchedulerConfig,
    SpeculativeDecodingConfig,
)
from trtserve.executor.interface.executor import Executor
from trtserve.executor.interface.records import Record, in_span
from trtserve.executor.interface.requests import (
    ContextPhaseParams,
    ExternalDraftTokensConfig,
    GuidedDecodingParams,
    KvCacheRetentionConfig,
    LoraConfig,
    MropeConfig,
    MultimodalInput,
    OutputConfig,
    PromptTuningConfig,
    Request,
    SamplingConfig,
)
from trtserve.executor.interface.results import (
    DebugTensorsPerIteration,
    DisServingRequestStats,
    InflightBatchingStats,
    IterationStats,
    KvCacheMetrics,
    KvCacheStats,
    RequestPerfMetrics,
    RequestStats,
    RequestStatsPerIteration,
    Response,
    Result,
    SpecDecodingStats,
    SpeculativeDecodingMetrics,
    StaticBatchingStats,
    TimingMetrics,
)
from trtserve.nvidia.releases import RELEASES

__all__ = [
    "AdditionalModelOutput",
    "BatchingType",
    "CacheTransceiverConfig",
    "CapacitySchedulerPolicy",
    "CommunicationMode",
    "CommunicationType",
    "ContextChunkingPolicy",
    "ContextPhaseParams",
    "DebugConfig",
    "DebugTensorsPerIteration",
    "DecodingConfig",
    "DecodingMode",
    "DisServingRequestStats",
    "DynamicBatchConfig",
    "EagleConfig",
    "Executor",
    "ExecutorConfig",
    "ExtendedRuntimePerfKnobConfig",
    "ExternalDraftTokensConfig",
    "FinishReason",
    "GuidedDecodingConfig",
    "GuidedDecodingParams",
    "InflightBatchingStats",
    "IterationStats",
    "KvCacheConfig",
    "KvCacheMetrics",
    "KvCacheRetentionConfig",
    "KvCacheStats",
    "KvCacheTransferMode",
    "LogitsPostProcessorConfig",
    "LookaheadDecodingConfig",
    "LoraConfig",
    "ModelType",
    "MropeConfig",
    "MultimodalInput",
    "OrchestratorConfig",
    "OutputConfig",
    "ParallelConfig",
    "PeftCacheConfig",
    "PromptTuningConfig",
    "Request",
    "RequestPerfMetrics",
    "RequestStage",
    "RequestStats",
    "RequestStatsPerIteration",
    "RequestType",
    "Response",
    "Result",
    "RuntimeDefaults",
    "SamplingConfig",
    "SchedulerConfig",
    "SpecDecodingStats",
    "SpeculativeDecodingConfig",
    "SpeculativeDecodingMetrics",
    "StaticBatchingStats",
    "TimingMetrics",
    "for_release",
]

_SINCE = {
    "ContextPhaseParams": "0.13",
    "DebugConfig": "0.13",
    "FinishReason": "0.13",
    "LogitsPostProcessorConfig": "0.13",
    "RequestType": "0.13",
    "DebugTensorsPerIteration": "0.14",
    "DisServingRequestStats": "0.14",
    "DynamicBatchConfig": "0.15",
    "EagleConfig": "0.15",
    "KvCacheRetentionConfig": "0.15",
    "SpeculativeDecodingConfig": "0.15",
    "GuidedDecodingConfig": "0.16",
    "GuidedDecodingParams": "0.16",
    "KvCacheMetrics": "0.16",
    "MropeConfig": "0.16",
    "RequestPerfMetrics": "0.16",
    "RuntimeDefaults": "0.16",
    "TimingMetrics": "0.16",
    "AdditionalModelOutput": "0.17",
    "CacheTransceiverConfig": "0.19",
    "SpeculativeDecodingMetrics": "0.19",
    "KvCacheTransferMode": "1.0",
    "MultimodalInput": "1.0",
    "SpecDecodingStats": "1.0",
}
"""First release of the names that 0.12 does not have."""


@cache
def for_release(release: str) -> SimpleNamespace:
    """Return a namespace like `tensorrt_llm.bindings.executor` of `release` ("0.12" … "1.2", "0.17.0").

    Its constructors accept exactly that release's keywords. Its enumerations have the members of all releases, so that
    records of different releases can be compared. Raises ValueError for an unknown release.
    """
    known = ".".join(release.split(".")[:2])
    if known not in RELEASES:
        raise ValueError(
            f"{release!r} is not a supported release of TensorRT-LLM; expected one of {', '.join(RELEASES)}"
        )
    classes: dict[str, type] = {}
    for name in __all__:
        item = globals()[name]
        if isinstance(item, type) and in_span(known, f"{_SINCE.get(name, RELEASES[0])}-"):
            classes[name] = item.of(known) if issubclass(item, Record) else item
    return SimpleNamespace(**classes, __version__=f"{known}.0")
