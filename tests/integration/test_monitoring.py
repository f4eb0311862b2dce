"""The Prometheus files of examples/monitoring: promtool accepts them, and every alert fires when it should."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.needs("promtool")

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
SERVER = 'instance="localhost:8000", job="trtserve"'
ENGINE = f'{SERVER}, model="tensorrt_llm", version="1"'
REQUESTS = f"nv_trt_llm_request_metrics{{{ENGINE}, request_type="
BLOCKS = f"nv_trt_llm_kv_cache_block_metrics{{{ENGINE}, kv_cache_block_type="
STEPS = f'nv_trt_llm_general_metrics{{{ENGINE}, general_type="iteration_counter"}}'
TOKENS = f'nv_trtserve_tokens_total{{{ENGINE}, token_type="generated"}}'
FIRST = f"nv_trtserve_first_token_seconds_bucket{{{SERVER}, le="
GAPS = f"nv_trtserve_inter_token_seconds_bucket{{{SERVER}, le="
# Values every minute: alert → metrics that make it fire, and metrics that do not.
ALERTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "TrtserveDown": ({f"up{{{SERVER}}}": "0x30"}, {f"up{{{SERVER}}}": "1x30"}),
    "TrtserveRestarted": ({TOKENS: "900+60x20 0+60x8"}, {TOKENS: "0+60x30"}),
    "TrtserveStuck": (
        {f'{REQUESTS}"active"}}': "3x30", STEPS: "70x30"},
        {f'{REQUESTS}"active"}}': "3x30", STEPS: "0+9x30"},
    ),
    "TrtserveRequestsFail": (
        {
            f'nv_inference_request_failure{{{ENGINE}, reason="OTHER"}}': "0+1x30",
            f"nv_inference_request_success{{{ENGINE}}}": "0+9x30",
        },
        {
            f'nv_inference_request_failure{{{ENGINE}, reason="CANCELED"}}': "0+1x30",
            f"nv_inference_request_success{{{ENGINE}}}": "0+9x30",
        },
    ),
    "TrtserveRequestsWait": ({f'{REQUESTS}"waiting"}}': "2x30"}, {f'{REQUESTS}"waiting"}}': "2 2 0 2 2 2 2 0x30"}),
    "TrtserveKvCacheFull": (
        {f'{BLOCKS}"used"}}': "99x30", f'{BLOCKS}"max"}}': "100x30"},
        {f'{BLOCKS}"used"}}': "90x30", f'{BLOCKS}"max"}}': "100x30"},
    ),
    "TrtserveSlowFirstToken": (
        {f'{FIRST}"2"}}': "0+1x30", f'{FIRST}"5"}}': "0+9x30", f'{FIRST}"+Inf"}}': "0+9x30"},
        {f'{FIRST}"2"}}': "0+9x30", f'{FIRST}"5"}}': "0+9x30", f'{FIRST}"+Inf"}}': "0+9x30"},
    ),
    "TrtserveSlowTokens": (
        {f'{GAPS}"0.2"}}': "0+1x30", f'{GAPS}"0.5"}}': "0+9x30", f'{GAPS}"+Inf"}}': "0+9x30"},
        {f'{GAPS}"0.2"}}': "0+9x30", f'{GAPS}"0.5"}}': "0+9x30", f'{GAPS}"+Inf"}}': "0+9x30"},
    ),
}


def promtool(*arguments: str) -> None:
    result = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_accepts_the_configuration_and_its_rules() -> None:
    promtool("check", "config", str(FOLDER / "prometheus.yml"))


def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    assert {rule["alert"] for rule in rules} == set(ALERTS)
    tests: list[dict[str, Any]] = []
    for rule in rules:
        for fires, series in zip((True, False), ALERTS[rule["alert"]], strict=True):
            # promtool compares labels and annotations, which `count` leaves out.
            found = f'count(ALERTS{{alertname="{rule["alert"]}", alertstate="firing"}}) or vector(0)'
            tests.append(
                {
                    "name": f"{rule['alert']}: {fires}",
                    "interval": "1m",
                    "input_series": [{"series": each, "values": values} for each, values in series.items()],
                    "promql_expr_test": [
                        {"expr": found, "eval_time": "25m", "exp_samples": [{"labels": "{}", "value": int(fires)}]}
                    ],
                }
            )
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(FOLDER / "alerts.yml")], "tests": tests}), encoding="utf-8")
    promtool("test", "rules", str(file))
