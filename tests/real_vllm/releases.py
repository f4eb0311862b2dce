"""Write the table of vLLM's releases from their sources: `python -m tests.real_vllm.releases FOLDER …`, oldest first.

A folder has the files of a wheel: `pip download --no-deps vllm==0.33.0 && unzip vllm-*.whl 'vllm/*.py' -d FOLDER`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from trtserve.executor.vllm import installation
from trtserve.executor.vllm.installation import VllmInstallation

SOURCE = "model_executor/models/registry.py and engine/arg_utils.py of the wheels of vllm in the package index"


def spans(found: Sequence[tuple[str, frozenset[str]]]) -> dict[str, tuple[str, str | None]]:
    """Return the first release of each name, and the last one, or None for one that the newest has."""
    made: dict[str, tuple[str, str | None]] = {}
    for release, names in found:
        for name in sorted(names):
            made[name] = (made.get(name, (release, None))[0], release)
    newest = found[-1][0]
    return {name: (first, None if last == newest else last) for name, (first, last) in sorted(made.items())}


def main() -> None:
    """Write the table beside the module that reads it."""
    packages = [VllmInstallation(Path(), Path(folder) / "vllm") for folder in sys.argv[1:]]
    content = {
        "source": SOURCE,
        "releases": [each.version for each in packages],
        "architectures": spans([(each.version.rpartition(".")[0], each.architectures) for each in packages]),
        "arguments": spans([(each.version.rpartition(".")[0], each.arguments) for each in packages]),
    }
    lines = json.dumps(content, indent=1).replace("[\n   ", "[").replace(",\n   ", ", ").replace("\n  ]", "]")
    Path(installation.__file__).with_name("releases.json").write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
