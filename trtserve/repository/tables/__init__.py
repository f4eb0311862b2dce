"""NVIDIA's Triton models in every supported release: one YAML file per model, to compare with its config.pbtxt.

`inputs` and `outputs` have one tensor per line: name, type, dims, flags (`-`: none), releases. A type such as `$logits`
is chosen when the repository is made. `steps` of the ensemble connect a model's tensor with an ensemble tensor.

Releases are `all`, `0.15..` (and later), `..0.14` (and earlier) or `0.16..0.18`. What changed has one line per form.

`added_inputs` and `added_outputs` are in no release. Repositories that serve clients of all releases have them: the
finish reason (named as in NVIDIA's llmapi model) and adapters by name. `added_parameters` are read by trtserve's own
programs, in every release; they are written only when they are set.

A parameter has these keys:

- `values`: a list of words, or one of the forms that `profiles.values_of` reads.
- `unset`: the text in config.pbtxt when nothing is set (default: empty). `default` says in words what that means.
- `required`: it cannot be unset. `needs_key`: NVIDIA's C++ backend does not load a model without the key.
- What the embedded executor does with it, unless it works as in TensorRT-LLM: `ignored` and `refused` say why,
  `refused_values` and `accepted_values` limit the refusal, `differs` names a difference of accepted values.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from trtserve.nvidia.releases import RELEASES, Row


@cache
def load_model(name: str) -> dict[str, Any]:
    """Return the parsed content of `<name>.yaml`, or empty for a model without a table."""
    import yaml

    path = Path(__file__).with_name(f"{name}.yaml")
    if not path.exists():
        return {}
    # The C loader is ten times as fast; some builds of PyYAML lack it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    return content


def read_releases(text: str) -> tuple[str, str | None]:
    """`0.16..0.18` → ("0.16", "0.18"); the second is None for rows that the newest release still has."""
    since, _, until = text.removeprefix("all").partition("..")
    return since or RELEASES[0], until or None


def releases_text(row: Row) -> str:
    """`0.16 – 0.18`, `0.19 –`, `– 0.14` or `all`: the releases that have `row`."""
    since = "" if row.since == RELEASES[0] else row.since
    return f"{since} – {row.until or ''}".strip() if since or row.until else "all"


def rows_of(table: str) -> list[list[str]]:
    """Return the cells of each line, without comments and empty lines."""
    return [line.split() for line in table.splitlines() if line and not line.startswith("#")]
