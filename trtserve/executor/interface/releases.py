"""The executor interface of one release of TensorRT-LLM: its names and their keywords."""

from __future__ import annotations

from functools import cache
from types import ModuleType, SimpleNamespace

from trtserve.executor.interface import (
    configs,
    enums,
    requests,
    results,
    statistics,
)
from trtserve.executor.interface.executor import Executor
from trtserve.executor.interface.records import Record, in_span
from trtserve.nvidia.releases import RELEASES

_NAMES: dict[ModuleType, tuple[str, ...]] = {
    enums: (
        "ModelType",
        "BatchingType",
        "CapacitySchedulerPolicy",
        "ContextChunkingPolicy",
        "CommunicationType",
        "CommunicationMode",
        "RequestType",
        "RequestStage",
        "FinishReason",
        "KvCacheTransferMode",
        "DecodingMode",
    ),
    configs: (
        "ExecutorConfig",
        "SchedulerConfig",
        "DynamicBatchConfig",
        "KvCacheConfig",
        "RuntimeDefaults",
        "PeftCacheConfig",
        "ParallelConfig",
        "OrchestratorConfig",
        "DecodingConfig",
        "LookaheadDecodingConfig",
        "EagleConfig",
        "ExtendedRuntimePerfKnobConfig",
        "LogitsPostProcessorConfig",
        "DebugConfig",
        "SpeculativeDecodingConfig",
        "GuidedDecodingConfig",
        "CacheTransceiverConfig",
        "AdditionalModelOutput",
    ),
    requests: (
        "SamplingConfig",
        "OutputConfig",
        "Request",
        "ExternalDraftTokensConfig",
        "PromptTuningConfig",
        "LoraConfig",
        "MropeConfig",
        "KvCacheRetentionConfig",
        "GuidedDecodingParams",
        "ContextPhaseParams",
        "MultimodalInput",
    ),
    results: (
        "Result",
        "Response",
        "RequestPerfMetrics",
        "TimingMetrics",
        "KvCacheMetrics",
        "SpeculativeDecodingMetrics",
    ),
    statistics: (
        "IterationStats",
        "KvCacheStats",
        "InflightBatchingStats",
        "StaticBatchingStats",
        "SpecDecodingStats",
        "RequestStats",
        "RequestStatsPerIteration",
        "DisServingRequestStats",
        "DebugTensorsPerIteration",
    ),
}

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
    classes: dict[str, type] = {"Executor": Executor}
    for module, names in _NAMES.items():
        for name in names:
            if in_span(known, f"{_SINCE.get(name, RELEASES[0])}-"):
                item = getattr(module, name)
                classes[name] = item.of(known) if issubclass(item, Record) else item
    return SimpleNamespace(**classes, __version__=f"{known}.0")
