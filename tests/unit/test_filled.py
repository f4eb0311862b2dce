"""Specs of commands: every field has an option, and the options reach their fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields

import pytest

from trtserve.cli import bench, convert, import_
from trtserve.cli.filled import filled
from trtserve.specs import BenchSpec, BuildSpec, ConvertSpec


@pytest.mark.parametrize(
    ("spec", "commands"),
    [
        (ConvertSpec, [convert.convert]),
        (ConvertSpec, [import_.import_]),
        (BuildSpec, [import_.import_]),
        (BenchSpec, [bench.token_norm_dist, bench.dataset]),
    ],
)
def test_every_field_has_an_option(spec: type, commands: list[Callable[..., None]]) -> None:
    options = {name for command in commands for name in inspect.signature(command).parameters}
    assert {field.name for field in fields(spec)} <= options


def test_options_reach_their_fields() -> None:
    spec = filled(ConvertSpec, {"tp_size": 2, "container_flags": ["--a"], "ignore_tensors": None, "quiet": True})
    assert spec == ConvertSpec(tp_size=2, container_flags=("--a",))
