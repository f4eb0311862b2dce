"""Real servers for tests: on free ports, in their own store, always stopped; the log is printed on failure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.commands import spare_round_trip
from trtserve.artifacts import ModelRepository, load_artifact
from trtserve.errors import PortInUseError, ServerStartError
from trtserve.host.ports import free_ports
from trtserve.process import stop
from trtserve.process.signals import one_interrupt
from trtserve.server.plan import plan_server
from trtserve.server.shutdown import stop_server
from trtserve.server.start import start_server
from trtserve.server.state import Server, list_servers, log_file
from trtserve.specs import ServerSpec
from trtserve.store import Store

HOST = "127.0.0.1"
READY_TIMEOUT = 60.0


def free_spec(
    name: str | None = None, *, ready_timeout: float = READY_TIMEOUT, gateway: bool = False, **options: Any
) -> ServerSpec:
    """A server on three ports that are free now; most tests need no gateway, which is one more process."""
    http_port, grpc_port, metrics_port = free_ports(HOST, 3)
    return ServerSpec(
        name=name,
        host=HOST,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        ready_timeout=ready_timeout,
        raw_http=not gateway,
        **options,
    )


@contextmanager
def running_server(
    repository: Path,
    *,
    home: Path,
    name: str | None = None,
    flags: tuple[str, ...] = (),
    bindings: str | None = None,
    gracefully: bool = False,
    gateway: bool = False,
    **options: Any,
) -> Iterator[Server]:
    """A ready server for `repository`; state and log lie below `home`, `flags` go to tritonserver.

    `bindings` is the release of TensorRT-LLM whose Python names its models import. With a `gateway` HTTP clients talk
    to it; `options` are fields of ServerSpec.

    Give $TRTSERVE_HOME as `home` when commands under test shall find it; fixtures of a wider scope use a
    `tmp_path_factory` folder and set the variable in the test. The log goes to stderr when the block fails. At the end
    the server is killed, which saves the seconds that models need to unload, or with `gracefully` stopped in order.
    """
    store = Store(home)
    spare_round_trip(home)
    artifact = load_artifact(ModelRepository, repository)

    def start() -> Server:
        spec = replace(free_spec(name, gateway=gateway, **options), extra_arguments=flags, bindings=bindings)
        plan = plan_server(ModelRepository(path=artifact.path, manifest=artifact.manifest), spec, store=store)
        return start_server(plan)

    server = None
    with one_interrupt():  # SIGTERM too must end the server
        try:
            server = started(start)
            yield server
        except BaseException:
            _print_log(log_file(name or artifact.name, store))
            raise
        finally:
            for each in list_servers(store):
                if server is not None and each.name == server.name:
                    if not gracefully:
                        stop(each.instances[0].process, grace=0)
                    stop_server(each.name, store=store)


def started(start: Callable[[], Server]) -> Server:
    """Return the server of `start`, which is called twice where another program or Triton 2.51 is at fault."""
    try:
        return start()
    except PortInUseError:  # since it was found to be free
        return start()
    except ServerStartError as error:
        # Triton waits for ever when a Python model gets no CPU for a second while it loads.
        if "models still loading" not in error.message:
            raise
        return start()


def _print_log(log: Path) -> None:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else "(no log)"
    sys.stderr.write(f"--- {log}\n{text}\n---\n")
