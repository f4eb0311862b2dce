"""Write an import as a setup file."""

from __future__ import annotations

from typing import Any

import yaml

from trtserve.errors import ArtifactError, UsageError
from trtserve.pipeline.import_records import recorded_spec
from trtserve.specs.command_line import given_values
from trtserve.store import Store


def setup_of_import(name: str, store: Store) -> str:
    """Return a setup file that makes the import `name` again, with its options, and serves it.

    Raises ArtifactError when there is no such import, and UsageError for one that a file cannot describe.
    """
    known = {record.name: record for record in store.recorded()}
    if name not in known:
        names = ", ".join(known)
        raise ArtifactError(
            f"Nothing was imported as {name!r}.", hint=f"Imports: {names}." if names else "Import a model first."
        )
    spec = recorded_spec(known[name])
    if spec is None:
        raise UsageError(f"The record of {name!r} does not say how it was made.", hint="Import it again.")
    if spec.draft is not None:
        raise UsageError(
            f"{name!r} has a draft engine, and a setup file describes the model that drafts.",
            hint="Start from examples/setups/draft-and-target.yaml.",
        )
    model: dict[str, Any] = {"source": spec.source}
    if spec.tokenizer is not None:
        model["tokenizer"] = str(spec.tokenizer)
    for part in (spec.convert, spec.build, spec.repository):
        model |= given_values(part)
    content = {"models": {name: model}, "servers": {name: {"model": name}}}
    text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return text
