"""Templates of manifests, job scripts and the proxy: a hostile value stays a value."""

from __future__ import annotations

import shlex

import jinja2
import pytest
import yaml

from trtserve.server.render import render, shell_value, yaml_block, yaml_value

HOSTILE = [
    "plain",
    "",
    "true",
    "1e5",
    "two words",
    "a: b # c",
    "- [x, {y}]",
    'it\'s "quoted"',
    "$(touch /tmp/x) `id` ${HOME}",
    "line\nbreak: injected",
    "{{ name }} {% raw %}",
    "\u2028separator\x85",
    "emoji \U0001f600 ü",
    "tab\tand\\backslash",
]


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_in_a_manifest_is_read_back_as_it_was(value: str) -> None:
    text = f"first:\n  key: {yaml_value(value)}\n  list:\n  - {yaml_value(value)}\nlast: {yaml_block(value, 2)}\n"
    assert yaml.safe_load(text) == {"first": {"key": value, "list": [value]}, "last": value}


def test_scripts_in_a_manifest_stay_readable() -> None:
    script = "#!/bin/bash\nif true; then\n    echo: 'x'\n\nfi\n"
    assert yaml_block(script, 4) == "|\n    #!/bin/bash\n    if true; then\n        echo: 'x'\n\n    fi"
    assert yaml.safe_load(f"a:\n  b: {yaml_block(script, 4)}\nc: 1\n") == {"a": {"b": script}, "c": 1}


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_in_a_script_is_one_word(value: str) -> None:
    assert shlex.split(f"command {shell_value(value)} end") == ["command", value, "end"]


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="shm_prefix"):
        render("node.sh.j2", repository="/r", gpus=1, tasks=1)
