"""What is left of NVIDIA's templates in a config.pbtxt: `${name}` where no value was filled in.

NVIDIA's backends read the placeholder of an optional parameter as unset, so a repository that was filled as NVIDIA's
guides say keeps dozens of them. A placeholder outside of quotes is a syntax error, and one in a mandatory parameter
keeps the model from loading.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trtserve.repository.parameters import parameters_of
from trtserve.repository.profiles import CORE, POSTPROCESSING, PREPROCESSING

_PLACEHOLDER = re.compile(r"\$\{[^}]*\}?")
_PARAMETER = re.compile(
    r'key\s*:\s*"(?P<key>[^"]*)"\s*[,;]?\s*value\s*:?\s*\{\s*string_value\s*:\s*"(?P<text>\$\{[^}"]*\})"'
)
# A text that only the config.pbtxt of one model has.
_SIGNS = {CORE: '"gpt_model_type"', PREPROCESSING: '"QUERY"', POSTPROCESSING: '"TOKENS_BATCH"'}


def wrong_placeholders(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every placeholder that keeps a model from loading; those in comments do not."""
    code = "\n".join(line.split("#", 1)[0] for line in text.splitlines())
    model = next((model for model, sign in _SIGNS.items() if sign in code), CORE)
    needed = {row.name for row in parameters_of(model) if row.required}
    optional = {found.start("text") for found in _PARAMETER.finditer(code) if found["key"] not in needed}
    for found in _PLACEHOLDER.finditer(code):
        if found.start() not in optional:
            yield code.count("\n", 0, found.start()) + 1, found[0]


def parameter_texts(config: Any) -> dict[str, str]:
    """Return parameter → text of a ModelConfig message; empty where the placeholder is left."""
    texts = {key: str(value.string_value).strip() for key, value in config.parameters.items()}
    return {key: "" if _PLACEHOLDER.fullmatch(text) else text for key, text in texts.items()}


def unfilled_parameters(config: Any) -> list[str]:
    """Return the parameters of a ModelConfig message whose placeholder is left."""
    values = config.parameters.items()
    return sorted(key for key, value in values if _PLACEHOLDER.fullmatch(value.string_value.strip()))
