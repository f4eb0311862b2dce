"""The options of an import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtserve.artifacts import Engine, Model
from trtserve.specs import (
    BuildSpec,
    CheckSpec,
    ConvertSpec,
    RepositorySpec,
)


@dataclass(frozen=True, kw_only=True)
class ImportSpec:
    """The options of all stages of an import."""

    source: str
    convert: ConvertSpec
    build: BuildSpec
    repository: RepositorySpec  # its name is used for all artefacts
    tokenizer: Path | None = None  # a Hugging Face folder; None: the model's own
    draft: Engine | None = None  # engine of a draft model
    draft_tokenizer: Path | None = None  # folder of the draft model's tokenizer, if known
    engine_out: Path | None = None  # folder of the engine; None: in the store
    out: Path | None = None  # folder of the repository; None: in the store
    into: Path | None = None  # a repository to add the models to
    discard_intermediate: bool = False  # remove the checkpoint when the repository is complete
    verify: CheckSpec | None = None  # compare the checkpoint with the model before the build, even a reused one

    @property
    def name(self) -> str:
        """Name of all artefacts, and of the served model."""
        return self.repository.name

    def tokenizer_of(self, model: Model) -> Path:
        """Return the folder of the tokenizer that is served with `model`."""
        return self.tokenizer or model.path
