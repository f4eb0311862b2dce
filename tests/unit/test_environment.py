"""Environment variables: options are read from them, and misspelt ones give a warning."""

from __future__ import annotations

import pytest

from trtserve.cli import run


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TRTSERVE_STRAT_HTTP_PORT", "Did you mean TRTSERVE_START_HTTP_PORT?"),
        ("TRTSERVE_START_HTTP_PROT", "Did you mean TRTSERVE_START_HTTP_PORT?"),
        ("TRTSERVE_BENCH_TOKEN_NORM_DIST_CONCURENCY", "Did you mean TRTSERVE_BENCH_TOKEN_NORM_DIST_CONCURRENCY?"),
        ("TRTSERVE_HOEM", "Did you mean TRTSERVE_HOME?"),
        ("TRTSERVE_TRTLM_VERSION", "Did you mean TRTSERVE_TRTLLM_VERSION?"),
        (
            "TRTSERVE_STRAT_PORT",
            "or TRTSERVE_START_HTTP_PORT or TRTSERVE_START_METRICS_PORT or TRTSERVE_START_PROXY_PORT?",
        ),
        ("TRTSERVE_STOP_SIDEWAYS", "`trtserve stop` has no such option."),
        ("TRTSERVE_STPO_SIDEWAYS", "`trtserve stop` has no such option."),
        ("TRTSERVE_COLOUR", "it begins with no command, as TRTSERVE_START_HTTP_PORT does."),
    ],
)
def test_a_misspelt_variable_gives_a_warning(
    name: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    assert run(["list"]) == 0
    (said, _) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"warning: {name} is set but not read")
    assert said.endswith(meant)


@pytest.mark.parametrize(
    "name",
    [
        "TRTSERVE_START_HTTP_PORT",
        "TRTSERVE_TRTLLM_VERSION",
        "TRTSERVE_START_TRTLLM_VERSION",
        "TRTSERVE_REMOVE_ALL",
        "TRTSERVE_PORT_8000_TCP_ADDR",  # Kubernetes, for a service that is called trtserve
        "TRTSERVE_SERVICE_PORT",
        "TRTSERVE_GATEWAY_SERVICE_HOST",
        "TRTSERVE_PORT",
        "TRTSERVE_TESTS_BARE",
        "TRTSERVE_API_KEY",
        "TRTSERVE_VLLM_PYTHON",
        "TRTSERVE_VLLM_NODE",  # for the processes of other machines
    ],
)
def test_other_variables_give_no_warning(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    assert run(["list"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_a_variable_has_the_name_of_its_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parameter of --all has another name."""
    monkeypatch.setenv("TRTSERVE_STOP_ALL", "1")
    assert run(["stop", "demo"]) == 2
    assert "Both a name (demo) and --all were given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "typed", "told"),
    [
        ("TRTSERVE_CONVERT_DTYPE", "float99", "convert m", True),
        ("TRTSERVE_CONVERT_DTYPE", "float16", "convert m --dtype float99", False),
        ("TRTSERVE_START_HTTP_PORT", "99999", "start", True),
        ("TRTSERVE_BENCH_TOKEN_NORM_DIST_NUM_REQUESTS", "0", "bench token-norm-dist --url localhost:9", True),
        ("TRTSERVE_IMPORT_DTYPE", "float99", "convert m --dtype float99", False),
    ],
)
def test_a_wrong_value_names_the_variable_that_it_came_from(
    variable: str,
    value: str,
    typed: str,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    assert run(typed.split()) == 2
    assert capsys.readouterr().err.count(f"{variable} sets --") == told
