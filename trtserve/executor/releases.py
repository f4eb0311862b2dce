"""The executor interface as one release of TensorRT-LLM has it: which names exist, which keywords they take."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from trtserve.executor import configs, enums, requests, results, statistics
from trtserve.executor.executor import Executor
from trtserve.executor.records import RELEASES, Record, in_span

_NAMES: dict[str, tuple[str, type]] = {
    "Executor": ("0.10-", Executor),
    **{
        name: (span, getattr(enums, name))
        for name, span in {
            "ModelType": "0.10-",
            "BatchingType": "0.10-",
            "CapacitySchedulerPolicy": "0.10-",
            "ContextChunkingPolicy": "0.10-",
            "CommunicationType": "0.10-",
            "CommunicationMode": "0.10-",
            "RequestType": "0.13-",
            "RequestStage": "0.10-",
            "FinishReason": "0.13-",
            "KvCacheTransferMode": "1.0-",
            "DecodingMode": "0.11-",
        }.items()
    },
    **{
        name: (span, getattr(configs, name))
        for name, span in {
            "ExecutorConfig": "0.10-",
            "SchedulerConfig": "0.10-",
            "DynamicBatchConfig": "0.15-",
            "KvCacheConfig": "0.10-",
            "RuntimeDefaults": "0.16-",
            "PeftCacheConfig": "0.10-",
            "ParallelConfig": "0.10-",
            "OrchestratorConfig": "0.10-",
            "DecodingConfig": "0.11-",
            "LookaheadDecodingConfig": "0.11-",
            "EagleConfig": "0.15-",
            "ExtendedRuntimePerfKnobConfig": "0.12-",
            "LogitsPostProcessorConfig": "0.13-",
            "DebugConfig": "0.13-",
            "SpeculativeDecodingConfig": "0.15-",
            "GuidedDecodingConfig": "0.16-",
            "CacheTransceiverConfig": "0.19-",
            "AdditionalModelOutput": "0.17-",
        }.items()
    },
    **{
        name: (span, getattr(requests, name))
        for name, span in {
            "SamplingConfig": "0.10-",
            "OutputConfig": "0.10-",
            "Request": "0.10-",
            "ExternalDraftTokensConfig": "0.11-",
            "PromptTuningConfig": "0.10-",
            "LoraConfig": "0.10-",
            "MropeConfig": "0.16-",
            "KvCacheRetentionConfig": "0.15-",
            "GuidedDecodingParams": "0.16-",
            "ContextPhaseParams": "0.13-",
            "MultimodalInput": "1.0-",
        }.items()
    },
    **{
        name: (span, getattr(results, name))
        for name, span in {
            "Result": "0.10-",
            "Response": "0.10-",
            "RequestPerfMetrics": "0.16-",
            "TimingMetrics": "0.16-",
            "KvCacheMetrics": "0.16-",
            "SpeculativeDecodingMetrics": "0.19-",
        }.items()
    },
    **{
        name: (span, getattr(statistics, name))
        for name, span in {
            "IterationStats": "0.10-",
            "KvCacheStats": "0.10-",
            "InflightBatchingStats": "0.10-",
            "StaticBatchingStats": "0.10-",
            "SpecDecodingStats": "1.0-",
            "RequestStats": "0.10-",
            "RequestStatsPerIteration": "0.10-",
            "DisServingRequestStats": "0.14-",
            "DebugTensorsPerIteration": "0.14-",
        }.items()
    },
}

_RELEASE_010: dict[str, type] = {
    "DecodingMode": enums.DecodingMode010,
    "SpeculativeDecodingConfig": requests.ExternalDraftTokensConfig,
}
"""Names of 0.10 that mean something else later."""


@cache
def for_release(release: str) -> SimpleNamespace:
    """A namespace that stands for `tensorrt_llm.bindings.executor` of `release` ("0.10" … "1.2", "0.17.0" as "0.17").

    Its constructors take exactly that release's keywords; its enumerations have the members of all releases, so that
    records of different releases compare. Raises ValueError for an unknown release.
    """
    known = ".".join(release.split(".")[:2])
    if known not in RELEASES:
        raise ValueError(f"{release!r} is no known release of TensorRT-LLM; expected one of {', '.join(RELEASES)}")
    names = {name: item for name, (span, item) in _NAMES.items() if in_span(known, span)}
    if known == "0.10":
        names |= _RELEASE_010
    members = {name: item.of(known) if issubclass(item, Record) else item for name, item in names.items()}
    version = {"__version__": f"{known}.0"} if in_span(known, "0.12-") else {}
    return SimpleNamespace(**members, **version)
