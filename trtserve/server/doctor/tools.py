"""Programs that only some launches use: docker, Slurm, kubectl, nginx. No runtime needs them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from trtserve.errors import MissingDependencyError, counted
from trtserve.process import (
    Command,
    Completed,
    find_sbin_program,
    run,
)
from trtserve.server.doctor.findings import Finding, State

_TIMEOUT = 20.0


def check_docker(gpus: int) -> Finding:
    """Check client and daemon, and NVIDIA's runtime if there are GPUs."""
    client = _run("docker", "--version")
    if client is None:
        return _absent("docker", "Install it for `start --container`: docs.docker.com/engine/install.")
    name = f"client {_number(client.stdout)}"
    server = _run("docker", "version", "--format", "{{.Server.Version}}")
    if server is None or server.code != 0:
        output = _first(server.stderr) if server else "no answer"
        fix = "Start the daemon, or get permission to use it: usermod -aG docker USER."
        return _finding("docker", "failed", f"{name}, but no daemon: {output}", fix)
    versions = f"{name}, daemon {server.stdout.strip()}"
    if not gpus:
        return _finding("docker", "ok", versions)
    if "nvidia" in _runtimes():
        return _finding("docker", "ok", f"{versions}, runtime nvidia")
    return _finding(
        "docker",
        "warning",
        f"{versions}, no runtime nvidia",
        "Install NVIDIA Container Toolkit, then: nvidia-ctk runtime configure --runtime=docker.",
    )


def _runtimes() -> set[str]:
    ended = _run("docker", "info", "--format", "{{json .Runtimes}}")
    if ended is None or ended.code != 0:
        return set()
    found = json.loads(ended.stdout)
    return set(found) if isinstance(found, dict) else set()


def check_podman() -> Finding:
    """Report the version of podman."""
    return _versioned("podman", ("--version",), "Not needed: `start --container` uses docker.")


def check_slurm() -> Finding:
    """Check Slurm's programs, and whether its controller answers."""
    submit = _run("sbatch", "--version")
    if submit is None:
        return _absent("Slurm", "`start --slurm` writes scripts without it; only --submit needs it.")
    version = _number(submit.stdout)
    state = _run("sinfo", "--noheader", "--format=%P %a %D")
    if state is None or state.code != 0:
        output = _first(state.stderr) if state else "no sinfo"
        fix = "See what `scontrol ping` reports; outside the cluster, submit from its login node."
        return _finding("Slurm", "warning", f"{version}, but its controller does not answer: {output}", fix)
    partitions = len(state.stdout.splitlines())
    return _finding("Slurm", "ok", f"{version}, {counted(partitions, 'partition')}")


def check_kubernetes() -> Finding:
    """Report the version of kubectl."""
    fix = "`start --kubernetes` writes manifests without it; you need it to apply them."
    return _versioned("kubectl", ("version", "--client"), fix)


def check_nginx() -> Finding:
    """Report the version of nginx, the proxy in front of several instances."""
    program = find_sbin_program("nginx")  # as `start` finds it
    without = "Only `start --instances` uses it."
    return _versioned("nginx", ("-v",), without, program=program)


def _versioned(name: str, arguments: tuple[str, ...], without: str, *, program: Path | None = None) -> Finding:
    ended = _run(name if program is None else str(program), *arguments)
    if ended is None:
        return _absent(name, without)
    output = ended.stdout.strip() or ended.stderr.strip()  # nginx prints its version on stderr
    if ended.code != 0:
        return _finding(name, "warning", f"exit code {ended.code}: {_first(output)}", f"See what `{name}` reports.")
    return _finding(name, "ok", _number(output))


def _run(*argv: str) -> Completed | None:
    """Return None for a missing program."""
    try:
        return run(Command(argv=argv), timeout=_TIMEOUT)
    except MissingDependencyError:
        return None


def _number(output: str) -> str:
    """`Docker version 28.2.2, build …` → `28.2.2`."""
    found = re.search(r"\d+(?:\.\d+)+[^\s,]*", output)
    return found[0] if found else _first(output)


def _first(text: str) -> str:
    return next((line.strip().rstrip(".") for line in text.splitlines() if line.strip()), "no answer")


def _absent(name: str, fix: str) -> Finding:
    return _finding(name, "failed", "not installed", fix)


def _finding(name: str, state: State, evidence: str, fix: str = "") -> Finding:
    return Finding(group="tools", name=name, state=state, evidence=evidence, fix=fix)
