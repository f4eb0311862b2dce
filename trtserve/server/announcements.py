"""What `start` tells the user about the server that it is about to launch."""

from __future__ import annotations

from trtserve.errors import counted
from trtserve.host.machine import differences
from trtserve.nvidia.containers import known_container
from trtserve.nvidia.releases.advisories import EMBEDDED_TAG, known_faults
from trtserve.progress import Progress
from trtserve.server.doors import is_loopback
from trtserve.server.launch_plan import ServerPlan
from trtserve.server.proxy import ProxyPlan
from trtserve.specs import ServerSpec


def announce(plan: ServerPlan, progress: Progress) -> None:
    """Describe what is served, and how."""
    served = plan.served
    policy, other = transaction_policy(served.streaming), transaction_policy(not served.streaming)
    progress.step(f"{plan.name}: serving {served.model}, transaction policy {policy}")
    progress.step(f"(to switch: `trtserve import` or `repo` with --{other})")
    progress.step(f"Repository: {plan.repository.path.absolute()}")
    if served.precision:
        progress.step("Engine: " + ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in served.precision.items()))
    if plan.runs_ranks:
        each = counted(plan.instances[0].launch.ranks, "rank")
        several = f"{len(plan.instances)} instances of " if len(plan.instances) > 1 else ""
        progress.step(f"Mode: {plan.mode}, {several}{each}")
        announce_oversubscription(plan, progress)
    else:
        ranks = max(served.world_size, plan.spec.world_size or 1)
        if ranks > 1:
            progress.step(f"World size {ranks}: this runtime merges the shards, so one process serves them all.")
    announce_risks(plan, progress)


def announce_risks(plan: ServerPlan, progress: Progress) -> None:
    """Warn of what others can do to the server, and of an engine that was built on another machine."""
    address = plan.instances[0].address.host
    for warning in access_warnings(plan.spec, address, embedded=plan.triton.package is not None):
        progress.warn(warning)
    for difference in differences(plan.served.machine):
        progress.warn(difference)


def access_warnings(spec: ServerSpec, address: str, *, embedded: bool) -> list[str]:
    """Return what others can do to a server at an IPv4 address; `embedded` means the Triton of the package index."""
    warnings = []
    if spec.raw_http:
        warnings.append("--raw-http: Triton itself answers on --http-port; a malformed request can crash it.")
    if not is_loopback(address):
        known = None if spec.container is None else known_container(spec.container)
        tag = known.tag if known is not None else EMBEDDED_TAG if embedded else None
        faults = None if tag is None else known_faults(tag)
        no_key = "" if spec.api_key or spec.api_key_file else ", and need no API key"
        plain = "" if spec.tls_certificate else ". Nothing is encrypted"
        warnings.append(f"Other machines can reach {spec.host}{no_key}{plain}.{f' {faults}' if faults else ''}")
    return warnings


def announce_commands(plan: ServerPlan, progress: Progress) -> None:
    """Show the commands of the ranks, and that of the reverse proxy."""
    if plan.runs_ranks:
        for instance in plan.instances:
            progress.step(f"Command: {instance.launch.command}")
    if plan.proxy is not None:
        announce_proxy(plan.proxy, progress)


def announce_proxy(proxy: ProxyPlan, progress: Progress) -> None:
    """Show the command of the reverse proxy, or how to install and run it."""
    if proxy.executable is not None:
        progress.step(f"Reverse proxy: {proxy.command}")
        return
    progress.warn("nginx is not installed, so there is no common endpoint; each instance has its own ports.")
    progress.step(f"Install it (apt-get install nginx-light) and run: {proxy.command}")


def announce_oversubscription(plan: ServerPlan, progress: Progress) -> None:
    """Say that mpirun starts more ranks than there are cores, unless the user asked for it."""
    if "--oversubscribe" in plan.instances[0].launch.command.argv and not plan.spec.oversubscribe:
        progress.step("There are more ranks than cores, so mpirun gets --oversubscribe.")


def transaction_policy(streaming: bool) -> str:
    """Return the switch of `repo` and `import` that makes such a repository."""
    return "streaming" if streaming else "no-streaming"
