"""Templates of manifests, job scripts and the proxy: a hostile value stays a value."""

from __future__ import annotations

import shlex
from pathlib import Path

import jinja2
import pytest
import yaml

from trtserve.server.front import proxy_config
from trtserve.server.render import nginx_value, render, shell_value, yaml_block, yaml_value
from trtserve.server.triton.tritonserver import Address

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


def test_a_value_in_a_proxys_configuration_is_one_argument() -> None:
    assert nginx_value("/var/lib/x.proxy/pid") == "/var/lib/x.proxy/pid"
    assert nginx_value('/a b"; daemon on; #/pid') == '"/a b\\"; daemon on; #/pid"'
    address = Address(host="0.0.0.0", http_port=1, grpc_port=2, metrics_port=3)
    config = proxy_config([address], file=Path("/a b/nginx.conf"), http_port=8, grpc_port=9)
    assert 'pid "/a b/pid";' in config
    assert "server 127.0.0.1:1 max_fails=1" in config


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="shm_prefix"):
        render("node.sh.j2", repository="/r", gpus=1, tasks=1)
