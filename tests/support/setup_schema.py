"""The JSON schema of setup files, as the documentation has it."""

from __future__ import annotations

import json
from pathlib import Path

from jsonschema import Draft202012Validator

_SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "reference" / "setup-file.schema.json").read_text(encoding="utf-8")
)
Draft202012Validator.check_schema(_SCHEMA)
validate_setup = Draft202012Validator(_SCHEMA).validate
