"""The plan of an OpenVINO engine: precision of arithmetic and KV cache, and the features of `trtllm-build`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtserve.checkpoint.quantized import INT4_GROUPS, quant_algo
from trtserve.executor.features import Features
from trtserve.host import machine
from trtserve.specs.runtime import WEIGHT_ONLY_INT4, EnginePlan


@dataclass(frozen=True, kw_only=True)
class OpenvinoPlan(EnginePlan):
    """An OpenVINO engine; `compute_precision` and `kv_precision` apply to arithmetic and KV cache."""

    features: Features
    compute_precision: str
    kv_precision: str

    @property
    def needs_gpu(self) -> bool:
        """Whether the engine runs on NVIDIA GPUs."""
        return False

    @property
    def precision(self) -> str:
        """Describe the precision of weights, arithmetic and KV cache."""
        return f"{self.weights_precision} weights, {self.compute_precision} arithmetic, {self.kv_precision} KV cache"

    def settings(self) -> dict[str, Any]:
        """Features and precisions, and the maximum group size of int4 made from floats."""
        groups = {"int4_group_size": INT4_GROUPS[0]} if quant_algo(self.config) == WEIGHT_ONLY_INT4 else {}
        return {**self.features.record(), **self._precisions(), **groups}

    def words(self) -> str:
        """Describe the features beyond plain decoding."""
        return self.features.words()

    def build_config(self) -> dict[str, Any]:
        """The features' keys of `build_config`."""
        return {**self.features.build_config(), "plugin_config": self.features.plugin_config()}

    def facts(self) -> dict[str, Any]:
        """The machine, whose kernels determine speed and results."""
        return {"machine": machine.describe(), **self._precisions()}

    def config_outline(self) -> dict[str, Any]:
        """The outline plus the part specific to our engines."""
        return {**super().config_outline(), "trtserve": {"runtime": self.runtime, **self._precisions()}}

    def _precisions(self) -> dict[str, str]:
        return {"compute_precision": self.compute_precision, "kv_precision": self.kv_precision}
