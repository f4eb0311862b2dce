"""Headings in the help of `trtserve import`, which has the options of three other commands: one for each of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

# Options that fill no field of a spec, or that belong to the whole import although they do.
_OTHERS = {
    "name": "Options",
    "verify": "Checkpoint (as for convert)",
    "tokenizer": "Repository (as for repo)",
    "draft_engine": "Repository (as for repo)",
    "into": "Repository (as for repo)",
}


def group_by_stage(tree: Any) -> None:
    """Put each option of `import` in a command tree below the stage whose spec alone has it."""
    node = getattr(tree, "commands", {}).get("import")
    if node is None:
        return
    from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec

    specs = {
        "Checkpoint (as for convert)": ConvertSpec,
        "Engine (as for build)": BuildSpec,
        "Repository (as for repo)": RepositorySpec,
    }
    names = {title: {field.name for field in fields(spec)} for title, spec in specs.items()}
    for parameter in node.params:
        if parameter.param_type_name == "option" and parameter.rich_help_panel is None:
            parameter.rich_help_panel = _OTHERS.get(parameter.name) or _panel(parameter.name, names)


def _panel(option: str, names: Mapping[str, Collection[str]]) -> str | None:
    stages = [title for title, fields_of_it in names.items() if option in fields_of_it]
    return stages[0] if len(stages) == 1 else None
