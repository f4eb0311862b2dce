"""Servers of a setup file that a cluster runs: what the file may say, and what `up`, `diff` and `down` do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support.setup_schema import validate_setup
from trtserve.cli import run
from trtserve.errors import UsageError
from trtserve.pipeline.setup_file.reading import read_setup
from trtserve.specs.cluster import KubernetesOptions, SlurmOptions

MODEL = "models:\n  demo: {source: demo, runtime: llmapi, tp_size: 2}\nservers:\n  far:\n    model: demo\n"
JOB = MODEL + "    slurm: {nodes: 2, account: research, time: 08:00:00, flags: [--exclusive], out: job}\n"
MANIFEST = MODEL + "    instances: 3\n    kubernetes: {claim: models, namespace: serving}\n"
FAR = MODEL + "    kubernetes: {claim: models}\n"


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "setup.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_the_keys_are_the_options_of_start(tmp_path: Path) -> None:
    (server,) = read_setup(written(tmp_path, JOB)).servers
    assert server.cluster is not None
    assert server.cluster.options == SlurmOptions(account="research", time="08:00:00", flags=("--exclusive",))
    assert (server.cluster.spec.nodes, server.cluster.place) == (2, tmp_path / "job")
    validate_setup(yaml.safe_load(JOB.replace("08:00:00", '"08:00:00"')))
    (server,) = read_setup(written(tmp_path, MANIFEST)).servers
    assert server.cluster is not None
    assert server.cluster.options == KubernetesOptions(claim="models", namespace="serving")
    assert server.cluster.place == tmp_path / "far.yaml"
    validate_setup(yaml.safe_load(MANIFEST))


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (MODEL + "    slurm: {submit: true}\n", ":6: servers.far.slurm has no key 'submit'", "Known: account"),
        (MODEL + "    slurm: {nods: 2}\n", ":6: servers.far.slurm has no key 'nods'", "Did you mean nodes?"),
        (MODEL + "    slurm: {nodes: 0}\n", ":6: servers.far.slurm.nodes is 0; it must be at least 1", None),
        (MODEL + "    slurm: {time: soon}\n", ":6: servers.far.slurm: time is 'soon'", None),
        (MODEL + "    slurm:\n", ":6: servers.far.slurm must be a mapping", None),
        (MODEL + "    slurm: {}\n    kubernetes: {}\n", "servers.far has slurm and kubernetes", "Give one of them."),
        (MODEL + "    slurm: {}\n    auto_ports: true\n", ":7: servers.far.auto_ports is for a server on this", None),
        (MODEL + "    ui: true\n    slurm: {}\n", ":6: servers.far.ui is for a server on this", "Leave it out"),
        (FAR + "    restart: always\n", ":7: servers.far.restart is for", "restarts what ended"),
        (FAR + "    max_requests: 8\n", ":7: servers.far.max_requests is for", "limit requests"),
        (MODEL + "    slurm: {mpi: pmi2}\n", ":6: servers.far.slurm: mpi is 'pmi2'", "srun --mpi=list"),
        (JOB + "benchmarks:\n  b: {server: far}\n", "benchmarks.b measures far, which a cluster runs", "bench"),
    ],
)
def test_mistakes_are_refused_with_their_line(tmp_path: Path, text: str, message: str, hint: str | None) -> None:
    with pytest.raises(UsageError) as refused:
        read_setup(written(tmp_path, text))
    assert message in refused.value.message
    assert hint is None or hint in str(refused.value.hint)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slurm: {nodes: 2, ntasks_per_node: 3}", "servers.far.slurm: nodes 2 × ntasks_per_node 3 are 6 tasks"),
        ("slurm: {}\n    instances: 2", "servers.far.slurm: instances does not go with slurm"),
        (
            "kubernetes: {}",
            "far.kubernetes: kubernetes needs the volume that holds the repository: claim: NAME",
        ),
        ("kubernetes: {claim: c, nodes: 2}", "needs a key: ssh_secret: NAME"),
    ],
)
def test_what_is_refused_later_names_keys_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert run(["up", str(written(tmp_path, MODEL + f"    {text}\n"))]) == UsageError.code
    assert message in " ".join(capsys.readouterr().err.split())


def test_two_servers_elsewhere_need_no_ports_of_their_own(tmp_path: Path) -> None:
    second = "  more: {model: demo, slurm: {}}\n  here: {model: demo}\n"
    assert len(read_setup(written(tmp_path, JOB + second)).servers) == 3


@pytest.mark.parametrize(("text", "script"), [(JOB, "job/server.sbatch"), (MANIFEST, "far.yaml")])
def test_up_writes_the_files_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, script: str) -> None:
    file = written(tmp_path, text)
    assert run(["diff", str(file)]) == 0
    assert capsys.readouterr().out == "model demo: model, repo\nserver far: write\n"
    assert run(["up", str(file), "--json"]) == 0
    (job,) = json.loads(capsys.readouterr().out)["result"]["jobs"]
    assert str(tmp_path / script) in job.values()
    first = (tmp_path / script).read_text(encoding="utf-8")
    assert run(["diff", str(file)]) == 0
    assert capsys.readouterr().out == ""
    assert run(["up", str(file)]) == 0
    assert (tmp_path / script).read_text(encoding="utf-8") == first
    assert str(tmp_path / script) in capsys.readouterr().out
    (tmp_path / script).unlink()
    assert run(["diff", str(file)]) == 0
    assert capsys.readouterr().out == "server far: write\n"


def test_a_changed_option_writes_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", str(written(tmp_path, JOB))]) == 0
    file = written(tmp_path, JOB.replace("research", "teaching"))
    capsys.readouterr()
    assert run(["diff", str(file)]) == 0
    assert capsys.readouterr().out == "server far: write\n"
    assert run(["up", str(file)]) == 0
    assert "#SBATCH --account=teaching" in (tmp_path / "job" / "server.sbatch").read_text(encoding="utf-8")


def test_what_no_cluster_runs_is_refused_before_the_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", str(written(tmp_path, JOB.replace("llmapi", "openvino")))]) == 2
    assert "the runtime openvino serves demo on the CPU" in capsys.readouterr().err
    assert run(["up", str(written(tmp_path, MODEL + "    kubernetes: {}\n"))]) == 2
    assert "claim: NAME" in capsys.readouterr().err
    assert not (tmp_path / "far.yaml").exists()


def test_down_says_how_a_cluster_stops_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["down", str(written(tmp_path, MANIFEST))]) == 0
    assert f"kubectl delete -f {tmp_path / 'far.yaml'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("host: 0.0.0.0", "servers.far: host 0.0.0.0 can be reached by other machines"),
        ("host: 0.0.0.0, raw_http: true", "servers.far: raw_http on 0.0.0.0 lets everyone"),
        ("host: 0.0.0.0, api_key_file: key", "the API key and all prompts would be readable"),
    ],
)
@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_an_unprotected_server_is_refused_before_the_import(
    keys: str, message: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"models:\n  demo: {{source: demo, runtime: llmapi}}\nservers:\n  far: {{model: demo, {keys}}}\n"
    assert run(["up", str(written(tmp_path, text)), *more]) == UsageError.code
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("raw_http: true", "servers.far: raw_http: Triton itself answers on http_port"),
        ("host: 0.0.0.0, no_auth: true", "servers.far: Other machines can reach 0.0.0.0, and need no API key."),
    ],
)
def test_a_dry_run_names_the_risks_of_a_server(
    keys: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"models:\n  demo: {{source: demo, runtime: llmapi}}\nservers:\n  far: {{model: demo, {keys}}}\n"
    assert run(["up", str(written(tmp_path, text)), "--dry-run"]) == 0
    assert message in " ".join(capsys.readouterr().err.split())
