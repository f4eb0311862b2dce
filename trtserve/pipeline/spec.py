"""Everything that an import can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtserve.artifacts import Engine, Model
from trtserve.specs import BuildSpec, CheckSpec, ConvertSpec, RepositorySpec


@dataclass(frozen=True, kw_only=True)
class ImportSpec:
    """Everything that `import` can be asked for; the repository's name is the name of all artefacts.

    `tokenizer` is a Hugging Face folder, None for the model's own; `draft` is the engine of a draft model, and
    `draft_tokenizer` its tokenizer's folder where that is known. `engine_out` and `out` are the folders of engine and
    repository, None for the store; `into` is a repository to which the models are added. `discard_intermediate`
    removes the checkpoint when the repository is there. With `verify` the checkpoint is compared with the model before
    it is built, also one that is reused.
    """

    source: str
    convert: ConvertSpec
    build: BuildSpec
    repository: RepositorySpec
    tokenizer: Path | None = None
    draft: Engine | None = None
    draft_tokenizer: Path | None = None
    engine_out: Path | None = None
    out: Path | None = None
    into: Path | None = None
    discard_intermediate: bool = False
    verify: CheckSpec | None = None

    @property
    def name(self) -> str:
        """The name under which everything is filed and served."""
        return self.repository.name

    def tokenizer_of(self, model: Model) -> Path:
        """The folder whose tokenizer is served with `model`."""
        return self.tokenizer or model.path
