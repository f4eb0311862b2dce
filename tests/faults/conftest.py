"""Files whose tests only `make faults` runs: they mount file systems, or take minutes."""

from __future__ import annotations

from tests.support.supervised import ALL

collect_ignore = [] if ALL else ["test_file_systems.py", "test_hostile_clients.py", "test_kills_of_models.py"]
