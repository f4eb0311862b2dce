"""The names of `tensorrt_llm.bindings.executor`, implemented by the embedded executor.

The classes accept the keywords of every release, and have the newest defaults.
"""

# ruff: noqa: PLC0414 - programs import these names from here

from __future__ import annotations

import sys
from types import ModuleType

from trtserve.executor.engine.limits import CapacitySchedulerPolicy as CapacitySchedulerPolicy
from trtserve.executor.engine.limits import ContextChunkingPolicy as ContextChunkingPolicy
from trtserve.executor.engine.requests import FinishReason as FinishReason
from trtserve.executor.engine.requests import RequestStage as RequestStage
from trtserve.executor.interface.configs import AdditionalModelOutput as AdditionalModelOutput
from trtserve.executor.interface.configs import BatchingType as BatchingType
from trtserve.executor.interface.configs import CacheTransceiverConfig as CacheTransceiverConfig
from trtserve.executor.interface.configs import CommunicationMode as CommunicationMode
from trtserve.executor.interface.configs import CommunicationType as CommunicationType
from trtserve.executor.interface.configs import DebugConfig as DebugConfig
from trtserve.executor.interface.configs import DecodingConfig as DecodingConfig
from trtserve.executor.interface.configs import DecodingMode as DecodingMode
from trtserve.executor.interface.configs import DynamicBatchConfig as DynamicBatchConfig
from trtserve.executor.interface.configs import EagleConfig as EagleConfig
from trtserve.executor.interface.configs import ExecutorConfig as ExecutorConfig
from trtserve.executor.interface.configs import ExtendedRuntimePerfKnobConfig as ExtendedRuntimePerfKnobConfig
from trtserve.executor.interface.configs import GuidedDecodingConfig as GuidedDecodingConfig
from trtserve.executor.interface.configs import KvCacheConfig as KvCacheConfig
from trtserve.executor.interface.configs import KvCacheTransferMode as KvCacheTransferMode
from trtserve.executor.interface.configs import LogitsPostProcessorConfig as LogitsPostProcessorConfig
from trtserve.executor.interface.configs import LookaheadDecodingConfig as LookaheadDecodingConfig
from trtserve.executor.interface.configs import ModelType as ModelType
from trtserve.executor.interface.configs import OrchestratorConfig as OrchestratorConfig
from trtserve.executor.interface.configs import ParallelConfig as ParallelConfig
from trtserve.executor.interface.configs import PeftCacheConfig as PeftCacheConfig
from trtserve.executor.interface.configs import RequestType as RequestType
from trtserve.executor.interface.configs import RuntimeDefaults as RuntimeDefaults
from trtserve.executor.interface.configs import SchedulerConfig as SchedulerConfig
from trtserve.executor.interface.configs import SpeculativeDecodingConfig as SpeculativeDecodingConfig
from trtserve.executor.interface.executor import Executor as Executor
from trtserve.executor.interface.requests import ContextPhaseParams as ContextPhaseParams
from trtserve.executor.interface.requests import ExternalDraftTokensConfig as ExternalDraftTokensConfig
from trtserve.executor.interface.requests import GuidedDecodingParams as GuidedDecodingParams
from trtserve.executor.interface.requests import KvCacheRetentionConfig as KvCacheRetentionConfig
from trtserve.executor.interface.requests import LoraConfig as LoraConfig
from trtserve.executor.interface.requests import MropeConfig as MropeConfig
from trtserve.executor.interface.requests import MultimodalInput as MultimodalInput
from trtserve.executor.interface.requests import OutputConfig as OutputConfig
from trtserve.executor.interface.requests import PromptTuningConfig as PromptTuningConfig
from trtserve.executor.interface.requests import Request as Request
from trtserve.executor.interface.requests import SamplingConfig as SamplingConfig
from trtserve.executor.interface.results import DebugTensorsPerIteration as DebugTensorsPerIteration
from trtserve.executor.interface.results import DisServingRequestStats as DisServingRequestStats
from trtserve.executor.interface.results import InflightBatchingStats as InflightBatchingStats
from trtserve.executor.interface.results import IterationStats as IterationStats
from trtserve.executor.interface.results import KvCacheMetrics as KvCacheMetrics
from trtserve.executor.interface.results import KvCacheStats as KvCacheStats
from trtserve.executor.interface.results import RequestPerfMetrics as RequestPerfMetrics
from trtserve.executor.interface.results import RequestStats as RequestStats
from trtserve.executor.interface.results import RequestStatsPerIteration as RequestStatsPerIteration
from trtserve.executor.interface.results import Response as Response
from trtserve.executor.interface.results import Result as Result
from trtserve.executor.interface.results import SpecDecodingStats as SpecDecodingStats
from trtserve.executor.interface.results import SpeculativeDecodingMetrics as SpeculativeDecodingMetrics
from trtserve.executor.interface.results import StaticBatchingStats as StaticBatchingStats
from trtserve.executor.interface.results import TimingMetrics as TimingMetrics


def for_release(release: str) -> ModuleType:
    """Return this module: repositories of earlier versions ask for the names of a release."""
    del release
    return sys.modules[__name__]
