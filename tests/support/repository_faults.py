"""Single faults that are put into good repositories, each with the rule that must find it."""

from __future__ import annotations

from tests.support.core_faults import CORE_FAULTS
from tests.support.loading_faults import LOADING_FAULTS
from tests.support.model_faults import MODEL_FAULTS
from tests.support.repository_changes import Fault

__all__ = ["FAULTS", "Fault"]

FAULTS: tuple[Fault, ...] = (*MODEL_FAULTS, *CORE_FAULTS, *LOADING_FAULTS)
