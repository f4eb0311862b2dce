"""The arguments of one rank of tritonserver, in the order of upstream's launch script in each release."""

from __future__ import annotations

from trtserve.nvidia.releases.launcher import launcher_facts
from trtserve.server.launch.base import Setup


def rank_arguments(setup: Setup, rank: int, *, emptied_pools: int | None = None) -> tuple[str, ...]:
    """Return tritonserver's command line on `rank`.

    `emptied_pools` is the number of GPUs whose memory pools orchestrator mode sets to 0, or None in every other mode.
    Arguments that upstream does not have (addresses to bind, folder of the backends, a timeout before 1.0) follow its
    own. Upstream's --log has no counterpart: the output of every server is kept, and --log-verbose can be given.
    """
    facts = launcher_facts(setup.release)
    ports = [
        f"{flag}={setup.address.port_arguments[flag]}" for flag in ("--grpc-port", "--http-port", "--metrics-port")
    ]
    exit_timeout = f"--exit-timeout-secs={setup.exit_timeout}"

    arguments = [setup.executable, f"--model-repository={setup.repository.absolute()}"]
    if facts.exit_timeout:
        arguments.append(exit_timeout)
    if facts.ports_twice:
        arguments += ports
    if rank:
        # Other ranks load only the core models. These never finish loading there, so no port is opened.
        arguments += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in setup.core_models)]
    if facts.memory_pools:
        if rank == 0 and setup.pool_bytes:
            arguments.append(f"--cuda-memory-pool-byte-size=0:{setup.pool_bytes}")
        if emptied_pools is not None:
            arguments += ["--pinned-memory-pool-byte-size=0", "--enable-peer-access=false"]
            arguments += [f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(emptied_pools)]
    arguments += ports
    arguments.append("--disable-auto-complete-config")
    arguments.append(f"--backend-config=python,shm-region-prefix-name={setup.rank_prefix(rank)}")
    if not facts.exit_timeout:
        arguments.append(exit_timeout)
    if setup.backends is not None:
        arguments.append(f"--backend-directory={setup.backends}")
    # Loopback by default; upstream's script listens on every interface.
    arguments += [f"{flag}={host}" for flag, host in setup.address.host_arguments.items()]
    return (*arguments, *setup.arguments)
