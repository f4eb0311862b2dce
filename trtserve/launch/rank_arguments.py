"""The arguments of one rank of tritonserver, in the order of upstream's launch script in each release."""

from __future__ import annotations

from trtserve.launch.base import Setup
from trtserve.releases.launcher import launcher_facts


def rank_arguments(setup: Setup, rank: int, *, pools: int | None = None) -> tuple[str, ...]:
    """tritonserver's command line on `rank`.

    `pools` is the number of GPUs whose memory pools orchestrator mode empties, None in every other mode. What is not
    upstream's (interfaces to bind to, folder of the backends, a timeout before 1.0) stands behind what is. Its --log
    has no part here: every server's output is kept, and --log-verbose can be given as an argument.
    """
    facts = launcher_facts(setup.release)
    ports = _ports(setup)
    first = [setup.executable, f"--model-repository={setup.repository.absolute()}"]
    if facts.exit_timeout:
        first.append(f"--exit-timeout-secs={setup.exit_timeout}")
    if facts.ports_twice:
        first += ports
    return (
        *first,
        *(_explicit_models(setup) if rank else ()),
        *(_pools(setup, rank, pools) if facts.memory_pools else ()),
        *ports,
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name={setup.rank_prefix(rank)}",
        *(() if facts.exit_timeout else (f"--exit-timeout-secs={setup.exit_timeout}",)),
        *_own(setup),
    )


def _ports(setup: Setup) -> tuple[str, ...]:
    ports = setup.address.ports
    return tuple(f"{flag}={ports[flag]}" for flag in ("--grpc-port", "--http-port", "--metrics-port"))


def _explicit_models(setup: Setup) -> tuple[str, ...]:
    """Ranks other than 0 load the core models alone: these never finish loading there, so no port is opened."""
    return ("--model-control-mode=explicit", *(f"--load-model={name}" for name in setup.core_models))


def _pools(setup: Setup, rank: int, emptied: int | None) -> tuple[str, ...]:
    own = (f"--cuda-memory-pool-byte-size=0:{setup.pool_bytes}",) if rank == 0 and setup.pool_bytes else ()
    if emptied is None:
        return own
    none = tuple(f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(emptied))
    return (*own, "--pinned-memory-pool-byte-size=0", "--enable-peer-access=false", *none)


def _own(setup: Setup) -> tuple[str, ...]:
    """A server listens where it is told to, by default on loopback; upstream's listens on every interface."""
    flags = ("--http-address", "--grpc-address", "--metrics-address")
    folder = () if setup.backends is None else (f"--backend-directory={setup.backends}",)
    return (*folder, *(f"{flag}={setup.address.host}" for flag in flags), *setup.arguments)
