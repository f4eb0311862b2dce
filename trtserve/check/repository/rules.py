"""Every rule that a repository is checked by, in the order in which their findings are told."""

from __future__ import annotations

from trtserve.check.repository.core_rules import ADAPTERS, ENGINES, LLMAPI, MACHINE, TOKENIZERS
from trtserve.check.repository.findings import Rule
from trtserve.check.repository.model_rules import ENSEMBLES, FILES, SETTINGS, TENSORS

RULES: tuple[Rule, ...] = (
    *FILES,
    *SETTINGS,
    *ENGINES,
    *TENSORS,
    *ENSEMBLES,
    *ADAPTERS,
    *TOKENIZERS,
    *LLMAPI,
    *MACHINE,
)
