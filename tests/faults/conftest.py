"""Files whose tests only `make faults` runs: they mount file systems, or take minutes."""

from __future__ import annotations

from tests.support.supervised import ALL

_LONG = ("file_systems", "hostile_clients", "kills_of_models", "kills_of_ranks")
collect_ignore = [] if ALL else [f"test_{name}.py" for name in _LONG]
