"""`trtserve doctor`: whether this machine can run the server."""

from __future__ import annotations

from dataclasses import asdict

from trtserve.cli.options import JsonOption, QuietOption
from trtserve.cli.output import TerminalProgress, print_json, print_table
from trtserve.specs import ServerSpec


def doctor(json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Check everything whose lack is silent or cryptic at the first start, and print the fixes."""
    from trtserve.doctor import examine, raise_failed
    from trtserve.triton.server import Address

    spec = ServerSpec()
    address = Address(
        host=spec.host, http_port=spec.http_port, grpc_port=spec.grpc_port, metrics_port=spec.metrics_port
    )
    checks = examine(address=address, progress=TerminalProgress(quiet=quiet))
    if json:
        print_json("doctor", [asdict(check) for check in checks])
    else:
        print_table(("check", "result", "found", "fix"), [(c.name, c.result, c.found, c.fix) for c in checks])
    raise_failed(checks)
