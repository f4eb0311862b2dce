"""An answer that follows a JSON schema: `python examples/openai_structured.py [URL] [MODEL]`."""

from __future__ import annotations

import json
import sys

from openai import OpenAI, OpenAIError

SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["cat", "dog", "bird"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    },
    "required": ["animal", "legs"],
    "additionalProperties": False,
}


def main(url: str = "http://localhost:8000/v1", model: str = "demo") -> None:
    """Print an animal; guided decoding allows nothing but JSON that fits the schema."""
    client = OpenAI(base_url=url, api_key="none")
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Describe an animal as JSON."}],
        max_tokens=200,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}},
    )
    print(json.loads(answer.choices[0].message.content or ""))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OpenAIError as error:
        sys.exit(f"{error} Is the server running? trtserve start demo")
