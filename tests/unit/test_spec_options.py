"""Options that specs declare: what the command line makes of them, and what it refuses."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer

from trtserve.cli.options import with_spec_options
from trtserve.cli.parser import ParsedCommand
from trtserve.errors import UsageError
from trtserve.specs.options import Spec, option


@dataclass(frozen=True, kw_only=True)
class OvenSpec(Spec):
    """A spec with an option of every kind."""

    degrees: int = option(180, metavar="°C", help="Heat.", minimum=50, maximum=300, common=True)
    mode: Literal["fan", "grill"] = option("fan", help="Kind of heat.")
    hours: float | None = option(None, help="How long.", above=0, unset="until it is done")
    light: bool = option(True, "--light/--dark", help="See it.")
    racks: tuple[int, ...] = option((), "--rack", help="Racks in use.", separator=",", minimum=1)
    notes: dict[str, Path] = option({}, "--note", metavar="NAME=FILE", help="Notes.", panel="Paper")
    timer: int | None = option(None, "--timer", "-t", help="Minutes.", minimum=1)


@dataclass(frozen=True, kw_only=True)
class TableSpec(Spec):
    """A spec that shares a field and a flag with the other one."""

    light: bool = option(True, "--light/--dark", help="See it.")
    seats: int = option(4, "--seats", "--timer", help="People.", minimum=1)


def run(command: Callable[..., None], *words: str) -> None:
    """Run `command` as a command line of its own."""
    app = typer.Typer(add_completion=False, context_settings={"auto_envvar_prefix": "TRTSERVE_BAKE"})
    app.command(cls=ParsedCommand)(with_spec_options(command))
    app(args=list(words), standalone_mode=False)


def baked(*words: str) -> OvenSpec:
    """The spec that the command line makes of these words."""
    found: list[OvenSpec] = []

    def bake(spec: OvenSpec) -> None:
        found.append(spec)

    run(bake, *words)
    return found[0]


def test_options_fill_their_fields() -> None:
    assert baked() == OvenSpec()
    words = shlex.split("--degrees 200 --mode grill --hours 1.5 --dark --rack 1,2 --rack 3 --note a=b.txt -t 5")
    assert baked(*words) == OvenSpec(
        degrees=200, mode="grill", hours=1.5, light=False, racks=(1, 2, 3), notes={"a": Path("b.txt")}, timer=5
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--degrees 20", "--degrees is 20; it must be at least 50 and at most 300."),
        ("--degrees hot", "--degrees is 'hot'; expected an integer."),
        ("--mode steam", "--mode is 'steam'; expected one of fan, grill."),
        ("--hours 0", "--hours is 0.0; it must be above 0."),
        ("--hours nan", "--hours is nan; it must be above 0."),
        ("--timer 4294967297", "--timer is 4294967297; it must be at most 2147483647."),
        ("--rack 1,0", "--rack is 0; it must be at least 1."),
        ("--note a", "--note is 'a'; expected NAME=FILE."),
        ("--note a=b --note a=c", "--note gives a twice."),
    ],
)
def test_wrong_values_are_refused_with_their_flag(words: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        baked(*words.split())
    assert caught.value.message == message


def test_a_spec_made_in_python_is_checked_alike() -> None:
    with pytest.raises(UsageError, match="--degrees is 20"):
        OvenSpec(degrees=20)


def test_environment_variables_have_the_names_of_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSERVE_BAKE_RACK", "2")
    monkeypatch.setenv("TRTSERVE_BAKE_LIGHT", "no")
    assert baked() == OvenSpec(racks=(2,), light=False)


def test_specs_share_options_and_the_first_keeps_a_flag() -> None:
    found: list[tuple[OvenSpec, TableSpec]] = []

    def bake(oven: OvenSpec, table: TableSpec) -> None:
        found.append((oven, table))

    run(bake, "--dark", "--timer", "3", "--seats", "2")
    assert found == [(OvenSpec(light=False, timer=3), TableSpec(light=False, seats=2))]


def test_a_parameter_of_the_command_replaces_the_field_of_its_name() -> None:
    found: list[Any] = []

    def bake(spec: OvenSpec, mode: Annotated[str, typer.Option("--mode")] = "pizza") -> None:
        found.extend((spec.mode, mode))

    run(bake)
    assert found == ["fan", "pizza"]


def test_help_shows_choices_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    def bake(spec: OvenSpec) -> None:
        """Bake a cake.

        Examples:
            bake --degrees 200
        """

    run(bake, "--help")
    shown = capsys.readouterr().out
    for words in (
        "--degrees °C",
        "Heat. [default: 180]",
        "--mode fan|grill",
        "[default: until it is done]",
        "--light / --dark",
    ):
        assert words in shown
    assert (
        shown.index("Examples:\n  bake --degrees 200")
        < shown.index("Options:")
        < shown.index("Paper:\n  --note NAME=FILE")
    )
