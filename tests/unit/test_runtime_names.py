"""Runtimes are known by one registry."""

from __future__ import annotations

from typing import get_args

from trtserve.executor.embedded import EmbeddedRuntime
from trtserve.executor.loaders import MODELS
from trtserve.executor.runtimes import RUNTIMES
from trtserve.specs import RuntimeName


def test_the_option_lists_the_registry() -> None:
    assert set(get_args(RuntimeName)) == {"auto", *RUNTIMES}


def test_each_runtime_is_registered_under_its_name() -> None:
    assert {runtime.name: runtime for runtime in RUNTIMES.values()} == RUNTIMES


def test_the_executor_loads_the_engines_of_embedded_runtimes() -> None:
    assert set(MODELS) == {
        name for name, runtime in RUNTIMES.items() if isinstance(runtime, EmbeddedRuntime) or runtime.folder_as_engine
    }
