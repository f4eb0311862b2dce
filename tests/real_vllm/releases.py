"""Write the table of vLLM's releases from their sources: `python -m tests.real_vllm.releases FOLDER …`, oldest first.

A folder has the files of a wheel: `pip download --no-deps vllm==0.33.0 && unzip vllm-*.whl 'vllm/*.py' -d FOLDER`.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from trtserve.executor.vllm import installation
from trtserve.executor.vllm.installation import VllmInstallation

SOURCE = "model_executor/models/registry.py and engine/arg_utils.py of the wheels of vllm in the package index"
_WHOLE: Any = {"break_long_words": False, "break_on_hyphens": False}


def spans(found: Sequence[tuple[str, frozenset[str]]]) -> dict[str, list[str]]:
    """Return the names by the releases that have them, from the first to the last one."""
    made: dict[str, tuple[str, str]] = {}
    for release, names in found:
        made |= {name: (made.get(name, (release, ""))[0], release) for name in names}
    newest = found[-1][0]
    ordered = sorted(made.items(), key=lambda item: ([int(part) for part in ".".join(item[1]).split(".")], item[0]))
    spelled = [
        (f"{first} and later" if last == newest else f"{first} – {last}", name) for name, (first, last) in ordered
    ]
    return {span: [name for _, name in group] for span, group in groupby(spelled, key=itemgetter(0))}


def lines(content: dict[str, Any]) -> str:
    """Return JSON with lists that fill their lines."""
    parts = []
    for key, value in content.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict):
            rows = (f'"{span}": {json.dumps(names)}' for span, names in value.items())
            wrapped = (textwrap.fill(row, 118, initial_indent="  ", subsequent_indent="   ", **_WHOLE) for row in rows)
            text = "{\n" + ",\n".join(wrapped) + "\n }"
        parts.append(f' "{key}": {text}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Write the table beside the module that reads it."""
    packages = [VllmInstallation(Path(), Path(folder) / "vllm") for folder in sys.argv[1:]]
    content = {
        "source": SOURCE,
        "releases": [each.version for each in packages],
        "architectures": spans([(each.version.rpartition(".")[0], each.architectures) for each in packages]),
        "pooling": spans([(each.version.rpartition(".")[0], each.pooling) for each in packages]),
        "arguments": spans([(each.version.rpartition(".")[0], each.arguments) for each in packages]),
    }
    Path(installation.__file__).with_name("releases.json").write_text(lines(content), encoding="utf-8")


if __name__ == "__main__":
    main()
