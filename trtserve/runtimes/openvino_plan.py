"""What an engine of the openvino runtime is: precision of arithmetic and cache, and the features of `trtllm-build`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtserve import machine
from trtserve.architectures.quantized import INT4_GROUPS, quant_algo
from trtserve.runtimes.base import WEIGHT_ONLY_INT4, EnginePlan
from trtserve.runtimes.features import Features


@dataclass(frozen=True, kw_only=True)
class OpenvinoPlan(EnginePlan):
    """An engine of OpenVINO; `compute_precision` and `kv_precision` are those of arithmetic and KV cache."""

    features: Features
    compute_precision: str
    kv_precision: str

    @property
    def precision(self) -> str:
        """Precision of weights, arithmetic and KV cache in words."""
        return f"{self.weights_precision} weights, {self.compute_precision} arithmetic, {self.kv_precision} KV cache"

    def settings(self) -> dict[str, Any]:
        """Features and precisions, and where int4 is made of floats, in groups of how many inputs at most."""
        groups = {"int4_group_size": INT4_GROUPS[0]} if quant_algo(self.config) == WEIGHT_ONLY_INT4 else {}
        return {**self.features.record(), **self._precisions(), **groups}

    def words(self) -> str:
        """What goes beyond plain decoding, in words."""
        return self.features.words()

    def build_config(self) -> dict[str, Any]:
        """What the features decide of it."""
        return {**self.features.build_config(), "plugin_config": self.features.plugin_config()}

    def facts(self) -> dict[str, Any]:
        """The machine, whose kernels decide speed and results."""
        return {"machine": machine.describe(), **self._precisions()}

    def config_outline(self) -> dict[str, Any]:
        """With the part that only our engines have."""
        return {**super().config_outline(), "trtserve": {"runtime": self.runtime, **self._precisions()}}

    def _precisions(self) -> dict[str, str]:
        return {"compute_precision": self.compute_precision, "kv_precision": self.kv_precision}
