"""Entry point of the `trtserve` command."""

import os
import signal
import sys
from pathlib import Path

_SIGNALLED = 128


def main() -> None:
    """Run the command line and exit with its code."""
    # Of transformers only tokenizers are used; its advice to install PyTorch would mislead.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # A stream that our parent closed is None here, which nothing that prints expects.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - as long as the process
    try:
        from trtserve.cli import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while the command line itself is being imported
        code = 130
    if code > _SIGNALLED:  # one more signal on the way out changes nothing
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    main()
