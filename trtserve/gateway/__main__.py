"""`python -m trtserve.gateway SETTINGS`: the process of one gateway."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Final

from trtserve.errors import TrtserveError
from trtserve.gateway.settings import GatewaySettings
from trtserve.host.ports import listening_socket

_TURN: Final = 0.0005
"""Seconds that a thread with a large request may compute while the event loop waits; Python's own are ten times that.

The loop needs many turns for one answer.
"""


def main() -> int:
    """Serve until a signal, and return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    # Keep transformers from importing PyTorch: seconds and hundreds of megabytes that no tokenizer needs.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    sys.setswitchinterval(_TURN)
    settings = GatewaySettings.read(Path(sys.argv[1]))
    try:
        # The port is taken before anything else is loaded, so that a taken one is noticed at once.
        with listening_socket(settings.host, settings.port) as listening:
            from trtserve.gateway.processes import serve

            return serve(settings, listening)
    except TrtserveError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return error.code


sys.exit(main())
