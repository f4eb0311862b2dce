"""The enumerations of TensorRT-LLM's executor interface, with its values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trtserve.executor.engine.options import CapacitySchedulerPolicy, ContextChunkingPolicy
from trtserve.executor.engine.requests import FinishReason, GuideType, RequestStage

__all__ = [
    "BatchingType",
    "CapacitySchedulerPolicy",
    "CommunicationMode",
    "CommunicationType",
    "ContextChunkingPolicy",
    "DecodingMode",
    "FinishReason",
    "GuideType",
    "GuidedDecodingBackend",
    "KvCacheTransferMode",
    "ModelType",
    "RequestStage",
    "RequestType",
]


class ModelType(Enum):
    DECODER_ONLY = 0
    ENCODER_ONLY = 1
    ENCODER_DECODER = 2


class BatchingType(Enum):
    STATIC = 0
    INFLIGHT = 1


class CommunicationType(Enum):
    MPI = 0


class CommunicationMode(Enum):
    LEADER = 0
    ORCHESTRATOR = 1


class RequestType(Enum):
    REQUEST_TYPE_CONTEXT_AND_GENERATION = 0
    REQUEST_TYPE_CONTEXT_ONLY = 1
    REQUEST_TYPE_GENERATION_ONLY = 2


class GuidedDecodingBackend(Enum):
    XGRAMMAR = 0
    LLGUIDANCE = 1


class KvCacheTransferMode(Enum):
    DRAM = 0
    GDS = 1
    POSIX_DEBUG_FALLBACK = 2


@dataclass(frozen=True)
class DecodingMode:
    """How tokens are chosen. Unlike upstream, equal modes compare equal."""

    name: str

    @classmethod
    def Auto(cls) -> DecodingMode:  # noqa: N802 - the interface's names
        return cls("Auto")

    @classmethod
    def TopK(cls) -> DecodingMode:  # noqa: N802
        return cls("TopK")

    @classmethod
    def TopP(cls) -> DecodingMode:  # noqa: N802
        return cls("TopP")

    @classmethod
    def TopKTopP(cls) -> DecodingMode:  # noqa: N802
        return cls("TopKTopP")

    @classmethod
    def BeamSearch(cls) -> DecodingMode:  # noqa: N802
        return cls("BeamSearch")

    @classmethod
    def Medusa(cls) -> DecodingMode:  # noqa: N802
        return cls("Medusa")

    @classmethod
    def Lookahead(cls) -> DecodingMode:  # noqa: N802
        return cls("Lookahead")

    @classmethod
    def ExplicitDraftTokens(cls) -> DecodingMode:  # noqa: N802
        return cls("ExplicitDraftTokens")

    @classmethod
    def Eagle(cls) -> DecodingMode:  # noqa: N802
        return cls("Eagle")

    def isAuto(self) -> bool:  # noqa: N802
        return self.name == "Auto"

    def isTopK(self) -> bool:  # noqa: N802
        return self.name in ("TopK", "TopKTopP")

    def isTopP(self) -> bool:  # noqa: N802
        return self.name in ("TopP", "TopKTopP")

    def isTopKorTopP(self) -> bool:  # noqa: N802
        return self.isTopK() or self.isTopP()

    def isTopKandTopP(self) -> bool:  # noqa: N802
        return self.name == "TopKTopP"

    def isBeamSearch(self) -> bool:  # noqa: N802
        return self.name == "BeamSearch"

    def isMedusa(self) -> bool:  # noqa: N802
        return self.name == "Medusa"

    def isLookahead(self) -> bool:  # noqa: N802
        return self.name == "Lookahead"

    def isExplicitDraftTokens(self) -> bool:  # noqa: N802
        return self.name == "ExplicitDraftTokens"

    def isEagle(self) -> bool:  # noqa: N802
        return self.name == "Eagle"
