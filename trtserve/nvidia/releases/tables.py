"""The release tables: YAML files in this folder, one per subject, parsed on first use."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any


@functools.cache
def load_table(subject: str) -> Any:
    """Return the parsed content of `<subject>.yaml`."""
    import yaml

    text = Path(__file__).with_name(f"{subject}.yaml").read_text(encoding="utf-8")
    # The C loader is ten times as fast; some builds of PyYAML lack it.
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
